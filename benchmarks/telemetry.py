"""CPU time that spans and metrics by OTLP add to a turn: 20 ms frames of an open microphone, whose turns are echoed.

Two servers with the fake engine, whose answers cost nothing, have the same load at the same time, on the same core. One
exports to a collector that forgets. What that adds is less than the difference of two processes, so it is measured with
turns as short as SHORT_SEC, and exports as much more often; it is compared with the cost of a whole turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from unittest.mock import patch

from benchmarks.frames import prelude
from benchmarks.load import FRAME_SEC, Load
from benchmarks.server_process import free_port, scheduled_seconds, serving
from omni_ws.service.observing.telemetry import SPANS_INTERVAL_MS

OFF, ON = "off", "on"
SHORT_SEC: Final = 0.5
MAX_SHARE: Final = 0.01


class _Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    received = 0

    def do_POST(self) -> None:
        type(self).received += len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[str]:
    """The address of a collector that forgets what it receives."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def answers(port: int) -> int:
    """How many requests a server has answered."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as metrics:
        return sum(
            int(float(count)) for count in re.findall(rb"^omni_ws_requests_total{.*} (.*)$", metrics.read(), re.M)
        )


def measure(turn_sec: float, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of CPU time of a turn of ``turn_sec``, without and with telemetry."""
    hurry = turn_sec / options.turn
    with ExitStack() as stack:
        otel = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": stack.enter_context(collector()),
            "OTEL_METRIC_EXPORT_INTERVAL": f"{60_000 * hurry:.0f}",
            "OTEL_BSP_SCHEDULE_DELAY": f"{SPANS_INTERVAL_MS * hurry:.0f}",
        }
        stack.enter_context(patch.dict(os.environ, otel))
        flags = ["--engine", "fake", "--fake.chunk-ms", "20", "--log-level", "error"]
        servers: dict[str, tuple[int, int]] = {}
        for name, more in ((OFF, ()), (ON, ("--tracing", "--otlp-metrics"))):
            port = free_port()
            servers[name] = (port, stack.enter_context(serving(*flags, *more, port=port)).pid)
        own, *others = sorted(os.sched_getaffinity(0))
        for _, pid in servers.values():
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {own})
        load = Load(
            servers=[*servers.values()],
            streams=2 * options.streams,
            seconds=options.seconds + options.warm_up,
            warm_up=0,
            binary=True,
            echo=False,
            prelude=prelude(echo=False),
            turn_frames=round(turn_sec / FRAME_SEC),
        )
        command = ["taskset", "--cpu-list", ",".join(map(str, others)), sys.executable, "-m", "benchmarks.load"]
        generator = subprocess.Popen([*command, json.dumps(dataclasses.asdict(load))], stdout=subprocess.DEVNULL)
        stack.callback(generator.wait)
        stack.callback(generator.kill)
        time.sleep(options.warm_up)
        before = {name: (answers(port), scheduled_seconds(pid)) for name, (port, pid) in servers.items()}
        time.sleep(options.seconds)
        costs = {}
        for name, (port, pid) in servers.items():
            seconds = scheduled_seconds(pid) - before[name][1]
            costs[name] = seconds / (answers(port) - before[name][0])
        if generator.poll() is not None or not _Collector.received:
            raise RuntimeError("the load has ended, or nothing was exported")
        print(f"  turns of {turn_sec:g} s: {costs}", file=sys.stderr, flush=True)
        return costs


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks telemetry", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--runs", type=int, default=5, help="rounds")
    parser.add_argument("--streams", type=int, default=20, help="of each server")
    parser.add_argument("--turn", type=float, default=10, help="seconds of a turn, whose sound is the answer")
    parser.add_argument("--seconds", type=float, default=20, help="of a round")
    parser.add_argument("--warm-up", type=float, default=12)
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.seconds = 1, 10.0
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("servers and load need a core each")
    whole, added = [], []
    for _ in range(options.runs):
        whole.append(1000 * measure(options.turn, options)[OFF])
        short = measure(SHORT_SEC, options)
        added.append(1000 * (short[ON] - short[OFF]))
    turn, more = statistics.median(whole), statistics.median(added)
    print(f"### Spans and metrics by OTLP: CPU time of a turn of {options.turn:g} s, of {options.streams} streams\n")
    print("| ms a turn | ms added, median | lowest | highest | share | target |")
    print("|---|---|---|---|---|---|")
    met = more <= MAX_SHARE * turn
    print(
        f"| {turn:.1f} | {more:.3f} | {min(added):.3f} | {max(added):.3f} | {more / turn:.2%} "
        f"| ≤ {MAX_SHARE:.0%}: {'met' if met else 'MISSED'} |"
    )
    return met


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
