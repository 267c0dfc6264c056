"""A person's way through the whole server: the real engine, the real socket, the real programs."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import wave
from collections.abc import AsyncIterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import pytest_asyncio
from support.embedded_engine import EmbeddedEngine
from support.live_server import LiveServer, live_server
from support.patience import PATIENCE_SEC, until_heard
from support.real_models import fetched
from support.speech_clips import WORDS, clip_bytes
from websockets.asyncio.client import connect as connect_websocket

from omni_ws.client import (
    AudioChunk,
    ClientSession,
    ErrorEvent,
    Final,
    SpeechStarted,
    SpeechStopped,
    TranscriptChunk,
    connect,
)
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.engine.asr.recogniser_engine import AudioPace, RecogniserEngine
from omni_ws.errors import EngineFailed
from omni_ws.scenarios.speech import word_errors
from omni_ws.wire.frames import encode_input

pytestmark = [pytest.mark.slow, pytest.mark.real_time, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
FRAME_BYTES = 640  # 20 ms
PIECE_BYTES = 10 * FRAME_BYTES
#: The answer to "go forward ten meters".
TO_GOFORWARD = "I can't move. I'm only a voice."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started() -> AsyncIterator[LiveServer]:
    # By its clock a second passes between two looks at it: all audio comes as if it was being spoken.
    async with live_server(EmbeddedEngine(clock=partial(next, count(0.0)))) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started_with_voice(voice_choice: VoiceChoice) -> AsyncIterator[LiveServer]:
    async with live_server(EmbeddedEngine(voice=voice_choice)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def server(started: LiveServer) -> AsyncIterator[LiveServer]:
    """The running server; afterwards nothing of a test may be left in it."""
    yield started
    await started.check_empty()


@pytest_asyncio.fixture(loop_scope="module")
async def voiced(started_with_voice: LiveServer) -> AsyncIterator[LiveServer]:
    """The same with each voice in turn."""
    yield started_with_voice
    await started_with_voice.check_empty()


async def test_disorder_and_duplicates_change_nothing(server: LiveServer) -> None:
    audio = clip_bytes("goforward")
    frames = [audio[start : start + FRAME_BYTES] for start in range(0, len(audio), FRAME_BYTES)]
    chunks = [InputChunk(Modality.AUDIO, frame, number) for number, frame in enumerate(frames)]
    chunks.append(InputChunk(Modality.AUDIO, b"", len(frames), end_of_input=True))
    shuffled = [*chunks]
    generator = random.Random(5)
    for start in range(0, len(shuffled), 16):
        window = shuffled[start : start + 16]
        generator.shuffle(window)
        shuffled[start : start + 16] = window
    for chunk in generator.sample(chunks, 30):
        shuffled.insert(generator.randrange(shuffled.index(chunk), len(shuffled)), chunk)
    orderly = await transcript_and_reply(server, chunks)
    disorderly = await transcript_and_reply(server, shuffled)
    assert orderly == disorderly == (WORDS["goforward"], TO_GOFORWARD)


async def transcript_and_reply(server: LiveServer, chunks: list[InputChunk]) -> tuple[str, str]:
    """What was heard and answered to chunks that are sent just as they are."""
    heard, said = "", ""
    async with connect_websocket(server.websocket_url) as websocket:
        await websocket.send('{"type":"session_config","modalities":["text"]}')
        for chunk in chunks:
            await websocket.send(encode_input(chunk))
        async for message in websocket:
            frame = orjson.loads(message)
            assert frame["type"] != "error", frame
            if frame.get("modality") == "transcript" and not frame.get("interim"):
                heard += frame["text"]
            elif frame.get("modality") == "text":
                said += frame["text"]
            elif frame.get("final"):
                break
    return heard.strip(), said


def ears(server: LiveServer) -> RecogniserEngine:
    assert isinstance(server.engine, EmbeddedEngine)
    return server.engine.asr


async def test_partials_come_while_the_person_speaks(server: LiveServer) -> None:
    """The words show up before the end, and the answer follows it."""
    audio = clip_bytes("goforward")
    heard = ""
    async with connect(server.websocket_url) as session:
        for start in range(0, len(audio) - PIECE_BYTES, PIECE_BYTES):
            await session.send_audio(audio[start : start + PIECE_BYTES])
            await session.ping()
            await until_heard(ears(server))
        ended = False
        async for event in session.response():
            if isinstance(event, TranscriptChunk):
                if not event.interim:
                    heard += event.text
                elif not ended and event.text.startswith("go"):
                    ended = True
                    await session.send_audio(audio[start + PIECE_BYTES :])
                    await session.finish()
    assert ended
    assert heard.strip() == WORDS["goforward"]


async def test_two_turns_with_an_open_microphone(server: LiveServer) -> None:
    """Nobody says where a turn begins or ends, and the second begins while the first is still being answered."""
    first, second = (bytes(16_000) + clip_bytes(name) + bytes(40_000) for name in ("goforward", "cards_001"))
    config = {"turn_detection": {"type": "server_vad"}}
    async with connect(server.websocket_url, config=config) as session:
        await speak(session, first)
        answering = False
        heard: dict[str, str] = {}
        finals: list[Final] = []
        told: list[str] = []
        async for event in session.events():
            match event:
                case TranscriptChunk(request_id=request_id, text=text, interim=False):
                    heard[request_id] = heard.get(request_id, "") + text
                case SpeechStarted() | SpeechStopped():
                    told.append(type(event).__name__)
                case AudioChunk() if not answering:
                    answering = True
                    await speak(session, second)
                    await session.finish()
                case Final():
                    finals.append(event)
                    if len(finals) == 2:
                        break
    assert list(heard.values()) == [WORDS["goforward"], WORDS["cards_001"]]
    assert [final.finish_reason for final in finals] == ["cancelled", "stop"] or all(
        final.finish_reason == "stop" for final in finals
    )
    assert told == ["SpeechStarted", "SpeechStopped"] * 2


async def speak(session: ClientSession, audio: bytes) -> None:
    for start in range(0, len(audio), FRAME_BYTES):
        await session.send_audio(audio[start : start + FRAME_BYTES])


async def test_an_upload_is_answered_before_it_ends(server: LiveServer) -> None:
    """The first event comes while the body is still being sent."""
    audio = (DATA / "librivox_ss_0870.wav").read_bytes()
    first_event = asyncio.Event()
    # By hand, because HTTP clients read no answer before their request is sent.
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

    async def upload() -> None:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            b"Content-Type: audio/wav\r\nX-Streaming-Input: true\r\n\r\n"
        )
        step = 6400  # 200 ms
        for start in range(0, len(audio), step):
            if start > 20 * step:  # four seconds in, and no further before the first event has come
                await asyncio.wait_for(first_event.wait(), PATIENCE_SEC)
            piece = audio[start : start + step]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            for _ in range(20):  # the server is of this loop, and takes each piece by itself
                await asyncio.sleep(0)
            await until_heard(ears(server))
        writer.write(b"0\r\n\r\n")

    async def download() -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        async for line in reader:
            if line.startswith(b"data: {"):
                events.append(orjson.loads(line.removeprefix(b"data: ")))
                first_event.set()
            elif line.startswith(b"data: [DONE]"):
                break
        return events

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(upload())
            downloading = group.create_task(download())
    finally:
        writer.close()
    events = downloading.result()
    assert events[0]["choices"][0]["delta"] == {"role": "assistant"}
    assert any(is_interim(event) for event in events)
    heard = "".join(e["input_transcript"]["text"] for e in events if not e["choices"] and not is_interim(e))
    assert word_errors(WORDS["librivox_ss_0870"], heard).wrong == 0
    said = "".join(e["choices"][0]["delta"].get("content", "") for e in events if e["choices"])
    assert said == "I don't know what to say to that."


def is_interim(event: dict[str, Any]) -> bool:
    """Whether it carries a transcript that may still change."""
    return not event["choices"] and bool(event["input_transcript"]["interim"])


async def test_a_killed_voice_fails_one_request_and_no_other(voiced: LiveServer) -> None:
    async with connect(voiced.websocket_url, config={"task": "speech", "modalities": ["audio"]}) as session:
        # One sentence of minutes: it is still being spoken when its first audio is here.
        await session.send_text(" ".join(["one two three four five six seven eight nine ten"] * 60), end=True)
        errors: list[ErrorEvent] = []
        final: Final | None = None
        killed = False
        async for event in session.events():
            if isinstance(event, AudioChunk) and not killed:
                killed = True
                assert isinstance(voiced.engine, EmbeddedEngine)
                assert voiced.engine.voice.worker_pid is not None
                os.kill(voiced.engine.voice.worker_pid, signal.SIGKILL)
            elif isinstance(event, ErrorEvent):
                errors.append(event)
            elif isinstance(event, Final):
                final = event
                break
        assert killed
        assert [type(event.error) for event in errors] == [EngineFailed]
        assert final is not None
        assert final.finish_reason == "error"
        await session.send_text("back again", end=True)
        answer = await session.answer()
        assert len(answer.audio) > 10_000


async def talk(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omni_ws", "talk"),
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), PATIENCE_SEC)
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_talk_prints_and_saves(voiced: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AudioPace, "is_live", lambda self, audio_ms: True)  # however late a busy machine takes it
    reply = tmp_path / "reply.wav"
    output = await talk("--file", str(DATA / "goforward.wav"), "--save", str(reply), "--url", voiced.websocket_url)
    assert "hearing: go" in output
    assert f"heard: {WORDS['goforward']}" in output
    assert f"reply: {TO_GOFORWARD}" in output
    assert "latency: first audio" in output
    samples, rate = read_wav(reply)
    assert 1.0 < len(samples) / rate < 6.0
    assert np.sqrt(np.mean(samples**2)) > 0.02


def read_wav(path: Path) -> tuple[Any, int]:
    with wave.open(str(path), "rb") as file:
        data = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return data.astype(np.float32) / np.float32(32768), file.getframerate()


async def test_text_is_read_aloud_before_its_end_has_come(voiced: LiveServer) -> None:
    async with connect(voiced.websocket_url, config={"task": "speech", "modalities": ["audio"]}) as session:
        await session.send_text("This is the first sentence. And the second")
        async for event in session.events():
            if isinstance(event, AudioChunk):
                break
            assert not isinstance(event, Final)
        await session.send_text(" one ends here.", end=True)
        rest = [event async for event in session.response()]
        assert isinstance(rest[-1], Final)
        assert rest[-1].finish_reason == "stop"
        assert sum(isinstance(event, AudioChunk) for event in rest) > 3


async def test_a_conversation_remembers(server: LiveServer) -> None:
    async with connect(server.websocket_url, config={"modalities": ["text"]}) as session:
        assert (await session.ask_text("what is three plus four")).text == "That makes 7."
        await session.send_audio(clip_bytes("cards_001"), end=True)
        answer = await session.answer()
        assert (answer.transcript.strip(), answer.text) == (
            WORDS["cards_001"],
            "I don't know what to say to that.",
        )
        assert (await session.ask_text("what did i say")).text == f"I heard: {WORDS['cards_001']}."


async def test_an_idle_server_ends() -> None:
    """With its voice's and its recognisers' processes. How soon is measured by benchmarks/gate.py."""
    fetched("whisper-tiny-en")
    command = ("-m", "omni_ws", "serve", "--port", "0", "--asr", "whisper", "--llm", "rules", "--tts", "espeak")
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    while b"in a browser" not in (line := await process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGTERM)
    rest = await process.stderr.read()
    assert await process.wait() == 0, rest
    assert b"killed" not in rest


async def test_the_client_of_the_specification(started: LiveServer, tmp_path: Path) -> None:
    specification = (ROOT / "protocol" / "README.md").read_text("utf-8")
    program = specification.split("```python\n")[1].split("```")[0]
    url = f"ws://127.0.0.1:{started.port}/v1/streaming_input"
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, url, str(DATA / "goforward.wav")), cwd=tmp_path, stdout=subprocess.PIPE
    )
    output, _ = await client.communicate()
    assert output.decode() == f"transcript: {WORDS['goforward']}\ntext: {TO_GOFORWARD}\n"
    with wave.open(str(tmp_path / "answer.wav")) as answer:
        assert answer.getnframes() > answer.getframerate()
