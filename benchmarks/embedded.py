"""Latency of the embedded engine, and its effect on the event loop.

Speech is sent in pieces of 20 ms in real time, as from a microphone. While four people speak concurrently, pings on a
separate connection measure the round trip: the lag of the event loop, the network and the machine. Round trips to an
idle server in another process, at the same time, show the share of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import time
import urllib.request
import wave
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import websockets

from benchmarks.server_process import free_port, running
from omni_ws.client import AudioChunk, ClientSession, TranscriptChunk, connect
from omni_ws.client import Final as LastChunk
from omni_ws.client.pacing import paced, pieces
from omni_ws.client.wav import Pcm16

SAMPLE_RATE: Final = 16_000
PIECE_SEC: Final = 0.02
CLIPS: Final = ("cards_001", "goforward", "cards_005", "librivox_ss_0870")
_DATA: Final = Path(__file__).parent.parent / "tests" / "data"
TRAILING_SILENCE_SEC: Final = 0.5
#: RMS above which a frame is speech (full scale = 1); the clips have little noise.
_SPEECH_LEVEL: Final = 0.02
TALKERS: Final = 4

#: Targets in seconds: medians, and for the last the 99th percentile.
MAX_AFTER_SILENCE: Final = 0.150
MAX_AT_ONCE: Final = 0.100
MAX_AT_ONCE_PER_SECOND: Final = 0.12
MAX_FIRST_PARTIAL: Final = 1.0
MAX_LOOP_LAG: Final = 0.010


@dataclass(frozen=True, slots=True)
class Clip:
    name: str
    samples: bytes

    @property
    def seconds(self) -> float:
        return len(self.samples) / 2 / SAMPLE_RATE

    @property
    def speech_begins(self) -> float:
        """Onset of speech, in seconds."""
        for number, piece in enumerate(pieces(self.audio)):
            level = np.sqrt(np.mean((np.frombuffer(piece, "<i2") / 32768.0) ** 2))
            if level > _SPEECH_LEVEL:
                return number * PIECE_SEC
        raise ValueError(f"there is no speech in {self.name}")

    @property
    def audio(self) -> Pcm16:
        return Pcm16(self.samples, SAMPLE_RATE, 1)

    @classmethod
    def load(cls, name: str) -> Clip:
        with wave.open(str(_DATA / f"{name}.wav"), "rb") as file:
            return cls(name, file.readframes(file.getnframes()))


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from the end of input to the first audio, and from the onset of speech to the first transcript.

    The latter is None for a transcript that arrived after the end of input.
    """

    first_audio: float
    first_partial: float | None


async def speak(url: str, clip: Clip, *, paced_speech: bool, silence: float) -> Timing:
    async with connect(url) as session:
        listening = asyncio.create_task(first_events(session))
        began = time.perf_counter()
        samples = clip.samples + bytes(2 * round(silence * SAMPLE_RATE))
        if paced_speech:
            async for piece in paced(pieces(Pcm16(samples, SAMPLE_RATE, 1)), interval=PIECE_SEC):
                await session.send_audio(piece)
        else:
            for piece in pieces(Pcm16(samples, SAMPLE_RATE, 1), piece_ms=100):
                await session.send_audio(piece)
        await session.finish()
        ended = time.perf_counter()
        audio, transcript = await listening
    partial = None
    if transcript < ended:
        # A piece is sent when its last sample has been spoken.
        partial = transcript - (began + clip.speech_begins + PIECE_SEC)
    return Timing(audio - ended, partial)


async def first_events(session: ClientSession) -> tuple[float, float]:
    """Returns the times of the first audio and the first transcript."""
    audio = transcript = math.inf
    async for event in session.response():
        now = time.perf_counter()
        if isinstance(event, AudioChunk):
            audio = min(audio, now)
        elif isinstance(event, TranscriptChunk):
            transcript = min(transcript, now)
        elif isinstance(event, LastChunk) and event.finish_reason != "stop":
            raise RuntimeError(f"the answer ended with {event.finish_reason}")
    if audio == math.inf:
        raise RuntimeError("the answer has no audio")
    return audio, transcript


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """Round trips in seconds, to the loaded server and to an idle one."""

    server: list[float]
    idle: list[float]


async def ping_until_told(url: str, idle_url: str) -> None:
    """Runs in its own process; prints the round trips once its standard input ends."""
    stop = asyncio.Event()
    told = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    told.add_done_callback(lambda _: stop.set())
    trips = RoundTrips([], [])
    async with connect(url) as session, websockets.connect(idle_url) as idle:
        while not stop.is_set():
            trips.server.append(await session.ping())
            sent = time.perf_counter()
            await idle.send("ping")
            await idle.recv()
            trips.idle.append(time.perf_counter() - sent)
            await asyncio.sleep(0.02)
    print(json.dumps(dataclasses.asdict(trips)))


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(len(values) * part) - 1)]


