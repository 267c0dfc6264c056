"""The stored output of a Mode B session, from its beginning, for any number of readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from omni_ws.core.chunks import FinalChunk, OutputChunk
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import EngineOverloaded, OmniError, PayloadTooLarge
from omni_ws.service.conversation.messages import RequestWarning, message_cost
from omni_ws.wire.server_frames import ResponseStartedFrame

LoggedMessage: TypeAlias = ResponseStartedFrame | OutputChunk | FinalChunk | RequestWarning | OmniError


class OutputLogBudget:
    """The bytes that all output logs together may hold: at most ``capacity``, and charged to ``server`` as well.

    When the capacity does not suffice, ``evict`` is called with the number of bytes wanted. It may clear logs.
    """

    def __init__(self, server: ByteBudget, capacity: int, evict: Callable[[int], None]) -> None:
        self.capacity = capacity
        self.used = 0
        self._server = server
        self._evict = evict

    def take(self, size: int) -> None:
        """Charge ``size`` bytes. Raises EngineOverloaded, charging nothing, where they exceed a budget."""
        if self.used + size > self.capacity:
            self._evict(size)
        if self.used + size > self.capacity:
            raise EngineOverloaded("the server's memory for stored answers is full", retry_after_ms=1000)
        self._server.take(size)
        self.used += size

    def take_anyway(self, size: int) -> None:
        """Charge ``size`` bytes, whatever the budgets, for a small message that must not be lost."""
        self._server.charge(size)
        self.used += size

    def give(self, size: int) -> None:
        """Return ``size`` charged bytes."""
        self._server.give(size)
        self.used -= size


class OutputLog:
    """Messages at consecutive positions, at most ``capacity`` bytes of them, also bounded by a shared ``budget``.

    A reader asks for the message at a position and receives the next position along with it. Messages may be cleared
    before they are read; readers then continue with the first that is left.
    """

    def __init__(self, capacity: int, budget: OutputLogBudget) -> None:
        self.capacity = capacity
        #: Bytes charged.
        self.size = 0
        self._budget = budget
        self._messages: list[LoggedMessage] = []
        #: The position of the first message held.
        self._first = 0
        self._closed = False
        #: Replaced each time it is set: it wakes those who wait now.
        self._changed = asyncio.Event()

    @property
    def end(self) -> int:
        """The position of the next message to be appended."""
        return self._first + len(self._messages)

    @property
    def messages(self) -> tuple[LoggedMessage, ...]:
        """The messages held."""
        return tuple(self._messages)

    def append(self, message: LoggedMessage) -> None:
        """Append a message and charge it.

        Raises PayloadTooLarge beyond the capacity and EngineOverloaded beyond a budget. Only output can be refused:
        other messages are small and end or begin an answer.
        """
        cost = message_cost(message)
        if isinstance(message, OutputChunk):
            if self.size + cost > self.capacity:
                raise PayloadTooLarge(f"the answer exceeds the {self.capacity} bytes that the server stores")
            self._budget.take(cost)
        else:
            self._budget.take_anyway(cost)
        self.size += cost
        self._messages.append(message)
        self._wake()

    def append_end(self, message: FinalChunk | OmniError) -> None:
        """Append how the answer of a cleared log ended. Not charged, like the record of the session itself."""
        self._messages.append(message)
        self._wake()

    def clear(self) -> None:
        """Discard the messages held. Positions continue."""
        self._first = self.end
        self._messages.clear()
        self._budget.give(self.size)
        self.size = 0

    def close(self) -> None:
        """Nothing more will be appended. Idempotent."""
        self._closed = True
        self._wake()

    async def get(self, position: int) -> tuple[int, LoggedMessage] | None:
        """Wait for the first message at or after ``position``; return the position behind it, and the message.

        Returns None if the log is closed before there is one.
        """
        while (found := self.find(position)) is None and not self._closed:
            await self._changed.wait()
        return found

    def find(self, position: int) -> tuple[int, LoggedMessage] | None:
        """Return what ``get`` would return without waiting; None where it would wait."""
        index = max(0, position - self._first)
        return (self._first + index + 1, self._messages[index]) if index < len(self._messages) else None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
