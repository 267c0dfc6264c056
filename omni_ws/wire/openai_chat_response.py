"""Answers of the OpenAI-compatible routes: the exact order of stream chunks, and whole objects.

Pure: what goes in is what the session said, what comes out is JSON objects in the order in which they go out.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from omni_ws.core.chunks import FinishReason, OutputModality, TokenLogprob, ToolCall, ToolCallFragment, Usage
from omni_ws.core.output import FinalChunk, OutputChunk

#: What OpenAI says for a token that is as good as impossible.
LEAST_LOGPROB: Final = -9999.0
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
    #: How many answers there are to the one request.
    choices: int = 1
    logprobs: bool = False


def usage_object(usage: Usage) -> dict[str, Any]:
    told: dict[str, Any] = {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "input_audio_ms": usage.input_audio_ms,
        "output_audio_ms": usage.output_audio_ms,
        "input_after_start_bytes": usage.input_after_start_bytes,
    }
    if usage.cached_tokens is not None:
        told["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return told


def transcript_object(chunk: OutputChunk) -> dict[str, Any]:
    return {"text": chunk.text, "interim": chunk.interim, "start_ms": chunk.start_ms}


def finite_logprob(logprob: float | None) -> float | None:
    """JSON has no word for minus infinity."""
    return logprob if logprob is None else max(logprob, LEAST_LOGPROB)


def logprobs_object(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The ``logprobs`` of a choice of a chat."""
    content = [{**_token(one), "top_logprobs": [_token(top) for top in one.top]} for one in tokens]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": finite_logprob(token.logprob), "bytes": list(token.data)}


def finish_reasons(final: FinalChunk, choices: int) -> tuple[str, ...]:
    """The finish reason of each choice."""
    reasons = final.finish_reasons if len(final.finish_reasons) == choices else (final.finish_reason,) * choices
    return tuple(reason.value for reason in reasons)


