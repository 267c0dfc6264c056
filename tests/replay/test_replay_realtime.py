"""Replay of sessions of the Realtime API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from support.embedded_engine import EmbeddedEngine
from support.live_server import live_server
from support.realtime_client import RealtimeClient, realtime_client, text_of
from support.recordings import events, recordings, replay
from support.speech_clips import at_24k, clip_bytes, silence
from support.voices import need

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.fake import EchoEngine, EchoSettings

pytestmark = pytest.mark.slow

MANUAL: dict[str, Any] = {"input": {"turn_detection": None}}
WORDS = "one two three four five six seven eight nine ten eleven twelve"


def slow_echo() -> EchoEngine:
    return EchoEngine(EchoSettings(chunk_interval_ms=20, chunk_ms=20))


def tone(ms: int) -> bytes:
    samples = 8000 * np.sin(np.arange(ms * 24) * 2 * np.pi * 440 / 24_000)
    return bytes(samples.astype("<i2").tobytes())


async def session_with_ids(client: RealtimeClient) -> list[str]:
    """Text, an item of the server's that is deleted, audio, and a response that is cancelled. Returns their ends."""
    await client.update(audio=MANUAL, output_modalities=["text"])
    await client.say("hello there", id="mine")
    first = await client.respond()
    await client.send("conversation.item.delete", item_id=first["output"][0]["id"])
    await client.until("conversation.item.deleted")
    await client.append(tone(300))
    await client.send("input_audio_buffer.commit")
    second = await client.respond(output_modalities=["audio"])
    await client.say(WORDS)
    await client.send("response.create")
    created = (await client.until("response.created"))["response"]
    for _ in range(3):
        await client.until("response.output_text.delta")
    await client.send("response.cancel", response_id=created["id"])
    third = await client.response()
    await client.send("response.cancel")  # too late: an error that is no harm
    await client.until("error")
    return [response["status"] for response in (first, second, third)]


@pytest.mark.parametrize("speed", ["1", "max"])
async def test_a_session_is_answered_alike_byte_by_byte(tmp_path: Path, speed: str) -> None:
    async with live_server(slow_echo(), record=tmp_path / "r") as server, realtime_client(server) as client:
        ends = await session_with_ids(client)
    assert ends == ["completed", "completed", "cancelled"]
    (path,) = recordings(tmp_path / "r")
    async with live_server(slow_echo(), record=tmp_path / "again") as server:
        url = f"ws://127.0.0.1:{server.port}"
        replayed = await replay(path, "--url", url, "--speed", speed, "--compare", "exact", "--format", "json")
    assert replayed.status == 0, replayed.output + replayed.errors
    (session,) = replayed.report["sessions"]
    assert [answer["finish_reason"] for answer in session["answers"]] == ends
    assert all(answer["same_audio_bytes"] for answer in session["answers"])
    # The item of the server's has another id now.
    (twin,) = recordings(tmp_path / "again")
    deleted = [
        next(event for event in map(orjson.loads, texts) if event["type"] == "conversation.item.delete")["item_id"]
        for texts in ([line["text"] for line in events(one, "in")] for one in (path, twin))
    ]
    assert deleted[0] != deleted[1]


async def test_another_answer_is_a_difference(tmp_path: Path) -> None:
    async with live_server(record=tmp_path / "r") as server, realtime_client(server) as client:
        await client.update(audio=MANUAL, output_modalities=["text"])
        await client.say("hello there")
        assert text_of(await client.respond()) == "hello there"
    (path,) = recordings(tmp_path / "r")
    async with live_server(EchoEngine(EchoSettings(reply="something else"))) as server:
        different = await replay(path, "--url", f"ws://127.0.0.1:{server.port}")
    assert different.status == 1
    assert "text: 'hello there' recorded, 'something else' replayed" in different.output


@pytest.mark.real_time
async def test_speech_is_heard_and_answered_alike(tmp_path: Path) -> None:
    voice = need(VoiceChoice.ESPEAK)
    turns = {"type": "server_vad", "silence_duration_ms": 600}
    speech = at_24k(silence(0.6) + clip_bytes("goforward") + silence(1.5))
    async with (
        live_server(EmbeddedEngine(voice=voice), record=tmp_path / "r") as server,
        realtime_client(server) as client,
    ):
        await client.update(audio={"input": {"turn_detection": turns, "transcription": {"model": "whisper-1"}}})
        await client.append(speech)
        response = await client.response()
    assert response["status"] == "completed"
    (path,) = recordings(tmp_path / "r")
    async with live_server(EmbeddedEngine(voice=voice)) as server:
        url = f"ws://127.0.0.1:{server.port}"
        again = await replay(path, "--url", url, "--compare", "full", "--format", "json", "--patience", "100")
    assert again.status == 0, again.output + again.errors
    (session,) = again.report["sessions"]
    assert len(session["answers"]) == 1
