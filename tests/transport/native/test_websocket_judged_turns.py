"""Turns that a model judges, over real sockets: configuration, errors, and speakers who go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from support.inline_workers import MS, InlineWorkers, ScriptedJudge, loud, quiet
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client
from support.scripted_engines import PlayingEngine

from omni_ws.core.chunks import Word
from omni_ws.engine.base import (
    AudioOutput,
    Engine,
    EngineOutput,
    TextOutput,
    TranscriptOutput,
)
from omni_ws.engine.clauses import ContinuedInput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.service.listening import SpeechWorkers

SEMANTIC = {"type": "semantic_vad"}


@contextlib.asynccontextmanager
async def judged_client(
    judge: ScriptedJudge, engine: Engine | None = None
) -> AsyncIterator[tuple[LiveServer, NativeClient]]:
    async with live_server(engine) as server:
        workers = InlineWorkers()
        workers.judge = judge
        server.app.sessions.speech_workers = workers
        async with native_client(server) as client:
            yield server, client


async def stream(client: NativeClient, audio: bytes) -> None:
    for start in range(0, len(audio), 20 * MS):
        await client.binary(audio[start : start + 20 * MS])


# configuration


@pytest.mark.parametrize(
    ("turns", "effective"),
    [
        ({}, {"eagerness": "auto", "silence_duration_ms": 1500}),
        ({"eagerness": "auto"}, {"eagerness": "auto", "silence_duration_ms": 1500}),
        ({"eagerness": "low"}, {"eagerness": "low", "silence_duration_ms": 4000}),
        ({"eagerness": "medium"}, {"eagerness": "medium", "silence_duration_ms": 1500}),
        ({"eagerness": "high"}, {"eagerness": "high", "silence_duration_ms": 700}),
        (
            {"eagerness": "high", "silence_duration_ms": 2000},
            {"eagerness": "high", "silence_duration_ms": 2000},
        ),
    ],
)
async def test_the_silence_follows_from_the_eagerness(turns: dict[str, Any], effective: dict[str, Any]) -> None:
    async with judged_client(ScriptedJudge()) as (_, client):
        assert client.created["capabilities"]["turn_detection"] is True
        assert client.created["capabilities"]["turn_detection_types"] == ["server_vad", "semantic_vad"]
        updated = await client.configure(turn_detection=SEMANTIC | turns)
        assert updated["turn_detection"] == {
            "type": "semantic_vad",
            "threshold": 0.5,
            "prefix_padding_ms": 300,
            "interrupt_response": True,
            "interrupt_resume": False,
            "duck": False,
            "backchannel": False,
            **effective,
        }
        assert (updated["overlap"], updated["max_lead_ms"]) == ("interrupt", 400)


async def test_a_change_of_the_type_changes_the_silence_unless_it_was_said() -> None:
    async with judged_client(ScriptedJudge()) as (_, client):
        await client.configure(turn_detection={"type": "server_vad"})
        updated = await client.configure(turn_detection={"type": "semantic_vad", "eagerness": "low"})
        assert updated["turn_detection"]["silence_duration_ms"] == 4000
        await client.configure(turn_detection={"silence_duration_ms": 800})
        updated = await client.configure(turn_detection={"type": "server_vad"})
        assert updated["turn_detection"]["silence_duration_ms"] == 800
        assert "eagerness" not in updated["turn_detection"]
        updated = await client.configure(turn_detection={"type": "semantic_vad", "silence_duration_ms": None})
        assert updated["turn_detection"]["silence_duration_ms"] == 4000


@pytest.mark.parametrize(
    ("turns", "param"),
    [
        ({"eagerness": "keen"}, "turn_detection.eagerness"),
        ({"eagerness": 3}, "turn_detection.eagerness"),
        ({"silence_duration_ms": 10_001}, "turn_detection.silence_duration_ms"),
        ({"silence_duration_ms": -1}, "turn_detection.silence_duration_ms"),
    ],
)
async def test_bad_values_are_refused_by_name(turns: dict[str, Any], param: str) -> None:
    async with judged_client(ScriptedJudge()) as (_, client):
        await client.send("session_config", turn_detection=SEMANTIC | turns)
        error = await client.error()
        assert (error["code"], error["param"]) == ("invalid_value", param)
        updated = await client.configure(turn_detection=SEMANTIC | {"silence_duration_ms": 10_000})
        assert updated["turn_detection"]["silence_duration_ms"] == 10_000


async def test_without_the_model_it_is_refused() -> None:
    async with live_server() as server, native_client(server) as client:
        assert client.created["capabilities"]["turn_detection_types"] == ["server_vad"]
        await client.send("session_config", turn_detection=SEMANTIC)
        error = await client.error()
        assert (error["code"], error["param"]) == ("unsupported_parameter", "turn_detection.type")
        assert "server_vad" in error["message"]
        assert (await client.configure(voice=None))["turn_detection"] is None


async def test_without_the_detector_nothing_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeechWorkers, "available", False)
    async with live_server() as server:
        server.app.sessions.speech_workers.judge = ScriptedJudge()
        async with native_client(server) as client:
            assert client.created["capabilities"]["turn_detection_types"] == []
            await client.send("session_config", turn_detection=SEMANTIC)
            error = await client.error()
            assert (error["code"], error["param"]) == ("unsupported_parameter", "turn_detection")


# how sure the model has to be


@pytest.mark.parametrize(
    ("turns", "probability", "silence_ms"),
    [
        ({"eagerness": "high"}, 0.51, 256),
        ({"eagerness": "high"}, 0.5, 704),
        ({"eagerness": "medium"}, 0.91, 256),
        ({}, 0.91, 256),
        ({}, 0.9, 640),
        ({"eagerness": "low"}, 0.91, 640),
        ({"eagerness": "low"}, 0.96, 256),
        ({"silence_duration_ms": 512}, 0.6, 512),
    ],
)
@pytest.mark.virtual_clock
async def test_the_surer_the_model_is_the_sooner_a_turn_ends(
    turns: dict[str, Any], probability: float, silence_ms: int
) -> None:
    async with judged_client(ScriptedJudge([probability])) as (_, client):
        await client.configure(turn_detection=SEMANTIC | turns)
        # The detector of the test has no delay, which counts as silence, and its windows begin with the stream.
        await stream(client, quiet(96) + loud(320) + quiet(silence_ms - 64 - 32))
        await client.barrier()
        assert not client.seen("speech_stopped")
        await stream(client, quiet(32))
        await client.until("speech_stopped")


# speakers who go on


def talk(seconds: float) -> list[EngineOutput]:
    """A text, and its sound in pieces of 100 ms with a word each."""
    words = [f"word{number}" for number in range(round(seconds * 10))]
    sounds = [
        AudioOutput(np.zeros(2400, np.float32), 24_000, (Word(word, number * 100, number * 100 + 90),))
        for number, word in enumerate(words)
    ]
    return [TextOutput(" ".join(words)), *sounds]


@pytest.mark.virtual_clock
async def test_who_goes_on_before_the_end_is_told_continues_the_request() -> None:
    engine = ScriptedEngine(talk(1))
    async with judged_client(ScriptedJudge([False, True]), engine) as (_, client):
        await client.configure(turn_detection=SEMANTIC)
        await stream(client, quiet(96) + loud(320) + quiet(1000) + loud(320) + quiet(640))
        assert (await client.answer()).reason == "stop"
        assert len(client.seen("speech_started")) == len(client.seen("speech_stopped")) == 1
        assert len(engine.requests) == 1


def slow_voice(said: str) -> tuple[PlayingEngine, asyncio.Event]:
    """An engine that hears ``said`` and writes an answer, whose voice waits for the event."""
    voice = asyncio.Event()
    heard = TranscriptOutput(said, start_ms=0)
    text, *sounds = talk(1)
    return PlayingEngine([heard, text, voice.wait, *sounds], transcribes_first=True), voice


@pytest.mark.virtual_clock
async def test_who_goes_on_before_the_answer_is_heard_is_answered_in_one() -> None:
    engine, voice = slow_voice("what is two")
    async with judged_client(ScriptedJudge([True, True]), engine) as (_, client):
        await client.configure(turn_detection=SEMANTIC)
        await stream(client, quiet(96) + loud(320) + quiet(320))
        await client.until("speech_stopped")
        while (frame := await client.until("output_chunk"))["modality"] != "text":
            pass
        await stream(client, loud(320) + quiet(320))
        while not (frame := await client.until("output_chunk")).get("final"):
            pass
        assert frame["finish_reason"] == "cancelled"
        voice.set()
        assert (await client.answer()).reason == "stop"
        # What was said begins the same message, and nothing is known of an answer that nobody heard.
        second = engine.requests[1]
        assert second.history == ()
        assert isinstance(second.input, ContinuedInput)
        assert [chunk.payload for chunk in await second.input.earlier.chunks()] == [b"what is two"]


@pytest.mark.virtual_clock
async def test_an_answer_that_was_begun_to_be_heard_stays_as_far_as_that() -> None:
    engine, voice = slow_voice("what is two")
    voice.set()
    async with judged_client(ScriptedJudge([True, True]), engine) as (_, client):
        await client.configure(turn_detection=SEMANTIC)
        await stream(client, quiet(96) + loud(320) + quiet(320))
        while (frame := await client.until("output_chunk")).get("modality") != "audio":
            pass
        await client.send("output_ack", sequence_id=frame["sequence_id"], played_ms=50)
        await stream(client, loud(320) + quiet(320))
        while not (frame := await client.until("output_chunk")).get("final"):
            pass
        assert frame["finish_reason"] == "cancelled"
        await client.answer()
        history = [(one.role, one.text) for one in engine.requests[1].history]
        assert history == [("user", "what is two"), ("assistant", "word0")]
