"""Replay of speech with turn detection on the embedded engine: the same words are recognised and answered."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.embedded_engine import EmbeddedEngine
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client
from support.recordings import events, recordings, replay
from support.speech_clips import clip_bytes, silence

from omni_ws.config.model import VoiceChoice

FRAME = 640
RESUMABLE = {"resume_grace_sec": 60}


async def speak(client: NativeClient, audio: bytes) -> None:
    """Every fifth frame after the sixth, and every seventh twice."""
    first = client.next_sequence_id
    frames = [audio[start : start + FRAME] for start in range(0, len(audio), FRAME)]
    order = list(range(len(frames)))
    for place in range(5, len(order) - 1, 5):
        order[place], order[place + 1] = order[place + 1], order[place]
    for place in order:
        await client.binary(frames[place], number=first + place)
        if place % 7 == 0:
            await client.binary(frames[place], number=first + place)
    client.next_sequence_id = first + len(frames)


async def spoken_session(server: LiveServer) -> list[str]:
    """An utterance, another that interrupts its answer, a lost connection, a question. Returns how each ended."""
    async with native_client(server) as client:
        await client.configure(turn_detection={"type": "server_vad"})
        # Its answer is long enough to be interrupted, however much sooner or later it begins than in the recording.
        await speak(client, clip_bytes("cards_001") + silence(1))
        while not (frame := await client.until("output_chunk")).get("audio"):
            pass
        # Its answer does not depend on how much was heard of the one before.
        await speak(client, clip_bytes("goforward") + silence(1))
        reasons = [(await client.answer()).reason, (await client.answer()).reason]
        client.gone()
        await client.connection.wait_closed()
        last = client.guarantees.next_output - 1
        query = f"?session_id={client.created['session_id']}&resume_token={client.created['resume_token']}"
    assert frame["request_id"]
    async with native_client(server, query=f"{query}&last_output={last}", greeted=False) as again:
        await again.until("session_resumed")
        again.guarantees.next_output = last + 1
        again.next_sequence_id = client.next_sequence_id
        await again.configure(turn_detection=None)
        await again.say("what is three plus four")
        reasons.append((await again.answer()).reason)
    return reasons


# One voice is enough for what recordings hold, and every machine has this one.
@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize("voice_choice", [VoiceChoice.ESPEAK], indirect=True, ids=str)
async def test_speech_is_heard_and_answered_alike_at_any_speed(voice_choice: VoiceChoice, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    async with live_server(
        EmbeddedEngine(voice=voice_choice, max_recognisers=2), record=folder, streaming_input=RESUMABLE
    ) as server:
        reasons = await spoken_session(server)
    (path,) = recordings(folder)
    assert reasons == ["cancelled", "stop", "stop"]
    assert [event["by"] for event in events(path, "close")] == ["lost", "client"]
    for speed in ("1", "max"):
        async with live_server(
            EmbeddedEngine(voice=voice_choice, max_recognisers=2), streaming_input=RESUMABLE
        ) as server:
            url = f"ws://127.0.0.1:{server.port}"
            again = await replay(path, "--url", url, "--speed", speed, "--compare", "text", "--patience", "100")
        assert again.status == 0, (speed, again.output + again.errors)
        assert again.output.count("answer ") == 3
