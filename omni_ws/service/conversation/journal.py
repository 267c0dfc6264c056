"""Journal: what was sent and may not have arrived, kept so that it can be sent again. Bounded in bytes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from omni_ws.core.quota import ByteBudget
from omni_ws.service.conversation.messages import OUTPUTS, ServerMessage


class JournalEntry(NamedTuple):
    message: ServerMessage
    cost: int
    #: The output's own number; for anything else, that of the output that follows it. Whoever has heard exactly the
    #: outputs below this number has to be told this message.
    number: int


class Journal:
    """Keeps the newest ``capacity`` bytes of what it is given, or ``fair_share`` while the server holds too much."""

    def __init__(self, capacity: int, *, budget: ByteBudget | None = None, fair_share: int = 0) -> None:
        self.capacity = capacity
        self.held = 0
        self._budget = budget
        self._fair_share = fair_share
        self._entries: deque[JournalEntry] = deque()
        #: The number of the output that comes next.
        self._next_output = 0
        #: Who has heard less than this cannot be told the rest any more.
        self._forgotten = -1

    def record(self, message: ServerMessage, cost: int) -> None:
        """A message that was sent. Its cost is in the budget already."""
        self._entries.append(JournalEntry(message, cost, self._next_output))
        if type(message) in OUTPUTS:
            self._next_output += 1
        self.held += cost
        while self._entries and self.held > self._limit:
            self._forget_oldest()

    def acknowledge(self, last_output: int) -> None:
        """Everything up to this output has arrived. More than was sent cannot have."""
        last_output = min(last_output, self._next_output - 1)
        while self._entries and self._entries[0].number <= last_output:
            self._forget_oldest()

    def reaches(self, last_output: int) -> bool:
        """Whether everything that was sent after this output is here, and the output itself was sent."""
        return self._forgotten <= last_output < self._next_output

    def take_after(self, last_output: int) -> list[JournalEntry]:
        """What was sent after this output, which is going to be sent again. Needs ``reaches``."""
        self.acknowledge(last_output)
        again = list(self._entries)
        self._entries.clear()
        self.held = 0
        self._next_output = last_output + 1
        return again

    def clear(self) -> None:
        while self._entries:
            self._forget_oldest()

    @property
    def _limit(self) -> int:
        budget = self._budget
        if budget is not None and budget.held > budget.capacity // 2:
            return min(self.capacity, self._fair_share)
        return self.capacity

    def _forget_oldest(self) -> None:
        entry = self._entries.popleft()
        self._forgotten = max(self._forgotten, entry.number)
        self.held -= entry.cost
        if self._budget is not None:
            self._budget.give(entry.cost)
