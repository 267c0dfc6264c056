"""Live streams of 20 ms on one worker and on two: CPU time of the server a frame, how evenly they share, admission.

The load is that of ``frames``, to the fake engine. A round measures one worker, two with the same streams, and two with
as many for each. The CPU time is that of all processes of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from typing import Final

import websockets

from benchmarks.embedded import wait_until_ready
from benchmarks.frames import prelude
from benchmarks.load import Load, run_load
from benchmarks.server_process import child_processes, free_port, proportional_mib, running
from omni_ws.service.sessions.admission import Admission
from omni_ws.service.sessions.shared_counts import SharedCounts, SharedSlotCounts

#: Targets: of two workers' CPU time a frame to that of one, and how far their shares of the streams are apart.
MAX_RATIO: Final = 1.1
MAX_APART: Final = 0.1
#: Admissions that are timed.
ADMISSIONS: Final = 2000
MAX_SESSIONS: Final = 1000


def cost(port: int, pid: int, streams: int, options: argparse.Namespace) -> float:
    """Microseconds of CPU time for a frame."""
    load = Load(
        port=port,
        pid=pid,
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
    clients = [await websockets.connect(f"ws://127.0.0.1:{port}/v1/streaming_input") for _ in range(streams)]
    workers: Counter[str] = Counter()
    for client in clients:
        await client.send(prelude(echo=False))
        workers[json.loads(await client.recv())["session_id"].partition("_")[0]] += 1
    for client in clients:
        await client.close()
    return (max(workers.values()) - min(workers.values())) / streams


def streams(options: argparse.Namespace) -> bool:
    one, two, twice = (1, options.streams), (2, options.streams), (2, 2 * options.streams)
    costs: dict[tuple[int, int], list[float]] = {one: [], two: [], twice: []}
    farthest, memory = 0.0, {}
    for _ in range(options.runs):
        for (workers, count), found in costs.items():
            port = free_port()
            flags = ["--engine", "fake", "--log-level", "warning", "--workers", str(workers)]
            flags += ["--limits.max-connections", str(count + 100)]
            with running("omni_ws", "serve", *flags, port=port) as process:
                wait_until_ready(port)
                farthest = max(farthest, asyncio.run(apart(port, count))) if workers > 1 else farthest
                found.append(cost(port, process.pid, count, options))
                memory[workers, count] = sum(map(proportional_mib, (process.pid, *child_processes(process.pid))))
    print("### Live streams of 20 ms on one worker and on two\n")
    print(
        "| workers, streams | median µs of CPU a frame | lowest | highest | memory (PSS, MiB) |\n|---|---|---|---|---|"
    )
    for (workers, count), found in costs.items():
        low, middle, high = min(found), statistics.median(found), max(found)
        print(f"| {workers}, {count} | {middle:.1f} | {low:.1f} | {high:.1f} | {memory[workers, count]:.0f} |")
    print()
    met = farthest <= MAX_APART
    for what, contest in (("as many streams for each", twice), ("as many streams in all", two)):
        ratio = statistics.median(costs[contest]) / statistics.median(costs[one])
        met = met and ratio <= MAX_RATIO
        verdict = "met" if ratio <= MAX_RATIO else "MISSED"
        print(f"Two workers ÷ one, {what}: {ratio:.2f}; target ≤ {MAX_RATIO:g}: {verdict}  ")
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
