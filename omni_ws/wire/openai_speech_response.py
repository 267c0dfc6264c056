"""Event streams of ``/v1/audio/speech``, in two dialects."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

from omni_ws.core.chunks import FinalChunk, OutputChunk, OutputModality
from omni_ws.wire.openai_chat_response import usage_object


class SpeechEvents:
    """OpenAI's typed events (``stream_format: sse``); the stream ends without [DONE]."""

    def output(self, chunk: OutputChunk) -> Iterator[dict[str, Any]]:
        """Yield the event for an output."""
        if chunk.modality is OutputModality.AUDIO:
            yield {"type": "speech.audio.delta", "audio": base64.b64encode(chunk.payload).decode()}

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]:
        """Yield the last event."""
        usage = chunk.usage
        yield {
            "type": "speech.audio.done",
            "usage": {
                "input_tokens": usage.input_tokens,
                "output_tokens": usage.output_tokens,
                "total_tokens": usage.total_tokens,
            },
        }


class SpeechChunks:
    """``audio.speech.chunk`` objects (``stream: true``); the stream ends with [DONE].

    ``piece`` converts the audio of an output to what its event contains, such as bytes of a file format.
    """

    def __init__(
        self,
        speech_id: str,
        response_format: str,
        media_type: str,
        sample_rate: int,
        *,
        piece: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self._piece = piece
        self._id = speech_id
        self._index = 0
        self._audio = {"format": response_format, "mime_type": media_type, "sample_rate": sample_rate}

    def output(self, chunk: OutputChunk) -> Iterator[dict[str, Any]]:
        """Yield the object for an output."""
        if chunk.modality is OutputModality.AUDIO:
            data = base64.b64encode(self._piece(chunk.payload)).decode()
            yield self._chunk(audio={"data": data, **self._audio}, finish_reason=None)

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]:
        """Yield the last object."""
        yield self._chunk(audio=None, finish_reason=chunk.finish_reason.value, usage=usage_object(chunk.usage))

    def _chunk(self, **fields: Any) -> dict[str, Any]:
        index, self._index = self._index, self._index + 1
        return {"id": self._id, "object": "audio.speech.chunk", "index": index, **fields}
