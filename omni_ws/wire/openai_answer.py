"""Answers of the OpenAI-compatible routes: the exact order of stream chunks, and whole objects.

Pure: what goes in is what the session said, what comes out is JSON objects in the order in which they go out.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from omni_ws.core.chunks import FinishReason, OutputModality, Usage
from omni_ws.core.output import FinalChunk, OutputChunk

#: How long a client may refer to the audio of an answer; it is not kept here, so not for long.
AUDIO_EXPIRES_SEC: Final = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    completion_id: str
    created: int
    model: str
    wants_text: bool = True
    wants_audio: bool = False
    include_usage: bool = False
    usage_on_final_chunk: bool = False
    input_transcript: bool = True


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "input_audio_ms": usage.input_audio_ms,
        "output_audio_ms": usage.output_audio_ms,
        "input_after_start_bytes": usage.input_after_start_bytes,
    }


def transcript_object(chunk: OutputChunk) -> dict[str, Any]:
    return {"text": chunk.text, "interim": chunk.interim, "start_ms": chunk.start_ms}


class ChatStream:
    """The chunks of one streamed chat completion: role, content, terminal, and usage where it is asked for."""

    def __init__(self, options: ChatOptions) -> None:
        self._options = options
        self._role_sent = False
        self._audio_sent = False
        #: Text that was written and goes out as the transcript of the audio that says it.
        self._unspoken = ""
        self._audio = Base64Stream()

    def output(self, chunk: OutputChunk) -> Iterator[dict[str, Any]]:
        if chunk.modality is OutputModality.TRANSCRIPT and not self._options.input_transcript:
            return
        yield from self._role()
        match chunk.modality:
            case OutputModality.TRANSCRIPT:
                yield self._chunk([], input_transcript=transcript_object(chunk))
            case OutputModality.TEXT:
                if self._options.wants_audio:
                    self._unspoken += chunk.text
                if self._options.wants_text:
                    yield self._delta({"content": chunk.text})
            case OutputModality.AUDIO:
                if data := self._audio.feed(chunk.payload):
                    yield self._audio_delta({"data": data})

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]:
        yield from self._role()
        if (data := self._audio.finish()) or self._unspoken:
            yield self._audio_delta({"data": data} if data else {})
        if self._audio_sent:
            yield self._delta({"audio": {"expires_at": self._options.created + AUDIO_EXPIRES_SEC}})
        usage = usage_object(chunk.usage)
        extra = {"usage": usage} if self._options.usage_on_final_chunk else {}
        yield self._delta({}, finish_reason=chunk.finish_reason.value, **extra)
        if self._options.include_usage and not self._options.usage_on_final_chunk:
            yield self._chunk([], usage=usage)

    def _role(self) -> Iterator[dict[str, Any]]:
        if not self._role_sent:
            self._role_sent = True
            yield self._delta({"role": "assistant"})

    def _audio_delta(self, fields: dict[str, Any]) -> dict[str, Any]:
        # SDKs join the ids and the pieces of all deltas: the id once, pieces that need no padding before the last.
        head = {} if self._audio_sent else {"id": _audio_id(self._options)}
        self._audio_sent = True
        spoken, self._unspoken = self._unspoken, ""
        return self._delta({"audio": {**head, **fields, **({"transcript": spoken} if spoken else {})}})

    def _delta(self, delta: dict[str, Any], *, finish_reason: str | None = None, **extra: Any) -> dict[str, Any]:
        return self._chunk([{"index": 0, "delta": delta, "finish_reason": finish_reason}], **extra)

    def _chunk(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {
            "id": self._options.completion_id,
            "object": "chat.completion.chunk",
            "created": self._options.created,
            "model": self._options.model,
            "choices": choices,
            **extra,
        }


class ChatCompletion:
    """A whole chat completion, gathered from the same outputs that a stream would have carried."""

    def __init__(self, options: ChatOptions) -> None:
        self._options = options
        self._text: list[str] = []
        self._heard: list[str] = []
        self._audio = bytearray()

    def output(self, chunk: OutputChunk) -> None:
        match chunk.modality:
            case OutputModality.TEXT:
                self._text.append(chunk.text)
            case OutputModality.AUDIO:
                self._audio += chunk.payload
            case OutputModality.TRANSCRIPT if not chunk.interim:
                self._heard.append(chunk.text)

    def final(self, chunk: FinalChunk, *, audio: bytes | None = None) -> dict[str, Any]:
        """``audio`` replaces what was gathered: a file with its true length in the header."""
        options = self._options
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text if options.wants_text else None}
        message["refusal"] = None
        if options.wants_audio:
            data = self._audio if audio is None else audio
            message["audio"] = {
                "id": _audio_id(options),
                "data": base64.b64encode(data).decode(),
                "expires_at": options.created + AUDIO_EXPIRES_SEC,
                "transcript": text,
            }
        completion = {
            "id": options.completion_id,
            "object": "chat.completion",
            "created": options.created,
            "model": options.model,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "logprobs": None,
                    "finish_reason": chunk.finish_reason.value,
                }
            ],
            "usage": usage_object(chunk.usage),
        }
        if self._heard and options.input_transcript:
            completion["input_transcript"] = {"text": " ".join(self._heard)}
        return completion

    @property
    def audio(self) -> bytes:
        return bytes(self._audio)


class Base64Stream:
    """Base64 of a stream in pieces whose concatenation is the base64 of the whole: cut at multiples of 3 bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> str:
        data = self._rest + data
        whole = len(data) - len(data) % 3
        self._rest = data[whole:]
        return base64.b64encode(data[:whole]).decode()

    def finish(self) -> str:
        rest, self._rest = self._rest, b""
        return base64.b64encode(rest).decode()


class SpeechEvents:
    """``stream_format: sse``: OpenAI's typed events, which end without [DONE]."""

    def output(self, chunk: OutputChunk) -> Iterator[dict[str, Any]]:
        if chunk.modality is OutputModality.AUDIO:
            yield {"type": "speech.audio.delta", "audio": base64.b64encode(chunk.payload).decode()}

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]:
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
    """``stream: true``: the ``audio.speech.chunk`` dialect, which ends in [DONE]."""

    def __init__(self, speech_id: str, response_format: str, media_type: str, sample_rate: int) -> None:
        self._id = speech_id
        self._index = 0
        self._audio = {"format": response_format, "mime_type": media_type, "sample_rate": sample_rate}

    def output(self, chunk: OutputChunk) -> Iterator[dict[str, Any]]:
        if chunk.modality is OutputModality.AUDIO:
            data = base64.b64encode(chunk.payload).decode()
            yield self._chunk(audio={"data": data, **self._audio}, finish_reason=None)

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]:
        yield self._chunk(audio=None, finish_reason=chunk.finish_reason.value, usage=usage_object(chunk.usage))

    def _chunk(self, **fields: Any) -> dict[str, Any]:
        index, self._index = self._index, self._index + 1
        return {"id": self._id, "object": "audio.speech.chunk", "index": index, **fields}


def _audio_id(options: ChatOptions) -> str:
    return "audio_" + options.completion_id.removeprefix("chatcmpl-")


def finished_well(chunk: FinalChunk) -> bool:
    return chunk.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR)
