"""Many live streams of 20 ms frames to a server that has one core: how late acknowledgements come.

The load is that of ``frames``, and has the other cores. An acknowledgement is due 100 ms after the oldest frame that it
acknowledges should have been sent. How late it is includes what the sender itself is late.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.frames import prelude
from benchmarks.load import FRAME_SEC, Load, Outcome, run_load
from benchmarks.server_process import free_port, serving

#: Of the 99th percentile.
MAX_LATE_MS: Final = 50


def on_one_core(form: str, options: argparse.Namespace) -> Outcome:
    """Runs server and load, on cores of their own."""
    own, *others = sorted(os.sched_getaffinity(0))
    port = free_port()
    flags = ["--engine", "fake", "--log-level", "warning", "--limits.max-connections", str(options.streams + 100)]
    flags += ["--limits.max-sessions", str(options.streams + 100)]
    with serving(*flags, port=port) as process:
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {own})
        load = Load(
            servers=[(port, process.pid)],
            streams=options.streams,
            seconds=options.seconds,
            warm_up=options.warm_up,
            binary=form == "binary",
            echo=False,
            prelude=prelude(echo=False),
        )
        return run_load(load, "taskset", "--cpu-list", ",".join(map(str, others)))


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks streams", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--warm-up", type=float, default=3)
    parser.add_argument("--forms", nargs="+", default=["json", "binary"], choices=["json", "binary"])
    options = parser.parse_args(arguments)
    if options.quick:
        options.seconds, options.warm_up = 3.0, 1.0
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("server and load need a core each")
    print(f"### {options.streams} live streams of 20 ms frames, the server on one core\n")
    print("| frames | µs of CPU a frame | of the core | acknowledgements late, ms: median | p99 | most | target |")
    print("|---|---|---|---|---|---|---|")
    met = True
    for form in options.forms:
        outcome = on_one_core(form, options)
        if not outcome.frames or not outcome.late_ms:
            raise RuntimeError("this machine is too busy to pace the streams")
        median, p99, most = outcome.late_ms
        share = outcome.microseconds_per_frame * options.streams / FRAME_SEC / 1e6
        kept = p99 <= MAX_LATE_MS
        met = met and kept
        print(
            f"| {form} | {outcome.microseconds_per_frame:.1f} | {share:.0%} | {median:.1f} | {p99:.1f} | {most:.1f} "
            f"| p99 ≤ {MAX_LATE_MS}: {'met' if kept else 'MISSED'} |",
            flush=True,
        )
    return met


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