class ChatStream:
    """The chunks of one streamed chat completion: role, content, terminal, and usage where it is asked for.

    With several choices the frames of role and the terminal ones are in the order of their indexes.
    """

    def __init__(self, options: ChatOptions) -> None:
        self._options = options
        self._role_sent = False
        self._audio_sent = False
        #: Text that was written and goes out as the transcript of the audio that says it.
        self._unspoken = ""
        self._audio = Base64Stream()
        #: The JSON of a delta of text, which is nearly all there is, before its text and behind it.
        self._before_text, _, self._behind_text = orjson.dumps(self._delta({"content": ""})).rpartition(b'""')

    def output(self, chunk: OutputChunk) -> Iterable[dict[str, Any] | bytes]:
        if self._role_sent and chunk.modality is OutputModality.TEXT and not self._options.wants_audio:
            return (self._content(chunk),) if self._options.wants_text else ()
        return self._outputs(chunk)

    def _outputs(self, chunk: OutputChunk) -> Iterator[dict[str, Any] | bytes]:
        if chunk.modality is OutputModality.TRANSCRIPT and not self._options.input_transcript:
            return
        yield from self._role()
        match chunk.modality:
            case OutputModality.TEXT:
                if self._options.wants_audio:
                    self._unspoken += chunk.text
                if self._options.wants_text:
                    yield self._content(chunk)
            case OutputModality.TRANSCRIPT:
                yield self._chunk([], input_transcript=transcript_object(chunk))
            case OutputModality.TOOL_CALL if chunk.tool_call is not None:
                for call in _tool_call_deltas(chunk.tool_call):
                    yield self._delta({"tool_calls": [call]}, index=chunk.choice)
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
        for index, reason in enumerate(finish_reasons(chunk, self._options.choices)):
            last = index == self._options.choices - 1
            extra = {"usage": usage} if last and self._options.usage_on_final_chunk else {}
            yield self._delta({}, index=index, finish_reason=reason, **extra)
        if self._options.include_usage and not self._options.usage_on_final_chunk:
            yield self._chunk([], usage=usage)

    def _role(self) -> Iterator[dict[str, Any]]:
        if not self._role_sent:
            self._role_sent = True
            for index in range(self._options.choices):
                yield self._delta({"role": "assistant"}, index=index)

    def _content(self, chunk: OutputChunk) -> dict[str, Any] | bytes:
        if chunk.choice == 0 and not self._options.logprobs:
            return b"%b%b%b" % (self._before_text, orjson.dumps(chunk.text), self._behind_text)
        choice = {"index": chunk.choice, "delta": {"content": chunk.text}, "finish_reason": None}
        if self._options.logprobs:
            choice["logprobs"] = logprobs_object(chunk.logprobs)
        return self._chunk([choice])

    def _audio_delta(self, fields: dict[str, Any]) -> dict[str, Any]:
        # SDKs join the ids and the pieces of all deltas: the id once, pieces that need no padding before the last.
        head = {} if self._audio_sent else {"id": _audio_id(self._options)}
        self._audio_sent = True
        spoken, self._unspoken = self._unspoken, ""
        return self._delta({"audio": {**head, **fields, **({"transcript": spoken} if spoken else {})}})

    def _delta(
        self, delta: dict[str, Any], *, index: int = 0, finish_reason: str | None = None, **extra: Any
    ) -> dict[str, Any]:
        return self._chunk([{"index": index, "delta": delta, "finish_reason": finish_reason}], **extra)

    def _chunk(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {
            "id": self._options.completion_id,
            "object": "chat.completion.chunk",
            "created": self._options.created,
            "model": self._options.model,
            "choices": choices,
            **extra,
        }


def _tool_call_deltas(call: ToolCallFragment) -> Iterator[dict[str, Any]]:
    """The head once, with empty arguments, and then these in pieces: SDKs join all that they get."""
    if call.id is not None or call.name is not None:
        head: dict[str, Any] = {"index": call.index}
        if call.id is not None:
            head |= {"id": call.id, "type": "function"}
        name = {} if call.name is None else {"name": call.name}
        yield {**head, "function": {**name, "arguments": ""}}
    if call.arguments:
        yield {"index": call.index, "function": {"arguments": call.arguments}}


class _Choice:
    """One answer, gathered."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._calls: dict[int, ToolCall] = {}
        self._arguments: dict[int, list[str]] = {}

    @property
    def text(self) -> str:
        return "".join(self._text)

    def say(self, chunk: OutputChunk) -> None:
        self._text.append(chunk.text)
        self._logprobs += chunk.logprobs

    def call(self, fragment: ToolCallFragment) -> None:
        known = self._calls.get(fragment.index) or ToolCall("", "", "")
        self._calls[fragment.index] = ToolCall(fragment.id or known.id, fragment.name or known.name, "")
        self._arguments.setdefault(fragment.index, []).append(fragment.arguments)

    def message(self, *, wants_text: bool) -> dict[str, Any]:
        text = self.text
        says = wants_text and not (self._calls and not text)
        message: dict[str, Any] = {"role": "assistant", "content": text if says else None, "refusal": None}
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(self._arguments[index])},
                }
                for index, call in sorted(self._calls.items())
            ]
        return message

    def logprobs(self) -> dict[str, Any]:
        return logprobs_object(self._logprobs)


class ChatCompletion:
    """A whole chat completion, gathered from the same outputs that a stream would have carried."""

    def __init__(self, options: ChatOptions) -> None:
        self._options = options
        self._choices = [_Choice() for _ in range(options.choices)]
        self._heard: list[str] = []
        self._audio = bytearray()

    def output(self, chunk: OutputChunk) -> None:
        match chunk.modality:
            case OutputModality.TEXT:
                self._choices[chunk.choice].say(chunk)
            case OutputModality.TOOL_CALL if chunk.tool_call is not None:
                self._choices[chunk.choice].call(chunk.tool_call)
            case OutputModality.AUDIO:
                self._audio += chunk.payload
            case OutputModality.TRANSCRIPT if not chunk.interim:
                self._heard.append(chunk.text)

    def final(self, chunk: FinalChunk, *, audio: bytes | None = None) -> dict[str, Any]:
        """``audio`` replaces what was gathered: a file with its true length in the header."""
        options = self._options
        reasons = finish_reasons(chunk, options.choices)
        choices = [self._choice(index, reason) for index, reason in enumerate(reasons)]
        if options.wants_audio:
            data = self._audio if audio is None else audio
            choices[0]["message"]["audio"] = {
                "id": _audio_id(options),
                "data": base64.b64encode(data).decode(),
                "expires_at": options.created + AUDIO_EXPIRES_SEC,
                "transcript": self._choices[0].text,
            }
        completion = {
            "id": options.completion_id,
            "object": "chat.completion",
            "created": options.created,
            "model": options.model,
            "choices": choices,
            "usage": usage_object(chunk.usage),
        }
        if self._heard and options.input_transcript:
            completion["input_transcript"] = {"text": " ".join(self._heard)}
        return completion

    def _choice(self, index: int, reason: str) -> dict[str, Any]:
        choice = self._choices[index]
        return {
            "index": index,
            "message": choice.message(wants_text=self._options.wants_text),
            "logprobs": choice.logprobs() if self._options.logprobs else None,
            "finish_reason": reason,
        }

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


def _audio_id(options: ChatOptions) -> str:
    return "audio_" + options.completion_id.removeprefix("chatcmpl-")


def finished_well(chunk: FinalChunk) -> bool:
    return chunk.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR)
