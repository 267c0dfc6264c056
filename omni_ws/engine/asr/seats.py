"""Seats: the number of requests that may be listened to at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from omni_ws.errors import EngineOverloaded

RETRY_AFTER_MS: Final = 1000
#: How long a request waits for a seat. Longer, and it is refused: its speaker waits for an answer.
MAX_WAIT_SEC: Final = 2.0

#: How many talkers are carried just now, with interim texts or without.
Carried: TypeAlias = Callable[[bool], int]


class Seats:
    """Counts who is listened to: ``most``, and no more than ``carried`` tells just now.

    While more are listened to than are carried with interim texts, seats are *crowded*: there are no such texts then.
    Requests of one ``holder``, such as a session whose speaker goes on while the turn before is still being written
    down, share one seat. Seats are given in the order in which they were asked for.
    """

    def __init__(self, most: int, carried: Carried | None = None) -> None:
        self.taken = 0
        self._most = most
        self._carried = carried
        #: Requests on the seats that have a holder, by holder.
        self._shared: dict[str, int] = {}
        self._waiting: deque[_Waiter] = deque()

    @property
    def count(self) -> int:
        """How many there are without interim texts."""
        return self._most if self._carried is None else min(self._most, self._carried(False))

    @property
    def crowded(self) -> bool:
        """Whether interim texts would be too much."""
        return self._carried is not None and self.taken > self._carried(True)

    async def take(self, holder: str | None = None) -> Seat:
        """Wait for a seat, MAX_WAIT_SEC at most. Raises EngineOverloaded when there is none by then."""
        if not self._shares(holder) and (self._waiting or self.taken >= self.count):
            await self._wait(holder)
        else:
            self._grant(holder)
        return Seat(self, holder)

    def leave(self, holder: str | None) -> None:
        """A request needs its seat no more; see Seat."""
        if holder is not None:
            self._shared[holder] -= 1
            if self._shared[holder]:
                return
            del self._shared[holder]
        self.taken -= 1
        while self._waiting and self.taken < self.count:
            self._admit(self._waiting[0].holder)

    async def _wait(self, holder: str | None) -> None:
        waiter = _Waiter(holder)
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(MAX_WAIT_SEC):
                await waiter.admitted
        except BaseException as error:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif waiter.admitted.done() and not waiter.admitted.cancelled():
                self.leave(holder)  # it was given in the same moment
            if isinstance(error, TimeoutError):
                refusal = f"all {self.count} recognisers are in use"
                raise EngineOverloaded(refusal, retry_after_ms=RETRY_AFTER_MS) from None
            raise

    def _admit(self, holder: str | None) -> None:
        """Give a seat to the one who has waited longest, and to all who share it."""
        first = self._waiting.popleft()
        admitted = [first, *(one for one in self._waiting if holder is not None and one.holder == holder)]
        for waiter in admitted:
            if waiter is not first:
                self._waiting.remove(waiter)
            self._grant(holder)
            if not waiter.admitted.done():
                waiter.admitted.set_result(None)
            else:
                self.leave(holder)  # cancelled, and about to say so

    def _shares(self, holder: str | None) -> bool:
        return holder is not None and holder in self._shared

    def _grant(self, holder: str | None) -> None:
        self.taken += not self._shares(holder)
        if holder is not None:
            self._shared[holder] = self._shared.get(holder, 0) + 1


class Seat:
    """The place of one request, from its first audio to the end of its input."""

    def __init__(self, seats: Seats, holder: str | None) -> None:
        self._seats: Seats | None = seats
        #: Whose place it is; None where nobody can share it.
        self.holder = holder

    def leave(self) -> None:
        """It is not needed any more. Idempotent."""
        seats, self._seats = self._seats, None
        if seats is not None:
            seats.leave(self.holder)


class _Waiter:
    def __init__(self, holder: str | None) -> None:
        self.holder = holder
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
