"""Replicas that share a store, and die: ``python -m benchmarks fleet``.

Conversations that check every word talk to three replicas. One replica at a time is killed with SIGKILL, stopped with
SIGSTOP, or restarted with SIGTERM, and the store is restarted, too. No word may be lost, come twice or in another
order, and no conversation may begin anew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.fleet.chaos import Chaos, Plan
from benchmarks.fleet.processes import fleet_of, missing
from benchmarks.fleet.talkers import DEAD_MANS_SEC, Tally

#: A minute of it.
QUICK: Final = Plan(conversations=12, kills=8, stops=4, restarts=4, store_restarts=2, both=1, word_ms=50)
#: Two hundred faults, and five of the store.
LONG: Final = Plan(conversations=60, kills=90, stops=30, restarts=80, store_restarts=5, stop_sec=30, word_ms=100)
#: Seconds from a fault to the next word, for half of the conversations that it concerns and for 99 of 100.
HALF_SEC: Final = 2.0
MOST_SEC: Final = 5.0


def main(arguments: Sequence[str] = ()) -> bool:
    """Run the plan that the arguments describe; return whether no defect was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fleet", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="twelve conversations and 18 faults")
    parser.add_argument("--conversations", type=int)
    parser.add_argument("--kills", type=int, help="of a replica, with SIGKILL")
    parser.add_argument("--stops", type=int, help="of a replica, with SIGSTOP")
    parser.add_argument("--stop-sec", type=float, help="how long, at least")
    parser.add_argument("--restarts", type=int, help="of a replica, with SIGTERM")
    parser.add_argument("--store-restarts", type=int)
    parser.add_argument("--both", type=int, help="a replica is killed while the store is away")
    parser.add_argument("--word-ms", type=int, help="the pace of words")
    parser.add_argument("--made-ms", type=int, help="the pace at which the engine makes them, also again; as --word-ms")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--store", default="redis", help="redis: of its own; else a value of sessions.store")
    parser.add_argument("--front", choices=("haproxy", "nginx"), help="by default the clients know the replicas")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; by default another each time")
    options = parser.parse_args(arguments)
    if options.store == "redis" and (why := missing()) is not None:
        print(f"not run: {why}")
        return True
    seed = random.randrange(2**32) if options.seed is None else options.seed
    given = {name: getattr(options, name) for name in Plan.__dataclass_fields__ if getattr(options, name) is not None}
    plan = replace(QUICK if options.quick else LONG, **given)
    if options.store != "redis":
        plan = replace(plan, store_restarts=0, both=0)
    if options.replicas == 1:
        plan = replace(plan, stops=0)
    print(f"### {plan.conversations} conversations, {options.replicas} replicas, {options.store}, seed {seed}\n")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the processes, too
    tally = asyncio.run(_run(plan, options.replicas, options.store, options.front, seed))
    return _report(tally, is_timed=not options.quick)


async def _run(plan: Plan, replicas: int, store: str, front: str | None, seed: int) -> Tally:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made_ms = plan.made_ms or plan.word_ms
        processes, own = await stack.enter_async_context(fleet_of(replicas, folder, store=store, word_ms=made_ms))
        urls, statistics = [], None
        if front is not None:
            from support.outside import STATISTICS
            from support.outside import front as front_before

            kind = f"fleet/{front}"
            port = await stack.enter_async_context(front_before(kind, folder, [one.port for one in processes]))
            urls = [f"ws://127.0.0.1:{port}/v1/streaming_input"]
            statistics = folder / STATISTICS if front == "haproxy" else None
        tally = await Chaos(plan, processes, own, urls=urls, statistics=statistics, seed=seed).run()
        for one in processes:
            if "Traceback" in (lines := one.last_lines()):
                tally.wrong.append(f"in the log of {one.name}: {lines}")
        return tally


def _report(tally: Tally, *, is_timed: bool) -> bool:
    """Print the results of a run. The times of short runs are no defects, as other work goes on beside them."""
    print("| what | how often |\n|---|---|")
    for name, count in sorted(tally.counts.items()):
        print(f"| {name} | {count:,} |")
    print("\n| seconds to the next word after | conversations | p50 | p99 | most |\n|---|---|---|---|---|")
    for kind, gaps in tally.gaps.items():
        if not gaps:
            continue
        half, most = _share(gaps, 0.5), _share(gaps, 0.99)
        print(f"| {kind} | {len(gaps)} | {half:.2f} | {most:.2f} | {max(gaps):.2f} |")
        slack = DEAD_MANS_SEC if kind == "stop" else 0.0
        if is_timed and kind in ("kill", "stop") and (half > HALF_SEC + slack or most > MOST_SEC + slack):
            tally.wrong.append(
                f"{kind}: {half:.2f} and {most:.2f} s, allowed {HALF_SEC + slack:g} and {MOST_SEC + slack:g}"
            )
    if tally.lost_as_told and not tally.counts["fault: both"]:
        tally.wrong += tally.lost_as_told
    print(
        f"\n{len(tally.lost_as_told)} conversations began anew after they were told that the store does not keep them."
    )
    print(f"\nA client takes its server for dead after {DEAD_MANS_SEC:g} s of silence.\n\n{len(tally.wrong)} defects")
    for line in tally.wrong[:50]:
        print(f"- {line}")
    return not tally.wrong and tally.counts["turns"] > 0


def _share(values: Sequence[float], share: float) -> float:
    """The value that so many are not above."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
