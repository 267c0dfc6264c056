"""A streamed chat completion, event by event, as outputs of an engine."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from omni_ws.core.chunks import FinishReason, TokenLogprob, Usage
from omni_ws.core.json_values import check_values
from omni_ws.engine.answer_limit import count_words
from omni_ws.engine.base import EngineOutput, Finished, TextOutput, ThoughtOutput, ToolCallOutput, TranscriptOutput
from omni_ws.engine.remote.answer_fields import UpstreamToolCallReader, logprobs_of
from omni_ws.engine.remote.refusal import stream_error
from omni_ws.engine.remote.server_sent_events import ServerSentEvent
from omni_ws.engine.remote.thought import ThoughtFilter
from omni_ws.engine.remote.upstream_audio import UpstreamAudio
from omni_ws.errors import EngineFailed, InvalidFrame

DONE: Final = b"[DONE]"

_FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
}
#: Where servers put what a model thinks: vLLM, llama.cpp and LM Studio; Ollama and newer vLLM.
_THOUGHTS: Final = ("reasoning_content", "reasoning")
#: The texts that come in pieces.
_CUT_TEXTS: Final = frozenset({"content", *_THOUGHTS})
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
#: Ends that are no end of an answer: the upstream gave it up.
_BROKEN: Final = frozenset({"abort", "error", "cancelled"})


def event_content(event: ServerSentEvent, *, upstream: str) -> dict[str, Any]:
    """The JSON object of an event. Raises what an error event means, EngineFailed for anything that is no object."""
    try:
        check_values(event.data)
        content = orjson.loads(event.data)
    except InvalidFrame as error:
        raise EngineFailed(f"the upstream sent an event that is not read: {error.message}") from None
    except orjson.JSONDecodeError:
        if event.name == "error":
            raise stream_error({"message": event.data.decode("utf-8", "replace")}, upstream=upstream) from None
        content = _with_halves(event.data)
    if not isinstance(content, dict):
        raise EngineFailed("the upstream sent an event that is not an object")
    if event.name == "error" or content.get("error") is not None:
        raise stream_error(content, upstream=upstream)
    return content


def _with_halves(data: bytes) -> Any:
    """Parse an event in whose texts a character may be cut in two, as servers do that count in UTF-16.

    Only the texts of an answer keep the halves: their next event has the other one. Raises EngineFailed.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise EngineFailed("the upstream sent an event that is not JSON") from None
    return _mended(content, keeps=False)


def _mended(value: Any, *, keeps: bool) -> Any:
    if isinstance(value, str):
        return value if keeps else _whole_text(value)
    if isinstance(value, list):
        return [_mended(one, keeps=keeps) for one in value]
    if isinstance(value, dict):
        return {_whole_text(name): _mended(one, keeps=name in _CUT_TEXTS) for name, one in value.items()}
    return value


