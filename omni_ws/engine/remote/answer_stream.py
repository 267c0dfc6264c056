"""A streamed chat completion, event by event, as outputs of an engine."""

from __future__ import annotations

import json
import re
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from enum import Enum, StrEnum, auto
from typing import Any, Final

import orjson

from omni_ws.core.chunks import (
    CONTENT_FILTER,
    FINISH_REASON_WARNING,
    AnswerWarning,
    FinishReason,
    TokenLogprob,
    ToolCallFragment,
    Usage,
)
from omni_ws.core.json_values import MAX_BODY_VALUES, MAX_MESSAGE_VALUES, check_values
from omni_ws.engine.answer_limit import count_words
from omni_ws.engine.base import EngineOutput, Finished, TextOutput, ThoughtOutput, ToolCallOutput, TranscriptOutput
from omni_ws.engine.remote.event_stream import WHOLE_BODY, ServerSentEvent, UpstreamAudio
from omni_ws.engine.remote.refusal import stream_error
from omni_ws.errors import EngineFailed, InvalidFrame, UpstreamInvalid

# The answer.

#: The last event of a stream.
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
    # Of the parsers at hand only the standard library's gives back half a character.
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


class ChatAnswer:
    """Reads the events of one answer. ``done`` is set by ``[DONE]``, or at the end of a stream that gave a reason.

    The spoken text is there twice where a server sends both ``content`` and the transcript of its audio: the first of
    them that comes is the one that is used. What a model thinks before it answers is a ThoughtOutput.
    """

    def __init__(self, *, sample_rate: int, choices: int = 1, log_content: bool = False) -> None:
        self.done = False
        #: Input tokens as the upstream counts them; None where it does not.
        self.prompt_tokens: int | None = None
        self._upstream = ""
        self._log_content = log_content
        self._audio = UpstreamAudio(sample_rate=sample_rate)
        self._choices = [_Choice(index, self._audio) for index in range(choices)]
        self._usage: Mapping[str, Any] = {}
        #: Whether any event was read, and whether one had outputs.
        self._read = self._has_outputs = False

    def expect(self, upstream: str, *, holds: bool, watches: bool) -> None:
        """Say before the first event who answers, for the log, and how thoughts are found; see ThoughtFilter."""
        self._upstream = upstream
        for choice in self._choices:
            choice.expect_thoughts(holds=holds, watches=watches)

    @property
    def begun(self) -> bool:
        """Whether the model is at work for certain: it has thought, written, spoken or called a tool."""
        return self._has_outputs or any(choice.begun for choice in self._choices)

    @property
    def unopened_thought(self) -> bool:
        """Whether a thought lacked its opening tag."""
        return any(choice.unopened_thought for choice in self._choices)

    @property
    def waited(self) -> bool:
        """Whether text was held back because it might have been a thought."""
        return any(choice.waited for choice in self._choices)

    def read(self, event: ServerSentEvent) -> list[EngineOutput]:
        """Return the outputs of the next event.

        Raises what an error event means, EngineFailed for garbage, and UpstreamInvalid for an answer that says nothing.
        """
        if self.done:
            return []
        self._read = True
        if event.data.strip() == DONE:
            return self._end()
        content = event_content(event, upstream=self._upstream, log_content=self._log_content)
        if isinstance(usage := content.get("usage"), dict):
            self._usage = usage
            self.prompt_tokens = self._count("prompt_tokens", 0) or None
        is_whole = event.name == WHOLE_BODY
        outputs = [*_transcript(content), *self._read_choices(content, is_whole=is_whole)]
        self._has_outputs = self._has_outputs or bool(outputs)
        return outputs + self._end() if is_whole else outputs

    def end(self, *, is_stream: bool = True) -> list[EngineOutput]:
        """Return what was held back when the stream ends, which some do without ``[DONE]``.

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
        outputs = [output for choice in self._choices for output in choice.finish()]
        outputs += self._audio.flush()
        if not all(choice.is_understood for choice in self._choices):
            raise UpstreamInvalid("the upstream's answer has nothing in it that is understood")
        return outputs

    def finished(self, *, input_words: int, input_audio_ms: int) -> Finished:
        """Return the end of the answer; ``input_words`` and ``input_audio_ms`` count if the upstream counts nothing."""
        usage = Usage(
            input_tokens=self._count("prompt_tokens", input_words),
            output_tokens=self._count("completion_tokens", sum(choice.words for choice in self._choices)),
            input_audio_ms=self._count("input_audio_ms", input_audio_ms),
            output_audio_ms=round(self._audio.output_ms),
            cached_tokens=self._cached_tokens(),
        )
        reasons = tuple(choice.finish_reason for choice in self._choices)
        foreign = tuple(None if one.reason in (None, *_FINISH_REASONS) else one.reason for one in self._choices)
        warnings = [
            AnswerWarning(FINISH_REASON_WARNING, f"the upstream's reason for the end is {reason}")
            for reason in dict.fromkeys(foreign)
            if reason is not None
        ]
        if any(choice.unread for choice in self._choices):
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

    def _read_choices(self, content: Mapping[str, Any], *, is_whole: bool) -> Iterator[EngineOutput]:
        told = content.get("choices")
        for position, one in enumerate(told if isinstance(told, list) else ()):
            index = one.get("index") if isinstance(one, dict) else None
            index = position if index is None else index
            if not isinstance(one, dict) or type(index) is not int or not 0 <= index < len(self._choices):
                self._choices[0].note_unread()
                continue
            yield from self._choices[index].read(one, content.get("modality"), is_whole=is_whole)


def _transcript(content: Mapping[str, Any]) -> Iterator[EngineOutput]:
    heard = content.get("input_transcript")
    if isinstance(heard, dict) and isinstance(text := heard.get("text"), str):
        start_ms = heard.get("start_ms")
        interim, start_ms = heard.get("interim") is True, start_ms if type(start_ms) is int else None
        yield TranscriptOutput(whole_text(text), interim=interim, start_ms=start_ms)


class _Kind(StrEnum):
    """What a piece of text is."""

    CONTENT = "content"
    REFUSAL = "refusal"
    THOUGHT = "thought"
    #: Of the audio.
    SPOKEN = "transcript"


class _Choice:
    """Reads one of the answers of a completion; ``audio`` decodes the sound of all of them."""

    def __init__(self, index: int, audio: UpstreamAudio) -> None:
        #: Why the answer ended, as the upstream says; None until then.
        self.reason: str | None = None
        #: Whether text was held back because it might have been a thought.
        self.waited = False
        self._index = index
        self._audio = audio
        self._thoughts = ThoughtFilter()
        self._calls = UpstreamToolCallReader()
        self._halves: defaultdict[_Kind, Halves] = defaultdict(Halves)
        #: Whether text has come, also if it is held back; and whether anything has: text, a thought or sound.
        self._has_text = self._says = False
        self._unread = False
        #: The texts so far, and whether any of them came in a delta.
        self._texts: defaultdict[_Kind, list[str]] = defaultdict(list)
        self._has_deltas = False
        #: Which of the two texts of a spoken answer is used.
        self._text_kind: _Kind | None = None
        #: Text that the filter of thoughts has taken and not given back, in characters, and its tokens.
        self._filtered = 0
        self._tokens: list[TokenLogprob] = []
        self._said: list[str] = []

    def expect_thoughts(self, *, holds: bool, watches: bool) -> None:
        """Say before the first event how thoughts without an opening tag are found; see ThoughtFilter."""
        self._thoughts = ThoughtFilter(holds=holds, watches=watches)

    @property
    def begun(self) -> bool:
        """Whether the model has written, also a thought that is held back, or called a tool."""
        return self._has_text or self._calls.begun

    @property
    def unopened_thought(self) -> bool:
        """Whether a thought lacked its opening tag."""
        return self._thoughts.unopened

    @property
    def words(self) -> int:
        """How many words the text has."""
        return count_words("".join(self._said))

    @property
    def unread(self) -> bool:
        """Whether something in the answer could not be read."""
        return self._unread or self._calls.unread

    @property
    def is_understood(self) -> bool:
        """Whether the answer says something, or was read whole and ended for a reason that is known."""
        known = self.reason in (*_FINISH_REASONS, CONTENT_FILTER)
        return self._says or bool(self._calls.count) or (known and not self.unread)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the answer ended, in our words. Some servers say stop, also after a call."""
        reason = _FINISH_REASONS.get(self.reason or "", FinishReason.STOP)
        if reason is FinishReason.LENGTH or self.reason == CONTENT_FILTER:
            return reason
        return FinishReason.TOOL_CALLS if self._calls.count else FinishReason.STOP

    def note_unread(self) -> None:
        """Note that something in the answer could not be read."""
        self._unread = True

    def read(self, one: Mapping[str, Any], modality: object, *, is_whole: bool) -> Iterator[EngineOutput]:
        """Yield the outputs of what an event says of this answer. Raises EngineFailed where the upstream gave it up."""
        delta, message, reason = one.get("delta"), one.get("message"), one.get("finish_reason")
        reason = reason if isinstance(reason, str) else ""  # which some say before the end
        if delta and isinstance(delta, dict):
            self._has_deltas = True
            yield from self._fields(delta, modality, logprobs_of(one))
        elif message is None and (text := one.get("text")) is not None:
            yield from self._fields({"content": text}, None, ())  # as of a completion
        if message and isinstance(message, dict) and (not delta or reason):
            logprobs = () if self._texts[_Kind.CONTENT] else logprobs_of(one)
            message = self._unsaid(message) if reason or is_whole else message
            yield from self._fields(message, modality, logprobs)
        self._unread |= any(value and not isinstance(value, dict) for value in (delta, message))
        if reason:
            self.reason = "".join(one for one in reason[:_MAX_REASON] if one.isprintable())
            if reason in _BROKEN:
                raise EngineFailed("the upstream gave up the answer")

    def finish(self) -> Iterator[EngineOutput]:
        """Yield what was held back, at the end of the answer."""
        for kind, halves in tuple(self._halves.items()):
            if kind in (_Kind.CONTENT, _Kind.SPOKEN) and (text := halves.finish()):
                yield from self._text(kind, text, ())
        yield from self._filtered_text(*self._thoughts.finish())
        for call in self._calls.finish():
            yield ToolCallOutput(call, self._index)

    def _unsaid(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message at the end of an answer, without what deltas or messages before it have said."""
        kinds: defaultdict[_Kind, list[str]] = defaultdict(list)
        for kind, text in self._texts_of(message):
            kinds[kind].append(text)
        fields: dict[str, Any] = {"audio": message.get("audio")}
        for kind, texts in kinds.items():
            text, before = "".join(texts), "".join(self._texts[kind])
            if text.startswith(before):
                fields[kind] = text[len(before) :]
            elif not self._has_deltas:
                fields[kind] = text
        if not self._calls.begun:
            fields |= {name: message.get(name) for name in ("tool_calls", "function_call")}
        return {"reasoning_content" if name is _Kind.THOUGHT else name: value for name, value in fields.items()}

    def _fields(
        self, fields: Mapping[str, Any], modality: object, logprobs: tuple[TokenLogprob, ...]
    ) -> Iterator[EngineOutput]:
        """What a delta or a message says."""
        # vLLM-Omni says beside the choices what kind of content it is, and puts audio where text is otherwise.
        if modality == "audio":
            self._says = True
            if isinstance(said := fields.get("content"), str):
                yield from self._audio.feed_base64(said)
            fields = {name: value for name, value in fields.items() if name != "content"}
        for kind, text in self._texts_of(fields):
            self._texts[kind].append(text)
            text = self._halves[kind].feed(text)
            match kind:
                case _Kind.THOUGHT if text:
                    self._says = True
                    self._thoughts.hold_no_more()  # the upstream takes them out itself
                    yield ThoughtOutput(text, self._index)
                case _Kind.REFUSAL if text:
                    self._says = True
                    self._said.append(text)
                    yield TextOutput(text, (), self._index, refusal=True)
                case _Kind.CONTENT:
                    yield from self._text(kind, text, logprobs)
                    logprobs = ()
        yield from self._sound(fields.get("audio"))
        for call in self._calls.read(fields.get("tool_calls")):
            yield ToolCallOutput(call, self._index)
        for call in self._calls.read_legacy(fields.get("function_call")):
            yield ToolCallOutput(call, self._index)

    def _texts_of(self, fields: Mapping[str, Any]) -> Iterator[tuple[_Kind, str]]:
        """The texts of a delta or a message, in any of their forms."""
        for name in _THOUGHTS:
            if value := fields.get(name):
                yield from self._parts(value, _Kind.THOUGHT)
                break
        yield from self._parts(fields.get("content"), _Kind.CONTENT)
        yield from self._parts(fields.get("refusal"), _Kind.REFUSAL)

    def _parts(self, value: object, kind: _Kind, depth: int = 0) -> Iterator[tuple[_Kind, str]]:
        """Content as text, as a part, or as a list of parts: of OpenAI and of Mistral."""
        match value:
            case None | {"type": "reference"}:
                pass
            case str():
                yield kind, value
            case list() if depth < _MOST_NESTED:
                for part in value:
                    yield from self._parts(part, kind, depth + 1)
            case {"thinking": inner} | {"reasoning": inner} if depth < _MOST_NESTED:
                yield from self._parts(inner, _Kind.THOUGHT, depth + 1)
            case {"type": "refusal", "refusal": str(text)}:
                yield _Kind.REFUSAL, text
            case {"text": str(text)} | {"text": {"value": str(text)}}:
                yield kind, text
            case _:
                self._unread = True

    def _sound(self, audio: object) -> Iterator[EngineOutput]:
        if not isinstance(audio, dict):
            return
        if isinstance(spoken := audio.get("transcript"), str):
            yield from self._text(_Kind.SPOKEN, self._halves[_Kind.SPOKEN].feed(spoken), ())
        if isinstance(data := audio.get("data"), str) and data:
            self._says = True
            yield from self._audio.feed_base64(data)

    def _text(self, kind: _Kind, text: str, logprobs: tuple[TokenLogprob, ...]) -> Iterator[EngineOutput]:
        if not text and not logprobs:
            return
        self._has_text = True
        self._says = self._says or bool(text)
        self._text_kind = self._text_kind or kind
        if self._text_kind is kind:
            self._filtered += len(text)
            self._tokens += logprobs
            yield from self._filtered_text(*self._thoughts.feed(text))

    def _filtered_text(self, thought: str, answered: str) -> Iterator[EngineOutput]:
        if thought:
            yield ThoughtOutput(thought, self._index)
        if self._thoughts.waits:
            self.waited = True
            yield TextOutput("")  # it is at work
            return
        # The tokens of a piece that is cut are not those of its text.
        logprobs = tuple(self._tokens) if len(answered) == self._filtered else ()
        self._filtered, self._tokens = 0, []
        if answered or logprobs:
            self._said.append(answered)
            yield TextOutput(answered, logprobs, self._index)


# Tool calls and log-probabilities. What is malformed is left out, and noted.

#: In one answer.
_MOST_CALLS: Final = 1000
#: A call without arguments.
_NO_ARGUMENTS: Final = "{}"
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
#: What opens and closes in JSON; an escaped character with its backslash.
_MARKS: Final = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)


class Halves:
    """Joins the pieces of a text where a character is cut in two, as servers do that count in UTF-16."""

    def __init__(self) -> None:
        self._half = ""

    def feed(self, text: str) -> str:
        """Return what is whole of the text so far."""
        text, self._half = self._half + text, ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return whole_text(text)

    def finish(self) -> str:
        """Return what takes the place of a half whose other half has not come; empty without one."""
        half, self._half = self._half, ""
        return whole_text(half)


def whole_text(text: str) -> str:
    """Return a text with the halves of its characters joined, and U+FFFD in place of a half alone."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Call:
    """One call under way: the upstream's ``place`` and id, our own id, and what is known of the call."""

    def __init__(self, place: int, their_id: str) -> None:
        self.place = place
        self.their_id = their_id
        self.id = their_id or f"call_{uuid.uuid4().hex[:24]}"
        self.name = ""
        #: The place of the call in our answer; None until the call is told.
        self.index: int | None = None
        self.has_arguments = False
        #: Whether the arguments are a whole JSON value; known of a call without an id alone.
        self.closed = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._halves = Halves()
        #: Arguments that may still mean none.
        self._held = ""

    def take_id(self, their_id: str) -> None:
        """Note the upstream's id, which came late: ours, too, unless another one was told."""
        self.their_id = their_id
        if self.index is None:
            self.id = their_id

    def take_name(self, name: str) -> None:
        """Note a name, or the rest of one: before the arguments, and before the call is told."""
        if name != self.name and not self.has_arguments and self.index is None:
            self.name += name

    def take_arguments(self, text: str) -> str:
        """Take a piece of the arguments; return what may be told, nothing while they may still be ``null``."""
        text = self._halves.feed(text)
        if self.has_arguments:
            return text
        self._held += text
        if "null".startswith(self._held.strip()):
            self._held = self._held.strip()  # blanks must not pile up
            return ""
        self.has_arguments = True
        text, self._held = self._held.lstrip(), ""
        return text

    def told(self, arguments: str, *, index: int | None = None) -> ToolCallFragment:
        """Return the next piece of the call; the first one, which has its name, with an ``index``."""
        if not self.their_id:
            self._note_brackets(arguments)
        if index is None:
            assert self.index is not None
            return ToolCallFragment(self.index, arguments=arguments)
        self.index = index
        return ToolCallFragment(index, self.id, self.name, arguments)

    def _note_brackets(self, text: str) -> None:
        if self._escaped:
            text, self._escaped = text[1:], not text
        for mark in _MARKS.findall(text):
            if mark[0] == "\\":
                self._escaped = len(mark) == 1
            elif mark == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark in "{[" else -1
                self.closed = self._depth == 0

    def rest(self) -> str:
        """Return what is left of the arguments at the end of the answer."""
        return self._halves.finish() if self.has_arguments else _NO_ARGUMENTS


class UpstreamToolCallReader:
    """The calls of one answer.

    Calls are told apart by id, without one by index. A name behind arguments of the same index begins a new call; one
    before them continues the name, or repeats it. A call is told once its arguments begin, at the latest at the end.
    """

    def __init__(self) -> None:
        #: Whether something that looks like a call could not be read.
        self.unread = False
        #: How many calls have been told.
        self.count = 0
        self._calls: list[_Call] = []
        self._by_id: dict[str, _Call] = {}
        #: The newest of each index of the upstream's.
        self._newest: dict[int, _Call] = {}
        self._is_legacy = False

    @property
    def begun(self) -> bool:
        return bool(self._calls)

    def read(self, deltas: object) -> Iterator[ToolCallFragment]:
        """The next pieces, from ``tool_calls``."""
        if isinstance(deltas, dict):
            deltas = [deltas]
        if not isinstance(deltas, list):
            self.unread |= deltas is not None
            return
        for position, delta in enumerate(deltas):
            function = delta.get("function") if isinstance(delta, dict) else None
            index = delta.get("index") if isinstance(delta, dict) else None
            index = position if index is None else index
            if not isinstance(function, dict) or type(index) is not int or index < 0:
                self.unread = True
                continue
            call_id, name = _text(delta.get("id")) or "", _text(function.get("name")) or ""
            arguments = function.get("arguments")
            call = self._call(index, call_id, name, more=bool(arguments))
            yield from self._feed(call, name, arguments)

    def read_legacy(self, function: object) -> Iterator[ToolCallFragment]:
        """The next piece of the one call of an answer, from ``function_call``."""
        if isinstance(function, dict) and (self._is_legacy or not self._calls):
            self._is_legacy = True
            yield from self.read([{"index": 0, "function": function}])

    def finish(self) -> Iterator[ToolCallFragment]:
        """What has not been told of the calls, at the end of the answer."""
        for call in self._calls:
            if call.index is None and not call.name:
                self.unread = True
            elif call.index is None:
                yield self._told(call, "" if call.has_arguments else _NO_ARGUMENTS)
            elif rest := call.rest():
                yield call.told(rest)

    def _call(self, index: int, call_id: str, name: str, *, more: bool) -> _Call:
        """The call that a piece belongs to; ``more``: it has arguments."""
        newest = self._newest.get(index)
        known = self._by_id.get(call_id)
        if known is not None:
            begins_another = name and known.has_arguments and (name != known.name or index != known.place)
            return self._begin(index, "") if begins_another else known
        if newest is None:
            return self._begin(index, call_id)
        if not call_id:
            begins_another = name and newest.has_arguments and (name != newest.name or newest.closed)
            return self._begin(index, "") if begins_another else newest
        if not name and more and newest.name:
            return newest  # some servers make up another id for each piece
        if newest.their_id or (name and newest.name not in ("", name)) or (name and newest.has_arguments):
            return self._begin(index, call_id)
        newest.take_id(call_id)
        self._by_id[call_id] = newest
        return newest

    def _begin(self, index: int, call_id: str) -> _Call:
        if len(self._calls) == _MOST_CALLS:
            raise EngineFailed("the upstream's answer calls too many tools")
        call = _Call(index, call_id)
        self._calls.append(call)
        self._newest[index] = call
        if call_id:
            self._by_id[call_id] = call
        return call

    def _feed(self, call: _Call, name: str, arguments: object) -> Iterator[ToolCallFragment]:
        call.take_name(name)
        text = self._arguments(call, arguments)
        if not text:
            return
        if not call.name:
            self.unread = True  # arguments of a call without a name
            return
        if call.index is not None:
            yield call.told(text)
            return
        for earlier in self._calls[: self._calls.index(call)]:
            if earlier.index is None and earlier.name:
                yield self._told(earlier, "")
        yield self._told(call, text)

    def _arguments(self, call: _Call, arguments: object) -> str:
        """The next piece of the arguments, empty while they may still be none."""
        if isinstance(arguments, dict):
            try:
                arguments = "" if call.has_arguments else orjson.dumps(arguments).decode()
            except orjson.JSONEncodeError:
                self.unread = True
                return ""
        if isinstance(arguments, str):
            return call.take_arguments(arguments)
        self.unread |= arguments is not None
        return ""

    def _told(self, call: _Call, arguments: str) -> ToolCallFragment:
        self.count += 1
        return call.told(arguments, index=self.count - 1)


def logprobs_of(choice: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    told = choice.get("logprobs")
    content = told.get("content") if isinstance(told, dict) else None
    return tuple(_tokens(content))


def _tokens(entries: object) -> Iterator[TokenLogprob]:
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict):
            continue
        token, logprob = entry.get("token"), entry.get("logprob")
        if isinstance(token, str) and isinstance(logprob, int | float):
            top = tuple(_tokens(entry.get("top_logprobs")))
            yield TokenLogprob(token, _bytes(entry.get("bytes"), token), float(logprob), top)


def _bytes(values: object, token: str) -> bytes:
    """The token's own bytes; where the upstream does not tell them, those of its text."""
    if isinstance(values, list) and all(type(value) is int and 0 <= value <= 255 for value in values):
        return bytes(values)
    return token.encode()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


# What a reasoning model thinks, written into the text of its answer.

_OPENING_TAG: Final = "<think>"
CLOSING_TAG: Final = "</think>"
#: White space before the first word, in characters, that is held back because a thought may follow it.
_MOST_HELD: Final = 64
#: Text that may be a thought without an opening tag, in characters: what is longer is taken for the answer.
_MOST_UNOPENED: Final = 4 * 1024 * 1024


class _Place(Enum):
    """``BEGINNING`` → ``THOUGHT`` → ``GAP`` → ``ANSWER``; without a thought ``BEGINNING`` → ``ANSWER``.

    Where the opening tag may be missing: ``BEGINNING`` → ``UNOPENED`` → ``GAP``, or at the end of the text ``ANSWER``.
    """

    BEGINNING = auto()
    THOUGHT = auto()
    #: What the closing tag makes a thought, if it comes.
    UNOPENED = auto()
    #: Between the thought and the first word of the answer.
    GAP = auto()
    ANSWER = auto()


class ThoughtFilter:
    """Takes ``<think>…</think>`` at the beginning of a text that arrives in pieces, cut anywhere.

    Later in the text the same words are part of the answer. The white space around the thought goes with it. Takes time
    linear in the length of the text; holds back less than a tag, or ``_MOST_HELD``.

    Templates may end with the opening tag, which is then missing. With ``holds`` all is held back until the closing
    tag, or the end. Without it such a tag is taken out where it begins a line, if ``watches``; what stood before it has
    gone out.
    """

    def __init__(self, *, holds: bool = False, watches: bool = False) -> None:
        self._holds = holds
        #: Whether a thought was closed that had not been opened.
        self.unopened = False
        self._watches = watches
        self._place = _Place.BEGINNING
        self._held = ""
        #: What is UNOPENED, and its size.
        self._pieces: list[str] = []
        self._size = 0
        #: The end of the text before, and whether it ends a line, but for blanks.
        self._border = ""
        self._line_ended = True

    @property
    def waits(self) -> bool:
        """Whether it is not certain yet what the text so far is."""
        return self._place is _Place.UNOPENED

    def hold_no_more(self) -> None:
        """Hold back nothing that comes from now on: thoughts come by themselves."""
        self._holds = False

    def feed(self, text: str) -> tuple[str, str]:
        """Return what the next piece adds to the thought and to the answer."""
        if self._place is _Place.ANSWER and not self._watches:
            held, self._held = self._held, ""
            return "", held + text
        text, self._held = self._held + text, ""
        thought = ""
        if self._place is _Place.BEGINNING:
            text = self._begin(text)
        if self._place is _Place.ANSWER:
            return "", self._watch(text)
        if self._place is _Place.THOUGHT:
            thought, text = self._think(text)
        elif self._place is _Place.UNOPENED:
            thought, text = self._wait(text)
        if self._place is _Place.GAP:
            text = text.lstrip()
            if text:
                self._place, self._watches = _Place.ANSWER, False
        return thought, text

    def finish(self) -> tuple[str, str]:
        """Return the rest of the thought and of the answer, at the end of the text."""
        held, self._held = self._held, ""
        if self._place is _Place.THOUGHT:
            return held, ""
        self._place = _Place.ANSWER
        return "", self._let_go() + held

    def _begin(self, text: str) -> str:
        bare = text.lstrip()
        if len(text) - len(bare) <= _MOST_HELD:
            if bare.startswith(_OPENING_TAG):
                self._place = _Place.THOUGHT
                return bare[len(_OPENING_TAG) :]
            if _OPENING_TAG.startswith(bare):
                self._held = text
                return ""
        self._place = _Place.UNOPENED if self._holds else _Place.ANSWER
        return text

    def _think(self, text: str) -> tuple[str, str]:
        end = text.find(CLOSING_TAG)
        if end >= 0:
            self._place = _Place.GAP
            return text[:end], text[end + len(CLOSING_TAG) :]
        kept = _tag_begun(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], ""

    def _wait(self, text: str) -> tuple[str, str]:
        """Hold ``text`` back; the thought, and what follows it, once it is closed."""
        self._pieces.append(text)
        self._size += len(text)
        closed = CLOSING_TAG in self._border + text
        self._border = (self._border + text)[1 - len(CLOSING_TAG) :]
        if self._holds and self._size <= _MOST_UNOPENED and not closed:
            return "", ""
        whole = self._let_go()
        thought, _, answer = whole.partition(CLOSING_TAG)
        if not closed or _OPENING_TAG in thought:
            self._place, self._watches = _Place.ANSWER, False
            return "", whole
        self.unopened, self._place = True, _Place.GAP
        return thought, answer

    def _let_go(self) -> str:
        text, self._pieces, self._size = "".join(self._pieces), [], 0
        return text

    def _watch(self, text: str) -> str:
        """The answer; without a closing tag that begins a line, unless an opening one was there before."""
        if not self._watches or _OPENING_TAG in self._border + text:
            self._watches = False
            return text
        place = text.find(CLOSING_TAG)
        if place >= 0:
            self._watches = False
            if self._ends_line(text[:place]):
                behind = text[place + len(CLOSING_TAG) :].lstrip()
                self.unopened, self._place = True, _Place.ANSWER if behind else _Place.GAP
                return text[:place] + behind
            return text
        kept = _tag_begun(text)
        if kept and self._ends_line(text[:-kept]):
            text, self._held = text[:-kept], text[-kept:]
        self._line_ended = self._ends_line(text)
        self._border = (self._border + text)[1 - len(_OPENING_TAG) :]
        return text

    def _ends_line(self, text: str) -> bool:
        bare = text.rstrip(" \t")
        return bare.endswith("\n") if bare else self._line_ended


def _tag_begun(text: str) -> int:
    """How many characters at the end of ``text`` may begin a closing tag."""
    return next(size for size in range(len(CLOSING_TAG) - 1, -1, -1) if text.endswith(CLOSING_TAG[:size]))
