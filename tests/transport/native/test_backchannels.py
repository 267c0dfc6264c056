"""The "mm-hm" of the server in pauses of long turns, over real sockets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from support.inline_workers import MS, InlineWorkers, ScriptedJudge, loud, quiet
from support.live_server import LiveServer, live_server, read
from support.native_client import NativeClient, native_client
from support.scripted_engines import PlayingEngine

from omni_ws.core.chunks import FinishReason, Task, Usage
from omni_ws.engine.base import AudioOutput, Finished, GenerationRequest, OutputWriter, TextOutput
from omni_ws.errors import EngineFailed, EngineOverloaded
from omni_ws.service.conversation.unasked import (
    EVERY_SEC,
    LEAST_SPEECH_MS,
    LONGEST_MURMUR_SEC,
    MURMURED,
)

pytestmark = pytest.mark.virtual_clock

RATE = 24_000
TURNS = {"type": "semantic_vad", "backchannel": True}
#: A pause in which the listener says something, and one that is a window shorter.
PAUSE, SHORT = quiet(320), quiet(256)


class Murmuring(PlayingEngine):
    """Answers "Yes.", and reads aloud so many seconds, whatever the text, after ``takes`` seconds."""

    def __init__(self, *, seconds: float = 0.3, takes: float = 0.0, error: Exception | None = None) -> None:
        super().__init__([TextOutput("Yes.")], languages=frozenset({"en", "de"}))
        self.seconds, self.takes, self.error = seconds, takes, error
        self.spoken: list[str] = []

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        if request.task is not Task.SPEECH:
            await super().act(request, out)
            return
        self.spoken.append("".join([chunk.payload.decode() async for chunk in request.input]))
        await asyncio.sleep(self.takes)
        if self.error is not None:
            raise self.error
        out.write(AudioOutput(np.full(round(self.seconds * RATE), 0.5, np.float32), RATE))
        out.write(Finished(FinishReason.STOP, Usage()))


@contextlib.asynccontextmanager
async def talker(
    engine: Murmuring, *, probabilities: tuple[float, ...] = (0.1,) * 20, **fields: Any
) -> AsyncIterator[tuple[LiveServer, NativeClient]]:
    async with live_server(engine) as server:
        workers = InlineWorkers()
        workers.judge = ScriptedJudge(list(probabilities))
        server.app.sessions.speech_workers = workers
        async with native_client(server) as client:
            await client.configure(**{"turn_detection": TURNS, **fields})
            yield server, client


async def send(client: NativeClient, audio: bytes) -> None:
    for start in range(0, len(audio), 20 * MS):
        await client.binary(audio[start : start + 20 * MS])


async def stream(client: NativeClient, audio: bytes) -> None:
    await send(client, audio)
    await client.barrier()
    await asyncio.sleep(0.05)
    await client.barrier()


async def speak(client: NativeClient, ms: int = LEAST_SPEECH_MS, pause: bytes = PAUSE) -> list[str]:
    """Speaks and pauses. Returns what the server has said by now."""
    await stream(client, loud(ms))
    await stream(client, pause)
    return [frame["text"] for frame in client.seen("backchannel")]


async def test_it_says_so_in_a_pause_of_a_long_turn() -> None:
    engine = Murmuring()
    async with talker(engine) as (server, client):
        assert client.created["capabilities"]["backchannel"] is True
        assert await speak(client) == ["Mm-hm."]
        [frame] = client.seen("backchannel")
        [started] = client.seen("speech_started")
        assert (frame["turn_id"], frame["format"], frame["sample_rate"]) == (started["turn_id"], "pcm16", RATE)
        samples = np.frombuffer(base64.b64decode(frame["payload"]), "<i2")
        assert len(samples) == 0.3 * RATE
        assert samples.mean() == pytest.approx(0.5 * MURMURED * 32768, rel=0.01)
        await send(client, loud(320) + quiet(1600))
        answer = await client.answer()
        assert (answer.text, answer.reason) == ("Yes.", "stop")
        assert [len(client.seen(kind)) for kind in ("speech_started", "speech_stopped", "response_started")] == [1] * 3
        counted = read(server)
        assert counted.value("requests_total", **counted.labels("requests_total")[0]) == 1


@pytest.mark.parametrize(
    ("ms", "pause", "says"),
    [(LEAST_SPEECH_MS, PAUSE, True), (LEAST_SPEECH_MS - 400, PAUSE, False), (5000, SHORT, False)],
)
async def test_the_turn_is_long_and_the_pause_is_one(ms: int, pause: bytes, says: bool) -> None:
    async with talker(Murmuring()) as (_, client):
        assert bool(await speak(client, ms, pause)) is says


async def test_a_speaker_who_sounds_finished_is_answered_instead() -> None:
    async with talker(Murmuring(), probabilities=(0.6,)) as (_, client):
        assert await speak(client) == []


async def test_the_sounds_take_turns_and_are_made_once() -> None:
    engine = Murmuring()
    async with talker(engine) as (_, client):
        said = await speak(client)
        assert await speak(client, LEAST_SPEECH_MS) == said  # 8 s have not passed
        for number in range(3):
            await asyncio.sleep(EVERY_SEC)
            said = await speak(client)
            assert len(said) == number + 2
        assert said == ["Mm-hm.", "Uh-huh.", "Okay.", "Mm-hm."]
        assert engine.spoken == ["Mm-hm.", "Uh-huh.", "Okay."]


async def test_what_is_made_too_late_waits_for_the_next_pause() -> None:
    engine = Murmuring(takes=1.0)
    async with talker(engine) as (_, client):
        assert await speak(client) == []
        await stream(client, loud(640))
        await asyncio.sleep(2)
        assert await speak(client, 640) == ["Mm-hm."]
        assert engine.spoken == ["Mm-hm."]


@pytest.mark.parametrize(("seconds", "says"), [(LONGEST_MURMUR_SEC, True), (LONGEST_MURMUR_SEC + 0.01, False)])
async def test_a_voice_that_does_not_say_it_well_says_nothing(seconds: float, says: bool) -> None:
    async with talker(Murmuring(seconds=seconds)) as (_, client):
        assert bool(await speak(client)) is says


@pytest.mark.parametrize("error", [EngineOverloaded("full", retry_after_ms=100), EngineFailed("broken")])
async def test_an_engine_that_fails_is_asked_again_later(error: Exception) -> None:
    engine = Murmuring(error=error)
    async with talker(engine) as (_, client):
        assert await speak(client) == []
        engine.error = None
        assert await speak(client) == []
        await asyncio.sleep(EVERY_SEC)
        assert await speak(client) == ["Mm-hm."]
        assert not client.seen("error")


@pytest.mark.parametrize(
    "fields",
    [
        {"turn_detection": {"type": "semantic_vad"}},
        {"turn_detection": {"type": "server_vad", "backchannel": True}},
        {"modalities": ["text"]},
    ],
    ids=["not wanted", "by silence", "text only"],
)
async def test_without_these_nothing_is_said(fields: dict[str, Any]) -> None:
    async with talker(Murmuring(), **fields) as (_, client):
        assert await speak(client, 6000) == []


async def test_it_is_in_the_language_of_the_talk() -> None:
    async with talker(Murmuring(), input_audio={"language": "de"}) as (_, client):
        await speak(client)
        await asyncio.sleep(EVERY_SEC)
        assert await speak(client) == ["Mm-hm.", "Okay."]


async def test_nothing_is_said_while_an_answer_is_due() -> None:
    """The user goes on behind a turn whose answer is being made, and waits for it."""
    engine = Murmuring()
    made = asyncio.Event()
    script: list[Any] = [made.wait, TextOutput("Yes.")]
    engine.script = tuple(script)
    async with talker(engine, overlap="wait") as (_, client):
        await client.say("a question")
        assert await speak(client) == []
        made.set()
        await client.answer()


@pytest.mark.parametrize(("format_", "raw"), [("pcmu", "pcmu"), ("wav", "pcm16")])
async def test_it_is_raw_in_every_format(format_: str, raw: str) -> None:
    rate = 8000 if format_ == "pcmu" else 24_000
    async with talker(Murmuring(), output_audio={"format": format_, "sample_rate": rate}) as (_, client):
        assert await speak(client) == ["Mm-hm."]
        [frame] = client.seen("backchannel")
        assert (frame["format"], frame["sample_rate"]) == (raw, rate)


async def test_nothing_is_left_of_a_client_that_goes() -> None:
    engine = Murmuring(takes=60.0)
    async with talker(engine) as (server, client):
        await speak(client)
        assert engine.active_requests
        client.gone()
        await server.until(lambda: not server.connections and engine.active_requests == 0, "the end of all")