class Report:
    """Rows of a table, and whether every target was met."""

    def __init__(self) -> None:
        self.met = True
        print("| what | n | p50 | p90 | max | target |")
        print("|---|---|---|---|---|---|")

    def row(self, what: str, values: Sequence[float], *, target: float | None = None, at: float = 0.5) -> None:
        verdict = ""
        if target is not None:
            met = percentile(values, at) <= target
            self.met = self.met and met
            verdict = f"p{at * 100:.0f} ≤ {target * 1000:.0f} ms: {'met' if met else 'MISSED'}"
            if at > 0.9:
                verdict += f" ({percentile(values, at) * 1000:.1f})"
        figures = " | ".join(
            f"{value * 1000:.1f} ms" for value in (statistics.median(values), percentile(values, 0.9), max(values))
        )
        print(f"| {what} | {len(values)} | {figures} | {verdict} |", flush=True)


async def measure(url: str, *, rounds: int, talk_seconds: float) -> bool:
    clips = [Clip.load(name) for name in CLIPS]
    report = Report()
    await speak(url, clips[0], paced_speech=False, silence=0)  # warm-up
    calm = [
        await speak(url, clip, paced_speech=True, silence=TRAILING_SILENCE_SEC) for _ in range(rounds) for clip in clips
    ]
    report.row(
        "end of input → first audio, live speech and 500 ms of silence",
        [timing.first_audio for timing in calm],
        target=MAX_AFTER_SILENCE,
    )
    partials = [timing.first_partial for timing in calm if timing.first_partial is not None]
    report.row(
        f"speech begins → first transcript ({len(calm) - len(partials)} of {len(calm)} came only after the end)",
        partials,
        target=MAX_FIRST_PARTIAL,
    )
    for what, live in (("live speech that ends at once", True), ("speech sent at once", False)):
        timings = [
            (clip, await speak(url, clip, paced_speech=live, silence=0)) for _ in range(rounds) for clip in clips
        ]
        report.row(f"end of input → first audio, {what}", [timing.first_audio for _, timing in timings])
        report.row(
            f"the same, less {MAX_AT_ONCE_PER_SECOND:g} × its length",
            [timing.first_audio - MAX_AT_ONCE_PER_SECOND * clip.seconds for clip, timing in timings],
            target=MAX_AT_ONCE,
        )
    report.row("ping → pong, idle", (await pings_while(url, asyncio.sleep(talk_seconds / 2))).server)
    trips = await pings_while(url, talk(url, clips, talk_seconds))
    report.row(f"ping → pong, {TALKERS} people speak", trips.server, target=MAX_LOOP_LAG, at=0.99)
    what = f"meanwhile, to a server that does nothing (p99 {percentile(trips.idle, 0.99) * 1000:.1f} ms)"
    report.row(what, trips.idle)
    return report.met


async def pings_while(url: str, activity: Coroutine[Any, Any, None]) -> RoundTrips:
    port = free_port()
    with running("benchmarks.peers.bare_websockets", "--echo", port=port):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.embedded", "--ping", url, f"ws://127.0.0.1:{port}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        await activity
        printed, _ = await process.communicate(b"")
    return RoundTrips(**json.loads(printed))


async def talk(url: str, clips: Sequence[Clip], seconds: float) -> None:
    """Lets each talker speak one clip after another."""

    async def one(number: int) -> None:
        turn = number
        while time.perf_counter() < until:
            await speak(url, clips[turn % len(clips)], paced_speech=True, silence=TRAILING_SILENCE_SEC)
            turn += 1

    until = time.perf_counter() + seconds
    async with asyncio.TaskGroup() as talkers:
        for number in range(TALKERS):
            talkers.create_task(one(number))


def wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the engine does not start")


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks embedded", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--talk-seconds", type=float, default=20)
    parser.add_argument("--ping", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.ping:
        asyncio.run(ping_until_told(*options.ping))
        return True
    if options.quick:
        options.rounds, options.talk_seconds = 1, 8.0
    port = free_port()
    print("### The embedded engine\n")
    with running("omni_ws", "serve", "--engine", "embedded", "--log-level", "warning", port=port):
        wait_until_ready(port)
        url = f"ws://127.0.0.1:{port}/v1/streaming_input"
        return asyncio.run(measure(url, rounds=options.rounds, talk_seconds=options.talk_seconds))


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
