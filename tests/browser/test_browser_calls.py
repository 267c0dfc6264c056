"""The page by WebRTC: the same conversation as over the WebSocket, by a call of the Realtime API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.chromium import DemoPage, chromium_path, demo_page, recording
from support.live_server import LiveServer, live_server
from support.speech_clips import WORDS, clip_bytes, silence

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.embedded.config import EmbeddedConfig
from omni_ws.engine.embedded.engine import EmbeddedEngine

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

CALL = {"connection": "webrtc"}
FORWARD = WORDS["goforward"]
TO_FORWARD = "I can't move. I'm only a voice."


@pytest.fixture
async def server() -> AsyncIterator[LiveServer]:
    chromium_path()
    async with live_server(EmbeddedEngine(EmbeddedConfig(voice=VoiceChoice.ESPEAK))) as running:
        yield running


async def connected_by(demo: DemoPage) -> str:
    return await demo.page.locator("#figure-connection").text_content() or ""


async def test_a_spoken_turn_and_one_that_interrupts(server: LiveServer, tmp_path: Path) -> None:
    pieces = (silence(1), clip_bytes("goforward"), silence(30))
    async with demo_page(microphone=recording(tmp_path / "said.wav", *pieces), settings=CALL) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        assert await connected_by(demo) == "WebRTC"
        await demo.page.locator("#talk").click()
        await demo.heard(FORWARD, turn=0)
        await demo.answered(TO_FORWARD, turn=0)
        await demo.in_state("listening")
        note = await demo.page.locator(".turn .note").first.inner_text()
        assert "first sound after" in note
        print("NOTE", note, (played:=await demo.played()).seconds, played.level)
        await demo.page.goto("about:blank")
