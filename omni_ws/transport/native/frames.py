"""Encodes the messages of a session as frames of the native protocol."""

from __future__ import annotations

from msgspec import UNSET

from omni_ws.core.chunks import AnswerWarning, FinalChunk, OutputChunk, OutputModality, Usage
from omni_ws.errors import OmniError
from omni_ws.service.conversation.messages import RequestWarning, ServerMessage
from omni_ws.wire.frames import encode_output_audio
from omni_ws.wire.server_frames import (
    OutputChunkFrame,
    ServerFrame,
    UsageFields,
    WarningFields,
    encode_frame,
    encode_output,
    error_frame,
    unset,
)


def encode_message(message: ServerMessage, *, binary_audio: bool) -> tuple[bytes, bool]:
    """The bytes of a message, and whether they are a binary frame."""
    if isinstance(message, OutputChunk):
        if binary_audio and message.modality is OutputModality.AUDIO:
            return encode_output_audio(message), True
        return encode_output(message), False
    if isinstance(message, FinalChunk):
        return encode_frame(_final(message)), False
    if isinstance(message, RequestWarning):
        message = message.error
    if isinstance(message, OmniError):
        return encode_frame(error_frame(message)), False
    return encode_frame(message), False


def _final(chunk: FinalChunk) -> ServerFrame:
    return OutputChunkFrame(
        request_id=chunk.request_id,
        sequence_id=chunk.sequence_id,
        final=True,
        finish_reason=chunk.finish_reason,
        usage=usage_fields(chunk.usage),
        # Failures, of the input or of parts of the engine, were told as they came.
        warnings=[
            WarningFields(code=one.code, message=one.message, param=one.param)
            for one in chunk.warnings
            if isinstance(one, AnswerWarning)
        ]
        or UNSET,
        ref=unset(chunk.ref),
        turn_id=unset(chunk.turn_id),
    )


def usage_fields(usage: Usage) -> UsageFields:
    return UsageFields(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        total_tokens=usage.total_tokens,
        input_audio_ms=usage.input_audio_ms,
        output_audio_ms=usage.output_audio_ms,
        input_after_start_bytes=usage.input_after_start_bytes,
    )
