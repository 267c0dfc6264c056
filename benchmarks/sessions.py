"""Whether a session costs the same among many others, and when it is old.

Among others: open microphones with 20 ms frames of noise, listened to by turn detection; CPU time of the server for a
second of one session. Old: a few talkers with recorded speech every few seconds, whom the fake engine answers with
their own words, in one session each; the same for each stretch of the session's age.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Final

from benchmarks.embedded import Clip
from benchmarks.server_process import free_port, scheduled_seconds, serving
from benchmarks.turns import SILENCE_MS, TURNS, load
from benchmarks.voice_client import OmniWire, converse

#: Targets: of the most sessions against ten, and of the last stretch against the first.
MAX_AMONG_MANY: Final = 1.2
MAX_OLD: Final = 1.2
#: Ten share what a single one has to itself: a pass of the event loop, a round of the detector.
REFERENCE: Final = 10
TURN_SEC: Final = 5.0
CLIP: Final = "cards_001"


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sessions", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run of each")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, REFERENCE, 50, 200])
    parser.add_argument("--seconds", type=float, default=5, help="of one run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--talkers", type=int, default=8, help="whose sessions become old")
    parser.add_argument("--stretch", type=float, default=30, help="seconds of the age that one row is about")
    parser.add_argument("--stretches", type=int, default=4)
    options = parser.parse_args(arguments)
    if options.quick:
        options.seconds, options.runs, options.stretch, options.stretches = 2.0, 1, 10.0, 2
    met = among_others(options)
    return old(options) and met


def among_others(options: argparse.Namespace) -> bool:
    print("### Open microphones: CPU time of the server for a second of one session\n")
    found: dict[int, list[float]] = {count: [] for count in options.sessions}
    for _ in range(options.runs):
        for count, costs in found.items():
            outcome = load(dict(TURNS), options.seconds, streams=count)
            costs.append(outcome.server_cpu_sec / outcome.stream_sec * 1000)
    print("| sessions | median ms | lowest | highest |\n|---|---|---|---|")
    for count, costs in found.items():
        print(f"| {count} | {statistics.median(costs):.2f} | {min(costs):.2f} | {max(costs):.2f} |", flush=True)
    if REFERENCE not in found or (most := max(found)) <= REFERENCE:
        return True
    ratio = statistics.median(found[most]) / statistics.median(found[REFERENCE])
    met = ratio <= MAX_AMONG_MANY
    what = f"{most} sessions ÷ {REFERENCE}"
    print(f"\n{what}: {ratio:.2f}; target ≤ {MAX_AMONG_MANY:g}: {'met' if met else 'MISSED'}", flush=True)
    return met


def old(options: argparse.Namespace) -> bool:
    print(f"\n### {options.talkers} talkers: CPU time of the server for a second of one session, by its age\n")
    port = free_port()
    with serving("--engine", "fake", "--log-level", "warning", port=port) as process:
        costs = asyncio.run(by_age(port, process.pid, options))
    print("| age, to the second | median ms |\n|---|---|")
    for number, cost in enumerate(costs, 1):
        print(f"| {number * options.stretch:.0f} | {cost:.2f} |")
    ratio = costs[-1] / costs[0]
    met = ratio <= MAX_OLD
    print(f"\nThe last ÷ the first: {ratio:.2f}; target ≤ {MAX_OLD:g}: {'met' if met else 'MISSED'}", flush=True)
    return met


async def by_age(port: int, pid: int, options: argparse.Namespace) -> list[float]:
    """Milliseconds of CPU time for a second of one session, for each stretch. The first turn is not counted."""
    wire = OmniWire({"type": "server_vad", "silence_duration_ms": SILENCE_MS})
    turns = round(options.stretch * options.stretches / TURN_SEC) + 2
    clips = [Clip.load(CLIP)] * turns
    costs: list[float] = []
    async with asyncio.TaskGroup() as group:
        talkers = [group.create_task(converse(port, wire, clips, TURN_SEC)) for _ in range(options.talkers)]
        await asyncio.sleep(TURN_SEC)
        for _ in range(options.stretches):
            begun, spent = time.monotonic(), scheduled_seconds(pid)
            await asyncio.sleep(options.stretch)
            lasted = (time.monotonic() - begun) * options.talkers
            costs.append((scheduled_seconds(pid) - spent) / lasted * 1000)
    # The fake engine echoes while its user still speaks, so its answers are early.
    unanswered = sum(turn.arrived is None and not turn.early for talker in talkers for turn in talker.result())
    if unanswered:
        raise RuntimeError(f"{unanswered} turns were not answered")
    return costs


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
