"""Bounds in real time, which no test has: how soon the server speaks, hears, gives way, starts and ends.

A test passes or fails by what happens, never by the clock, so that it says the same on a busy machine. What a person
would notice is measured here, in about two minutes, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson
import websockets

from benchmarks.chromium import chromium_path, page_with_speech
from benchmarks.embedded import (
    CLIPS,
    LEAD_SEC,
    MAX_LOOP_LAG,
    MAX_START,
    SAMPLE_RATE,
    TALKERS,
    Clip,
    microphone,
    percentile,
    talk,
)
from benchmarks.server_process import free_port, serving
from benchmarks.turns import MAX_INTERRUPTION, interrupt
from omni_ws.caller.script import beside, say
from omni_ws.client import AudioChunk, SpeechStarted, connect
from omni_ws.profiler.report import build_report, read

#: The voices, as arguments of ``omni-ws serve``.
VOICES: Final = {"hibari": (), "espeak": ("--tts", "espeak")}
CLIP: Final = Path(__file__).parent.parent / "tests" / "data" / "goforward.wav"

#: Targets in seconds, where nothing else is said.
MAX_FIRST_AUDIO: Final = 0.5
MAX_SPEECH_STARTED: Final = 0.4
MAX_END: Final = 2.0
MAX_END_AT_ONCE: Final = 1.0
MAX_LATE_TIMER: Final = 0.05
MAX_LATE_SOUND: Final = 0.05
#: Of the page's script, while it speaks.
MAX_FRAME: Final = 0.004
#: Of the time of requests, the share that the stages of a profile explain.
MIN_ACCOUNTED: Final = 0.93

TURNS: Final = 5
SESSIONS: Final = 20


class Bounds:
    """Rows of a table, and whether every target was met."""

    def __init__(self) -> None:
        self.met = True
        print("| bound | target | figure | |\n|---|---|---|---|")

    def at_most(self, what: str, seconds: float, target: float) -> None:
        self._row(what, f"≤ {target * 1000:.0f} ms", f"{seconds * 1000:.1f} ms", met=seconds <= target)

    def at_least(self, what: str, share: float, target: float) -> None:
        self._row(what, f"≥ {target:.0%}", f"{share:.1%}", met=share >= target)

    def _row(self, what: str, target: str, figure: str, *, met: bool) -> None:
        self.met = self.met and met
        print(f"| {what} | {target} | {figure} | {'met' if met else 'MISSED'} |", flush=True)


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gate", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a turn of each voice, and few interruptions")
    options = parser.parse_args(arguments)
    turns, sessions = (1, 4) if options.quick else (TURNS, SESSIONS)
    bounds = Bounds()
    for voice, flags in VOICES.items():
        with_voice(bounds, voice, flags, turns, parser)
    with_the_fake_engine(bounds, sessions)
    ends_at_once(bounds)
    return bounds.met


def with_voice(bounds: Bounds, voice: str, flags: Sequence[str], turns: int, parser: argparse.ArgumentParser) -> None:
    """Start, answers to an open microphone, lag beside people who talk, a profile, and the end of an idle server."""
    port = free_port()
    url = f"ws://127.0.0.1:{port}/v1/streaming_input"
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as profiles,
        serving(*flags, "--profiler.root", profiles, "--log-level", "warning", port=port) as server,
    ):
        bounds.at_most(f"{voice}: start, with the weights in the cache", time.perf_counter() - began, MAX_START)
        spoken = ("--file", str(CLIP), "--open-mic", "semantic_vad", "--sessions", "1")
        benched(url, *spoken, "--turns", "1")  # warm-up
        first_audio = benched(url, *spoken, "--turns", str(turns))["ms"]["first_audio"]["median"] / 1000
        bounds.at_most(f"{voice}: end of speech → first audio, median", first_audio, MAX_FIRST_AUDIO)
        if not flags:
            lag = asyncio.run(lag_beside_talkers(url))
            bounds.at_most(f"ping → pong while {TALKERS} people talk, p90", lag, MAX_LOOP_LAG)
        else:
            bounds.at_least(
                "time of requests that the stages of a profile explain", accounted(url, port), MIN_ACCOUNTED
            )
            frame = asyncio.run(frame_of_the_page(chromium_path(parser), port))
            bounds.at_most("the page: script of a frame while it speaks, median", frame, MAX_FRAME)
        ended = seconds_to_end(server)
        bounds.at_most(f"{voice}: SIGTERM → the end of an idle server", ended, MAX_END)


def benched(url: str, *options: str) -> dict[str, Any]:
    """The report of ``omni-ws bench``."""
    command = [sys.executable, "-m", "omni_ws", "bench", "--url", url, "--json", *options]
    report: dict[str, Any] = orjson.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return report


async def lag_beside_talkers(url: str) -> float:
    clips = [Clip.load(name) for name in CLIPS]
    talking = asyncio.create_task(talk(url, clips, 6.0, talkers=TALKERS))
    trips: list[float] = []
    async with connect(url) as session:
        while not talking.done():
            trips.append(await session.ping())
            await asyncio.sleep(0.02)
    await talking
    return percentile(trips, 0.9)


def accounted(url: str, port: int) -> float:
    """The share of the time of spoken answers that a profile explains by stages."""
    started = asked(port, "/start_request_profile", {"run_id": "gate"})
    benched(url, "--sessions", "2", "--turns", "4")
    asked(port, "/stop_request_profile", {})
    return float(build_report(read([Path(started["event_file"]).parent]))["accounted_share"])


async def frame_of_the_page(chromium: str, port: int) -> float:
    """Seconds that the page's script takes to draw while an answer sounds."""
    async with page_with_speech(chromium, pause_sec=1) as page:
        await page.goto(f"http://127.0.0.1:{port}/")
        await page.locator("body[data-state=ready]").wait_for(state="attached")
        await page.locator("#text").fill("Count to twenty.")
        await page.locator("#text").press("Enter")
        await page.locator("body[data-state=speaking]").wait_for(state="attached")
        await asyncio.sleep(3)
        recent: list[float] = await page.evaluate("document.querySelector('#orb').orb.cost.recent")
        return statistics.median(recent) / 1000


