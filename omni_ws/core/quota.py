"""The bytes that all sessions of a server hold together, the account of one session, and what a value takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, Self

import msgspec

from omni_ws.errors import EngineOverloaded, PayloadTooLarge

#: What any session has of settings, and of history: it counts with the session itself, and only more is charged.
ORDINARY_BYTES: Final = 4096


class ByteBudget:
    """The bytes that all sessions together may hold: input, decoded media, output, history, settings.

    ``used`` changes on the event loop only. ``decoded``, the bytes of decoded media, changes on the decoding threads,
    under the lock of ``MediaRoom``: separate counters, so the event loop needs no lock.
    """

    __slots__ = ("capacity", "decoded", "used")

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

    def charge(self, size: int) -> None:
        """Count ``size`` bytes more, whether there is room or not: what is held already, or must not be lost."""
        self.used += size

    def give(self, size: int) -> None:
        """Return ``size`` reserved bytes."""
        self.used -= size

    def over_half(self, more: int = 0) -> bool:
        """Whether more than half of the server's capacity is used, or would be with ``more``: the rest is for input."""
        return self.used + self.decoded + more > self.capacity // 2


class SessionAccount(ByteBudget):
    """What one session holds, of whatever kind: its holders charge it, and it charges the budget of the server.

    Beyond its ``capacity`` it refuses with PayloadTooLarge, beyond that of the server with EngineOverloaded.
    """

    __slots__ = ("_server",)

    def __init__(self, server: ByteBudget, capacity: int) -> None:
        super().__init__(capacity)
        self._server = server

    def take(self, size: int) -> None:
        if self.used + size > self.capacity and size > 0:
            raise PayloadTooLarge(f"a session may hold {self.capacity} bytes together")
        self._server.take(size)
        self.used += size

    def charge(self, size: int) -> None:
        self._server.charge(size)
        self.used += size

    def give(self, size: int) -> None:
        self._server.give(size)
        self.used -= size

    def over_half(self, more: int = 0) -> bool:
        return self._server.over_half(more)


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

    __slots__ = ("budget", "size")

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.size = 0

    def resize(self, size: int) -> None:
        """Set the reservation to ``size`` bytes.

        Raises EngineOverloaded, changing nothing, when the budget is exceeded.
        """
        if size > self.size:
            self.budget.take(size - self.size)
        else:
            self.budget.give(self.size - size)
        self.size = size

    def force(self, size: int) -> None:
        """Set the reservation to ``size`` bytes, which are held already."""
        self.budget.charge(size - self.size)
        self.size = size

    def move(self, budget: ByteBudget) -> None:
        """Reserve in ``budget`` from now on."""
        self.budget.give(self.size)
        self.budget = budget
        budget.charge(self.size)


def beyond_ordinary(size: int) -> int:
    """What is charged of settings, or of a history, that take ``size`` bytes."""
    return max(0, size - ORDINARY_BYTES)


def memory_of(value: Any) -> int:
    """The bytes of memory that a value takes, with all that is in it: JSON, bytes, structs of both.

    What occurs in it more than once is counted once.
    """
    total, left, seen = 0, [value], {0}
    while left:
        one = left.pop()
        kind = type(one)
        if kind is bool or one is None or id(one) in seen:
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if kind is dict:
            left += one
            left += one.values()
        elif kind is list or kind is tuple:
            left += one
        elif issubclass(kind, msgspec.Struct):
            left += [getattr(one, name) for name in one.__struct_fields__]
    return total
