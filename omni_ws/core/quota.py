"""Limits that are shared by all sessions of a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol, Self

from omni_ws.errors import EngineOverloaded


class ByteBudget:
    """Bytes that all sessions of the server may hold together. ``decoded`` is what decoded media have of them: that
    one is counted by whatever thread decodes, and ``used`` by the event loop alone."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.decoded = 0

    @property
    def held(self) -> int:
        """By everything together."""
        return self.used + self.decoded

    def take(self, size: int) -> None:
        """Raises EngineOverloaded, and takes nothing, when the budget is used up."""
        if self.held + size > self.capacity:
            raise EngineOverloaded("the server holds as much unprocessed input as it may", retry_after_ms=1000)
        self.used += size

    def give(self, size: int) -> None:
        self.used -= size


class Room(Protocol):
    """Where decoders count their bytes, before these exist."""

    def take(self, size: int) -> None:
        """Raises an OmniError, and takes nothing, where there is no room."""
        ...

    def give(self, size: int) -> None: ...


class _Uncounted:
    def take(self, size: int) -> None:
        pass

    def give(self, size: int) -> None:
        pass


#: Room without bounds, for media that no client sent.
UNCOUNTED: Final[Room] = _Uncounted()


@contextmanager
def counted(room: Room, size: int, *, keep: bool = False) -> Iterator[None]:
    """So many bytes, for as long as the block runs; with ``keep`` they stay counted unless it fails."""
    room.take(size)
    try:
        yield
    except BaseException:
        room.give(size)
        raise
    if not keep:
        room.give(size)


class Holding:
    """The largest size that was said so far, counted in ``room`` until the block is left."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._size = 0

    def hold(self, size: int) -> None:
        if size > self._size:
            self._room.take(size - self._size)
            self._size = size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._room.give(self._size)
        self._size = 0


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
