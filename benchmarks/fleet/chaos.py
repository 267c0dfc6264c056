"""Faults of a fleet, one after the other: after each, every conversation has to go on."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.fleet.processes import PATIENCE_SEC, Replica, StoreProcess, now
from benchmarks.fleet.silence import told
from benchmarks.fleet.talkers import Talker, Tally

#: Words of each conversation that have to come back after a fault.
GOES_ON: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is done to a fleet. ``stop_sec`` is how long a replica is stopped, at least: until all have gone on.

    ``both`` is how often a replica is killed while the store is away.
    """

    conversations: int
    kills: int
    stops: int
    restarts: int
    store_restarts: int
    both: int = 0
    stop_sec: float = 0.0
    word_ms: int = 50
    #: The pace at which the engine makes words, also those of an answer that another replica had begun; 0: ``word_ms``.
    made_ms: int = 0

    def faults(self, luck: random.Random) -> list[str]:
        """The faults, in a random order."""
        kinds = {
            "kill": self.kills,
            "stop": self.stops,
            "restart": self.restarts,
            "store": self.store_restarts,
            "both": self.both,
        }
        found = [kind for kind, count in kinds.items() for _ in range(count)]
        luck.shuffle(found)
        return found


class Chaos:
    """One run: conversations, and the faults of a plan."""

    def __init__(
        self,
        plan: Plan,
        replicas: Sequence[Replica],
        store: StoreProcess | None,
        *,
        urls: Sequence[str] = (),
        statistics: Path | None = None,
        seed: int,
    ) -> None:
        """``urls``: of a front; by default the clients know the replicas. ``statistics``: the socket of HAProxy's."""
        self.tally = Tally()
        self._plan = plan
        self._replicas = replicas
        self._store = store
        self._statistics = statistics
        self._luck = random.Random(seed)
        self._word = asyncio.Event()
        self._talkers: list[Talker] = []
        for number in range(plan.conversations):
            known = [one.url for one in replicas]
            self._luck.shuffle(known)
            talker = Talker(
                f"t{number}",
                urls or known,
                self.tally,
                seed=self._luck.randrange(2**32),
                word_sec=plan.word_ms / 1000,
                heard=self._word.set,
            )
            self._talkers.append(talker)

    async def run(self) -> Tally:
        """Talk, and do all faults meanwhile."""
        talking = [asyncio.create_task(one.run(), name=one.name) for one in self._talkers]
        try:
            await self._all_go_on()
            faults: dict[str, Callable[[], Awaitable[None]]] = {
                "kill": self._kill,
                "stop": self._stop,
                "restart": self._restart,
                "store": self._restart_store,
                "both": self._kill_both,
            }
            for kind in self._plan.faults(self._luck):
                if not await self._happen(kind, faults[kind]):
                    break
            for talker in self._talkers:
                talker.stop = True
            _, late = await asyncio.wait(talking, timeout=PATIENCE_SEC)
            self.tally.wrong += [f"{one.get_name()} does not come to an end" for one in late]
        finally:
            for task in talking:
                task.cancel()
            await asyncio.gather(*talking, return_exceptions=True)
        return self.tally

    async def _happen(self, kind: str, fault: Callable[[], Awaitable[None]]) -> bool:
        """Do a fault, and wait until all conversations have gone on. Returns whether they have."""
        try:
            # A store that is slow, as on a busy machine, excuses that sessions are lost: none of them is yet.
            await self._until(lambda one: one.resumable, "became resumable")
            self.tally.counts[f"fault: {kind}"] += 1
            began = now()
            await fault()
        except TimeoutError:
            self.tally.wrong.append(f"{kind}: no end after {PATIENCE_SEC:g} s")
            return False
        moved = [one for one in self._talkers if one.resumed_at > began and one.next_word_at]
        self.tally.gaps.setdefault(kind, []).extend(one.next_word_at - began for one in moved)
        self.tally.gaps.setdefault(f"{kind}, until resumed", []).extend(one.resumed_at - began for one in moved)
        return True

    async def _all_go_on(self) -> None:
        """Return when each conversation has heard some more words. Raises TimeoutError."""
        wanted = {one: one.heard + GOES_ON for one in self._talkers}
        await self._until(lambda one: one.heard >= wanted[one], "heard more words")

    async def _until(self, condition: Callable[[Talker], bool], what: str) -> None:
        """Return when the condition holds for all conversations; check it each time that a word arrives.

        Raises TimeoutError, and says of which conversations it does not hold.
        """
        try:
            async with asyncio.timeout(PATIENCE_SEC):
                while not all(map(condition, self._talkers)):
                    self._word.clear()
                    await self._word.wait()
        except TimeoutError:
            stuck = [one for one in self._talkers if not condition(one)]
            names = ", ".join(f"{one.name} at {one.server}" for one in stuck)
            self.tally.wrong.append(f"within {PATIENCE_SEC:g} s none of these {what}: {names}")
            for line in await told(stuck, self._replicas, self._store, self._statistics):
                print(line)
            print(flush=True)
            raise

    def _some_replica(self) -> Replica:
        return self._luck.choice([one for one in self._replicas if one.is_running])

    async def _kill(self) -> None:
        replica = self._some_replica()
        await replica.kill()
        await self._begin_again(replica)

    async def _begin_again(self, replica: Replica) -> None:
        """Start a replica again once all conversations have gone on at others, if there are any."""
        if len(self._replicas) > 1:
            await self._all_go_on()
            await replica.start()
        else:
            await replica.start()
            await self._all_go_on()

    async def _stop(self) -> None:
        replica, began = self._some_replica(), now()
        replica.signal(signal.SIGSTOP)
        try:
            await self._all_go_on()
            await asyncio.sleep(max(0.0, began + self._plan.stop_sec - now()))
        finally:
            replica.signal(signal.SIGCONT)
        await replica.until_well()

    async def _restart(self) -> None:
        """A deploy, of one replica."""
        replica, began = self._some_replica(), now()
        status = await replica.end()
        self.tally.gaps.setdefault("drain", []).append(now() - began)
        if status != 0:
            self.tally.wrong.append(f"{replica.name} ended with status {status}")
        await self._begin_again(replica)

    async def _restart_store(self) -> None:
        assert self._store is not None
        if self._luck.random() < 0.5:
            await self._store.kill()
        else:
            await self._store.end()
        if self._luck.random() < 0.5:
            await self._all_go_on()  # without a store
        await self._store.start()
        await asyncio.gather(*(one.until_well() for one in self._replicas))
        await self._all_go_on()

    async def _kill_both(self) -> None:
        """What cannot be kept is said: the conversations of that replica begin anew, and no other does."""
        assert self._store is not None
        await self._store.kill()
        await self._until(lambda one: not one.resumable, "learnt that it is not resumable")
        replica = self._some_replica()
        await replica.kill()
        await self._store.start()
        await replica.start()
        await self._all_go_on()
