"""An open microphone, where the server finds the turns and speech interrupts it; and a network that breaks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from support.chromium import IN_BROWSER, demo_page, hear_screen_reader, said_by_screen_reader
from support.embedded_engine import EmbeddedEngine
from support.live_server import LiveServer, live_server
from support.scripted_engines import HearingEngine
from support.speech_clips import WORDS, clip_bytes
from support.tcp_relay import tcp_relay

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.base import AudioOutput, TextOutput
from omni_ws.transport.routes import operations

pytestmark = IN_BROWSER

OPEN = {"mode": "open"}
FORWARD = WORDS["goforward"]
TO_FORWARD = "I can't move. I'm only a voice."
#: The recogniser is not sure of the first word.
CARDS = "of clubs"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def started() -> AsyncIterator[LiveServer]:
    # One voice is enough for a page, and every machine has this one.
    async with live_server(
        EmbeddedEngine(voice=VoiceChoice.ESPEAK), streaming_input={"resume_grace_sec": 30}
    ) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def server(started: LiveServer) -> AsyncIterator[LiveServer]:
    """The running server; afterwards nothing of a test may be left in it."""
    yield started
    await started.check_empty()


async def test_two_turns_without_touching_anything(server: LiveServer) -> None:
    """A screen reader says what somebody's hand has done, and is silent while one of both speaks."""
    async with demo_page(settings=OPEN) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await hear_screen_reader(demo.page)
        await demo.page.locator("#talk").click()
        await demo.say(clip_bytes("goforward"))
        await demo.heard(FORWARD, turn=0)
        await demo.answered(TO_FORWARD, turn=0)
        await demo.in_state("listening")
        await demo.say(clip_bytes("cards_001"))
        await demo.heard(CARDS, turn=1)
        await demo.answered("I don't know what to say to that.", turn=1)
        await demo.in_state("listening")
        played = await demo.played()
        assert "first sound after" in await demo.note(turn=0)
        assert await said_by_screen_reader(demo.page) == ["Listening"]
        await demo.page.keyboard.press("m")
        await demo.in_state("muted")
        await demo.page.keyboard.press("m")
        await demo.page.locator("#talk").click()
        await demo.in_state("ready")
        assert await said_by_screen_reader(demo.page) == ["Listening", "Muted", "Listening", "Ready"]
        assert await demo.page.locator(".turn").count() == 2
    assert played.level > 0.01


async def test_speech_interrupts_an_answer(server: LiveServer) -> None:
    async with demo_page(settings=OPEN) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.interrupt_by_speech(clip_bytes("goforward"), FORWARD, TO_FORWARD)


