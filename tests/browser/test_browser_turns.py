"""Which turn an answer belongs to, and what a turn shows once it is over."""

from __future__ import annotations

import asyncio
import re

import pytest
from support.chromium import IN_BROWSER, demo_page
from support.embedded_engine import EmbeddedEngine
from support.live_server import live_server
from support.speech_clips import clip_bytes
from support.tcp_relay import tcp_relay

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.base import TextOutput, TranscriptOutput
from omni_ws.engine.fake import ScriptedEngine

pytestmark = IN_BROWSER

HOLD = {"mode": "hold"}


async def test_a_server_that_dies_while_it_speaks() -> None:
    """What the next one answers goes into the turn that it was asked in."""
    async with (
        live_server(EmbeddedEngine(voice=VoiceChoice.ESPEAK)) as first_server,
        live_server(EmbeddedEngine(voice=VoiceChoice.ESPEAK)) as next_server,
        tcp_relay(first_server.port) as relay,
        demo_page(expect_problems=True) as demo,
    ):
        await demo.open(f"http://127.0.0.1:{relay.port}/")
        await demo.write("Count to two hundred.")
        await demo.in_state("speaking")
        await demo.page.locator(".server .words", has_text="1").wait_for()
        relay.refusing = True
        relay.target_port = next_server.port
        relay.cut()
        await demo.in_state("away")
        first = demo.page.locator(".turn").first
        before = await first.locator(".server .words").inner_text()
        relay.refusing = False
        await demo.message("does not remember what was said before")
        await demo.write("What is three plus four?")
        assert await demo.answered(turn=1) == "That makes 7."
        await demo.in_state("ready")
        assert before
        assert await demo.answered(turn=0, state="failed") == before
        note = await first.locator(".note").inner_text()
        assert note.endswith("The connection was lost in the middle of this answer."), note


async def test_words_that_were_heard_stay_when_one_goes_on_speaking() -> None:
    """The request is cancelled before its transcript is settled: what stood there last is what was heard."""
    engine = ScriptedEngine([TranscriptOutput("turn the", interim=True), asyncio.Event().wait])
    async with live_server(engine) as server, demo_page(settings=HOLD) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        talk = demo.page.locator("#talk")
        await talk.press("Enter")
        await server.until(lambda: engine.active_requests == 1, "the spoken request")
        await talk.press("Enter")
        await demo.heard("turn the")
        await talk.press("Enter")
        await demo.answered(turn=0, state="stopped")
        heard = demo.page.locator(".turn").first.locator(".you")
        await heard.locator(".settled", has_text=re.compile("^turn the$")).wait_for()
        assert await heard.locator(".interim").text_content() == ""
        await talk.press("Enter")
        await demo.heard("turn the", turn=1)
        await demo.page.locator("#stop").click()
        await demo.in_state("ready")


@pytest.mark.parametrize("mode", ["hold", "open"])
async def test_what_is_written_while_one_speaks_is_a_turn_of_its_own(mode: str) -> None:
    engine = ScriptedEngine([TextOutput("fine")])
    async with live_server(engine) as server, demo_page(settings={"mode": mode}) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.locator("#talk").press("Enter")
        await demo.say(clip_bytes("librivox_ss_0870"))
        await demo.in_state("hearing")
        await server.until(lambda: engine.active_requests == 1, "the spoken request")
        for turn in (1, 2):
            await demo.write("how are you")
            assert await demo.answered(turn=turn) == "fine"
        await demo.answered(turn=0, state="stopped")
        assert await demo.page.locator(".turn .interim").first.inner_text() == "(not transcribed)"
