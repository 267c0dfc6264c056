"""What was said in conversations that go on over several connections, by the names that their clients gave them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from omni_ws.core.history import Message, estimate_tokens
from omni_ws.core.quota import keep_newest

#: Conversations that are known at a time, and for how long after their last answer: Home Assistant's own time.
MAX_TALKS: Final = 64
KEPT_SEC: Final = 300.0


class Talks:
    """The latest messages of each conversation: Home Assistant opens a connection for each sentence.

    They have at most ``max_tokens`` together. The conversation that rested for longest is forgotten first.
    """

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        #: The messages, and the time at which they are forgotten.
        self._talks: dict[str, tuple[tuple[Message, ...], float]] = {}

    def messages(self, name: str, *, now: float) -> tuple[Message, ...]:
        """Return what was said in a conversation so far."""
        while self._talks and self._talks[oldest := next(iter(self._talks))][1] <= now:
            del self._talks[oldest]
        return self._talks.get(name, ((), now))[0]

    def add(self, name: str, said: Sequence[Message], *, now: float) -> None:
        """Add a message of the user with its answer."""
        messages, tokens = [*self.messages(name, now=now), *said], 0
        first = len(messages)
        while first and (tokens := tokens + estimate_tokens(messages[first - 1].text)) <= self._max_tokens:
            first -= 1
        self._talks.pop(name, None)
        self._talks[name] = tuple(messages[first:]), now + KEPT_SEC
        keep_newest(self._talks, MAX_TALKS)
