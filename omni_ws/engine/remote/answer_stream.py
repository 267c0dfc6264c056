"""A streamed chat completion, event by event, as outputs of an engine."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import orjson

from omni_ws.core.chunks import CONTENT_FILTER, FINISH_REASON_WARNING, AnswerWarning, FinishReason, TokenLogprob, Usage
from omni_ws.core.json_values import MAX_BODY_VALUES, MAX_MESSAGE_VALUES, check_values
from omni_ws.engine.answer_limit import count_words
from omni_ws.engine.base import EngineOutput, Finished, TextOutput, ThoughtOutput, ToolCallOutput, TranscriptOutput
from omni_ws.engine.remote.answer_fields import Halves, UpstreamToolCallReader, logprobs_of, whole_text
from omni_ws.engine.remote.refusal import stream_error
from omni_ws.engine.remote.server_sent_events import WHOLE_BODY, ServerSentEvent
from omni_ws.engine.remote.thought import ThoughtFilter
from omni_ws.engine.remote.upstream_audio import UpstreamAudio
from omni_ws.errors import EngineFailed, InvalidFrame, UpstreamInvalid

DONE: Final = b"[DONE]"

_FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
}
#: The longest name of another reason, in characters.
_MAX_REASON: Final = 64
#: Where servers put what a model thinks: vLLM, llama.cpp and LM Studio; Ollama and newer vLLM.
_THOUGHTS: Final = ("reasoning_content", "reasoning")
#: The texts that come in pieces, and their names in lists of parts.
_CUT_TEXTS: Final = frozenset({"content", *_THOUGHTS, "refusal", "arguments", "transcript", "text", "thinking"})
#: How deep parts of content may lie in one another.
_MOST_NESTED: Final = 4
#: Ends that are no end of an answer: the upstream gave it up.
_BROKEN: Final = frozenset({"abort", "error", "cancelled"})


def event_content(event: ServerSentEvent, *, upstream: str, log_content: bool = False) -> dict[str, Any]:
    """The JSON object of an event. Raises what an error event means, EngineFailed for anything that is no object."""
    try:
        check_values(event.data, MAX_BODY_VALUES if event.name == WHOLE_BODY else MAX_MESSAGE_VALUES)
        content = orjson.loads(event.data)
    except InvalidFrame as error:
        raise EngineFailed(f"the upstream sent an event that is not read: {error.message}") from None
    except orjson.JSONDecodeError:
        if event.name == "error":
            message = event.data.decode("utf-8", "replace")
            raise stream_error({"message": message}, upstream=upstream, log_content=log_content) from None
        content = _with_halves(event.data)
    if not isinstance(content, dict):
        raise EngineFailed("the upstream sent an event that is not an object")
    if event.name == "error" or content.get("error") is not None:
        raise stream_error(content, upstream=upstream, log_content=log_content)
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
        return value if keeps else whole_text(value)
    if isinstance(value, list):
        return [_mended(one, keeps=keeps) for one in value]
    if isinstance(value, dict):
        return {whole_text(name): _mended(one, keeps=name in _CUT_TEXTS) for name, one in value.items()}
    return value


class _Kind(StrEnum):
    """What a piece of text is."""

    CONTENT = "content"
    REFUSAL = "refusal"
    THOUGHT = "thought"
    #: Of the audio.
    SPOKEN = "transcript"


@dataclass(slots=True)
class _Choice:
    """One answer on its way."""

    index: int
    thoughts: ThoughtFilter
    calls: UpstreamToolCallReader = field(default_factory=UpstreamToolCallReader)
    halves: defaultdict[_Kind, Halves] = field(default_factory=lambda: defaultdict(Halves))
    #: Why it ended, as the upstream says.
    reason: str | None = None
    #: Whether there is anything in it: text, a refusal, a call, a thought or sound.
    says: bool = False
    #: Whether something in it could not be read.
    unread: bool = False
    #: The texts so far, and whether any of them came in a delta.
    texts: defaultdict[_Kind, list[str]] = field(default_factory=lambda: defaultdict(list))
    has_deltas: bool = False
    #: Text that the filter of thoughts has and has not given, in characters, and its tokens.
    filtered: int = 0
    tokens: list[TokenLogprob] = field(default_factory=list)
    #: Whether text was held back because it might have been a thought.
    waited: bool = False


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
        self.log_content = False
        self._choices = [_Choice(index, ThoughtFilter()) for index in range(choices)]
        self._usage: Mapping[str, Any] = {}
        self._text_kind: _Kind | None = None
        self._said: list[str] = []
        #: Whether any event was read.
        self._read = False

    def expect_thoughts(self, *, holds: bool, watches: bool) -> None:
        """Before the first event: thoughts may lack their opening tag, see ThoughtFilter."""
        for choice in self._choices:
            choice.thoughts = ThoughtFilter(holds=holds, watches=watches)

    @property
    def unopened_thought(self) -> bool:
        """Whether a thought lacked its opening tag."""
        return any(choice.thoughts.unopened for choice in self._choices)

    @property
    def waited(self) -> bool:
        """Whether text was held back because it might have been a thought."""
        return any(choice.waited for choice in self._choices)

    def read(self, event: ServerSentEvent) -> list[EngineOutput]:
        """Raises what an error event means, EngineFailed for garbage, and UpstreamInvalid for what says nothing."""
        if self.done:
            return []
        self._read = True
        if event.data.strip() == DONE:
            return self._end()
        content = event_content(event, upstream=self.upstream, log_content=self.log_content)
        if isinstance(usage := content.get("usage"), dict):
            self._usage = usage
            self.prompt_tokens = self._count("prompt_tokens", 0) or None
        is_whole = event.name == WHOLE_BODY
        outputs = [*self._transcript(content), *self._read_choices(content, is_whole=is_whole)]
        self.begun = self.begun or bool(outputs)
        return outputs + self._end() if is_whole else outputs

    def end(self, *, is_stream: bool = True) -> list[EngineOutput]:
        """The stream has ended, some without ``[DONE]``.

        Raises EngineFailed where the answer was not over, UpstreamInvalid where it is no stream and no answer.
        """
        if self.done:
            return []
        if not is_stream and not self._read:
            raise UpstreamInvalid("the upstream's answer is neither events nor JSON")
        if any(choice.reason is None for choice in self._choices):
            raise EngineFailed("the upstream's answer ended before its end")
        return self._end()

    def _end(self) -> list[EngineOutput]:
        self.done = True
        outputs = [*self._rest(), *self.audio.flush()]
        for choice in self._choices:
            known = choice.reason in (*_FINISH_REASONS, CONTENT_FILTER)
            unread = choice.unread or choice.calls.unread
            if not (choice.says or choice.calls.count) and (unread or not known):
                raise UpstreamInvalid("the upstream's answer has nothing in it that is understood")
        return outputs

    def finished(self, *, input_words: int, input_audio_ms: int) -> Finished:
        """``input_words`` and ``input_audio_ms`` count where the upstream says nothing of it."""
        usage = Usage(
            input_tokens=self._count("prompt_tokens", input_words),
            output_tokens=self._count("completion_tokens", count_words("".join(self._said))),
            input_audio_ms=self._count("input_audio_ms", input_audio_ms),
            output_audio_ms=round(self.audio.output_ms),
            cached_tokens=self._cached_tokens(),
        )
        reasons = tuple(map(_finish_reason, self._choices))
        foreign = tuple(None if one.reason in (None, *_FINISH_REASONS) else one.reason for one in self._choices)
        warnings = [
            AnswerWarning(FINISH_REASON_WARNING, f"the upstream's reason for the end is {reason}")
            for reason in dict.fromkeys(foreign)
            if reason is not None
        ]
        if any(choice.unread or choice.calls.unread for choice in self._choices):
            code = UpstreamInvalid.wire.code
            warnings.append(AnswerWarning(code, "something in the upstream's answer is not understood"))
        return Finished(
            reasons[0],
            usage,
            reasons if len(reasons) > 1 else (),
            foreign_reasons=foreign if any(foreign) else (),
            warnings=tuple(warnings),
        )

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
            interim, start_ms = heard.get("interim") is True, start_ms if type(start_ms) is int else None
            yield TranscriptOutput(whole_text(text), interim=interim, start_ms=start_ms)

    def _read_choices(self, content: Mapping[str, Any], *, is_whole: bool) -> Iterator[EngineOutput]:
        told = content.get("choices")
        for position, one in enumerate(told if isinstance(told, list) else ()):
            index = one.get("index") if isinstance(one, dict) else None
            index = position if index is None else index
            if not isinstance(one, dict) or type(index) is not int or not 0 <= index < len(self._choices):
                self._choices[0].unread = True
                continue
            choice, delta, message = self._choices[index], one.get("delta"), one.get("message")
            reason = one.get("finish_reason")
            reason = reason if isinstance(reason, str) else ""  # which some say before the end
            if delta and isinstance(delta, dict):
                choice.has_deltas = True
                yield from self._fields(choice, delta, content.get("modality"), logprobs_of(one))
            elif message is None and (text := one.get("text")) is not None:
                yield from self._fields(choice, {"content": text}, None, ())  # as of a completion
            if message and isinstance(message, dict) and (not delta or reason):
                logprobs = () if choice.texts[_Kind.CONTENT] else logprobs_of(one)
                message = self._unsaid(choice, message) if reason or is_whole else message
                yield from self._fields(choice, message, content.get("modality"), logprobs)
            choice.unread |= any(value and not isinstance(value, dict) for value in (delta, message))
            if reason:
                choice.reason = "".join(one for one in reason[:_MAX_REASON] if one.isprintable())
                if reason in _BROKEN:
                    raise EngineFailed("the upstream gave up the answer")

    def _unsaid(self, choice: _Choice, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message at the end of an answer, without what deltas or messages before it have said."""
        kinds: defaultdict[_Kind, list[str]] = defaultdict(list)
        for kind, text in self._texts(choice, message):
            kinds[kind].append(text)
        fields: dict[str, Any] = {"audio": message.get("audio")}
        for kind, texts in kinds.items():
            text, before = "".join(texts), "".join(choice.texts[kind])
            if text.startswith(before):
                fields[kind] = text[len(before) :]
            elif not choice.has_deltas:
                fields[kind] = text
        if not choice.calls.begun:
            fields |= {name: message.get(name) for name in ("tool_calls", "function_call")}
        return {"reasoning_content" if name is _Kind.THOUGHT else name: value for name, value in fields.items()}

    def _fields(
        self, choice: _Choice, fields: Mapping[str, Any], modality: object, logprobs: tuple[TokenLogprob, ...]
    ) -> Iterator[EngineOutput]:
        """What a delta or a message says."""
        # vLLM-Omni says beside the choices what kind of content it is, and puts audio where text is otherwise.
        if modality == "audio":
            choice.says = True
            if isinstance(said := fields.get("content"), str):
                yield from self.audio.feed_base64(said)
            fields = {name: value for name, value in fields.items() if name != "content"}
        for kind, text in self._texts(choice, fields):
            choice.texts[kind].append(text)
            text = choice.halves[kind].feed(text)
            match kind:
                case _Kind.THOUGHT if text:
                    choice.says, choice.thoughts.holds = True, False  # the upstream takes them out itself
                    yield ThoughtOutput(text, choice.index)
                case _Kind.REFUSAL if text:
                    choice.says = True
                    self._said.append(text)
                    yield TextOutput(text, (), choice.index, refusal=True)
                case _Kind.CONTENT:
                    yield from self._text(choice, kind, text, logprobs)
                    logprobs = ()
        yield from self._audio(choice, fields.get("audio"))
        for call in choice.calls.read(fields.get("tool_calls")):
            yield ToolCallOutput(call, choice.index)
        for call in choice.calls.read_legacy(fields.get("function_call")):
            yield ToolCallOutput(call, choice.index)
        if choice.calls.begun:
            self.begun = True

    def _texts(self, choice: _Choice, fields: Mapping[str, Any]) -> Iterator[tuple[_Kind, str]]:
        """The texts of a delta or a message, in any of their forms."""
        for name in _THOUGHTS:
            if value := fields.get(name):
                yield from self._parts(choice, value, _Kind.THOUGHT)
                break
        yield from self._parts(choice, fields.get("content"), _Kind.CONTENT)
        yield from self._parts(choice, fields.get("refusal"), _Kind.REFUSAL)

    def _parts(self, choice: _Choice, value: object, kind: _Kind, depth: int = 0) -> Iterator[tuple[_Kind, str]]:
        """Content as text, as a part, or as a list of parts: of OpenAI and of Mistral."""
        match value:
            case None | {"type": "reference"}:
                pass
            case str():
                yield kind, value
            case list() if depth < _MOST_NESTED:
                for part in value:
                    yield from self._parts(choice, part, kind, depth + 1)
            case {"thinking": inner} | {"reasoning": inner} if depth < _MOST_NESTED:
                yield from self._parts(choice, inner, _Kind.THOUGHT, depth + 1)
            case {"type": "refusal", "refusal": str(text)}:
                yield _Kind.REFUSAL, text
            case {"text": str(text)} | {"text": {"value": str(text)}}:
                yield kind, text
            case _:
                choice.unread = True

    def _audio(self, choice: _Choice, audio: object) -> Iterator[EngineOutput]:
        if not isinstance(audio, dict):
            return
        if isinstance(spoken := audio.get("transcript"), str):
            yield from self._text(choice, _Kind.SPOKEN, choice.halves[_Kind.SPOKEN].feed(spoken), ())
        if isinstance(data := audio.get("data"), str) and data:
            choice.says = True
            yield from self.audio.feed_base64(data)

    def _rest(self) -> Iterator[EngineOutput]:
        """What was held back."""
        for choice in self._choices:
            for kind, halves in tuple(choice.halves.items()):
                if kind in (_Kind.CONTENT, _Kind.SPOKEN) and (text := halves.finish()):
                    yield from self._text(choice, kind, text, ())
            yield from self._filtered(choice, *choice.thoughts.finish())
            for call in choice.calls.finish():
                yield ToolCallOutput(call, choice.index)

    def _text(
        self, choice: _Choice, kind: _Kind, text: str, logprobs: tuple[TokenLogprob, ...]
    ) -> Iterator[EngineOutput]:
        if not text and not logprobs:
            return
        self.begun = True  # also by a thought that is held back
        choice.says = choice.says or bool(text)
        self._text_kind = self._text_kind or kind
        if self._text_kind is kind:
            choice.filtered += len(text)
            choice.tokens += logprobs
            yield from self._filtered(choice, *choice.thoughts.feed(text))

    def _filtered(self, choice: _Choice, thought: str, answered: str) -> Iterator[EngineOutput]:
        if thought:
            yield ThoughtOutput(thought, choice.index)
        if choice.thoughts.waits:
            choice.waited = True
            yield TextOutput("")  # it is at work
            return
        # The tokens of a piece that is cut are not those of its text.
        logprobs = tuple(choice.tokens) if len(answered) == choice.filtered else ()
        choice.filtered, choice.tokens = 0, []
        if answered or logprobs:
            self._said.append(answered)
            yield TextOutput(answered, logprobs, choice.index)


def _finish_reason(choice: _Choice) -> FinishReason:
    called = bool(choice.calls.count)  # some servers say stop, also after a call
    reason = _FINISH_REASONS.get(choice.reason or "", FinishReason.STOP)
    if reason is FinishReason.LENGTH or choice.reason == CONTENT_FILTER:
        return reason
    return FinishReason.TOOL_CALLS if called else FinishReason.STOP
