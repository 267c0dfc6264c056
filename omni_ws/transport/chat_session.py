"""What every way to a chat answer has in common: its configuration, and the form that the client wants it in."""

from __future__ import annotations

import time
from functools import lru_cache

from omni_ws.audio.encoder import AudioEncoder
from omni_ws.core.audio_format import AudioEncoding, AudioFormat
from omni_ws.errors import InvalidRequest, UnsupportedFormat
from omni_ws.service.conversation import Conversation
from omni_ws.service.identifiers import new_id
from omni_ws.wire.openai_answer import ChatOptions
from omni_ws.wire.openai_request import ChatRequest, ConfigurationPatch


def configure(conversation: Conversation, patch: ConfigurationPatch) -> AudioFormat:
    """Returns the format that the client wants audio in. Raises an InvalidRequest that names the body's own field."""
    try:
        config = conversation.configure(patch.fields)
        target = AudioFormat(config.output_audio.format, config.output_audio.sample_rate)
        _check_encodable(target)
    except InvalidRequest as error:
        error.param = patch.name_in_body(error.param)
        raise
    return target


def chat_options(request: ChatRequest, *, model: str) -> ChatOptions:
    return ChatOptions(
        completion_id="chatcmpl-" + (request.request_id or new_id("")),
        created=int(time.time()),
        model=model,
        wants_text=request.wants_text,
        wants_audio=request.wants_audio,
        include_usage=request.include_usage,
        usage_on_final_chunk=request.usage_on_final_chunk,
        input_transcript=request.input_transcript,
    )


@lru_cache(maxsize=64)
def _check_encodable(target: AudioFormat) -> None:
    """Raises UnsupportedFormat now instead of when the answer has been made."""
    if target.is_raw or target.encoding is AudioEncoding.WAV:
        return
    try:
        AudioEncoder(target, source_rate=target.sample_rate).flush()
    except UnsupportedFormat as error:
        error.param = "output_audio.sample_rate" if error.param == "sample_rate" else "output_audio.format"
        raise
