"""ChatAnswer: a converter of the events of a streamed chat completion to outputs of an engine."""

from __future__ import annotations

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
    UrlCitation,
    Usage,
)
from omni_ws.engine.answer_limit import count_words
from omni_ws.engine.base import EngineOutput, Finished, TextOutput, ThoughtOutput, ToolCallOutput, TranscriptOutput
from omni_ws.engine.remote.event_stream import (
    DONE,
    THOUGHTS,
    WHOLE_BODY,
    Halves,
    ServerSentEvent,
    UpstreamAudio,
    event_content,
    whole_text,
)
from omni_ws.errors import EngineFailed, UpstreamInvalid

# The answer.

_FINISH_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
}
#: The limit, in characters, on the name of a finish reason that FinishReason lacks.
_MAX_REASON: Final = 64
#: How deeply content parts may be nested.
_MOST_NESTED: Final = 4
#: Finish reasons that mean that the upstream abandoned the answer.
_BROKEN: Final = frozenset({"abort", "error", "cancelled"})


class ChatAnswer:
    """A converter of the events of one chat completion to outputs.

    ``choices`` is the number of answers, ``sample_rate`` the rate of raw audio in Hz; with ``log_content``, the log may
    quote the upstream's errors. ``done`` is set by ``[DONE]``, or at the end of a stream that had a finish reason. If a
    server sends both ``content`` and the transcript of its audio, whichever comes first is used, since the text is the
    same. The model's reasoning becomes ThoughtOutputs.
    """

    def __init__(self, *, sample_rate: int, choices: int = 1, log_content: bool = False) -> None:
        self.done = False
        #: The number of input tokens by the upstream's count; None if it reports none.
        self.prompt_tokens: int | None = None
        self._upstream = ""
        self._log_content = log_content
        self._audio = UpstreamAudio(sample_rate=sample_rate)
        self._choices = [_Choice(index, self._audio) for index in range(choices)]
        self._usage: Mapping[str, Any] = {}
        #: Whether any event was read, and whether any event had outputs.
        self._read = self._has_outputs = False

    def expect(self, upstream: str, *, holds: bool, watches: bool) -> None:
        """Set the upstream's name, for the log, and the ThoughtFilters' parameters. To be called before any event."""
        self._upstream = upstream
        for choice in self._choices:
            choice.expect_thoughts(holds=holds, watches=watches)

    @property
    def begun(self) -> bool:
        """Whether the model has certainly begun: there was reasoning, text, audio or a tool call."""
        return self._has_outputs or any(choice.begun for choice in self._choices)

    @property
    def unopened_thought(self) -> bool:
        """Whether the answer had a closing tag of a thought without an opening one."""
        return any(choice.unopened_thought for choice in self._choices)

    @property
    def waited(self) -> bool:
        """Whether any text was held back because it might have been a thought."""
        return any(choice.waited for choice in self._choices)

    def read(self, event: ServerSentEvent) -> list[EngineOutput]:
        """Return the outputs for the next event.

        Raises the error of an error event, EngineFailed for an event that cannot be read, and UpstreamInvalid at the
        end of an answer without content.
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
        """End the stream, which may lack ``[DONE]``, and return the outputs that were held back.

        Raises EngineFailed if the answer is incomplete, UpstreamInvalid if it has no content or the response was
        neither a stream nor JSON.
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
        """Return the Finished of the answer. Its usage has the upstream's counts, or else the two arguments."""
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
            citations=tuple(one for choice in self._choices for one in choice.citations),
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
    """The kinds of text in an answer."""

    CONTENT = "content"
    REFUSAL = "refusal"
    THOUGHT = "thought"
    #: The transcript of the audio.
    SPOKEN = "transcript"