async def test_an_answer_goes_on_after_a_voice_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece of it is played, and nothing is left of what interrupted it."""
    monkeypatch.setattr("omni_ws.service.conversation.interrupted.MAX_HOLD_SEC", 1000.0)  # a busy machine speaks slowly
    levels = [number / 100 for number in range(1, 61)]
    pieces = [AudioOutput(np.full(2400, level, np.float32), 24_000) for level in levels]
    engine = HearingEngine([TextOutput("It goes on."), *pieces])
    async with live_server(engine) as server, demo_page(settings={**OPEN, "overShortWords": False}) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.write("Talk to me.")
        await demo.until_played(0.3)
        await demo.page.locator("#talk").click()
        await demo.say(clip_bytes("goforward"))
        await demo.answered(turn=0, state="held")
        assert await demo.answered(turn=0) == "It goes on."
        await demo.in_state("listening")
        played = await demo.played()
        assert len(engine.requests) == 2
        assert await demo.page.locator(".turn:visible").count() == 1
        assert "stopped" not in await demo.page.locator(".turn .note").first.inner_text()
        for level in levels:
            assert np.count_nonzero(np.abs(played.samples - level) < 0.002) / played.rate > 0.08, level


async def test_a_broken_connection_is_resumed(server: LiveServer) -> None:
    """In the middle of a sentence, and again in the middle of its answer: nothing is lost."""
    page = demo_page(settings={"mode": "hold"}, expect_problems=True)
    async with tcp_relay(server.port) as relay, page as demo:
        await demo.open(f"http://127.0.0.1:{relay.port}/")
        await demo.page.keyboard.down("Space")
        await demo.say(clip_bytes("goforward"))
        await demo.heard("go forward")
        relay.cut()
        await demo.message("Connected again. Nothing was lost.")
        await demo.heard(FORWARD)
        await demo.page.keyboard.up("Space")
        assert await demo.answered() == TO_FORWARD
        await demo.in_state("ready")
        whole = await demo.played()
        await demo.write("Count to eight.")
        await demo.in_state("speaking")
        relay.cut()
        await demo.answered("8")
        await demo.in_state("ready")
        played = await demo.played()
        assert await demo.page.locator(".server[data-state=done]").count() == 2
        assert played.seconds > whole.seconds + 2


async def test_a_microphone_that_is_off_is_neither_muted_nor_spoken_into() -> None:
    async with live_server() as server, demo_page(settings={"mode": "open"}) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        mute, invitation = demo.page.locator("#mute"), demo.page.locator("#invitation")
        assert await mute.is_disabled()
        assert await invitation.inner_text() == "Press the button and speak."
        await demo.page.keyboard.press("m")
        assert await mute.get_attribute("aria-pressed") == "false"
        await demo.page.locator("#talk").click()
        await demo.in_state("listening")
        assert await invitation.inner_text() == "Say something."
        await demo.page.keyboard.press("m")
        await demo.in_state("muted")
        await mute.click()
        await demo.in_state("listening")
        await mute.click()
        await demo.in_state("muted")
        await demo.page.locator("#talk").click()
        await demo.in_state("ready")
        assert await mute.is_disabled()
        assert await mute.get_attribute("aria-pressed") == "false"
        await demo.page.locator("#talk").click()
        await demo.in_state("listening")  # who begins anew is heard
        await demo.page.locator("#talk").click()
        await demo.in_state("ready")


async def test_the_screen_may_go_dark_once_nobody_is_listened_to(server: LiveServer) -> None:
    """However long the browser takes to keep it lit."""
    slow = """window.locks = [];
    const request = async () => {
      const lock = { released: false, release: async () => (lock.released = true) };
      await new Promise((grant) => locks.push({ lock, grant }));
      return lock;
    };
    Object.defineProperty(navigator, "wakeLock", { value: { request } });"""
    lit = "locks.map(({ lock }) => lock.released)"
    async with demo_page(settings=OPEN) as demo:
        await demo.page.add_init_script(slow)
        await demo.open(f"http://127.0.0.1:{server.port}/")
        talk = demo.page.locator("#talk")
        for state in ("listening", "ready", "listening"):
            await talk.click()
            await demo.in_state(state)
        await demo.page.evaluate("locks.forEach(({ grant }) => grant())")
        assert await demo.page.evaluate(lit) == [False]
        await talk.click()
        await demo.in_state("ready")
        assert await demo.page.evaluate(lit) == [True]
        await talk.click()
        await demo.in_state("listening")
        await talk.click()
        await demo.in_state("ready")
        await demo.page.evaluate("locks.forEach(({ grant }) => grant())")
        assert await demo.page.evaluate(lit) == [True, True]


async def test_a_closed_microphone_leaves_nothing_on_the_audio_thread(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each time that it is opened would cost something until the page is left."""
    files = dict(operations.page_files())
    worklet = files["client/capture-worklet.js"]
    silent, tells = b"if (channels === 0) return true;", b"if (channels === 0) return this.port.postMessage(0), true;"
    assert silent in worklet.content
    content = worklet.content.replace(silent, tells)
    files["client/capture-worklet.js"] = operations.PageFile.of(content, worklet.media_type)
    monkeypatch.setattr(operations, "page_files", lambda: files)
    counts = """window.pieces = window.idle = 0;
    window.AudioWorkletNode = class extends AudioWorkletNode {
      constructor(context, name, options) {
        super(context, name, options);
        if (name === "capture") this.port.addEventListener("message", ({ data }) => (data ? pieces++ : idle++));
      }
    };"""
    more = "(count) => pieces >= count"
    async with demo_page(settings=OPEN) as demo:
        await demo.page.add_init_script(counts)
        await demo.open(f"http://127.0.0.1:{server.port}/")
        talk = demo.page.locator("#talk")
        for state in ("listening", "ready", "listening", "ready", "listening"):
            await talk.click()
            await demo.in_state(state)
        pieces = await demo.page.evaluate("pieces")
        await demo.until(more, pieces + 10)
        idle = await demo.page.evaluate("idle")
        await demo.until(more, pieces + 50)
        assert await demo.page.evaluate("idle") == idle
