"""CPU time that request events cost the server for a 20 ms frame of audio: while they are recorded, and while not.

With ``--before TREE``, a checkout of the server without any events in it, also what their being off costs. Without
``--network`` the server's own code alone is measured, which other work on the machine disturbs little; the process then
receives nothing, so that what events cost is a larger share of it than of a server.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.frames import MAX_ATTEMPTS, MAX_LATE_MS, Contestant, prelude, print_figures
from benchmarks.load import Load, Outcome
from benchmarks.server_process import free_port, running

BEFORE, OFF, ON = "before", "off", "on"
#: What may be taken, compared with events that are off; and by them, compared with a server that knows none.
MOST_ON: Final = 1.05
MOST_OFF: Final = 1.02


def measure(contestant: Contestant, options: argparse.Namespace) -> Outcome:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["serve", "--engine", "fake", "--fake.chunk-ms", "20", "--log-level", "warning"]
        if contestant.server == ON:
            arguments += ["--profiler.root", folder]
        tree = options.before if contestant.server == BEFORE else None
        with running("omni_ws", *arguments, port=port, tree=tree) as process:
            if contestant.server == ON:
                request = urllib.request.Request(f"http://127.0.0.1:{port}/start_request_profile", method="POST")
                urllib.request.urlopen(request).close()
            load = Load(
                port=port,
                pid=process.pid,
                streams=options.streams,
                seconds=options.seconds,
                warm_up=options.warm_up,
                binary=contestant.form == "binary",
                echo=options.echo,
                prelude=prelude(echo=options.echo),
            )
            command = [sys.executable, "-m", "benchmarks.load", json.dumps(dataclasses.asdict(load))]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=load.seconds + 90).stdout
        if contestant.server == ON:
            written = sum(path.stat().st_size for path in Path(folder).rglob("events_*.jsonl"))
            assert written > 0, "events were recorded, and there is no file of them"
    return Outcome(**json.loads(printed))


def measure_in_peace(contestant: Contestant, options: argparse.Namespace) -> float:
    """Microseconds a frame. A run in which the generator could not pace the streams is done again."""
    for _ in range(MAX_ATTEMPTS):
        outcome = measure(contestant, options)
        paced = outcome.late_ms <= MAX_LATE_MS
        print(
            f"  {contestant}: {outcome.microseconds_per_frame:.2f} µs a frame{'' if paced else ': not counted'}",
            file=sys.stderr,
            flush=True,
        )
        if paced:
            return outcome.microseconds_per_frame
    raise RuntimeError("this machine is too busy to pace the streams")


def measure_alone(contestant: Contestant, options: argparse.Namespace) -> float:
    """Microseconds a frame, the median of the batches of one process."""
    tree = Path(__file__).parents[1] if contestant.server != BEFORE else options.before
    command = [sys.executable, str(Path(__file__).with_name("event_cost.py")), "--batches", str(options.batches)]
    if contestant.server == ON:
        command.append("--record")
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, timeout=300).stdout
    batches: list[float] = json.loads(printed)
    return statistics.median(batches)


def print_added(figures: dict[Contestant, list[float]]) -> None:
    print("\n| events | against | frames | added µs a frame | lowest | highest |")
    print("|---|---|---|---|---|---|")
    for one, other in ((ON, OFF), (OFF, BEFORE)):
        if Contestant(other, "json") in figures:
            pairs = zip(figures[Contestant(one, "json")], figures[Contestant(other, "json")], strict=True)
            added = [first - second for first, second in pairs]
            print(
                f"| {one} | {other} | json | {statistics.median(added):+.2f} | {min(added):+.2f} | {max(added):+.2f} |"
            )


def compare(figures: dict[Contestant, list[float]], form: str, one: str, other: str, most: float | None) -> bool:
    """Within the rounds, and the median of those."""
    pairs = zip(figures[Contestant(one, form)], figures[Contestant(other, form)], strict=True)
    ratios = [first / second for first, second in pairs]
    ratio = statistics.median(ratios)
    met = most is None or ratio <= most
    verdict = "" if most is None else f"≤ {most:g}: {'met' if met else 'MISSED'}"
    print(f"| {one} | {other} | {form} | {ratio:.3f} | {min(ratios):.3f} | {max(ratios):.3f} | {verdict} |")
    return met


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks events", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--before", type=Path, help="a checkout to compare with, from before there were events")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--warm-up", type=float, default=1)
    parser.add_argument("--runs", type=int, default=5, help="rounds")
    parser.add_argument("--forms", nargs="+", default=["json", "binary"], choices=["json", "binary"])
    parser.add_argument("--echo", action="store_true", help="the audio goes back, too: an event for each output")
    parser.add_argument("--network", action="store_true", help="a server with streams of frames, instead of its code")
    parser.add_argument("--batches", type=int, default=30, help="of 2,000 frames each, of a process of the code alone")
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.seconds, options.batches = 1, 3.0, 5
    if not options.network:
        options.forms = ["json"]
    servers = [*([BEFORE] if options.before is not None else []), OFF, ON]
    contestants = [Contestant(server, form) for form in options.forms for server in servers]
    figures: dict[Contestant, list[float]] = {contestant: [] for contestant in contestants}
    for number in range(options.runs):
        print(f"round {number + 1} of {options.runs}", file=sys.stderr)
        # The other way round every second time: what comes later in a round must not always be the same.
        for contestant in contestants if number % 2 == 0 else reversed(contestants):
            measured = (measure_in_peace if options.network else measure_alone)(contestant, options)
            figures[contestant].append(measured)
    if not options.network:
        print("### Request events: CPU time of the server's own code a frame\n")
        print_figures(figures)
        print_added(figures)
        return True
    print(f"### Request events: CPU time of the server a frame, {options.streams} streams\n")
    print_figures(figures)
    print("\n| events | against | frames | CPU time, one ÷ other | lowest | highest | target |")
    print("|---|---|---|---|---|---|---|")
    met = True
    for form in options.forms:
        met = compare(figures, form, ON, OFF, None if options.echo else MOST_ON) and met
        if options.before is not None:
            met = compare(figures, form, OFF, BEFORE, None if options.echo else MOST_OFF) and met
    return met


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
