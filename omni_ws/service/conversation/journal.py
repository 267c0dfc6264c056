"""Journal: the messages that were sent but not acknowledged, kept for resume. Bounded in bytes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from omni_ws.core.quota import ByteBudget
from omni_ws.service.conversation.messages import OUTPUTS, ServerMessage


class JournalEntry(NamedTuple):
    """A message that was sent, and the bytes that it is charged with."""

    message: ServerMessage
    cost: int
    #: The number of the output; for any other message, that of the output that follows it. A client that has received
    #: exactly the outputs below this number lacks this message.
    number: int


class Journal:
    """Keeps the newest messages, up to ``capacity`` bytes.

    While more than half of ``budget`` is used, it keeps ``fair_share`` bytes only.
    """

    def __init__(self, capacity: int, *, budget: ByteBudget | None = None, fair_share: int = 0) -> None:
        self.capacity = capacity
        self.held = 0
        self._budget = budget
        #: What is kept whatever the load of the server.
        self._least_limit = min(capacity, fair_share)
        self._entries: deque[JournalEntry] = deque()
        #: The number of the next output.
        self._next_output = 0
        #: The number of the newest message that was dropped: a client that has received less cannot resume.
        self._forgotten = -1

    def record(self, message: ServerMessage, cost: int) -> None:
        """Keep a message that was sent, and drop the oldest beyond the capacity. Its cost is in the budget already."""
        self._entries.append(JournalEntry(message, cost, self._next_output))
        if type(message) in OUTPUTS:
            self._next_output += 1
        self.held += cost
        while self.held > self._least_limit and self.held > self._limit:
            self._forget_oldest()

    def acknowledge(self, last_output: int) -> None:
        """Drop everything up to this output, which the client has received; at most up to the last that was sent."""
        last_output = min(last_output, self._next_output - 1)
        while self._entries and self._entries[0].number <= last_output:
            self._forget_oldest()

    def reaches(self, last_output: int) -> bool:
        """Whether this output was sent, and everything after it is kept."""
        return self._forgotten <= last_output < self._next_output

    def take_after(self, last_output: int) -> list[JournalEntry]:
        """Remove and return what was sent after this output, to be sent again. Requires ``reaches``."""
        self.acknowledge(last_output)
        again = list(self._entries)
        self._entries.clear()
        self.held = 0
        self._next_output = last_output + 1
        return again

    def clear(self) -> None:
        """Drop everything."""
        while self._entries:
            self._forget_oldest()

    @property
    def _limit(self) -> int:
        budget = self._budget
        if budget is not None and budget.over_half():
            return self._least_limit
        return self.capacity

    def _forget_oldest(self) -> None:
        entry = self._entries.popleft()
        self._forgotten = max(self._forgotten, entry.number)
        self.held -= entry.cost
        if self._budget is not None:
            self._budget.give(entry.cost)
