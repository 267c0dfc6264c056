"""CPU time that request events add to a 20 ms frame of audio, while they are recorded and while they are not.

Only the server's own code is measured, from the message to the acknowledgement, which is robust against other load;
``frames`` gives the cost of a frame in a whole server. ``--before TREE``, a checkout from before events existed, also
shows their cost while they are off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

BEFORE, OFF, ON = "before", "off", "on"
_HERE: Final = Path(__file__).parents[1]


def measure(events: str, options: argparse.Namespace) -> float:
    """Microseconds per frame: the median of the batches of one process."""
    command = [sys.executable, str(Path(__file__).with_name("event_cost.py")), "--batches", str(options.batches)]
    if events == ON:
        command.append("--record")
    tree: Path = options.before if events == BEFORE else _HERE
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, timeout=300).stdout
    batches: list[float] = json.loads(printed)
    return statistics.median(batches)


def print_figures(figures: dict[str, list[float]]) -> None:
    print("### Request events: CPU time of the server's own code a frame\n")
    print("| events | median µs a frame | lowest | highest |")
    print("|---|---|---|---|")
    for events, runs in figures.items():
        print(f"| {events} | {statistics.median(runs):.2f} | {min(runs):.2f} | {max(runs):.2f} |")
    print("\n| events | against | added µs a frame, median of the rounds | lowest | highest |")
    print("|---|---|---|---|---|")
    for one, other in ((ON, OFF), (OFF, BEFORE)):
        if other in figures:
            added = [first - second for first, second in zip(figures[one], figures[other], strict=True)]
            print(f"| {one} | {other} | {statistics.median(added):+.2f} | {min(added):+.2f} | {max(added):+.2f} |")


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks events", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--before", type=Path, help="checkout to compare with, from before events existed")
    parser.add_argument("--batches", type=int, default=30, help="batches of 2,000 frames in a process")
    parser.add_argument("--runs", type=int, default=7, help="rounds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.batches = 1, 5
    contestants = [*([BEFORE] if options.before is not None else []), OFF, ON]
    figures: dict[str, list[float]] = {events: [] for events in contestants}
    for number in range(options.runs):
        # Alternates the order, so that drift within a round affects both.
        for events in contestants if number % 2 == 0 else reversed(contestants):
            figures[events].append(measure(events, options))
    print_figures(figures)
    return True


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
