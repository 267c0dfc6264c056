"""Talking to the embedded engine over Wyoming: how soon it answers a satellite, and each step of Home Assistant's.

A satellite sends recordings in real time, with silence behind them; turn detection ends the turn. The end of the speech
is that of the last 20 ms within 26 dB of the loudest. Home Assistant detects the end of the speech itself, and then
takes three steps, each over a connection of its own: it ends the sound and gets the words, sends the words and gets the
answer, and sends the answer and gets its sound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Final

from support.wyoming_peer import AudioChunk, AudioStart, AudioStop, WyomingPeer
from wyoming.asr import Transcribe, Transcript
from wyoming.pipeline import PipelineStage, RunPipeline
from wyoming.tts import Synthesize

from benchmarks.embedded import CLIPS, SAMPLE_RATE, Clip, Report, microphone
from benchmarks.server_process import free_port, serving
from omni_ws.caller.script import beside

PIECE_SEC: Final = 0.02
#: The target, in seconds.
MAX_FIRST_SOUND: Final = 1.2


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[WyomingPeer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield WyomingPeer(reader, writer)
    finally:
        writer.close()


async def say(peer: WyomingPeer, samples: bytes, began: float) -> None:
    """Sends sound in real time."""
    size = 2 * round(SAMPLE_RATE * PIECE_SEC)
    for number, start in enumerate(range(0, len(samples), size)):
        await asyncio.sleep(began + number * PIECE_SEC - time.perf_counter())
        await peer.send(AudioChunk(SAMPLE_RATE, 2, 1, samples[start : start + size]))


async def satellite_turn(port: int, clip: Clip) -> float:
    """Seconds from the end of the speech to the first sound of the answer."""
    async with connected(port) as peer:
        await peer.send(RunPipeline(PipelineStage.ASR, PipelineStage.TTS))
        began = time.perf_counter()
        heard = microphone(clip)
        async with beside(say(peer, heard.samples, began)):
            await peer.until("audio-chunk")
        lead = heard.samples.index(clip.samples) / 2 / SAMPLE_RATE
        return time.perf_counter() - began - lead - clip.speech[1]


async def steps_of_home_assistant(port: int, clip: Clip) -> tuple[float, float, float]:
    """Seconds of each step: to the words, to the whole answer, and to its first sound."""
    async with connected(port) as peer:
        await peer.send(Transcribe(language="en"), AudioStart(SAMPLE_RATE, 2, 1))
        await say(peer, clip.samples, time.perf_counter())
        asked = time.perf_counter()
        await peer.send(AudioStop())
        words = (await peer.until("transcript")).data["text"]
    heard = time.perf_counter()
    async with connected(port) as peer:
        await peer.send(Transcript(words))
        answer = (await peer.until("handled")).data["text"]
    answered = time.perf_counter()
    async with connected(port) as peer:
        await peer.send(Synthesize(answer))
        await peer.until("audio-chunk")
    return heard - asked, answered - heard, time.perf_counter() - answered


async def measure(port: int, rounds: int) -> bool:
    clips = [Clip.load(name) for name in CLIPS]
    report = Report()
    await satellite_turn(port, clips[0])  # warm-up
    turns = [await satellite_turn(port, clip) for _ in range(rounds) for clip in clips]
    report.row("satellite: end of speech → first sound", turns, target=MAX_FIRST_SOUND, at=0.9)
    steps = [await steps_of_home_assistant(port, clip) for _ in range(rounds) for clip in clips]
    for number, what in enumerate(("`audio-stop` → `transcript`", "`transcript` → `handled`", "`synthesize` → sound")):
        report.row(f"Home Assistant: {what}", [step[number] for step in steps])
    report.row("its three steps together", [sum(step) for step in steps], target=MAX_FIRST_SOUND, at=0.9)
    return report.met


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks wyoming", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    port, wyoming_port = free_port(), free_port()
    print("### Wyoming, with the embedded engine: default parts, answers by rules\n")
    settings = ("--llm", "rules", "--wyoming-port", str(wyoming_port), "--log-level", "warning")
    with serving(*settings, port=port):
        met = asyncio.run(measure(wyoming_port, 1 if options.quick else options.rounds))
    print(flush=True)
    return met
