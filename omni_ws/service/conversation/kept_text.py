"""KeptText: text of a request, as much of it as its history could hold; and the tool calls that were sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from omni_ws.core.chunks import ToolCall, ToolCallFragment

#: Text of a request that is kept for the history, which could not hold more anyway. Characters, or bytes of input.
MAX_KEPT_TEXT: Final = 1 << 18


class KeptText:
    """Pieces of a text, up to MAX_KEPT_TEXT characters together; the rest is dropped."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._room = MAX_KEPT_TEXT
        self._dropped = 0

    def append(self, piece: str) -> None:
        self._dropped += max(0, len(piece) - self._room)
        piece = piece[: self._room]
        if piece:
            self._pieces.append(piece)
            self._room -= len(piece)

    def take_back(self, length: int) -> None:
        """Remove the last pieces, which were ``length`` characters together."""
        dropped = min(length, self._dropped)
        self._dropped -= dropped
        length -= dropped
        while self._pieces and length >= len(self._pieces[-1]):
            length -= len(self._pieces[-1])
            self._room += len(self._pieces.pop())

    def joined(self, separator: str = "") -> str:
        return separator.join(self._pieces)


@dataclass(slots=True)
class _SentCall:
    """What was sent of a tool call, and in how many fragments."""

    id: str = ""
    name: str = ""
    arguments: KeptText = field(default_factory=KeptText)
    fragments: int = 0


class SentCalls:
    """The tool calls of one answer, as far as they were sent."""

    def __init__(self) -> None:
        self._calls: dict[int, _SentCall] = {}

    def append(self, fragment: ToolCallFragment) -> None:
        """A fragment was sent."""
        call = self._calls.setdefault(fragment.index, _SentCall())
        call.id, call.name = fragment.id or call.id, fragment.name or call.name
        call.arguments.append(fragment.arguments)
        call.fragments += 1

    def take_back(self, fragment: ToolCallFragment) -> None:
        """The latest fragment of its call was taken back. A call of which nothing was sent is none."""
        call = self._calls.get(fragment.index)
        if call is None:
            return
        call.arguments.take_back(len(fragment.arguments))
        call.fragments -= 1
        if not call.fragments:
            del self._calls[fragment.index]

    def calls(self) -> tuple[ToolCall, ...]:
        """All of them, in the order in which they began. The arguments of one that was cut off are not whole."""
        return tuple(ToolCall(call.id, call.name, call.arguments.joined()) for call in self._calls.values())
