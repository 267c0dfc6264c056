"""Limits that are shared by all sessions of a server."""

from __future__ import annotations

from omni_ws.errors import EngineOverloaded


class ByteBudget:
    """Bytes that all sessions of the server may hold together."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0

    def take(self, size: int) -> None:
        """Raises EngineOverloaded, and takes nothing, when the budget is used up."""
        if self.used + size > self.capacity:
            raise EngineOverloaded("the server holds as much unprocessed input as it may", retry_after_ms=1000)
        self.used += size

    def give(self, size: int) -> None:
        self.used -= size


class Share:
    """What one holder has of a budget, said anew each time that it changes."""

    __slots__ = ("_budget", "size")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.size = 0

    def resize(self, size: int) -> None:
        """Raises EngineOverloaded, and changes nothing, when there is no room for so much more."""
        if size > self.size:
            self._budget.take(size - self.size)
        else:
            self._budget.give(self.size - size)
        self.size = size
