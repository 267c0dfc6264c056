"""The Realtime API beside the native WebSocket: CPU time of a frame of 20 ms, and the time to the first audio.

Frames: streams of noise at 24 kHz with turn detection, to the fake engine; a round measures the one front and then the
other, and is over when the server has answered a ping behind the last frame. Answers: the recordings of the benchmark
``embedded``, spoken in real time, in turn to the one front and the other.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import websockets

from benchmarks.embedded import CLIPS, LEAD_SEC, SAMPLE_RATE, Clip, microphone, speak
from benchmarks.server_process import free_port, scheduled_seconds, serving
from omni_ws.caller.answers import Answers, RealtimeReader
from omni_ws.caller.script import PIECE_SEC, Target, WebSocketCall, spoken
from omni_ws.client.audio import paced

RATE: Final = 24_000
NATIVE: Final = "/v1/streaming_input"
REALTIME: Final = "/v1/realtime?model=local-model"
TURNS: Final = {"type": "server_vad"}
#: Targets: a ratio of CPU times, and seconds.
MAX_RATIO: Final = 1.5
MAX_LATER: Final = 0.020


def native_frames(payload: str) -> Callable[[int], str]:
    head, tail = '{"type":"input_chunk","modality":"audio","sequence_id":', f',"payload":"{payload}"}}'
    return lambda number: f"{head}{number}{tail}"


def realtime_frames(payload: str) -> Callable[[int], str]:
    frame = json.dumps({"type": "input_audio_buffer.append", "audio": payload})
    return lambda number: frame


def realtime_session(turns: dict[str, str], rate: int) -> dict[str, Any]:
    audio = {"input": {"format": {"type": "audio/pcm", "rate": rate}, "turn_detection": turns}}
    return {"type": "session.update", "session": {"type": "realtime", "audio": audio}}


#: For each front its path, the frame that configures a session, and what builds its frames.
FRONTS: Final[dict[str, tuple[str, dict[str, Any], Callable[[str], Callable[[int], str]]]]] = {
    "native": (
        NATIVE,
        {"type": "session_config", "input_audio": {"format": "pcm16", "sample_rate": RATE}, "turn_detection": TURNS},
        native_frames,
    ),
    "realtime": (REALTIME, realtime_session(TURNS, RATE), realtime_frames),
}


async def frame_cost(port: int, pid: int, front: str, options: argparse.Namespace) -> float:
    """Seconds of the server's CPU time for a frame."""
    path, config, build = FRONTS[front]
    noise = np.random.default_rng(1).normal(0, 30, round(RATE * PIECE_SEC)).astype("<i2").tobytes()
    frame = build(base64.b64encode(noise).decode())
    clients = [await websockets.connect(f"ws://127.0.0.1:{port}{path}") for _ in range(options.streams)]
    for client in clients:
        await client.send(json.dumps(config))
        for _ in range(2):  # the session as it was created, and as it is now
            await client.recv()
    reading = [asyncio.create_task(_read(client)) for client in clients]
    count = round(options.seconds / PIECE_SEC)
    begun = scheduled_seconds(pid)
    number = 0
    async for _ in paced([b""] * count, interval=PIECE_SEC):
        for client in clients:
            await client.send(frame(number))
        number += 1
    await asyncio.gather(*[await client.ping() for client in clients])
    spent = scheduled_seconds(pid) - begun
    for client in clients:
        await client.close()
    await asyncio.gather(*reading)
    cost: float = spent / (count * options.streams)
    return cost


async def _read(client: websockets.ClientConnection) -> None:
    async for message in client:
        if '"error"' in str(message):
            raise RuntimeError(str(message))


def _is_heard(now: Answers) -> bool:
    """Whether there is sound, or none will come."""
    ends = [answer.first_audio_at or answer.final_at for answer in now.answers]
    return bool(now.errors) or any(ends)


async def speak_realtime(url: str, clip: Clip) -> float:
    """Seconds from the end of the speech to the first audio."""
    opening = json.dumps(realtime_session({"type": "semantic_vad"}, SAMPLE_RATE))
    script = spoken(microphone(clip), opening, target=REALTIME)
    call = WebSocketCall(script, Target.parse(url), RealtimeReader)
    found = await call.run(until=_is_heard)
    if found.errors or found.answers[0].first_audio_at is None:
        raise RuntimeError(f"no audio: {found.errors}")
    # The first that was sent is the configuration.
    ended = call.sent[round((LEAD_SEC + clip.speech[1]) / PIECE_SEC)]
    return (found.answers[0].first_audio_at - ended) / 1000


def frames(options: argparse.Namespace) -> bool:
    port = free_port()
    rounds: list[dict[str, float]] = []
    with serving("--engine", "fake", "--log-level", "warning", port=port) as process:
        for _ in range(options.runs):
            rounds.append({front: asyncio.run(frame_cost(port, process.pid, front, options)) for front in FRONTS})
    print(f"### {options.streams} open microphones: CPU time of the server a frame\n")
    print("| front | median µs a frame | lowest | highest |\n|---|---|---|---|")
    for front in FRONTS:
        costs = [each[front] * 1e6 for each in rounds]
        print(f"| {front} | {statistics.median(costs):.1f} | {min(costs):.1f} | {max(costs):.1f} |")
    ratios = [each["realtime"] / each["native"] for each in rounds]
    met = statistics.median(ratios) <= MAX_RATIO
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"\nrealtime ÷ native: {spread}; target ≤ {MAX_RATIO:g}: {'met' if met else 'MISSED'}\n", flush=True)
    return met


def answers(options: argparse.Namespace) -> bool:
    port = free_port()
    clips = [Clip.load(name) for name in CLIPS]
    times: dict[str, list[float]] = {front: [] for front in FRONTS}
    with serving("--engine", "embedded", "--log-level", "warning", port=port):
        base = f"ws://127.0.0.1:{port}"
        for _ in range(options.runs):
            for clip in clips:
                times["native"].append(asyncio.run(speak(base + NATIVE, clip)).first_audio)
                times["realtime"].append(asyncio.run(speak_realtime(base, clip)))
    print("### End of speech → first audio\n\n| front | n | median | lowest | highest |\n|---|---|---|---|---|")
    for front, values in times.items():
        figures = " | ".join(
            f"{value * 1000:.0f} ms" for value in (statistics.median(values), min(values), max(values))
        )
        print(f"| {front} | {len(values)} | {figures} |")
    later = statistics.median(b - a for a, b in zip(times["native"], times["realtime"], strict=True))
    met = later <= MAX_LATER
    print(f"\nrealtime − native, median: {later * 1000:.0f} ms; target ≤ {MAX_LATER * 1000:.0f} ms: ", end="")
    print("met" if met else "MISSED")
    return met


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks realtime", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--runs", type=int, default=5, help="rounds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.seconds = 1, 2.0
    met = frames(options)
    return answers(options) and met


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