def asked(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = orjson.loads(answer.read())
    return found


def seconds_to_end(server: subprocess.Popen[bytes]) -> float:
    began = time.perf_counter()
    server.send_signal(signal.SIGTERM)
    server.wait(60)
    return time.perf_counter() - began


def with_the_fake_engine(bounds: Bounds, sessions: int) -> None:
    """What listening, interrupting and the timers cost, with an engine that takes no time."""
    port = free_port()
    flags = ("--streaming-input.session-timeout-sec", "1", "--log-level", "warning")
    with serving("--engine", "fake", *flags, port=port):
        bounds.at_most("silence of 1 s → the session is closed, late by", asyncio.run(late_timer(port)), MAX_LATE_TIMER)
    port = free_port()
    url = f"ws://127.0.0.1:{port}/v1/streaming_input"
    with serving("--engine", "fake", "--log-level", "warning", port=port):
        clips = [Clip.load(name) for name in CLIPS]
        begins = [asyncio.run(speech_started(url, clip)) for clip in clips]
        bounds.at_most("speech begins → speech_started, the latest", max(begins), MAX_SPEECH_STARTED)
        last = percentile(asyncio.run(interruptions(url, sessions)), 0.99)
        bounds.at_most("cancel → last audio of the answer, p99", last, MAX_INTERRUPTION)
        bounds.at_most(
            "sound of 3 s, 400 ms ahead: its end comes late by", asyncio.run(late_sound(url)), MAX_LATE_SOUND
        )


async def late_timer(port: int) -> float:
    """By how much a session that is silent for a second is closed later than that."""
    url = f"ws://127.0.0.1:{port}/v1/streaming_input"
    async with websockets.connect(url) as connection:
        await connection.recv()
        began = time.perf_counter()
        await connection.wait_closed()
        return time.perf_counter() - began - 1


async def speech_started(url: str, clip: Clip) -> float:
    """Seconds from the first sound of speech to the event."""
    config = {"turn_detection": {"type": "server_vad"}, "start_policy": "on_end_only"}
    async with connect(url, config=config) as session:
        began = time.perf_counter()
        async with beside(say(session, microphone(clip))):
            async for event in session.events():
                if isinstance(event, SpeechStarted):
                    return time.perf_counter() - began - LEAD_SEC - clip.speech[0]
    raise RuntimeError("the session ended before it heard any speech")


async def interruptions(url: str, sessions: int) -> list[float]:
    """Seconds from each cancel to the last audio of its answer."""
    gate = asyncio.Event()
    gate.set()
    found = await asyncio.gather(*(interrupt(url, gate, number / sessions) for number in range(sessions)))
    return [last for last, _ in found]


async def late_sound(url: str) -> float:
    """By how much the last sound of an answer comes later than it is due, where the client plays it as it comes."""
    lead_ms, sound_sec = 400, 3
    config = {"max_lead_ms": lead_ms, "output_audio": {"format": "pcm16", "sample_rate": SAMPLE_RATE}}
    async with connect(url, config=config) as session:
        await session.send_audio(bytes(2 * SAMPLE_RATE * sound_sec), end=True)
        began = ended = 0.0
        async for event in session.response():
            if isinstance(event, AudioChunk):
                ended = time.perf_counter()
                began = began or ended
    return ended - began - (sound_sec - lead_ms / 1000)


def ends_at_once(bounds: Bounds) -> None:
    """A second signal, while an answer that takes ten minutes is being waited for."""
    port = free_port()
    flags = ("--fake.first-chunk-delay-ms", "600000", "--log-level", "warning")
    with serving("--engine", "fake", *flags, port=port) as server:
        ended = asyncio.run(second_signal(f"ws://127.0.0.1:{port}/v1/streaming_input", server))
        bounds.at_most("a second SIGTERM → the end of a busy server", ended, MAX_END_AT_ONCE)


async def second_signal(url: str, server: subprocess.Popen[bytes]) -> float:
    """Seconds to the end of a server that is waiting for an answer."""
    async with websockets.connect(url) as connection:
        await connection.send('{"type":"input_chunk","sequence_id":0,"text":"hello","end_of_input":true}')
        while "response_started" not in str(await connection.recv()):
            pass
        server.send_signal(signal.SIGTERM)
        while "session_closing" not in str(await connection.recv()):
            pass
        return await asyncio.to_thread(seconds_to_end, server)


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
