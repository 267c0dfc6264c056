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
        """Messages without text say nothing and are left out; the oldest make room."""
        for message in messages:
            if message.text:
                self._messages.append(message)
                self._tokens += count_words(message.text)
        while self._messages and self._tokens > self.max_tokens:
            self._tokens -= count_words(self._messages.popleft().text)
