"""``/v1/live/sessions``: how a session starts, talks and ends."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from support import inline_workers
from support.inline_workers import inline
from support.live_client import live_client
from support.live_server import live_server

from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput
from omni_ws.engine.fake import ScriptedEngine

pytestmark = pytest.mark.virtual_clock

loud, quiet = partial(inline_workers.loud, khz=24), partial(inline_workers.quiet, khz=24)
ANSWER = (
    TranscriptOutput("go forward"),
    TextOutput("I go"),
    AudioOutput(np.full(2400, 0.25, np.float32), 24_000),
)


async def test_a_spoken_turn_is_answered() -> None:
    async with live_server(ScriptedEngine(ANSWER)) as server, live_client(inline(server)) as client:
        session = await client.start(instructions="Be brief.")
        assert session["id"].startswith("live_")
        await client.append(quiet(96) + loud(320) + quiet(640))
        said = await client.until("session.output_transcript.delta")
        assert client.heard() == "go forward"
        assert said["delta"] == "I go"
        closed = await client.end()
        assert closed["reason"] == "close_requested"
