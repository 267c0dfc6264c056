"""Pauses: whether a speaker who goes on loses words, while other processes keep all cores busy.

Three parts, with real speech and the real parts of a server. *words*: "My name is Robert.", a pause in which the turn
ends, "What is my name?"; the first words have to be in a settled transcript or in the answer. *calls*: the same,
several at a time; none may be closed. *manners*: over a long answer, acknowledgements ("yeah", "I see"), which should
not end it, and interruptions, which should, in each voice of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import shlex
import subprocess
import tempfile
import time
import urllib.request
import wave
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final

import numpy as np
import soxr

from benchmarks.server_process import free_port, serving
from omni_ws.caller.answers import NativeReader, RealtimeReader
from omni_ws.caller.script import Target, WebSocketCall, beside, say, spoken
from omni_ws.client import AudioChunk, connect
from omni_ws.client import Final as LastChunk
from omni_ws.client.audio import Pcm16
from omni_ws.engine.threads import cores

FIRST, SECOND, KEY = "My name is Robert.", "What is my name?", "robert"
ACKNOWLEDGEMENTS: Final = ("Yeah.", "Okay.", "Right.", "I see.", "Uh-huh.")
INTERRUPTIONS: Final = ("Stop.", "Wait a minute.", "No, not that one.", "What time is it?", "Please be quiet.")
STORY: Final = "Please tell me a long story."
#: Kinds of turn detection, each with a pause that ends a turn, in milliseconds.
DETECTIONS: Final[tuple[tuple[dict[str, Any], int], ...]] = (
    ({"type": "semantic_vad"}, 450),
    ({"type": "server_vad"}, 650),
    ({"type": "server_vad", "silence_duration_ms": 200}, 350),
)
_RATE: Final = 16_000
_LEVEL: Final = 200
#: How long a session is listened to behind the last sound.
_AFTER_SEC: Final = 8.0


def main(arguments: Sequence[str]) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pauses", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["words", "calls", "manners"])
    parser.add_argument(
        "--server", default="--engine embedded", help="arguments of omni-ws serve, in place of: --engine embedded"
    )
    parser.add_argument("--url", help="a server that runs already, http://…")
    parser.add_argument("--runs", type=int, default=36, help="pauses")
    parser.add_argument("--conversations", type=int, default=124)
    parser.add_argument("--parallel", type=int, default=3)
    parser.add_argument("--words", type=int, default=20, help="acknowledgements, and interruptions")
    parser.add_argument(
        "--said-by",
        nargs="+",
        metavar="COMMAND",
        help="programs that say the words over an answer, in place of the server's voices, each with {text} and {file}",
    )
    parser.add_argument("--busy", type=int, default=cores(), help="processes that keep a core busy")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.conversations, options.words = 6, 6, 5
    port = free_port()
    server = serving(*shlex.split(options.server), port=port) if not options.url else nullcontext()
    with server:
        return asyncio.run(_run(options, (options.url or f"http://127.0.0.1:{port}").rstrip("/")))


async def _run(options: argparse.Namespace, base: str) -> bool:
    await asyncio.to_thread(_until_ready, base)
    voices = await _voices(base)
    parts = [await asyncio.to_thread(_speech, base, text) for text in (FIRST, SECOND)]
    says = [partial(_said_by, command) for command in options.said_by or ()]
    says = says or [partial(_speech, base, voice=voice) for voice in voices] or [partial(_speech, base)]
    words = {
        text: await asyncio.to_thread(says[index % len(says)], text)
        for index, text in enumerate((*ACKNOWLEDGEMENTS, *INTERRUPTIONS))
    }
    met = True
    with _busy(options.busy):
        if "words" in options.parts:
            known = [await _pause(base, parts, number) for number in range(options.runs)]
            print(f"words: {sum(one is True for one in known)} of {options.runs} first parts are known")
            met = met and all(one is True for one in known)
        if "calls" in options.parts:
            turnstile = asyncio.Semaphore(options.parallel)

            async def one(number: int) -> bool | None:
                async with turnstile:
                    return await _pause(base, parts, number)

            known = await asyncio.gather(*map(one, range(options.conversations)))
            closed = sum(one is None for one in known)
            print(f"calls: {closed} of {options.conversations} closed, {sum(map(bool, known))} knew all words")
            met = met and not closed
        if "manners" in options.parts:
            for name, texts in (("acknowledgements", ACKNOWLEDGEMENTS), ("interruptions", INTERRUPTIONS)):
                ended = [await _over_an_answer(base, words[texts[n % len(texts)]]) for n in range(options.words)]
                print(f"{name}: {sum(ended)} of {options.words} end the answer")
                share = sum(ended) / options.words
                met = met and (share <= 0.2 if name == "acknowledgements" else share >= 0.95)
    return met


async def _pause(base: str, parts: Sequence[bytes], number: int) -> bool | None:
    """Whether what was said first is known; None where the session was closed."""
    detection, pause_ms = DETECTIONS[number // 2 % len(DETECTIONS)]
    pause_ms += 50 * (number // 6 % 3)
    audio = bytes(_RATE) + parts[0] + bytes(2 * _RATE * pause_ms // 1000) + parts[1] + bytes(3 * _RATE)
    path, opening = (_native if number % 2 == 0 else _realtime)(detection)
    rate, reader = (_RATE, NativeReader) if number % 2 == 0 else (24_000, RealtimeReader)
    said = _resampled(audio, _RATE, rate)
    script = spoken(Pcm16(said, rate), json.dumps(opening), target=path, after_ms=_AFTER_SEC * 1000)
    found = await WebSocketCall(script, Target.parse(base), reader).run()
    if found.ends != ["client"]:
        return None
    return KEY in " ".join(f"{one.heard} {one.text}" for one in found.answers).lower()


def _native(detection: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path of a WebSocket, and what configures a session there."""
    return "/v1/streaming_input", {"type": "session_config", "modalities": ["text"], "turn_detection": detection}


