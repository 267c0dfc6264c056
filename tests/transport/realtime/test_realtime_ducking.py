"""Over a response, ``/v1/realtime`` with ``semantic_vad`` tells of speech once it is known that it interrupts."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from support import inline_workers
from support.inline_workers import InlineWorkers, ScriptedJudge, inline
from support.live_server import LiveServer, live_server
from support.patience import until
from support.realtime_client import RealtimeClient, realtime_client, text_of
from support.scripted_engines import HearingEngine

from omni_ws.audio import speech_watch
from omni_ws.core.chunks import Modality
from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput
from omni_ws.engine.fake import ScriptedEngine

pytestmark = pytest.mark.virtual_clock

BUFFER = "input_audio_buffer."
#: Where speech begins.
BEGINS_MS = 96


loud, quiet = partial(inline_workers.loud, khz=24), partial(inline_workers.quiet, khz=24)


@pytest.fixture(autouse=True)
def _judged_by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sound may be a backchannel, by its sound."""
    monkeypatch.setattr(speech_watch, "backchannel_probability", lambda samples: 0.6)


@contextlib.asynccontextmanager
async def responding(
    said: str, *, out_of_band: bool = False, **detection: Any
) -> AsyncIterator[tuple[RealtimeClient, HearingEngine, asyncio.Event]]:
    """A client whose response sounds for ten seconds, and ends once the event is set; then ``said`` is heard."""
    over = asyncio.Event()
    second = AudioOutput(np.full(24_000, 0.25, np.float32), 24_000)
    engine = HearingEngine(
        [TextOutput("A story."), *[second] * 10, over.wait], heard=[TranscriptOutput(said), TextOutput("I go.")]
    )
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        await client.update(audio={"input": {"turn_detection": detection, "transcription": {"model": "any"}}})
        if out_of_band:
            own = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Tell me a story."}]}
            await client.send("response.create", response={"conversation": "none", "input": [own]})
        else:
            await client.say("Tell me a story.")
            await client.send("response.create")
        await client.until("response.output_audio.delta")
        yield client, engine, over


def speech_events(client: RealtimeClient) -> list[str]:
    return [event["type"].removeprefix(BUFFER) for event in client.received if event["type"].startswith(BUFFER)]


@pytest.mark.parametrize("detection", [{"type": "semantic_vad"}, {"type": "server_vad", "duck": True}])
async def test_an_acknowledgement_is_told_to_nobody_and_the_response_is_whole(detection: dict[str, Any]) -> None:
    async with responding("Mm-hm.", **detection) as (client, engine, over):
        await client.append(quiet(BEGINS_MS) + loud(320) + quiet(2000))
        await until(lambda: len(engine.inputs) == 2)  # it was listened to
        await client.append(quiet(BEGINS_MS) + loud(320) + quiet(2000))
        await until(lambda: len(engine.inputs) == 3)
        over.set()
        response = await client.response()
        assert (response["status"], text_of(response)) == ("completed", "A story.")
        assert len(client.heard(response["id"])) == 10 * 48_000
        await client.append(quiet(12_000))
        assert speech_events(client) == []
        assert not client.seen("conversation.item.input_audio_transcription.completed")


async def test_speech_that_interrupts_is_told_late_with_the_place_where_it_began() -> None:
    async with responding("Go forward.", type="semantic_vad") as (client, *_):
        await client.append(quiet(BEGINS_MS) + loud(640))
        assert speech_events(client) == []
        await client.append(loud(320) + quiet(2000))
        started = await client.until(BUFFER + "speech_started")
        assert started["audio_start_ms"] == BEGINS_MS
        response = await client.response()
        assert (response["status"], response["status_details"]["reason"]) == ("cancelled", "turn_detected")
        assert text_of(await client.response()) == "I go."
        (completed,) = client.seen("conversation.item.input_audio_transcription.completed")
        assert (completed["item_id"], completed["transcript"]) == (started["item_id"], "Go forward.")
        assert speech_events(client) == ["speech_started", "speech_stopped", "committed"]