def _whole_text(text: str) -> str:
    """The text with its surrogates joined, and those without the other half replaced."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Halves:
    """Joins the pieces of a text where a character is cut in two."""

    def __init__(self) -> None:
        self._half = ""

    def feed(self, text: str) -> str:
        """Return what is whole of the text so far."""
        text, self._half = self._half + text, ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return _whole_text(text)

    def finish(self) -> str:
        """Return what is in place of a half whose other one has not come."""
        half, self._half = self._half, ""
        return _whole_text(half)


class ChatAnswer:
    """Reads the events of one answer. ``done`` is set by ``[DONE]``, or at the end of a stream that gave a reason.

    The spoken text is there twice where a server sends both ``content`` and the transcript of its audio: the first of
    them that comes is the one that is used. What a model thinks before it answers is a ThoughtOutput.
    """

    def __init__(self, *, sample_rate: int, upstream: str, choices: int = 1) -> None:
        self.done = False
        #: Whether the model is at work for certain: it has thought, written, spoken or called a tool.
        self.begun = False
        #: Input tokens as the upstream counts them; None where it does not.
        self.prompt_tokens: int | None = None
        self.audio = UpstreamAudio(sample_rate=sample_rate)
        #: For the log.
        self.upstream = upstream
        self._reasons = [FinishReason.STOP] * choices
        self._calls = [UpstreamToolCallReader() for _ in range(choices)]
        self._thoughts = [ThoughtFilter() for _ in range(choices)]
        #: Whether each has told why it ended.
        self._told_reason = [False] * choices
        self._halves: defaultdict[tuple[int, str], _Halves] = defaultdict(_Halves)
        self._usage: Mapping[str, Any] = {}
        self._text_field: str | None = None
        self._said: list[str] = []

    def read(self, event: ServerSentEvent) -> list[EngineOutput]:
        """Raises what an error event means, and EngineFailed for garbage."""
        if self.done:
            return []
        if event.data.strip() == DONE:
            return self._end()
        content = event_content(event, upstream=self.upstream)
        if isinstance(usage := content.get("usage"), dict):
            self._usage = usage
            self.prompt_tokens = self._count("prompt_tokens", 0) or None
        outputs = [*self._transcript(content), *self._choices(content)]
        self.begun = self.begun or bool(outputs)
        return outputs

    def end(self) -> list[EngineOutput]:
        """The stream has ended, some without ``[DONE]``. Raises EngineFailed where the answer was not over."""
        if self.done:
            return []
        if not all(self._told_reason):
            raise EngineFailed("the upstream's answer ended before its end")
        return self._end()

    def _end(self) -> list[EngineOutput]:
        self.done = True
        return [*self._rest(), *self.audio.flush()]

    def finished(self, *, input_words: int, input_audio_ms: int) -> Finished:
        """``input_words`` and ``input_audio_ms`` count where the upstream says nothing of it."""
        usage = Usage(
            input_tokens=self._count("prompt_tokens", input_words),
            output_tokens=self._count("completion_tokens", count_words("".join(self._said))),
            input_audio_ms=self._count("input_audio_ms", input_audio_ms),
            output_audio_ms=round(self.audio.output_ms),
            cached_tokens=self._cached_tokens(),
        )
        return Finished(self._reasons[0], usage, tuple(self._reasons) if len(self._reasons) > 1 else ())

    def _count(self, name: str, otherwise: int) -> int:
        value = self._usage.get(name)
        return value if type(value) is int and value >= 0 else otherwise

    def _cached_tokens(self) -> int | None:
        details = self._usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return cached if type(cached) is int and cached >= 0 else None

    def _transcript(self, content: Mapping[str, Any]) -> Iterator[EngineOutput]:
        heard = content.get("input_transcript")
        if isinstance(heard, dict) and isinstance(text := heard.get("text"), str):
            start_ms = heard.get("start_ms")
            yield TranscriptOutput(
                text, interim=heard.get("interim") is True, start_ms=start_ms if type(start_ms) is int else None
            )

    def _choices(self, content: Mapping[str, Any]) -> Iterator[EngineOutput]:
        choices = content.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict) or (index := choice.get("index", 0)) not in range(len(self._reasons)):
                continue
            delta = choice.get("delta")
            if delta is None:  # a whole answer
                delta = choice.get("message")
            if isinstance(delta, dict):
                yield from self._delta(delta, content.get("modality"), index, logprobs_of(choice))
                for call in self._calls[index].read(delta.get("tool_calls")):
                    yield ToolCallOutput(call, index)
            self._finish(choice.get("finish_reason"), index)

    def _rest(self) -> Iterator[EngineOutput]:
        """What the filters of thoughts held back."""
        for (index, name), halves in tuple(self._halves.items()):
            if name == "content" and (text := halves.finish()):
                yield from self._text("content", text, index)
        for index, thoughts in enumerate(self._thoughts):
            thought, answered = thoughts.finish()
            if thought:
                yield ThoughtOutput(thought, index)
            yield from self._said_text(answered, index, ())

    def _finish(self, reason: object, index: int) -> None:
        if not isinstance(reason, str):
            return
        self._told_reason[index] = True
        if reason in _BROKEN:
            raise EngineFailed("the upstream gave up the answer")
        called = bool(self._calls[index].count)  # some servers say stop, also after a call
        self._reasons[index] = _FINISH_REASONS.get(reason, FinishReason.TOOL_CALLS if called else FinishReason.STOP)

    def _delta(
        self, delta: Mapping[str, Any], modality: object, index: int, logprobs: tuple[TokenLogprob, ...]
    ) -> Iterator[EngineOutput]:
        said = delta.get("content")
        thought = next((text for name in _THOUGHTS if isinstance(text := delta.get(name), str) and text), "")
        if thought and (thought := self._halves[index, "thought"].feed(thought)):
            yield ThoughtOutput(thought, index)
        # vLLM-Omni says beside the choices what kind of content it is, and puts audio where text is otherwise.
        if modality == "audio":
            if isinstance(said, str):
                yield from self.audio.feed_base64(said)
        elif isinstance(said, str):
            yield from self._text("content", self._halves[index, "content"].feed(said), index, logprobs)
        audio = delta.get("audio")
        if isinstance(audio, dict):
            if isinstance(spoken := audio.get("transcript"), str):
                yield from self._text("transcript", spoken)
            if isinstance(data := audio.get("data"), str):
                yield from self.audio.feed_base64(data)

    def _text(
        self, field: str, text: str, index: int = 0, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> Iterator[EngineOutput]:
        if not text and not logprobs:
            return
        self.begun = True  # also by a thought that is held back
        self._text_field = self._text_field or field
        if self._text_field == field:
            thought, answered = self._thoughts[index].feed(text)
            if thought:
                yield ThoughtOutput(thought, index)
            # The tokens of a piece that is cut are not those of its text.
            yield from self._said_text(answered, index, logprobs if answered == text else ())

    def _said_text(self, text: str, index: int, logprobs: tuple[TokenLogprob, ...]) -> Iterator[EngineOutput]:
        if text or logprobs:
            self._said.append(text)
            yield TextOutput(text, logprobs, index)
