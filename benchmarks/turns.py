"""Turn detection and barge-in: CPU time of listening, and latency of interruptions and of ends of turns.

Listening: streams of 20 ms frames of noise to a server with the fake engine, once with turn detection and once merely
held; the difference in CPU time is the cost of listening. Detector: its network alone, for one stream and for several
together. Interruption: sessions whose answers are being paced are cancelled one by one, and output that still arrives
is timed. End of turn: recorded speech in real time, whose end is labelled after the last 20 ms within 26 dB of the
loudest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks.embedded import CLIPS, SAMPLE_RATE, Clip, Report
from benchmarks.load import Load, Outcome, run_load
from benchmarks.server_process import free_port, serving
from omni_ws.audio.vad import WINDOW_SAMPLES, SpeechDetector, process_together
from omni_ws.caller.script import beside, say
from omni_ws.client import AudioChunk, ClientSession, SpeechStopped, connect
from omni_ws.client import Final as LastChunk
from omni_ws.client.audio import Pcm16

SILENCE_MS: Final = 500
TURNS: Final = {"type": "server_vad", "silence_duration_ms": SILENCE_MS}
#: Targets: share of a core per session, and seconds.
MAX_CPU_SHARE: Final = 0.005
MAX_INTERRUPTION: Final = 0.020
MAX_END_OF_TURN: Final = 0.100
LISTENING_STREAMS: Final = 20
#: As many windows as a round usually has of a session.
DETECTOR_WINDOWS: Final = 8
DETECTOR_ROUNDS: Final = 100


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks turns", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter, with fewer sessions and clips")
    parser.add_argument("--seconds", type=float, default=20, help="seconds of listening in one run")
    parser.add_argument("--runs", type=int, default=3, help="of listening")
    parser.add_argument("--sessions", type=int, default=100, help="sessions that are interrupted")
    parser.add_argument("--shifts", type=int, default=8, help="repetitions of each clip, each 4 ms later")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seconds, options.runs, options.sessions, options.shifts = 5.0, 1, 20, 2
    met = listening(options)
    detecting()
    port = free_port()
    print("\n### Interruptions and ends of turns\n")
    with serving("--engine", "fake", "--log-level", "warning", port=port):
        url = f"ws://127.0.0.1:{port}/v1/streaming_input"
        return asyncio.run(measure(url, options)) and met


def listening(options: argparse.Namespace) -> bool:
    print(f"### {LISTENING_STREAMS} open microphones: CPU time of the server\n")
    print("| run | held only | listened to | a session that is listened to | target |\n|---|---|---|---|---|")
    shares: list[float] = []
    for number in range(options.runs):
        idle, busy = (load(turns, options.seconds) for turns in (None, TURNS))
        held, listened = (outcome.server_cpu_sec / outcome.stream_sec for outcome in (idle, busy))
        shares.append(listened - held)
        costs = " | ".join(f"{share:.2%} of a core" for share in (held, listened))
        print(f"| {number + 1} | {costs} | {shares[-1]:.2%} of a core | |", flush=True)
    share = statistics.median(shares)
    met = share <= MAX_CPU_SHARE
    print(f"| median | | | {share:.2%} of a core | ≤ {MAX_CPU_SHARE:.1%}: {'met' if met else 'MISSED'} |")
    return met


def detecting() -> None:
    print("\n### The detector: CPU time of a window of 32 ms\n")
    print("| streams judged at once | each |\n|---|---|")
    noise = np.random.default_rng(1).normal(0, 0.1, DETECTOR_WINDOWS * WINDOW_SAMPLES).astype(np.float32)
    for count in (1, 2, 4, 8, 16):
        streams = [(SpeechDetector(), noise) for _ in range(count)]
        process_together(streams)
        times: list[float] = []
        for _ in range(DETECTOR_ROUNDS):
            begun = time.thread_time()
            process_together(streams)
            times.append(time.thread_time() - begun)
        print(f"| {count} | {statistics.median(times) / DETECTOR_WINDOWS / count * 1e6:.0f} µs |", flush=True)


def load(turns: dict[str, object] | None, seconds: float, *, streams: int = LISTENING_STREAMS) -> Outcome:
    port = free_port()
    config = {"type": "session_config", "start_policy": "on_end_only", "turn_detection": turns}
    with serving("--engine", "fake", "--log-level", "warning", port=port) as process:
        wanted = Load(
            servers=[(port, process.pid)],
            streams=streams,
            seconds=seconds,
            warm_up=2,
            binary=True,
            echo=False,
            prelude=json.dumps(config),
        )
        outcome = run_load(wanted)
    if not outcome.frames:
        raise RuntimeError("this machine is too busy to pace the streams")
    return outcome


async def measure(url: str, options: argparse.Namespace) -> bool:
    report = Report()
    gate = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        answers = [
            group.create_task(interrupt(url, gate, number / options.sessions)) for number in range(options.sessions)
        ]
        await asyncio.sleep(0)
        gate.set()
    last, final = ([task.result()[index] for task in answers] for index in (0, 1))
    who = f"{options.sessions} sessions"
    report.row(f"cancel → last audio of the answer, {who}", last, target=MAX_INTERRUPTION, at=0.99)
    report.row(f"cancel → final of the answer, {who}", final)
    clips = [Clip.load(name) for name in CLIPS]
    ends: list[float] = []
    for shift in range(options.shifts):
        async with asyncio.TaskGroup() as group:
            spoken = [group.create_task(end_of_turn(url, clip, shift_ms=4 * shift)) for clip in clips]
        ends += [task.result() for task in spoken]
    what = f"labelled end of speech → speech_stopped, less the {SILENCE_MS} ms of silence"
    report.row(what, ends, target=MAX_END_OF_TURN, at=0.9)
    return report.met


async def interrupt(url: str, gate: asyncio.Event, after: float) -> tuple[float, float]:
    """Seconds from the cancel to the last audio after it (0 without any), and to the final."""
    config = {"max_lead_ms": 400, "output_audio": {"format": "pcm16", "sample_rate": SAMPLE_RATE}}
    async with connect(url, config=config) as session:
        await session.send_audio(bytes(2 * SAMPLE_RATE * 30))
        await gate.wait()
        cancelled: float | None = None
        cancel = asyncio.create_task(_cancel_after(session, 2 + after * 3 + random.random() * 0.1))
        last = 0.0
        async for event in session.events():
            now = time.perf_counter()
            cancelled = cancel.result() if cancel.done() else None
            if isinstance(event, AudioChunk) and cancelled is not None:
                last = now - cancelled
            elif isinstance(event, LastChunk):
                return last, now - await cancel
    raise RuntimeError("the session ended before its answer")


async def _cancel_after(session: ClientSession, seconds: float) -> float:
    await asyncio.sleep(seconds)
    now = time.perf_counter()
    await session.cancel()
    return now


async def end_of_turn(url: str, clip: Clip, *, shift_ms: int) -> float:
    """Seconds from the labelled end of speech, plus the configured silence, to ``speech_stopped``."""
    lead = bytes(2 * (SAMPLE_RATE // 2 + shift_ms * SAMPLE_RATE // 1000))
    audio = Pcm16(lead + clip.samples + bytes(2 * 2 * SAMPLE_RATE), SAMPLE_RATE, 1)
    end = len(lead) / 2 / SAMPLE_RATE + clip.speech[1]
    async with connect(url, config={"turn_detection": TURNS, "start_policy": "on_end_only"}) as session:
        began = time.perf_counter()
        async with beside(say(session, audio)) as (speaking,):
            stopped = 0.0
            async for event in session.events():
                if isinstance(event, SpeechStopped):
                    stopped = time.perf_counter() - began
                elif isinstance(event, LastChunk) or speaking.done():
                    break
    return stopped - end - SILENCE_MS / 1000


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