async def test_speech_over_a_response_out_of_band_has_nothing_of_it() -> None:
    async with responding("Go forward.", out_of_band=True, type="semantic_vad") as (client, engine, _):
        await client.append(quiet(BEGINS_MS) + loud(640))
        await until(lambda: len(engine.requests) == 2)  # it is listened to
        await client.append(loud(320) + quiet(2000))
        assert (await client.response())["status"] == "cancelled"
        assert text_of(await client.response()) == "I go."
        assert not engine.requests[1].history
        assert {chunk.modality for chunk in engine.inputs[1]} == {Modality.AUDIO}


async def test_audio_that_is_cleared_interrupts_nothing() -> None:
    async with responding("Go forward.", type="semantic_vad") as (client, _, over):
        await client.append(quiet(BEGINS_MS) + loud(640))
        await client.send(BUFFER + "clear")
        await client.until(BUFFER + "cleared")
        await client.append(loud(960) + quiet(2000))
        await client.send(BUFFER + "clear")
        await client.until(BUFFER + "cleared")
        over.set()
        response = await client.response()
        assert (response["status"], text_of(response)) == ("completed", "A story.")
        assert "speech_started" not in speech_events(client)


@pytest.mark.parametrize("detection", [{"type": "server_vad"}, {"type": "semantic_vad", "duck": False}])
async def test_otherwise_whatever_is_heard_interrupts_at_once(detection: dict[str, Any]) -> None:
    async with responding("Mm-hm.", **detection) as (client, *_):
        await client.append(quiet(BEGINS_MS) + loud(320))
        await client.until(BUFFER + "speech_started")
        assert (await client.response())["status"] == "cancelled"


async def test_a_choice_that_is_none_is_refused_by_its_name() -> None:
    async with live_server() as server, realtime_client(inline(server)) as client:
        session = {"type": "realtime", "audio": {"input": {"turn_detection": {"type": "server_vad", "duck": "no"}}}}
        await client.send("session.update", session=session)
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"]) == ("invalid_value", "session.audio.input.turn_detection.duck")


async def test_mm_hm_is_an_event_of_an_extension() -> None:
    engine = ScriptedEngine([AudioOutput(np.full(12_000, 0.25, np.float32), 24_000)])
    async with live_server(engine) as server:
        workers = InlineWorkers()
        workers.judge = ScriptedJudge([0.1] * 8)
        server.app.sessions.speech_workers = workers
        async with realtime_client(server) as client:
            detection = {"type": "semantic_vad", "backchannel": True}
            await client.update(audio={"input": {"turn_detection": detection}})
            await client.append(quiet(BEGINS_MS) + loud(4200))
            await client.append(quiet(352))
            event = await client.until(BUFFER + "backchannel")
            assert (event["transcript"], len(base64.b64decode(event["delta"]))) == ("Mm-hm.", 24_000)
            assert not client.seen("response.created")


@contextlib.asynccontextmanager
async def judging() -> AsyncIterator[tuple[LiveServer, RealtimeClient]]:
    """A server that offers semantic_vad, with a judge that no test asks, and its client."""
    async with live_server(ScriptedEngine([])) as server:
        workers = InlineWorkers()
        workers.judge = ScriptedJudge([])
        server.app.sessions.speech_workers = workers
        async with realtime_client(server) as client:
            yield server, client


async def test_mm_hm_without_semantic_vad_is_named_as_without_effect() -> None:
    async with judging() as (_, client):
        for kind, wanted, warned in (
            ("server_vad", True, True),
            ("server_vad", False, False),
            ("semantic_vad", True, False),
        ):
            await client.update(audio={"input": {"turn_detection": {"type": kind, "backchannel": wanted}}})
            params = [one["param"] for one in client.received[-1].get("warnings", ())]
            assert params == ["session.audio.input.turn_detection.backchannel"] * warned


async def test_a_detection_that_does_not_name_mm_hm_replaces_one_that_did() -> None:
    async with judging() as (server, client):
        for detection, murmurs in (
            ({"type": "semantic_vad", "backchannel": True}, True),
            ({"type": "semantic_vad"}, False),
        ):
            await client.update(audio={"input": {"turn_detection": detection}})
            [conversation] = server.app.sessions.conversations
            config = conversation.configuration.effective.turn_detection
            assert config is not None
            assert config.backchannel is murmurs
