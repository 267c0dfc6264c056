"""What earlier turns of a conversation the engine still gets to see."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from omni_ws.core.quota import ByteBudget
from omni_ws.engine.answer_limit import count_words
from omni_ws.engine.base import Message
from omni_ws.service.conversation.kept_speech import MAX_SPEECH_BYTES, held_bytes, tokens_of


class History:
    """The latest messages, within ``max_tokens`` (counted in words: a session does not know its engine's tokens).

    Speech in them is charged to ``budget`` already when it comes, and given back when it goes.
    """

    def __init__(self, max_tokens: int, budget: ByteBudget) -> None:
        self.max_tokens = max_tokens
        self._budget = budget
        self._messages: deque[Message] = deque()
        self._tokens = 0
        #: Of the speech.
        self.held_bytes = 0

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    def add(self, messages: Iterable[Message]) -> None:
        """Messages that say nothing are left out; the oldest turns make room, results of tools with their calls."""
        for message in messages:
            if message.text or message.tool_calls or message.tool_call_id is not None or message.speech is not None:
                self._messages.append(message)
                self._tokens += _count(message)
                self.held_bytes += _speech_bytes(message)
        while self._tokens > self.max_tokens or self.held_bytes > MAX_SPEECH_BYTES:
            self._forget_oldest()
        while self._messages and self._messages[0].role == "tool":
            self._forget_oldest()

    def close(self) -> None:
        """The session is over: nothing is held any more, nor kept of what still comes. Idempotent."""
        self.max_tokens = 0
        self.add(())

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

    def _forget_oldest(self) -> None:
        """A question goes with its answer: templates want turns that take turns."""
        asked = self._forget_message()
        while asked and self._messages and self._messages[0].role != "user":
            self._forget_message()

    def _forget_message(self) -> bool:
        """Returns whether it was the user's."""
        message = self._messages.popleft()
        self._tokens -= _count(message)
        size = _speech_bytes(message)
        self.held_bytes -= size
        self._budget.give(size)
        return message.role == "user"


def _count(message: Message) -> int:
    calls = sum(1 + count_words(call.arguments) for call in message.tool_calls)
    speech = 0 if message.speech is None else tokens_of(message.speech)
    return max(1, count_words(message.text) + calls + speech)


def _speech_bytes(message: Message) -> int:
    return 0 if message.speech is None else held_bytes(message.speech)
