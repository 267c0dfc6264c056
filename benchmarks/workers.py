"""Live streams of 20 ms on one worker and on two: CPU time of the server a frame, how evenly they share, admission.

The load is that of ``frames``, to the fake engine. A round measures one worker, two with the same streams, and two with
as many for each. Beside each pair of workers come two servers of one worker that know nothing of each other: what
a frame costs on this machine when two processes are busy. The CPU time is that of all processes of the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from benchmarks.frames import prelude
from benchmarks.load import Load, run_load
from benchmarks.server_process import child_processes, free_port, proportional_mib, serving
from omni_ws.client import connect
from omni_ws.service.sessions.admission import Admission
from omni_ws.service.sessions.shared_counts import SharedCounts, SharedSlotCounts

#: Targets: of two workers' CPU time a frame to that of one, and how far their shares of the streams are apart.
MAX_RATIO: Final = 1.1
MAX_APART: Final = 0.1
#: Admissions that are timed.
ADMISSIONS: Final = 2000
MAX_SESSIONS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """So many servers of so many workers each, with so many streams in all."""

    servers: int
    workers: int
    streams: int

    def __str__(self) -> str:
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return f"{workers}, {self.streams}" if self.servers == 1 else f"{self.servers} × {workers}, {self.streams}"

    @contextmanager
    def running(self) -> Iterator[tuple[int, int]]:
        """Runs one of the servers; its port and process."""
        port = free_port()
        flags = ["--engine", "fake", "--log-level", "warning", "--workers", str(self.workers)]
        flags += ["--limits.max-connections", str(self.streams + 100)]
        with serving(*flags, port=port) as process:
            yield port, process.pid


def cost(servers: Sequence[tuple[int, int]], streams: int, options: argparse.Namespace) -> float:
    """Microseconds of CPU time for a frame."""
    load = Load(
        servers=servers,
        streams=streams,
        seconds=options.seconds,
        warm_up=2,
        binary=False,
        echo=False,
        prelude=prelude(echo=False),
    )
    outcome = run_load(load)
    if not outcome.frames:
        raise RuntimeError("this machine is too busy to pace the streams")
    return outcome.microseconds_per_frame


async def apart(port: int, streams: int) -> float:
    """How far the workers' shares of so many streams are apart."""
    async with AsyncExitStack() as stack:
        url = f"ws://127.0.0.1:{port}"
        sessions = [await stack.enter_async_context(connect(url)) for _ in range(streams)]
        workers = Counter(session.session_id.partition("_")[0] for session in sessions)
    return (max(workers.values()) - min(workers.values())) / streams


def streams(options: argparse.Namespace) -> bool:
    once, twice = options.streams, 2 * options.streams
    one = Case(servers=1, workers=1, streams=once)
    beside = {
        Case(servers=1, workers=2, streams=each): Case(servers=2, workers=1, streams=each) for each in (twice, once)
    }
    costs: dict[Case, list[float]] = {case: [] for case in (one, *beside, *beside.values())}
    farthest, memory = 0.0, {}
    for _ in range(options.runs):
        for case, found in costs.items():
            with ExitStack() as running_servers:
                servers = [running_servers.enter_context(case.running()) for _ in range(case.servers)]
                if case.workers > 1:
                    farthest = max(farthest, asyncio.run(apart(servers[0][0], case.streams)))
                found.append(cost(servers, case.streams, options))
                processes = [each for _, pid in servers for each in (pid, *child_processes(pid))]
                memory[case] = sum(map(proportional_mib, processes))
    print("### Live streams of 20 ms on one worker and on two\n")
    print(
        "| workers, streams | median µs of CPU a frame | lowest | highest | memory (PSS, MiB) |\n|---|---|---|---|---|"
    )
    for case, found in costs.items():
        low, middle, high = min(found), statistics.median(found), max(found)
        print(f"| {case} | {middle:.1f} | {low:.1f} | {high:.1f} | {memory[case]:.0f} |")
    print()
    met = farthest <= MAX_APART
    for case, separate in beside.items():
        what = "as many streams for each" if case.streams == twice else "as many streams in all"
        middle = statistics.median(costs[case])
        ratio = middle / statistics.median(costs[one])
        met = met and ratio <= MAX_RATIO
        verdict = "met" if ratio <= MAX_RATIO else "MISSED"
        print(f"Two workers ÷ one, {what}: {ratio:.2f}; target ≤ {MAX_RATIO:g}: {verdict}  ")
        print(f"Two workers ÷ two servers, {what}: {middle / statistics.median(costs[separate]):.2f}  ")
    verdict = "met" if farthest <= MAX_APART else "MISSED"
    print(f"Shares {farthest:.0%} apart at most; target ≤ {MAX_APART:.0%}: {verdict}\n", flush=True)
    return met


def admissions() -> None:
    """Times taking and releasing a slot, in a server that is empty and in one that is nearly full."""
    print("### Taking and releasing a slot\n\n| counted | slots taken before | µs of CPU |\n|---|---|---|")
    for taken in (0, round(0.9 * MAX_SESSIONS)):
        with tempfile.TemporaryFile() as file:
            counts = SharedCounts(file, rows=6, slots=MAX_SESSIONS, keys=())
            shared = SharedSlotCounts(counts, counts.take_row(1))
            for name, admission in (
                ("by one process", Admission(max_sessions=MAX_SESSIONS)),
                ("by all workers", Admission(max_sessions=MAX_SESSIONS, counts=shared)),
            ):
                for number in range(taken):
                    admission.take(None, client=f"2001:db8:{number:x}::1", many_requests=True)
                begun = time.process_time()
                for _ in range(ADMISSIONS):
                    admission.take(None, client="198.51.100.1", many_requests=True).release()
                print(f"| {name} | {taken} | {(time.process_time() - begun) / ADMISSIONS * 1e6:.1f} |")
    print(flush=True)


def main(arguments: list[str]) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks workers", description=__doc__)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short run")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seconds, options.runs = 3, 1
    admissions()
    return streams(options)


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