def _realtime(detection: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    audio = {"input": {"transcription": {"model": "whisper-1"}, "turn_detection": detection}}
    session = {"type": "realtime", "output_modalities": ["text"], "audio": audio}
    return "/v1/realtime?model=gpt-realtime", {"type": "session.update", "session": session}


async def _over_an_answer(base: str, words: bytes) -> bool:
    """Whether ``words`` end a long answer, with the settings of the page."""
    detection = {"type": "semantic_vad", "interrupt_resume": True}
    async with connect(base, config={"turn_detection": detection}) as session, AsyncExitStack() as speaking:
        await session.send_text(STORY, end=True)
        answer = None
        with suppress(TimeoutError):
            async with asyncio.timeout(60):
                async for event in session.events():
                    if isinstance(event, AudioChunk) and answer is None and (event.start_ms or 0) >= 1500:
                        answer = event.request_id
                        said = Pcm16(words + bytes(5 * _RATE), _RATE)
                        await speaking.enter_async_context(beside(say(session, said)))
                    if isinstance(event, LastChunk) and event.request_id == answer:
                        return event.finish_reason == "cancelled"
                return True
        return False


def _until_ready(base: str) -> None:
    while True:
        with suppress(OSError):  # 503 until the models are loaded
            _fetch(f"{base}/health")
            return
        time.sleep(1)


async def _voices(base: str) -> list[str]:
    async with connect(base) as session:
        return session.created.capabilities.voices


def _fetch(url: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return bytes(response.read())


def _speech(base: str, text: str, voice: str | None = None) -> bytes:
    """Text as a voice of the server says it, without the silence around it, 16 kHz pcm16."""
    body = {"input": text, "response_format": "pcm", **({"voice": voice} if voice else {})}
    return _trimmed(_fetch(f"{base}/v1/audio/speech", body), 24_000)


def _said_by(command: str, text: str) -> bytes:
    """Text as a program says it, which writes a WAV file."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/said.wav"
        subprocess.run([part.format(text=text, file=file) for part in shlex.split(command)], check=True)
        with wave.open(file) as said:
            return _trimmed(said.readframes(said.getnframes()), said.getframerate())


def _resampled(audio: bytes, rate: int, wanted: int) -> bytes:
    return bytes(soxr.resample(np.frombuffer(audio, "<i2"), rate, wanted).astype("<i2").tobytes())


def _trimmed(audio: bytes, rate: int) -> bytes:
    samples = np.frombuffer(_resampled(audio, rate, _RATE), "<i2")
    loud = np.flatnonzero(np.abs(samples.astype(int)) > _LEVEL)
    return bytes(samples[max(0, loud[0] - 160) : loud[-1] + 160].tobytes())


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keeps so many cores busy."""
    spinning = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(count)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.terminate()
            process.join()


def _spin() -> None:
    while True:
        sum(range(10_000))
