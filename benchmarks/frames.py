"""CPU time of the server process for a 20 ms frame of audio.

The server receives, orders, accumulates and acknowledges; with ``--echo`` it also sends the audio back. Contestants
alternate (A B C A B C …) and are compared within a round, so that a disturbance affects all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.load import Load, Outcome, run_load
from benchmarks.server_process import free_port, running

OURS: Final = "omni_ws"
#: The same, with sessions kept in a file of SQLite.
KEPT: Final = "omni_ws sqlite"
PEERS: Final = {
    "websockets": "benchmarks.peers.bare_websockets",
    "fastapi": "benchmarks.peers.fastapi_uvicorn",
    "picows": "benchmarks.peers.bare_picows",
}


#: Share of the intended time that must be measured for a run to count.
MIN_COUNTED: Final = 0.25
MAX_ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server, and the form of frames it receives."""

    server: str
    form: str

    def __str__(self) -> str:
        return f"{self.server} {self.form}"


@dataclass(frozen=True, slots=True)
class Target:
    """``ours`` may take at most ``ratio`` times the CPU time of the peer: in the median, or in every round."""

    ours: Contestant
    peer: Contestant
    ratio: float
    every: bool = False


#: Usual handlers receive JSON; our binary frames are the equivalent for a client.
TARGETS: Final = (
    Target(Contestant(OURS, "json"), Contestant("websockets", "json"), 1.0, every=True),
    Target(Contestant(OURS, "binary"), Contestant("websockets", "binary"), 0.85),
    Target(Contestant(OURS, "json"), Contestant("fastapi", "json"), 0.6),
    Target(Contestant(OURS, "binary"), Contestant("fastapi", "json"), 0.6),
    *(Target(Contestant(KEPT, form), Contestant(OURS, form), 1.05) for form in ("json", "binary")),
)
ECHO_TARGETS: Final = tuple(
    Target(Contestant(OURS, form), Contestant(peer, form), ratio)
    for form in ("json", "binary")
    for peer, ratio in (("websockets", 1.3), ("fastapi", 1.0))
)


def measure(contestant: Contestant, options: argparse.Namespace) -> Outcome:
    """Runs one server and the load, in processes of their own."""
    port = free_port()
    ours = contestant.server in (OURS, KEPT)
    if ours:
        module, arguments = "omni_ws", ["serve", "--engine", "fake", "--fake.chunk-ms", "20", "--log-level", "warning"]
    else:
        module, arguments = PEERS[contestant.server], ["--echo"] if options.echo else []
    with TemporaryDirectory() as folder, ExitStack() as stack:
        if contestant.server == KEPT:
            arguments += ["--sessions.store", f"sqlite:{folder}/sessions.db"]
        process = stack.enter_context(running(module, *arguments, port=port))
        load = Load(
            servers=[(port, process.pid)],
            streams=options.streams,
            seconds=options.seconds,
            warm_up=options.warm_up,
            binary=contestant.form == "binary",
            echo=options.echo,
            prelude=prelude(echo=options.echo) if ours else None,
        )
        return run_load(load)


def measure_in_peace(contestant: Contestant, options: argparse.Namespace) -> Outcome:
    """Repeats a run until enough slices were paced."""
    for _ in range(MAX_ATTEMPTS):
        outcome = measure(contestant, options)
        enough = outcome.stream_sec >= MIN_COUNTED * options.seconds * options.streams
        cost = f"{outcome.microseconds_per_frame:.1f} µs a frame" if enough else "too busy a machine"
        print(
            f"  {contestant}: {cost}, {outcome.answers} answers, {outcome.counted:.0%} of the slices counted",
            file=sys.stderr,
            flush=True,
        )
        if enough:
            return outcome
    raise RuntimeError("this machine is too busy to pace the streams")


