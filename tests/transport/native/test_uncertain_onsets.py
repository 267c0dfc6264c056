"""Uncertain onsets over real sockets: a sound over an answer is confirmed or dismissed, exactly one of the two."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.capable_engine import HearingEngine
from support.inline_workers import MS, InlineWorkers, loud, quiet
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client

from omni_ws.audio import speech_watch
from omni_ws.core.chunks import Word
from omni_ws.engine.base import AudioOutput, EngineOutput, TextOutput, TranscriptOutput

pytestmark = pytest.mark.virtual_clock

FRAME = 20 * MS
RATE = 16_000
PIECES, PIECE_MS = 60, 100
#: A sound of an acknowledgement's length, and the quiet behind it that lets it be judged.
SHORT, QUIET = loud(320), quiet(192)
#: What ends a turn.
PAUSE = quiet(640)


def spoken_answer(text: str = "") -> list[EngineOutput]:
    """A sentence, and its sound in pieces of 100 ms, a word each."""
    words = (text.split() + [f"word{number}" for number in range(PIECES)])[:PIECES]
    script: list[EngineOutput] = [TextOutput(" ".join(words))]
    ramp = np.arange(RATE * PIECE_MS // 1000) / RATE
    for number, word in enumerate(words):
        begins = number * PIECE_MS
        sound = (ramp + number / 100).astype(np.float32)
        script.append(AudioOutput(sound, RATE, (Word(word, begins, begins + 90),)))
    return script


def hearing(*heard: Any, script: Sequence[Any] = (), **changes: Any) -> HearingEngine:
    return HearingEngine(script or spoken_answer(), heard=heard, **changes)


@pytest.fixture(autouse=True)
def probability(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The probability that every sound is a backchannel, by its sound; the test may change it."""
    probabilities = [0.95]
    monkeypatch.setattr(speech_watch, "backchannel_probability", lambda samples: probabilities[-1])
    return probabilities


@contextlib.asynccontextmanager
async def conversation(
    engine: HearingEngine, *, turns: dict[str, Any] | None = None, **fields: Any
) -> AsyncIterator[tuple[LiveServer, NativeClient]]:
    async with live_server(engine, **fields) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with native_client(server) as client:
            await client.configure(
                turn_detection={"type": "server_vad", "duck": True, **(turns or {})},
                output_audio={"sample_rate": RATE},
            )
            yield server, client


async def stream(client: NativeClient, audio: bytes) -> None:
    for start in range(0, len(audio), FRAME):
        await client.binary(audio[start : start + FRAME])


async def playing(client: NativeClient, *, until_ms: float = 500) -> str:
    """Asks, and waits until the answer sounds. Returns its request."""
    await client.say("talk to me")
    request_id: str = (await client.until("response_started"))["request_id"]
    while (await client.until("output_chunk")).get("start_ms", 0) < until_ms:
        pass
    return request_id


async def onset(client: NativeClient, sound: bytes = SHORT) -> dict[str, Any]:
    """Sounds over the answer: the uncertain onset."""
    await stream(client, quiet(96) + sound)
    frame = await client.until("speech_started")
    assert (frame["certain"], frame["request_id"]) == (False, None)
    return frame


def speech_frames(client: NativeClient) -> list[str]:
    return [frame["type"] for frame in client.frames if frame["type"].startswith("speech_")]


async def goes_on(client: NativeClient, request_id: str) -> None:
    """The answer comes whole, without a gap and nothing twice, and nothing of the sound is anywhere."""
    assert (await client.answer()).reason == "stop"
    pieces = [frame["start_ms"] for frame in client.seen("output_chunk") if "start_ms" in frame]
    assert pieces == [number * PIECE_MS for number in range(PIECES)]
    assert {frame["request_id"] for frame in client.seen("output_chunk")} == {request_id}
    assert not client.seen("error")


async def test_a_backchannel_is_dismissed_and_the_answer_goes_on() -> None:
    engine = hearing(TranscriptOutput("Mm-hm."), TextOutput("Pardon?"))
    async with conversation(engine) as (_, client):
        assert client.created["capabilities"]["duck"] is True
        request_id = await playing(client)
        began = await onset(client)
        await stream(client, QUIET)
        assert await client.until("speech_dismissed") == {
            "type": "speech_dismissed",
            "turn_id": began["turn_id"],
            "audio_ms": began["audio_ms"],
        }
        await stream(client, PAUSE)
        await goes_on(client, request_id)
        assert speech_frames(client) == ["speech_started", "speech_dismissed"]


async def test_words_are_confirmed_and_interrupt() -> None:
    engine = hearing(TranscriptOutput("What time is it?"), TextOutput("Noon."))
    async with conversation(engine) as (_, client):
        request_id = await playing(client)
        began = await onset(client, loud(900))
        confirmed = await client.until("speech_confirmed")
        assert (confirmed["turn_id"], confirmed["audio_ms"]) == (began["turn_id"], began["audio_ms"])
        cut = await client.answer()
        assert (cut.final["request_id"], cut.reason) == (request_id, "cancelled")
        await stream(client, PAUSE)
        answer = await client.answer()
        assert (answer.final["request_id"], answer.text) == (confirmed["request_id"], "Noon.")
        assert answer.final["turn_id"] == began["turn_id"]
        assert speech_frames(client) == ["speech_started", "speech_confirmed", "speech_stopped"]
        await client.configure(turn_detection=None, overlap=None)
        await client.say("and?")
        await client.answer()
        roles = [(one.role, one.text) for one in engine.requests[-1].history]
        assert [role for role, _ in roles] == ["user", "assistant", "user", "assistant"]
        assert roles[2:] == [("user", "What time is it?"), ("assistant", "Noon.")]