class _Choice:
    """A converter of one of a completion's answers (OpenAI's *choices*); ``audio`` decodes the audio of all answers."""

    def __init__(self, index: int, audio: UpstreamAudio) -> None:
        #: The upstream's finish reason; None before the end.
        self.reason: str | None = None
        #: Whether text was held back because it might have been a thought.
        self.waited = False
        self._index = index
        self._audio = audio
        self._thoughts = ThoughtFilter()
        self._calls = UpstreamToolCallReader()
        self._halves: defaultdict[_Kind, Halves] = defaultdict(Halves)
        #: Whether there was text, even if it is held back; and whether there was any content: text, reasoning or audio.
        self._has_text = self._says = False
        self._unread = False
        #: The texts so far by kind, and whether any of them came in a delta.
        self._texts: defaultdict[_Kind, list[str]] = defaultdict(list)
        self._has_deltas = False
        #: Which of the two texts of a spoken answer is used: CONTENT or SPOKEN.
        self._text_kind: _Kind | None = None
        #: The length, in characters, of text that the ThoughtFilter holds back, and the log-probabilities of its
        #: tokens.
        self._filtered = 0
        self._tokens: list[TokenLogprob] = []
        self._said: list[str] = []
        #: The web pages that the answer names, in order, each once.
        self.citations: dict[UrlCitation, None] = {}

    def expect_thoughts(self, *, holds: bool, watches: bool) -> None:
        """Set the parameters of the ThoughtFilter. To be called before any event."""
        self._thoughts = ThoughtFilter(holds=holds, watches=watches)

    @property
    def begun(self) -> bool:
        """Whether the model has written text, even if it is held back, or called a tool."""
        return self._has_text or self._calls.begun

    @property
    def unopened_thought(self) -> bool:
        """Whether the answer had a closing tag of a thought without an opening one."""
        return self._thoughts.unopened

    @property
    def words(self) -> int:
        """The number of words in the text of the answer so far."""
        return count_words("".join(self._said))

    @property
    def unread(self) -> bool:
        """Whether any part of the answer could not be read and was skipped."""
        return self._unread or self._calls.unread

    @property
    def is_understood(self) -> bool:
        """Whether the answer has content, or was read without problems and ended for a known reason."""
        known = self.reason in (*_FINISH_REASONS, CONTENT_FILTER)
        return self._says or bool(self._calls.count) or (known and not self.unread)

    @property
    def finish_reason(self) -> FinishReason:
        """The reason for the end of the answer. Some servers report "stop" even after a tool call."""
        reason = _FINISH_REASONS.get(self.reason or "", FinishReason.STOP)
        if reason is FinishReason.LENGTH or self.reason == CONTENT_FILTER:
            return reason
        return FinishReason.TOOL_CALLS if self._calls.count else FinishReason.STOP

    def note_unread(self) -> None:
        """Note that a part of the answer could not be read and was skipped."""
        self._unread = True

    def read(self, one: Mapping[str, Any], modality: object, *, is_whole: bool) -> Iterator[EngineOutput]:
        """Yield the outputs for ``one``, the item of an event's ``choices`` about this answer.

        ``modality`` is vLLM-Omni's field of that name. ``is_whole``: the event is a whole response instead of a stream.
        Raises EngineFailed if the upstream has abandoned the answer.
        """
        delta, message, reason = one.get("delta"), one.get("message"), one.get("finish_reason")
        reason = reason if isinstance(reason, str) else ""  # some servers send another value before the end
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
        for fields in (delta, one.get("message")):
            for page in _citations_of(fields, self._index):
                if len(self.citations) < _MOST_CITATIONS:
                    self.citations[page] = None
        if reason:
            self.reason = "".join(one for one in reason[:_MAX_REASON] if one.isprintable())
            if reason in _BROKEN:
                raise EngineFailed("the upstream gave up the answer")

    def finish(self) -> Iterator[EngineOutput]:
        """End the answer, and yield the outputs that were held back."""
        for kind, halves in tuple(self._halves.items()):
            if kind in (_Kind.CONTENT, _Kind.SPOKEN) and (text := halves.finish()):
                yield from self._text(kind, text, ())
        yield from self._filtered_text(*self._thoughts.finish())
        for call in self._calls.finish():
            yield ToolCallOutput(call, self._index)

    def _unsaid(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a complete ``message``, sent at the end of an answer, without the texts of earlier events."""
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
        """Yield the outputs for the fields of a delta or a message."""
        # vLLM-Omni names the modality of the event beside ``choices``, and sends audio in the field for text.
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
        """Yield the texts of a delta or a message with their kinds. Servers send texts in several forms."""
        for name in THOUGHTS:
            if value := fields.get(name):
                yield from self._parts(value, _Kind.THOUGHT)
                break
        yield from self._parts(fields.get("content"), _Kind.CONTENT)
        yield from self._parts(fields.get("refusal"), _Kind.REFUSAL)

    def _parts(self, value: object, kind: _Kind, depth: int = 0) -> Iterator[tuple[_Kind, str]]:
        """Yield the texts in content that is a string, a content part, or a list of parts, of OpenAI or Mistral."""
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
        # If only a part of the text is passed on, its tokens are unknown.
        logprobs = tuple(self._tokens) if len(answered) == self._filtered else ()
        self._filtered, self._tokens = 0, []
        if answered or logprobs:
            self._said.append(answered)
            yield TextOutput(answered, logprobs, self._index)


# The web pages that an answer names, in OpenAI's ``annotations``.

#: More pages than any answer names, and the longest addresses and titles, in characters.
_MOST_CITATIONS: Final = 32
_LONGEST_URL: Final = 2048
_LONGEST_TITLE: Final = 256
_LONGEST_LICENSE: Final = 64


def _citations_of(fields: object, choice: int) -> Iterator[UrlCitation]:
    """Yield the web pages in the ``annotations`` of a delta or a message; annotations of other kinds are left out."""
    annotations = fields.get("annotations") if isinstance(fields, dict) else None
    for one in annotations if isinstance(annotations, list) else ():
        match one:
            case {"type": "url_citation", "url_citation": {"url": str(url), **more}} if len(url) <= _LONGEST_URL:
                if not url.startswith(("https://", "http://")):
                    continue
                title, license = more.get("title"), more.get("license")
                start, end = (
                    value if type(value := more.get(name)) is int and value >= 0 else 0
                    for name in ("start_index", "end_index")
                )
                yield UrlCitation(
                    title=title[:_LONGEST_TITLE] if isinstance(title, str) and title else url,
                    url=url,
                    start=start,
                    end=max(start, end),
                    license=license[:_LONGEST_LICENSE] if isinstance(license, str) and license else None,
                    choice=choice,
                )


# Tool calls and log-probabilities. Malformed ones are skipped, and ``unread`` is set.

#: The limit on tool calls in an answer.
_MOST_CALLS: Final = 1000
#: The arguments of a call without arguments.
_NO_ARGUMENTS: Final = "{}"
#: Brackets and quotes of JSON, and escaped characters with their backslash.
_MARKS: Final = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)


class OpenBrackets:
    """A tracker of the open brackets in JSON that arrives in pieces."""

    def __init__(self) -> None:
        #: Whether all brackets so far are closed; False before the first.
        self.closed = False
        self._depth = 0
        self._in_string = self._escaped = False

    def read(self, text: str) -> int | None:
        """Read the next piece of the JSON.

        Returns the index just after the first bracket in it with which all brackets are closed; None if there is none.
        """
        end = None
        start = int(self._escaped and bool(text))
        self._escaped = self._escaped and not text
        for mark in _MARKS.finditer(text, start):
            if mark[0][0] == "\\":
                self._escaped = len(mark[0]) == 1
            elif mark[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark[0] in "{[" else -1
                self.closed = self._depth == 0
                end = mark.end() if self.closed and end is None else end
        return end


class _Call:
    """A tool call that arrives in pieces; ``place`` and ``their_id`` are the call's index and ID at the upstream."""

    def __init__(self, place: int, their_id: str) -> None:
        self.place = place
        self.their_id = their_id
        self.id = their_id or f"call_{uuid.uuid4().hex[:24]}"
        self.name = ""
        #: The index of the call in our answer; None until its first piece is passed on.
        self.index: int | None = None
        self.has_arguments = False
        #: The open brackets of the arguments; only maintained for calls without an ID.
        self._brackets = OpenBrackets()
        self._halves = Halves()
        #: Arguments that may turn out to be ``null``, which means no arguments.
        self._held = ""

    def take_id(self, their_id: str) -> None:
        """Set the upstream's ID of the call, which came late. The client gets it, too, unless it has got another ID."""
        self.their_id = their_id
        if self.index is None:
            self.id = their_id

    def take_name(self, name: str) -> None:
        """Add a piece to the name of the tool; ignored once the arguments have begun or the name was passed on."""
        if name != self.name and not self.has_arguments and self.index is None:
            self.name += name

    def take_arguments(self, text: str) -> str:
        """Add a piece of the arguments; return the part to pass on, or "" while the arguments may still be ``null``."""
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
        """Return the next fragment of the call, with ``arguments``.

        ``index`` is set for the first fragment, which also has the ID and the name.
        """
        if not self.their_id:
            self._brackets.read(arguments)
        if index is None:
            assert self.index is not None
            return ToolCallFragment(self.index, arguments=arguments)
        self.index = index
        return ToolCallFragment(index, self.id, self.name, arguments)

    @property
    def closed(self) -> bool:
        """Whether the arguments are a complete JSON value; only known for calls without an ID."""
        return self._brackets.closed

    def rest(self) -> str:
        """Return the arguments that are still held back at the end of the answer; "{}" if there were no arguments."""
        return self._halves.finish() if self.has_arguments else _NO_ARGUMENTS


class UpstreamToolCallReader:
    """A reader of the tool calls of one answer from the upstream's events, which yields them in pieces.

    Calls are distinguished by ID, or by index if they have no ID. A name that follows arguments with the same index
    begins a new call; a name before the arguments continues or repeats the name. The first fragment of a call is
    yielded when its arguments begin, and at the end of the answer at the latest.
    """

    def __init__(self) -> None:
        #: Whether something that looks like a call could not be read.
        self.unread = False
        #: How many calls have been yielded.
        self.count = 0
        self._calls: list[_Call] = []
        self._by_id: dict[str, _Call] = {}
        #: The newest call by the upstream's index.
        self._newest: dict[int, _Call] = {}
        self._is_legacy = False

    @property
    def begun(self) -> bool:
        return bool(self._calls)

    def read(self, deltas: object) -> Iterator[ToolCallFragment]:
        """Yield the fragments of calls in ``deltas``, the field ``tool_calls`` of an event.

        Raises EngineFailed for an answer with too many calls.
        """
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
        """Yield the fragment in ``function``, the older field ``function_call``; such an answer has only one call."""
        if isinstance(function, dict) and (self._is_legacy or not self._calls):
            self._is_legacy = True
            yield from self.read([{"index": 0, "function": function}])

    def finish(self) -> Iterator[ToolCallFragment]:
        """End the answer, and yield the remaining fragments of all calls."""
        for call in self._calls:
            if call.index is None and not call.name:
                self.unread = True
            elif call.index is None:
                yield self._told(call, "" if call.has_arguments else _NO_ARGUMENTS)
            elif rest := call.rest():
                yield call.told(rest)

    def _call(self, index: int, call_id: str, name: str, *, more: bool) -> _Call:
        """Return the call to which a piece belongs, perhaps a new one; ``more``: the piece has arguments."""
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
        """Return the part of ``arguments`` that may be passed on; "" while they may still be ``null``."""
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
    """Return the bytes of a token: ``values`` if the upstream reports them, or else the token's text in UTF-8."""
    if isinstance(values, list) and all(type(value) is int and 0 <= value <= 255 for value in values):
        return bytes(values)
    return token.encode()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


# Thoughts: the reasoning of a model inside the text of its answer.

_OPENING_TAG: Final = "<think>"
CLOSING_TAG: Final = "</think>"
#: The limit, in characters, on white space that is held back at the beginning because a thought may follow it.
_MOST_HELD: Final = 64
#: The limit, in characters, on text that is held back because it may be a thought without an opening tag. Longer text
#: is taken for the answer.
_MOST_UNOPENED: Final = 4 * 1024 * 1024


class _Place(Enum):
    """The state of a ThoughtFilter, as it reads a text.

    With a thought: ``BEGINNING`` → ``THOUGHT`` → ``GAP`` → ``ANSWER``; without one: ``BEGINNING`` → ``ANSWER``. If the
    opening tag may be missing: ``BEGINNING`` → ``UNOPENED`` → ``GAP`` → ``ANSWER``, or directly to ``ANSWER`` at the
    end of the text.
    """

    BEGINNING = auto()
    THOUGHT = auto()
    #: In text that is a thought if a closing tag follows.
    UNOPENED = auto()
    #: In white space between the thought and the first word of the answer.
    GAP = auto()
    ANSWER = auto()


class ThoughtFilter:
    """A filter that separates a thought, ``<think>…</think>`` at the beginning, from a text that arrives in pieces.

    Tags later in the text are part of the answer. The white space around the thought is removed. The time is linear in
    the length of the text. Less text than a tag is held back, or at most ``_MOST_HELD`` characters of white space.

    With some chat templates the prompt ends with the opening tag, so that the text lacks it. With ``holds``, all text
    is held back until the closing tag or the end of the text. Otherwise, with ``watches``, a closing tag at the
    beginning of a line is removed, but the text before it has already been passed on as part of the answer.
    """

    def __init__(self, *, holds: bool = False, watches: bool = False) -> None:
        self._holds = holds
        #: Whether there was a closing tag without an opening one.
        self.unopened = False
        self._watches = watches
        self._place = _Place.BEGINNING
        self._held = ""
        #: The text that is held back in UNOPENED, and its length.
        self._pieces: list[str] = []
        self._size = 0
        #: The end of the previous text, and whether a line begins there, apart from blanks.
        self._border = ""
        self._line_ended = True

    @property
    def waits(self) -> bool:
        """Whether all text so far is held back, because it may be a thought without an opening tag."""
        return self._place is _Place.UNOPENED

    def hold_no_more(self) -> None:
        """Stop holding text back, because the upstream sends thoughts in a field of their own."""
        self._holds = False

    def feed(self, text: str) -> tuple[str, str]:
        """Add the next piece of the text; return the text to add to the thought, and the text to add to the answer."""
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
        """End the text; return the rest of the thought and the rest of the answer."""
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
        """Hold ``text`` back; once the closing tag has come, return the thought and the text after the tag."""
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
        """Return ``text`` without a closing tag that begins a line, unless there was an opening tag before."""
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
    """Return how many characters at the end of ``text`` may be the beginning of a closing tag."""
    return next(size for size in range(len(CLOSING_TAG) - 1, -1, -1) if text.endswith(CLOSING_TAG[:size]))
