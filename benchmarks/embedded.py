"""Talking to the embedded engine: how soon it answers, what it costs, and its effect on the event loop.

Open microphones: recordings are sent in pieces of 20 ms in real time, silence follows, and turn detection ends the
turn. The end of the speech is that of the last 20 ms within 26 dB of the loudest. While three people speak at once,
pings on a separate connection measure the round trip: the lag of the event loop, the network and the machine. Round
trips to an idle server in another process, at the same time, show the share of the machine. CPU time and memory
(proportional set size) are those of all processes of the server.
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
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import websockets

from benchmarks.server_process import child_processes, cpu_seconds_of_all, free_port, proportional_mib, running, serving
from omni_ws.caller.script import PIECE_SEC, beside, say, speech_of
from omni_ws.client import AudioChunk, ClientSession, TranscriptChunk, connect
from omni_ws.client import Final as LastChunk
from omni_ws.client.audio import Pcm16, read_wav
from omni_ws.engine.threads import cores

SAMPLE_RATE: Final = 16_000
CLIPS: Final = ("cards_001", "goforward", "cards_005", "librivox_ss_0870")
_DATA: Final = Path(__file__).parent.parent / "tests" / "data"
LEAD_SEC: Final = 0.5
#: For the answer to come in.
PATIENCE_SEC: Final = 10
TALKERS: Final = 3

#: Targets: seconds; people a core; MiB.
MAX_FIRST_AUDIO: Final = {0.5: 0.500, 0.9: 0.700}
MAX_FIRST_INTERIM: Final = 0.800
MAX_LOOP_LAG: Final = 0.010
MIN_PEOPLE: Final = 3
MAX_MEMORY: Final = 450
MAX_START: Final = 6.0


@dataclass(frozen=True, slots=True)
class Clip:
    name: str
    samples: bytes

    @property
    def seconds(self) -> float:
        return len(self.samples) / 2 / SAMPLE_RATE

    @property
    def speech(self) -> tuple[float, float]:
        """Where the speech begins and ends, in seconds."""
        first, last = speech_of(self.audio)
        return first * PIECE_SEC, last * PIECE_SEC

    @property
    def audio(self) -> Pcm16:
        return Pcm16(self.samples, SAMPLE_RATE, 1)

    @classmethod
    def load(cls, name: str) -> Clip:
        return cls(name, read_wav(_DATA / f"{name}.wav").samples)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from the end of the speech to the first audio, and from its beginning to the first interim transcript.

    The latter is None if there was none before the turn had ended.
    """

    first_audio: float
    first_interim: float | None


def microphone(clip: Clip) -> Pcm16:
    """What a microphone picks up: silence before and after the speech."""
    silence = [bytes(2 * round(LEAD_SEC * SAMPLE_RATE)), bytes(2 * PATIENCE_SEC * SAMPLE_RATE)]
    return Pcm16(clip.samples.join(silence), SAMPLE_RATE, 1)


async def speak(url: str, clip: Clip) -> Timing:
    async with connect(url, config={"turn_detection": {"type": "semantic_vad"}}) as session:
        began = time.perf_counter()
        async with beside(say(session, microphone(clip))):
            first_audio, first_interim = await first_events(session)
    begins, ends = (began + LEAD_SEC + place for place in clip.speech)
    return Timing(first_audio - ends, None if first_interim is None else first_interim - begins)


async def first_events(session: ClientSession) -> tuple[float, float | None]:
    """When the first audio and the first interim transcript came."""
    interim: float | None = None
    async for event in session.events():
        if isinstance(event, TranscriptChunk) and event.interim and interim is None:
            interim = time.perf_counter()
        elif isinstance(event, AudioChunk):
            return time.perf_counter(), interim
        elif isinstance(event, LastChunk):
            raise RuntimeError(f"the answer ended with {event.finish_reason} before any audio")
    raise RuntimeError("the session ended before its answer")


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


async def measure(url: str, pid: int, options: argparse.Namespace) -> bool:
    clips = [Clip.load(name) for name in CLIPS]
    report = Report()
    await speak(url, clips[0])  # warm-up
    timings = [await speak(url, clip) for _ in range(options.rounds) for clip in clips]
    first_audio = [timing.first_audio for timing in timings]
    for (at, limit), what in zip(MAX_FIRST_AUDIO.items(), ("end of speech → first audio", "the same"), strict=True):
        report.row(what, first_audio, target=limit, at=at)
    interims = [timing.first_interim for timing in timings if timing.first_interim is not None]
    what = f"speech begins → first interim transcript (none in {len(timings) - len(interims)} of {len(timings)} turns)"
    report.row(what, interims, target=MAX_FIRST_INTERIM)
    report.row("ping → pong, idle", (await pings_while(url, asyncio.sleep(options.talk_seconds / 2))).server)
    trips = await pings_while(url, talk(url, clips, options.talk_seconds, talkers=TALKERS))
    what = f"ping → pong, {TALKERS} people speak without pause"
    report.row(what, trips.server, target=MAX_LOOP_LAG, at=0.99)
    what = f"meanwhile, to a server that does nothing (p99 {percentile(trips.idle, 0.99) * 1000:.1f} ms)"
    report.row(what, trips.idle)
    before = cpu_seconds_of_all(pid)
    await talk(url, clips, options.talk_seconds, talkers=MIN_PEOPLE * cores())
    spent = (cpu_seconds_of_all(pid) - before) / (MIN_PEOPLE * cores() * options.talk_seconds)
    memory = sum(map(proportional_mib, (pid, *child_processes(pid))))
    print("\n| of the server | | target |\n|---|---|---|")
    what = f"people who talk without pause, with interim transcripts, on a core, where {MIN_PEOPLE * cores()} talk"
    people = f"≥ {MIN_PEOPLE}: {'met' if 1 / spent >= MIN_PEOPLE else 'MISSED'}"
    print(f"| {what} | {1 / spent:.1f} | {people} |")
    most = f"≤ {MAX_MEMORY} MiB: {'met' if memory <= MAX_MEMORY else 'MISSED'}"
    print(f"| memory, all processes | {memory:.0f} MiB | {most} |", flush=True)
    return report.met and 1 / spent >= MIN_PEOPLE and memory <= MAX_MEMORY


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


async def talk(url: str, clips: Sequence[Clip], seconds: float, *, talkers: int) -> None:
    """Lets each talker say one clip after another, without a pause that would end the turn."""

    async def one(number: int) -> None:
        turned = number % len(clips)
        said = b"".join(clip.samples for clip in (*clips[turned:], *clips[:turned]))
        count = math.ceil(2 * SAMPLE_RATE * seconds / len(said))
        samples = (said * count)[: 2 * round(SAMPLE_RATE * seconds)]
        # No turn ends before the recording does.
        config = {"turn_detection": {"type": "server_vad", "silence_duration_ms": 2000}}
        async with connect(url, config=config) as session:
            await say(session, Pcm16(samples, SAMPLE_RATE, 1))

    async with asyncio.TaskGroup() as group:
        for number in range(talkers):
            group.create_task(one(number))


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
    print("### The embedded engine: default parts\n")
    began = time.perf_counter()
    with serving("--engine", "embedded", "--log-level", "warning", port=port) as process:
        started = time.perf_counter() - began
        met = asyncio.run(measure(f"ws://127.0.0.1:{port}/v1/streaming_input", process.pid, options))
    limit = f"≤ {MAX_START:g} s: {'met' if started <= MAX_START else 'MISSED'}"
    print(f"| start, with the weights in the cache | {started:.1f} s | {limit} |\n", flush=True)
    return met and started <= MAX_START


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
