"""Spoken turns over ``/v1/realtime``: detected or committed, transcribed, answered, interrupted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.inline_workers import InlineWorkers
from support.live_server import LiveServer, live_server
from support.realtime_client import RealtimeClient, realtime_client, text_of

from omni_ws.core.chunks import FinishReason, Usage
from omni_ws.engine.base import AudioOutput, Finished, TextOutput, TranscriptOutput
from omni_ws.engine.fake import ScriptedEngine

TRANSCRIBED: dict[str, Any] = {"transcription": {"model": "gpt-4o-mini-transcribe"}}
HEARD_AND_ANSWERED = (
    TranscriptOutput("go forward"),
    TextOutput("I go"),
    AudioOutput(np.full(2400, 0.25, np.float32), 24_000),
)


def loud(ms: int) -> bytes:
    return (8000 + np.arange(ms * 24) % 9973).astype("<i2").tobytes()


def quiet(ms: int) -> bytes:
    return (np.arange(ms * 24) % 97).astype("<i2").tobytes()


def inline(server: LiveServer) -> LiveServer:
    server.app.sessions.speech_workers = InlineWorkers()
    return server


async def speak(client: RealtimeClient, ms: int = 320) -> None:
    """A turn, and the silence behind it."""
    await client.append(quiet(96) + loud(ms) + quiet(640))


@pytest.mark.virtual_clock
async def test_a_detected_turn_is_an_item_and_is_answered() -> None:
    async with live_server(ScriptedEngine(HEARD_AND_ANSWERED)) as server, realtime_client(inline(server)) as client:
        await client.update(audio={"input": TRANSCRIBED})
        begin = len(client.received)
        await speak(client)
        response = await client.response()
        assert text_of(response) == "I go"
        assert len(client.heard(response["id"])) == 4800
        assert client.kinds(since=begin) == [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
            "rate_limits.updated",
            "conversation.item.input_audio_transcription.delta",
            "conversation.item.input_audio_transcription.completed",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
            "response.output_audio_transcript.delta",
            "response.output_audio.delta",
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        (started,) = client.seen("input_audio_buffer.speech_started")
        (completed,) = client.seen("conversation.item.input_audio_transcription.completed")
        assert completed["item_id"] == started["item_id"]
        assert completed["transcript"] == "go forward"


@pytest.mark.virtual_clock
async def test_a_committed_turn_waits_for_its_response() -> None:
    engine = ScriptedEngine((*HEARD_AND_ANSWERED, Finished(FinishReason.STOP, Usage(output_tokens=2))))
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        session = await client.update(audio={"input": {"turn_detection": None, **TRANSCRIBED}})
        assert session["audio"]["input"]["turn_detection"] is None
        await client.append(loud(300))
        await client.send("input_audio_buffer.commit")
        committed = await client.until("input_audio_buffer.committed")
        await client.until("conversation.item.done")
        assert not engine.requests
        response = await client.respond()
        assert text_of(response) == "I go"
        (completed,) = client.seen("conversation.item.input_audio_transcription.completed")
        assert (completed["item_id"], completed["transcript"]) == (committed["item_id"], "go forward")


@pytest.mark.virtual_clock
async def test_clear_drops_what_was_appended() -> None:
    async with live_server() as server, realtime_client(inline(server)) as client:
        await client.update(audio={"input": {"turn_detection": None}})
        await client.append(loud(300))
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        await client.send("input_audio_buffer.commit", event_id="e1")
        error = (await client.until("error"))["error"]
        assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", "e1")


@pytest.mark.virtual_clock
async def test_speech_cancels_the_response() -> None:
    endless = (TextOutput("word "), AudioOutput(np.full(24_000, 0.25, np.float32), 24_000), lambda: _never())
    async with live_server(ScriptedEngine(endless)) as server, realtime_client(inline(server)) as client:
        await speak(client)
        await client.until("response.output_audio.delta")
        await speak(client)
        response = await client.response()
        assert (response["status"], response["status_details"]["reason"]) == ("cancelled", "turn_detected")
        assert client.kinds()[-1] == "response.done"


async def _never() -> None:
    import asyncio

    await asyncio.Event().wait()


@pytest.mark.virtual_clock
async def test_a_turn_without_a_response_is_transcribed_and_answered_on_request() -> None:
    engine = ScriptedEngine(HEARD_AND_ANSWERED)
    async with live_server(engine) as server, realtime_client(inline(server)) as client:
        detection = {"type": "server_vad", "create_response": False}
        session = await client.update(audio={"input": {"turn_detection": detection}})
        assert session["audio"]["input"]["turn_detection"]["create_response"] is False
        await speak(client)
        completed = await client.until("conversation.item.input_audio_transcription.completed")
        assert completed["transcript"] == "go forward"
        assert not client.seen("response.created")
        assert text_of(await client.respond()) == "I go"
        assert [one.task for one in engine.requests] == ["transcribe", "chat"]
        assert not engine.requests[1].history
