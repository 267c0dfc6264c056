"""Pauses: whether a speaker who goes on loses words, while other processes keep all cores busy.

Three parts, with real speech and the real parts of a server. *words*: "My name is Robert.", a pause in which the turn
ends, "What is my name?"; the first words have to be in a settled transcript or in the answer. *calls*: the same,
several at a time; none may be closed. *manners*: over a long answer, acknowledgements ("yeah", "I see"), which should
not end it, and interruptions, which should, in each voice of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import shlex
import subprocess
import tempfile
import time
import urllib.request
import wave
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from typing import Any, Final

import numpy as np
import soxr
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from benchmarks.server_process import free_port, running
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
_FRAME_SEC: Final = 0.1
_LEVEL: Final = 200
#: How long a session is listened to behind the last sound.
_AFTER_SEC: Final = 8.0


def main(arguments: Sequence[str]) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pauses", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["words", "calls", "manners"])
    parser.add_argument("--server", default="", help="further arguments of omni-ws serve")
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
    server = running("omni_ws", "serve", *shlex.split(options.server), port=port) if not options.url else nullcontext()
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
    talk = _native if number % 2 == 0 else _realtime
    told = await talk(base, audio, detection)
    return None if told is None else KEY in told.lower()


async def _native(base: str, audio: bytes, detection: dict[str, Any]) -> str | None:
    """What was settled and answered; None where the session was closed."""
    told: list[str] = []
    try:
        async with connect(_websocket(base, "/v1/streaming_input"), max_size=None) as connection:
            await connection.recv()
            config = {"type": "session_config", "modalities": ["text"], "turn_detection": detection}
            await connection.send(json.dumps(config))
            async with asyncio.timeout(len(audio) / 2 / _RATE + _AFTER_SEC):
                sending = asyncio.create_task(_send(connection, audio))
                async for message in connection:
                    event = json.loads(message)
                    if event.get("modality") in ("transcript", "text") and not event.get("interim"):
                        told.append(event["text"])
                await sending
        return None
    except TimeoutError:
        return " ".join(told)
    except ConnectionClosed:
        return None


async def _send(connection: Any, audio: bytes) -> None:
    numbers = count()

    def frame(payload: str) -> dict[str, Any]:
        return {"type": "input_chunk", "sequence_id": next(numbers), "modality": "audio", "payload": payload}

    await _stream(connection, audio, _RATE, frame)


async def _stream(connection: Any, audio: bytes, rate: int, frame: Callable[[str], dict[str, Any]]) -> None:
    """Send audio as a microphone does, each piece in the frame that ``frame`` makes of its base64."""
    loop, began, size = asyncio.get_running_loop(), asyncio.get_running_loop().time(), int(2 * rate * _FRAME_SEC)
    for number, start in enumerate(range(0, len(audio), size)):
        await connection.send(json.dumps(frame(base64.b64encode(audio[start : start + size]).decode())))
        await asyncio.sleep(max(0.0, began + (number + 1) * _FRAME_SEC - loop.time()))


async def _realtime(base: str, audio: bytes, detection: dict[str, Any]) -> str | None:
    told: list[str] = []
    audio = soxr.resample(np.frombuffer(audio, "<i2"), _RATE, 24_000).astype("<i2").tobytes()
    turns = {"transcription": {"model": "whisper-1"}, "turn_detection": detection}
    session = {"type": "realtime", "output_modalities": ["text"], "audio": {"input": turns}}
    try:
        async with connect(_websocket(base, "/v1/realtime?model=gpt-realtime"), max_size=None) as connection:
            await connection.send(json.dumps({"type": "session.update", "session": session}))
            async with asyncio.timeout(len(audio) / 48_000 + _AFTER_SEC):
                sending = asyncio.create_task(_append(connection, audio))
                async for message in connection:
                    event = json.loads(message)
                    if event["type"].endswith("input_audio_transcription.completed"):
                        told.append(event["transcript"])
                    elif event["type"] == "response.output_text.done":
                        told.append(event["text"])
                await sending
        return None
    except TimeoutError:
        return " ".join(told)
    except ConnectionClosed:
        return None


async def _append(connection: Any, audio: bytes) -> None:
    await _stream(connection, audio, 24_000, lambda payload: {"type": "input_audio_buffer.append", "audio": payload})


async def _over_an_answer(base: str, words: bytes) -> bool:
    """Whether ``words`` end a long answer, with the settings of the page."""
    detection = {"type": "semantic_vad", "interrupt_resume": True}
    async with connect(_websocket(base, "/v1/streaming_input"), max_size=None) as connection:
        await connection.recv()
        await connection.send(json.dumps({"type": "session_config", "turn_detection": detection}))
        story = {"type": "input_chunk", "sequence_id": 0, "text": STORY, "end_of_input": True}
        await connection.send(json.dumps(story))
        speaking: asyncio.Task[None] | None = None
        answer = None
        try:
            async with asyncio.timeout(60):
                async for message in connection:
                    event = json.loads(message)
                    if event.get("modality") == "audio" and speaking is None and event["start_ms"] >= 1500:
                        answer = event["request_id"]
                        speaking = asyncio.create_task(_speak_over(connection, words + bytes(5 * _RATE)))
                    if event.get("final") and event["request_id"] == answer:
                        return bool(event["finish_reason"] == "cancelled")
        except TimeoutError:
            return False
        finally:
            if speaking is not None:
                speaking.cancel()
                await asyncio.gather(speaking, return_exceptions=True)
    return True


async def _speak_over(connection: Any, audio: bytes) -> None:
    size = int(2 * _RATE * _FRAME_SEC)
    for number, start in enumerate(range(0, len(audio), size), 1):
        payload = base64.b64encode(audio[start : start + size]).decode()
        chunk = {"type": "input_chunk", "sequence_id": number, "modality": "audio", "payload": payload}
        await connection.send(json.dumps(chunk))
        await asyncio.sleep(_FRAME_SEC)


def _until_ready(base: str) -> None:
    while True:
        with suppress(OSError):  # 503 until the models are loaded
            _fetch(f"{base}/health")
            return
        time.sleep(1)


async def _voices(base: str) -> list[str]:
    async with connect(_websocket(base, "/v1/streaming_input")) as connection:
        created = json.loads(await connection.recv())
    return list(created["capabilities"]["voices"])


def _websocket(base: str, path: str) -> str:
    return base.replace("http", "ws", 1) + path


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


def _trimmed(audio: bytes, rate: int) -> bytes:
    samples = soxr.resample(np.frombuffer(audio, "<i2"), rate, _RATE).astype("<i2")
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
