"""Tool calls and log-probabilities as upstreams send them. What is malformed is left out, and noted."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from omni_ws.core.chunks import TokenLogprob, ToolCallFragment
from omni_ws.errors import EngineFailed

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
        """Return what is in place of a half whose other one has not come."""
        half, self._half = self._half, ""
        return whole_text(half)


def whole_text(text: str) -> str:
    """The text with its surrogates joined, and those without the other half replaced."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@dataclass(slots=True, eq=False)
class _Call:
    """One call under way: the upstream's ``place`` and id, our own, and what is known of it.

    ``index`` is its place in our answer, None until it is told. ``held`` are arguments that may still mean none.
    """

    place: int
    their_id: str
    id: str
    name: str = ""
    index: int | None = None
    has_arguments: bool = False
    held: str = ""
    halves: Halves = field(default_factory=Halves)
    brackets: _Brackets = field(default_factory=lambda: _Brackets())


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
            if call.index is None and call.name:
                yield self._told(call, _NO_ARGUMENTS if not call.has_arguments else "")
            elif call.index is None:
                self.unread = True
            elif not call.has_arguments:
                yield ToolCallFragment(call.index, arguments=_NO_ARGUMENTS)
            elif rest := call.halves.finish():
                yield ToolCallFragment(call.index, arguments=rest)

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
            begins_another = name and newest.has_arguments and (name != newest.name or newest.brackets.closed)
            return self._begin(index, "") if begins_another else newest
        if not name and more and newest.name:
            return newest  # some servers make up another id for each piece
        if newest.their_id or (name and newest.name not in ("", name)) or (name and newest.has_arguments):
            return self._begin(index, call_id)
        newest.their_id = call_id
        newest.id = call_id if newest.index is None else newest.id
        self._by_id[call_id] = newest
        return newest

    def _begin(self, index: int, call_id: str) -> _Call:
        if len(self._calls) == _MOST_CALLS:
            raise EngineFailed("the upstream's answer calls too many tools")
        call = _Call(index, call_id, call_id or f"call_{uuid.uuid4().hex[:24]}")
        self._calls.append(call)
        self._newest[index] = call
        if call_id:
            self._by_id[call_id] = call
        return call

    def _feed(self, call: _Call, name: str, arguments: object) -> Iterator[ToolCallFragment]:
        if name and name != call.name and not call.has_arguments and call.index is None:
            call.name += name
        text = self._arguments(call, arguments)
        if not text:
            return
        if not call.name:
            self.unread = True  # nobody knows whose they are
            return
        if not call.their_id:
            call.brackets.feed(text)
        if call.index is not None:
            yield ToolCallFragment(call.index, arguments=text)
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
        if not isinstance(arguments, str):
            self.unread |= arguments is not None
            return ""
        text = call.halves.feed(arguments)
        if call.has_arguments:
            return text
        call.held += text
        if "null".startswith(call.held.strip()):
            call.held = call.held.strip()  # blanks must not pile up
            return ""
        call.has_arguments = True
        text, call.held = call.held.lstrip(), ""
        return text

    def _told(self, call: _Call, arguments: str) -> ToolCallFragment:
        call.index = self.count
        self.count += 1
        return ToolCallFragment(call.index, call.id, call.name, arguments)


class _Brackets:
    """Whether a JSON text that comes in pieces is closed."""

    def __init__(self) -> None:
        self.closed = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> None:
        """Read the next piece."""
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
