"""What earlier turns of a conversation the engine still gets to see."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from omni_ws.engine.answer_limit import count_words
from omni_ws.engine.base import Message


class History:
    """The latest messages, within ``max_tokens`` (counted in words: a session does not know its engine's tokens)."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._messages: deque[Message] = deque()
        self._tokens = 0

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    def add(self, messages: Iterable[Message]) -> None:
        """Messages that say nothing are left out; the oldest make room, tool results together with their calls."""
        for message in messages:
            if message.text or message.tool_calls or message.tool_call_id is not None:
                self._messages.append(message)
                self._tokens += _count(message)
        while self._messages and (self._tokens > self.max_tokens or self._messages[0].role == "tool"):
            self._tokens -= _count(self._messages.popleft())

    def replace(self, message: Message, other: Message) -> None:
        """What was said turned out to be something else; nothing happens where it is forgotten already."""
        if message not in self._messages:
            return
        place = len(self._messages) - 1 - list(reversed(self._messages)).index(message)
        self._tokens -= _count(message)
        del self._messages[place]
        if other.text or other.tool_calls:
            self._messages.insert(place, other)
            self._tokens += _count(other)


def _count(message: Message) -> int:
    calls = sum(1 + count_words(call.arguments) for call in message.tool_calls)
    return max(1, count_words(message.text) + calls)
