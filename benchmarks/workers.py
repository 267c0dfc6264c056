"""Live streams of 20 ms on one worker and on two: CPU time of the server a frame, how evenly they share, admission.

Streams of noise to the fake engine. A round measures one worker and then two, and is over when the server has answered
a ping behind the last frame. The CPU time is that of all processes of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from typing import Final

import numpy as np
import websockets

from benchmarks.embedded import wait_until_ready
from benchmarks.server_process import child_processes, free_port, proportional_mib, running, scheduled_seconds
from omni_ws.client.pacing import paced
from omni_ws.service.sessions.admission import Admission
from omni_ws.service.sessions.shared_counts import SharedCounts, SharedSlotCounts

RATE: Final = 16_000
FRAME_SEC: Final = 0.02
#: Targets: of two workers' CPU time a frame to that of one, and how far their shares of the streams are apart.
MAX_RATIO: Final = 1.1
MAX_APART: Final = 0.1
#: Admissions that are timed.
ADMISSIONS: Final = 2000
MAX_SESSIONS: Final = 1000


def cpu_seconds(pid: int) -> float:
    return sum(map(scheduled_seconds, (pid, *child_processes(pid))))


async def measured(port: int, pid: int, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of CPU time for a frame, and how far the workers' shares of the streams are apart."""
    noise = np.random.default_rng(1).normal(0, 30, round(RATE * FRAME_SEC)).astype("<i2").tobytes()
    payload = base64.b64encode(noise).decode()
    clients = [await websockets.connect(f"ws://127.0.0.1:{port}/v1/streaming_input") for _ in range(options.streams)]
    workers: Counter[str] = Counter()
    for client in clients:
        await client.send(json.dumps({"type": "session_config", "input_audio": {"sample_rate": RATE}}))
        workers[json.loads(await client.recv())["session_id"].partition("_")[0]] += 1
    reading = [asyncio.create_task(_read(client)) for client in clients]
    count = round(options.seconds / FRAME_SEC)
    begun = cpu_seconds(pid)
    turn = 0
    # The streams are out of step, as people are: one process would read frames that come together more cheaply.
    async for _ in paced([b""] * (count * len(clients)), interval=FRAME_SEC / len(clients)):
        number, place = divmod(turn, len(clients))
        await clients[place].send(
            f'{{"type":"input_chunk","modality":"audio","sequence_id":{number},"payload":"{payload}"}}'
        )
        turn += 1
    await asyncio.gather(*[await client.ping() for client in clients])
    spent = cpu_seconds(pid) - begun
    for client in clients:
        await client.close()
    await asyncio.gather(*reading)
    apart = (max(workers.values()) - min(workers.values())) / options.streams
    return spent / (count * options.streams), apart


async def _read(client: websockets.ClientConnection) -> None:
    async for message in client:
        if '"error"' in str(message):
            raise RuntimeError(str(message))


def streams(options: argparse.Namespace) -> bool:
    costs: dict[int, list[float]] = {1: [], 2: []}
    farthest, memory = 0.0, {}
    for _ in range(options.runs):
        for count, found in costs.items():
            port = free_port()
            flags = ("--engine", "fake", "--log-level", "warning", "--workers", str(count))
            with running("omni_ws", "serve", *flags, port=port) as process:
                wait_until_ready(port)
                cost, apart = asyncio.run(measured(port, process.pid, options))
                memory[count] = sum(map(proportional_mib, (process.pid, *child_processes(process.pid))))
            found.append(cost)
            farthest = max(farthest, apart)
    print(f"### {options.streams} live streams of 20 ms\n")
    print("| workers | median µs of CPU a frame | lowest | highest | memory (PSS, MiB) |\n|---|---|---|---|---|")
    for count, found in costs.items():
        low, middle, high = (1e6 * one for one in (min(found), statistics.median(found), max(found)))
        print(f"| {count} | {middle:.1f} | {low:.1f} | {high:.1f} | {memory[count]:.0f} |")
    ratio = statistics.median(costs[2]) / statistics.median(costs[1])
    met = ratio <= MAX_RATIO and farthest <= MAX_APART
    print(
        f"\ntwo workers ÷ one: {ratio:.2f}, target ≤ {MAX_RATIO:g}; shares {farthest:.0%} apart at most, target", end=""
    )
    print(f" ≤ {MAX_APART:.0%}: {'met' if met else 'MISSED'}\n", flush=True)
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
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one short run")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seconds, options.runs = 3, 1
    admissions()
    return streams(options)


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
