"""The server takes its own echo out of an open microphone: real speech, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from support.capable_engine import HearingEngine
from support.echoing_client import EchoingClient, Room
from support.inline_workers import InlineWorkers
from support.live_server import live_server
from support.native_client import native_client
from support.speech_clips import SAMPLE_RATE, clip_samples

from omni_ws.audio.pcm import Samples, resampled
from omni_ws.audio.vad import SpeechDetector
from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput

pytestmark = pytest.mark.virtual_clock

RATE = 24_000
LEVEL = 0.08
PIECE = RATE // 10
ANSWER_SEC = 9


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


@pytest.mark.parametrize("gain_db", [-20, -6])
@pytest.mark.parametrize("delay_ms", [40, 120, 250])
async def test_no_self_interruption(gain_db, delay_ms):
    async with in_a_room(Room(delay_ms, gain_db)) as (person, _):
        await asyncio.sleep(ANSWER_SEC + 1)
        print(person.interruptions)
        assert person.interruptions == []
