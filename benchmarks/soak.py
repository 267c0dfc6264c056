"""A soak: clients that talk and check each word, while clients vanish and faults happen at random, by a seed.

Every second a tenth of the talkers vanish. Every few seconds one of these happens: a process of a voice is killed, the
server gets garbage, heads that never end, or more connections than it has descriptors, its disk is full for a while,
the network of some talkers is cut, or its wall clock jumps.
Now and then the server itself is killed, and started again. Twice a minute the clients rest: then nothing may be left
of them, and what the server holds is measured.

Before that, *microphones*: clients that pause, interrupt, cough, press stop and lose their connections, on a clock that
jumps over idle time. What the model is given of each conversation is compared with what was said and played.

After that, a *fleet*: replicas that share a store are killed, stopped and restarted; ``python -m benchmarks fleet``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

from benchmarks import fleet
from benchmarks.lossy_link import SERVER, LossyLink
from benchmarks.soak_clients import Talker, Tally, keep_heads_open, send_garbage, take_descriptors
from benchmarks.soak_microphones import converse
from benchmarks.soak_network import connect_from_beyond, link_to_cut
from benchmarks.soak_server import CLOCK_CAN_BE_SET, DESCRIPTORS, Measures, SoakedServer, small_disk

PARTS: Final = ("microphones", "talkers", "fleet")
#: Between two rests.
ROUND_SEC: Final = 25.0
#: In which nothing may be left of the clients of a round.
REST_SEC: Final = 60.0
BETWEEN_FAULTS_SEC: Final = 3.0
#: Share of the talkers that vanish in a second.
VANISHING: Final = 0.1
#: Share of the talkers that talk over the link.
BEYOND: Final = 0.3
#: Longest cut. TCP repeats what was lost, and both ends wait longer than that: a cut excuses nothing.
CUT_SEC: Final = 8.0
#: How far ahead the wall clock is set, or back, before it is set right: keys have counts of a day.
JUMPS_SEC: Final = (-400 * 86_400, -86_400, -90, 90, 86_400, 400 * 86_400)
#: Rounds of a life after which the server is killed.
ROUNDS_OF_A_LIFE: Final = 15
#: Over the second half of a life. In the first, recognisers are loaded and heaps find their size.
MAX_GROWTH: Final = {"descriptors": 12, "threads": 24, "memory_mib": 30.0}
#: A recogniser that is loaded when more talk at once than before takes some 93 MiB. It stays, and a life loads four.
RECOGNISER_MIB: Final = (80.0, 110.0)
RECOGNISERS: Final = 4


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="one minute, three microphones, 19 faults of the fleet")
    parser.add_argument("--minutes", type=float, default=10, help="of the clock; of microphones, of their own")
    parser.add_argument("--talkers", type=int, default=8, help="sessions at a time")
    parser.add_argument("--microphones", type=int, default=12, help="conversations at a time")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; by default another each time")
    options = parser.parse_args(arguments)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    minutes = 1.0 if options.quick else options.minutes
    right = True
    if "microphones" in options.parts:
        right = _open_microphones(3 if options.quick else options.microphones, minutes, seed)
    if "talkers" in options.parts:
        right = _talk(options.talkers, minutes, seed) and right
    if "fleet" in options.parts:
        right = fleet.main([*(["--quick"] if options.quick else []), "--seed", str(seed)]) and right
    return right


def _open_microphones(count: int, minutes: float, seed: int) -> bool:
    print(f"### {minutes:g} minutes of {count} microphones, seed {seed}\n")
    findings = converse(seed, count, minutes)
    _print_counts(findings.counts)
    print(f"\n{len(findings.differences)} differences, {len(findings.wrong)} other defects")
    for line in (*findings.differences[:50], *findings.wrong[:50]):
        print(f"- {line}")
    print()
    return not findings.differences and not findings.wrong and findings.counts["histories compared"] > 0


def _print_counts(counts: Counter[str]) -> None:
    print("| what | how often |\n|---|---|")
    for name, count in sorted(counts.items()):
        print(f"| {name} | {count:,} |")


def _talk(talkers: int, minutes: float, seed: int) -> bool:
    print(f"### {minutes:g} minutes of {talkers} talkers, seed {seed}\n")
    with tempfile.TemporaryDirectory() as folder, small_disk() as (disk, can_be_full), link_to_cut(seed) as link:
        if not can_be_full:
            print("no disk to fill: it needs root\n")
        if not CLOCK_CAN_BE_SET:
            print("no clock to set: it needs libfaketime\n")
        server = SoakedServer(disk, Path(folder) / "server.log", host="127.0.0.1" if link is None else SERVER)
        soak = Soak(server, talkers, seed, disk=disk if can_be_full else None, link=link)
        return asyncio.run(soak.run(minutes * 60))


class Soak:
    """One run."""

    def __init__(
        self, server: SoakedServer, talkers: int, seed: int, *, disk: Path | None = None, link: LossyLink | None = None
    ) -> None:
        self._server = server
        self._talkers = talkers
        self._random = random.Random(seed)
        #: Of its own, so that the faults come in one order however fast the talkers are.
        self._luck = random.Random(seed)
        self._disk = disk
        self._link = link
        self._tally = Tally()
        self._live: set[Talker] = set()
        self._microphone = asyncio.Lock()
        #: What was measured at the rests of each life.
        self._rests: list[list[Measures]] = []

    async def run(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        await self._begin_life()
        try:
            while time.monotonic() < end:
                await self._round(min(ROUND_SEC, max(5.0, end - time.monotonic())))
                await self._rest()
            status = await self._server.stop()
        except BaseException:
            with contextlib.suppress(OSError, AssertionError):
                self._server.kill()
            raise
        if status != 0:
            self._tally.wrong.append(f"the server ended with status {status}")
        self._tally.wrong += [f"in the log: {line}" for line in self._server.unforeseen()]
        return self._report()

    async def _begin_life(self) -> None:
        await self._server.start()
        self._rests.append([])

    async def _round(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        tasks = [asyncio.create_task(self._talk_until(end)) for _ in range(self._talkers)]
        disturbing = [asyncio.create_task(work) for work in (self._let_vanish(), self._make_faults(end))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in (*disturbing[:1], *tasks):
                task.cancel()
            await asyncio.gather(*disturbing, *tasks, return_exceptions=True)
        disturbing[1].result()

    async def _talk_until(self, end: float) -> None:
        while time.monotonic() < end:
            beyond = self._link is not None and self._random.random() < BEYOND
            reach = partial(connect_from_beyond, self._server.port) if beyond else None
            talker = Talker(self._server.url, self._tally, self._random, self._microphone, reach=reach)
            self._live.add(talker)
            try:
                await talker.talk()
            finally:
                self._live.discard(talker)
            await asyncio.sleep(self._random.random())

    async def _let_vanish(self) -> None:
        while True:
            await asyncio.sleep(1)
            for talker in [*self._live]:
                if self._random.random() < VANISHING:
                    talker.vanish()

    # faults

    async def _make_faults(self, end: float) -> None:
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "voice": self._kill_voice,
            "garbage": lambda: send_garbage(self._server.address, self._random),
            "heads": lambda: keep_heads_open(self._server.address),
            "descriptors": lambda: take_descriptors(self._server.address, DESCRIPTORS),
        }
        if self._disk is not None:
            kinds["disk"] = self._fill_disk
        if self._link is not None:
            kinds["network"] = partial(self._cut, self._link)
        if CLOCK_CAN_BE_SET:
            kinds["clock"] = self._set_clock
        if len(self._rests[-1]) + 1 == ROUNDS_OF_A_LIFE or self._luck.random() < 1 / ROUNDS_OF_A_LIFE:
            await asyncio.sleep(5)
            await self._happen("server", self._kill_server)
        while time.monotonic() < end - 5:
            await asyncio.sleep(BETWEEN_FAULTS_SEC * self._luck.random() * 2)
            kind = self._luck.choice([*kinds])
            await self._happen(kind, kinds[kind])

    async def _happen(self, kind: str, fault: Callable[[], Awaitable[None]]) -> None:
        self._tally.counts[f"fault: {kind}"] += 1
        self._tally.faults[kind] = float("inf")
        try:
            await fault()
        finally:
            self._tally.faults[kind] = time.monotonic()

    async def _kill_voice(self) -> None:
        for pid in self._random.sample(workers := self._server.workers(), min(1, len(workers))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _kill_server(self) -> None:
        self._server.kill()
        await self._begin_life()

    async def _fill_disk(self) -> None:
        assert self._disk is not None
        filling = self._disk / "filling"
        with contextlib.suppress(OSError), filling.open("wb") as file:
            while True:
                file.write(bytes(2**16))
        await asyncio.sleep(3)
        filling.unlink()
        self._server.make_room()

    async def _cut(self, link: LossyLink) -> None:
        seconds = self._luck.uniform(1, CUT_SEC)
        link.cut(seconds)
        await asyncio.sleep(seconds)

    async def _set_clock(self) -> None:
        for ahead in (self._luck.choice(JUMPS_SEC), 0):
            if not await self._server.set_clock(ahead):
                self._tally.wrong.append(f"answers are not dated by a clock that is set {ahead} s ahead")

    # rests

    async def _rest(self) -> None:
        """Waits until nothing is left of the clients, and measures."""
        end = time.monotonic() + REST_SEC
        while not (measures := await self._server.measure()).empty:
            if time.monotonic() > end:
                self._tally.wrong.append(f"{REST_SEC:g} s after the last client there was left: {measures}")
                break
            await asyncio.sleep(0.5)
        self._rests[-1].append(measures)

    # report

    def _report(self) -> bool:
        if not self._tally.counts["answers"]:
            self._tally.wrong.append("no answer")
        _print_counts(self._tally.counts)
        print("\n| life | rests | descriptors | threads | MiB |\n|---|---|---|---|---|")
        for number, rests in enumerate(self._rests):
            columns = [[getattr(rest, name) for rest in rests] for name in MAX_GROWTH]
            shown = (f"{column[0]:.0f} → {column[-1]:.0f}" if column else "–" for column in columns)
            print(f"| {number + 1} | {len(rests)} | {' | '.join(shown)} |")
            for name, column in zip(MAX_GROWTH, columns, strict=True):
                if column[3:] and growth(column[len(column) // 2 :]) > MAX_GROWTH[name]:
                    self._tally.wrong.append(f"{name} grew in life {number + 1}: {column}")
        print(f"\n{len(self._tally.wrong)} defects")
        for line in self._tally.wrong[:50]:
            print(f"- {line}")
        if self._tally.wrong:
            print(f"\nThe end of the log:\n\n{self._server.last_lines()}")
        return not self._tally.wrong


def growth(values: Sequence[float]) -> float:
    """From the first to the last, less the steps that are recognisers."""
    low, high = RECOGNISER_MIB
    steps = [after - before for before, after in pairwise(values)]
    return sum(steps) - sum([step for step in steps if low <= step <= high][:RECOGNISERS])
