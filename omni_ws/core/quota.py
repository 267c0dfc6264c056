"""ByteBudget: the bytes that all sessions of a server hold together, and how parts of it are reserved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol, Self

from omni_ws.errors import EngineOverloaded


class ByteBudget:
    """The bytes of input, decoded media, output and kept speech that all sessions together may hold.

    ``used`` changes on the event loop only. ``decoded``, the bytes of decoded media, changes on the decoding threads,
    under the lock of ``MediaRoom``: separate counters, so the event loop needs no lock.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.decoded = 0

    @property
    def held(self) -> int:
        """The bytes that count against the capacity."""
        return self.used + self.decoded

    def take(self, size: int) -> None:
        """Reserve ``size`` bytes. Raises EngineOverloaded, reserving nothing, when they exceed the capacity."""
        if self.used + self.decoded + size > self.capacity:
            raise EngineOverloaded(
                "the server's buffer for unprocessed input is full; retry later", retry_after_ms=1000
            )
        self.used += size

    def give(self, size: int) -> None:
        """Return ``size`` reserved bytes."""
        self.used -= size


class Room(Protocol):
    """A budget in which decoders reserve memory before they allocate it."""

    def take(self, size: int) -> None:
        """Reserve ``size`` bytes. Raises an OmniError, reserving nothing, when they exceed the budget."""
        ...

    def give(self, size: int) -> None:
        """Return ``size`` reserved bytes."""
        ...


class _Unlimited:
    def take(self, size: int) -> None:
        pass

    def give(self, size: int) -> None:
        pass


#: A room without limit, for media that do not come from a client.
UNLIMITED: Final[Room] = _Unlimited()


@contextmanager
def reserved(room: Room, size: int, *, keep: bool = False) -> Iterator[None]:
    """Reserve ``size`` bytes while the block runs; with ``keep``, also after it, unless it raises."""
    room.take(size)
    try:
        yield
    except BaseException:
        room.give(size)
        raise
    if not keep:
        room.give(size)


class Reservation:
    """Reserves the largest size requested so far, until the ``with`` block ends."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._size = 0

    def raise_to(self, size: int) -> None:
        """Raise the reservation to ``size`` bytes if it is smaller. Raises what the room raises."""
        if size > self._size:
            self._room.take(size - self._size)
            self._size = size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._room.give(self._size)
        self._size = 0


class Share:
    """One holder's reservation in a budget, which it resizes as its data grows and shrinks."""

    __slots__ = ("_budget", "size")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.size = 0

    def resize(self, size: int) -> None:
        """Set the reservation to ``size`` bytes.

        Raises EngineOverloaded, changing nothing, when the budget is exceeded.
        """
        if size > self.size:
            self._budget.take(size - self.size)
        else:
            self._budget.give(self.size - size)
        self.size = size
