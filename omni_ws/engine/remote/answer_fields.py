"""Tool calls and log-probabilities as upstreams send them. What is malformed is left out: it would mislead."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omni_ws.core.chunks import TokenLogprob, ToolCallFragment


@dataclass(slots=True)
class _Call:
    """One call under way; ``index`` is its place in our own answer."""

    index: int
    id: str


class UpstreamToolCallReader:
    """The calls of one answer.

    Some servers say id and name with every piece, some give whole calls one after the other the same index: there
    another id begins another call.
    """

    def __init__(self) -> None:
        #: How many calls have begun.
        self.count = 0
        #: The newest of each index of the upstream's.
        self._calls: dict[int, _Call] = {}

    def read(self, deltas: object) -> Iterator[ToolCallFragment]:
        for position, delta in enumerate(deltas if isinstance(deltas, list) else ()):
            if not isinstance(delta, dict) or not isinstance(function := delta.get("function"), dict):
                continue
            index, name = delta.get("index", position), function.get("name")
            arguments = _text(function.get("arguments")) or ""
            if type(index) is not int or index < 0:
                continue
            call, call_id = self._calls.get(index), _text(delta.get("id")) or ""
            named = isinstance(name, str) and bool(name)
            if call is not None and not (named and call_id and call_id != call.id):
                if arguments:
                    yield ToolCallFragment(call.index, arguments=arguments)
            elif named:
                call = self._calls[index] = _Call(self.count, call_id or f"call_{uuid.uuid4().hex[:24]}")
                self.count += 1
                yield ToolCallFragment(call.index, call.id, name, arguments)


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