def prelude(*, echo: bool) -> str:
    policy = "on_first_chunk" if echo else "on_end_only"
    return json.dumps(
        {"type": "session_config", "start_policy": policy, "output_audio": {"format": "pcm16", "sample_rate": 16000}}
    )


def installed_peers() -> list[str]:
    """Peers of the extra ``bench`` that are installed."""
    found = [peer for peer in PEERS if importlib.util.find_spec(peer) is not None]
    for peer in PEERS:
        if peer not in found:
            print(f"{peer} is not installed, and not compared with", file=sys.stderr)
    return found


def play(contestants: Sequence[Contestant], options: argparse.Namespace) -> dict[Contestant, list[float]]:
    """Measures every contestant, round by round; in microseconds per frame."""
    figures: dict[Contestant, list[float]] = {contestant: [] for contestant in contestants}
    for number in range(options.runs):
        print(f"round {number + 1} of {options.runs}", file=sys.stderr)
        for contestant in contestants:
            figures[contestant].append(measure_in_peace(contestant, options).microseconds_per_frame)
    return figures


def print_figures(figures: dict[Contestant, list[float]]) -> None:
    print("| server | frames | median µs a frame | lowest | highest |")
    print("|---|---|---|---|---|")
    for contestant, runs in figures.items():
        spread = f"{statistics.median(runs):.1f} | {min(runs):.1f} | {max(runs):.1f}"
        print(f"| {contestant.server} | {contestant.form} | {spread} |")


def print_ratios(figures: dict[Contestant, list[float]], *, echo: bool) -> bool:
    """Prints our ratio to each peer (median of the rounds); returns False if a target is missed."""
    targets = {(target.ours, target.peer): target for target in (ECHO_TARGETS if echo else TARGETS)}
    met = True
    print("\n| ours | against | CPU time, ours ÷ theirs | lowest | highest | target |")
    print("|---|---|---|---|---|---|")
    for ours in (contestant for contestant in figures if contestant.server in (OURS, KEPT)):
        for peer in (contestant for contestant in figures if contestant.server != ours.server):
            target = targets.get((ours, peer))
            if target is None and (ours.form != peer.form or KEPT in (ours.server, peer.server)):
                continue
            ratios = [mine / theirs for mine, theirs in zip(figures[ours], figures[peer], strict=True)]
            ratio = statistics.median(ratios)
            verdict = ""
            if target is not None:
                is_met = (max(ratios) if target.every else ratio) <= target.ratio
                scope = ", in every round" if target.every else ""
                verdict = f"≤ {target.ratio:g}{scope}: {'met' if is_met else 'MISSED'}"
                met = met and is_met
            print(f"| {ours} | {peer} | {ratio:.2f} | {min(ratios):.2f} | {max(ratios):.2f} | {verdict} |")
    return met


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks frames", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--streams", type=int, help="300; with --echo 150, which keep the generator as busy")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--warm-up", type=float, default=2)
    parser.add_argument("--runs", type=int, default=5, help="rounds")
    parser.add_argument("--kept", action="store_true", help="also with sessions kept in a file of SQLite")
    parser.add_argument("--servers", nargs="*", default=installed_peers(), choices=list(PEERS))
    parser.add_argument("--forms", nargs="+", default=["json", "binary"], choices=["json", "binary"])
    parser.add_argument("--echo", action="store_true", help="the audio goes back, too")
    options = parser.parse_args(arguments)
    if options.streams is None:
        options.streams = 150 if options.echo else 300
    if options.quick:
        options.runs, options.seconds, options.warm_up = 1, 3.0, 1.0
    servers = (OURS, *([KEPT] if options.kept else []), *options.servers)
    contestants = [Contestant(server, form) for form in options.forms for server in servers]
    figures = play(contestants, options)
    echoed = ", echoed" if options.echo else ""
    print(f"### {options.streams} streams of 20 ms frames{echoed}: CPU time of the server a frame\n")
    print_figures(figures)
    return print_ratios(figures, echo=options.echo)


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
