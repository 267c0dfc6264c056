"""Event streams: CPU time of the server process per token, and delay of the first byte after the first token.

Alternates with the usual FastAPI handler (A B A B …) and compares within a round, so that a disturbance affects both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from benchmarks.server_process import free_port, running
from benchmarks.sse_load import Load, Outcome

OURS: Final = "omni_ws"
#: The same with an engine whose task sleeps for each token, as the peer's does, in place of a timer's callbacks.
ASLEEP: Final = "omni_ws, a task that sleeps"
PEER: Final = "fastapi"
#: Lower bound for paced tokens: a task that sleeps and writes, without any layer.
FLOOR: Final = "nothing but the writes"
MAX_CPU_RATIO: Final = 0.5
MAX_PACED_CPU_RATIO: Final = 0.8
MAX_FIRST_BYTE_MS: Final = 0.1
#: Share of the engine's tokens that must arrive in time for a run to count: late tokens arrive in batches, which cost
#: less.
MIN_SHARE: Final = 0.9
MAX_ATTEMPTS: Final = 20
FIRST_MS: Final = 50


def _command(server: str, *, interval_ms: int, stamp: bool) -> tuple[str, list[str]]:
    pace = ["--interval-ms", str(interval_ms), "--first-ms", str(FIRST_MS)]
    if server == FLOOR:
        return "benchmarks.peers.bare_sse", pace
    if server == PEER:
        return "benchmarks.peers.fastapi_sse", [*pace, *(["--stamp"] if stamp else [])]
    if stamp:
        return "benchmarks.token_streams", ["stamping", *pace]
    if server == ASLEEP:
        return "benchmarks.token_streams", ["sleeping", *pace]
    fake = ["--fake.chunk-interval-ms", str(interval_ms), "--fake.first-chunk-delay-ms", str(FIRST_MS)]
    return "omni_ws", ["serve", "--engine", "fake", *fake, "--log-level", "warning"]


def measure(server: str, *, streams: int, words: int, interval_ms: int, stamp: bool, seconds: float) -> Outcome:
    port = free_port()
    module, arguments = _command(server, interval_ms=interval_ms, stamp=stamp)
    with running(module, *arguments, port=port) as process:
        load = Load(port=port, pid=process.pid, streams=streams, words=words, warm_up=2, seconds=seconds)
        command = [sys.executable, "-m", "benchmarks.sse_load", json.dumps(dataclasses.asdict(load))]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=seconds + 60).stdout
    return Outcome(**json.loads(printed))


def measure_in_peace(server: str, options: argparse.Namespace, interval_ms: int) -> Outcome:
    expected = options.streams * options.seconds * 1000 / interval_ms if interval_ms else 0
    for _ in range(MAX_ATTEMPTS):
        outcome = measure(
            server,
            streams=options.streams,
            words=options.words,
            interval_ms=interval_ms,
            stamp=False,
            seconds=options.seconds,
        )
        paced = outcome.tokens >= MIN_SHARE * expected
        print(
            f"  {server}: {outcome.microseconds_per_token:.1f} µs a token, {outcome.tokens} tokens"
            f"{'' if paced else ': not counted'}",
            file=sys.stderr,
            flush=True,
        )
        if paced:
            return outcome
    raise RuntimeError("this machine is too busy to pace the streams")


def cost_of_a_token(options: argparse.Namespace, interval_ms: int) -> bool:
    servers = (OURS, PEER, FLOOR, ASLEEP) if interval_ms else (OURS, PEER)
    figures: dict[str, list[float]] = {server: [] for server in servers}
    for number in range(options.runs):
        print(f"round {number + 1} of {options.runs}", file=sys.stderr)
        for server, runs in figures.items():
            runs.append(measure_in_peace(server, options, interval_ms).microseconds_per_token)
    pace = f"a token each {interval_ms} ms" if interval_ms else "as fast as the server makes them"
    print(f"### {options.streams} event streams, {pace}: CPU time of the server a token\n")
    print("| server | median µs a token | lowest | highest |")
    print("|---|---|---|---|")
    for server, runs in figures.items():
        print(f"| {server} | {statistics.median(runs):.1f} | {min(runs):.1f} | {max(runs):.1f} |")
    met = print_ratio(
        "Ours ÷ theirs", figures[OURS], figures[PEER], target=MAX_PACED_CPU_RATIO if interval_ms else MAX_CPU_RATIO
    )
    if interval_ms:
        print_ratio("Ours with a task that sleeps ÷ theirs", figures[ASLEEP], figures[PEER], target=None)
        print_ratio("The writes alone ÷ theirs", figures[FLOOR], figures[PEER], target=None)
    return met


def print_ratio(name: str, these: Sequence[float], those: Sequence[float], *, target: float | None) -> bool:
    """Prints a ratio; returns whether its target, if any, was met."""
    ratios = [one / other for one, other in zip(these, those, strict=True)]
    ratio = statistics.median(ratios)
    met = target is None or ratio <= target
    verdict = "no target" if target is None else f"target ≤ {target:g}: {'met' if met else 'MISSED'}"
    print(
        f"\n{name}, median of the rounds: {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}); {verdict}", flush=True
    )
    return met


def time_to_first_byte(options: argparse.Namespace) -> bool:
    late: dict[str, list[float]] = {OURS: [], PEER: []}
    for _ in range(options.runs):
        for server, found in late.items():
            outcome = measure(
                server,
                streams=options.latency_streams,
                words=round(1000 / options.interval_ms),
                interval_ms=options.interval_ms,
                stamp=True,
                seconds=options.seconds,
            )
            found += outcome.first_byte_ms
    print(f"\n### {options.latency_streams} event streams: from the engine's first token to the first byte\n")
    print("| server | answers | median ms | p90 | p99 |")
    print("|---|---|---|---|---|")
    for server, found in late.items():
        centiles = statistics.quantiles(found, n=100)
        print(f"| {server} | {len(found)} | {centiles[49]:.2f} | {centiles[89]:.2f} | {centiles[98]:.2f} |")
    median = statistics.median(late[OURS])
    met = median <= MAX_FIRST_BYTE_MS
    print(f"\nTarget for the median ≤ {MAX_FIRST_BYTE_MS:g} ms: {'met' if met else 'MISSED'}")
    return met


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sse", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--latency-streams", type=int, default=50)
    parser.add_argument("--interval-ms", type=int, default=40, help="between two tokens of a stream")
    parser.add_argument("--words", type=int, default=250, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--runs", type=int, default=5, help="rounds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.seconds = 1, 3.0
    met = cost_of_a_token(options, 0)
    print()
    met = cost_of_a_token(options, options.interval_ms) and met
    return time_to_first_byte(options) and met


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
