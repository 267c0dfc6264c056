"""OutputLog: everything that a session says, kept from its beginning for any number of readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from omni_ws.core.output import FinalChunk, OutputChunk
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import EngineOverloaded, OmniError, PayloadTooLarge
from omni_ws.service.conversation.messages import message_cost
from omni_ws.wire.server_frames import ResponseStartedFrame

AnswerMessage: TypeAlias = ResponseStartedFrame | OutputChunk | FinalChunk | OmniError


class OutputLogBudget:
    """What the answers of all journals hold together: ``capacity`` bytes at most, of all that the server may hold.

    ``relieve`` is called where that is not enough, with the bytes that are wanted, and may drop answers.
    """

    def __init__(self, whole: ByteBudget, capacity: int, relieve: Callable[[int], None]) -> None:
        self.capacity = capacity
        self.used = 0
        self._whole = whole
        self._relieve = relieve

    def take(self, size: int) -> None:
        """Raises EngineOverloaded, and takes nothing, where there is no room."""
        if self.used + size > self.capacity:
            self._relieve(size)
        if self.used + size > self.capacity:
            raise EngineOverloaded("the server keeps as much of answers as it may", retry_after_ms=1000)
        self._whole.take(size)
        self.used += size

    def take_anyway(self, size: int) -> None:
        """For what is small, and must be told."""
        self._whole.used += size
        self.used += size

    def give(self, size: int) -> None:
        self._whole.give(size)
        self.used -= size


class OutputLog:
    """Bounded by its own ``capacity`` in bytes, and by a ``budget`` that it shares with the others.

    Readers ask by position; what was dropped meanwhile is passed over.
    """

    def __init__(self, capacity: int, budget: OutputLogBudget) -> None:
        self.capacity = capacity
        #: Bytes that are held.
        self.size = 0
        self._budget = budget
        self._messages: list[AnswerMessage] = []
        #: Position of the first message that is kept.
        self._first = 0
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def end(self) -> int:
        """The position of the next message."""
        return self._first + len(self._messages)

    @property
    def messages(self) -> tuple[AnswerMessage, ...]:
        return tuple(self._messages)

    def append(self, message: AnswerMessage) -> None:
        """Raises PayloadTooLarge or EngineOverloaded for output that there is no room for; the rest is small."""
        cost = message_cost(message)
        if isinstance(message, OutputChunk):
            if self.size + cost > self.capacity:
                raise PayloadTooLarge(f"the answer has more than the {self.capacity} bytes that are kept of one")
            self._budget.take(cost)
        else:
            self._budget.take_anyway(cost)
        self.size += cost
        self._messages.append(message)
        self._wake()

    def remember(self, message: FinalChunk | OmniError) -> None:
        """What became of an answer that was dropped. It counts as little as the memory of its session."""
        self._messages.append(message)
        self._wake()

    def clear(self) -> None:
        """Drop what is held."""
        self._first = self.end
        self._messages.clear()
        self._budget.give(self.size)
        self.size = 0

    def close(self) -> None:
        """Nothing more will come. Idempotent."""
        self._closed = True
        self._wake()

    async def get(self, position: int) -> tuple[int, AnswerMessage] | None:
        """The first message at ``position`` or after it, once there is one, and the position behind it.

        None when there will be none.
        """
        while (found := self.find(position)) is None and not self._closed:
            await self._changed.wait()
        return found

    def find(self, position: int) -> tuple[int, AnswerMessage] | None:
        """What ``get`` gives at once, if there is anything."""
        index = max(0, position - self._first)
        return (self._first + index + 1, self._messages[index]) if index < len(self._messages) else None

    def _wake(self) -> None:
        """Everybody who waits now, and nobody who comes later."""
        self._changed.set()
        self._changed = asyncio.Event()
