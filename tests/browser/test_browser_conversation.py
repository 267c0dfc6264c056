"""A person talks with the page: the real browser, the real engine, recorded speech."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support.chromium import IN_BROWSER, DemoPage, Played, demo_page
from support.embedded_engine import EmbeddedEngine
from support.live_server import LiveServer, live_server
from support.scripted_engines import ReadingEngine, RetortEngine, ToolCallingEngine, WordEngine
from support.speech_clips import WORDS, clip_bytes

from omni_ws.client import connect
from omni_ws.config.model import VoiceChoice
from omni_ws.engine.composed.engine import ComposedEngine

pytestmark = IN_BROWSER

#: What is answered to "go forward ten meters", the first time and the second.
TO_GOFORWARD = ("I can't move. I'm only a voice.", "I have no wheels and no legs. I can only talk.")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def started() -> AsyncIterator[LiveServer]:
    # One voice is enough for a page, and every machine has this one.
    async with live_server(EmbeddedEngine(voice=VoiceChoice.ESPEAK), still_answers=False) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def server(started: LiveServer) -> AsyncIterator[LiveServer]:
    """The running server; afterwards nothing of a test may be left in it."""
    yield started
    await started.check_empty()


def url(server: LiveServer) -> str:
    return f"http://127.0.0.1:{server.port}/"


async def say(demo: DemoPage, clip: str) -> None:
    """Hold the space bar until the words stand on the page, then wait for the whole answer."""
    await demo.page.keyboard.down("Space")
    await demo.say(clip_bytes(clip))
    await demo.heard(WORDS[clip])
    await demo.page.keyboard.up("Space")
    await demo.answered()
    await demo.in_state("ready")


async def test_two_spoken_turns(server: LiveServer, tmp_path: Path) -> None:
    words = WORDS["goforward"]
    async with demo_page(settings={"mode": "hold"}) as demo:
        await demo.open(url(server))
        await say(demo, "goforward")
        first = await demo.played()
        await say(demo, "goforward")
        assert await demo.page.locator(".turn").count() == 2
        for turn in (0, 1):
            assert words in await demo.page.locator(".turn").nth(turn).locator(".you").inner_text()
            assert await demo.answered(turn=turn) == TO_GOFORWARD[turn]
            note = await demo.note(turn)
            assert re.fullmatch(r"first sound after (\d+ ms|\d+\.\d s)", note), note
        async with saved_file(demo, ".wav") as sound, saved_file(demo, ".json") as text:
            await demo.page.locator("#save").click()
            await demo.page.locator("#save-all").click()
        async with saved_file(demo, ".txt") as words_alone:
            await demo.page.locator("#save").click()
            await demo.page.locator("#save-text").click()
        assert f"Answer: {TO_GOFORWARD[0]}\n\n".encode() in await read_download(words_alone, tmp_path / "saved.txt")
        saved = json.loads(await read_download(text, tmp_path / "saved.json"))
        wav = await read_download(sound, tmp_path / "saved.wav")
    assert all(words in turn["user"]["text"] for turn in saved["turns"])
    assert all(0 < turn["first_sound_ms"] < 10_000 for turn in saved["turns"])
    await check_sound(server, first, saved["turns"][0])
    heard = sum(turn["heard_ms"] for turn in saved["turns"]) / 1000
    assert wav[:4] == b"RIFF"
    # Both sides, and a pause behind each: at least what was heard and the words themselves.
    assert (len(wav) - 44) / 2 / first.rate > heard + 2 * 1.5


async def check_sound(server: LiveServer, played: Played, turn: dict[str, Any]) -> None:
    """All of the answer's sound was played, and all that was announced counts as heard, silence at its ends too."""
    answer = turn["answer"]
    assert turn["heard_ms"] == pytest.approx(answer["usage"]["output_audio_ms"], abs=5)
    async with connect(server.websocket_url, config={"task": "speech", "modalities": ["audio"]}) as session:
        read_aloud = await session.ask_text(answer["text"])
    assert read_aloud.sample_rate is not None
    samples = np.frombuffer(read_aloud.audio, "<i2").astype(np.float32) / np.float32(32768)
    sent = Played.within(samples, read_aloud.sample_rate)
    # A busy machine makes holes, and may not make it shorter.
    assert played.seconds > sent.seconds - 0.02
    assert played.without_holes.level == pytest.approx(sent.without_holes.level, rel=0.2)


def saved_file(demo: DemoPage, ending: str) -> Any:
    return demo.page.expect_event("download", lambda one: one.suggested_filename.endswith(ending))


async def read_download(waiting: Any, path: Path) -> bytes:
    await (await waiting.value).save_as(path)
    return await asyncio.to_thread(path.read_bytes)


async def test_an_answer_can_be_interrupted(server: LiveServer) -> None:
    async with demo_page(settings={"mode": "hold"}) as demo:
        await demo.open(url(server))
        await demo.write("Count to twenty.")
        await demo.in_state("speaking")
        await demo.until_played(0.3)
        await demo.page.locator("body").click(position={"x": 5, "y": 300})
        await demo.page.keyboard.press("Escape")
        await demo.in_state("ready")
        await demo.answered(state="stopped")
        note = await demo.note()
        assert re.search(r"stopped after \d+\.\d s", note), note
        before = await demo.played()
        await server.until(lambda: server.engine.active_requests == 0, "the engine to stop")
        # The next answer is whole, and nothing of the one before is in it.
        await demo.write("What is three plus four?")
        assert await demo.answered() == "That makes 7."
        await demo.in_state("ready")
        after = await demo.played()
        assert after.seconds > before.seconds
        tail = after.samples[len(before.samples) :]
        assert float(np.abs(tail[: after.rate // 100]).max()) < 0.01, "it went on after it was stopped"
        # A question can be changed: what came after it is gone, here and there.
        await demo.change_first_question("What is three plus five?")
        assert await demo.answered() == "That makes 8."
        assert await demo.page.locator(".turn").count() == 1
        await demo.page.locator("#new").click()
        await demo.page.locator("#welcome").wait_for()
        assert await demo.page.locator(".turn").count() == 0


async def test_speaking_interrupts(server: LiveServer) -> None:
    async with demo_page(settings={"mode": "hold"}) as demo:
        await demo.open(url(server))
        await demo.write("Count to twenty.")
        await demo.in_state("speaking")
        await demo.until_played(0.3)  # what is interrupted before it is heard is answered together with what follows
        await demo.page.locator("#talk").press("Enter")  # a tap: the turn goes on until the next one
        await demo.answered(turn=0, state="stopped")
        await demo.say(clip_bytes("goforward"))
        await demo.heard(WORDS["goforward"])
        await demo.page.locator("#talk").press("Enter")
        assert await demo.answered() == TO_GOFORWARD[0]
        await demo.in_state("ready")


async def test_pictures_go_with_what_is_written(tmp_path: Path) -> None:
    from PIL import Image

    picture = tmp_path / "red.png"
    Image.new("RGB", (640, 320), "red").save(picture)
    engine = EmbeddedEngine(voice=VoiceChoice.ESPEAK)
    engine.llm.name = "a model that sees"  # to rules no pictures are offered
    async with live_server(engine) as server, demo_page("--use-fake-ui-for-media-stream") as demo:
        await demo.open(url(server))
        await demo.page.locator("#image-file").set_input_files(picture)
        await demo.page.locator("#pictures img").wait_for()
        await demo.write("What do you see?")
        answer = await demo.answered()
        assert "red" in answer.lower(), answer
        assert await demo.page.locator(".you .images img").count() == 1
        await demo.page.locator("#camera").click()
        await demo.page.locator("#camera-view:not([hidden])").wait_for()
        await demo.page.locator("#camera[aria-pressed=true]").wait_for()
        # The screen takes its place, until the person ends that in the browser's own bar.
        await demo.page.locator("#screen").click()
        await demo.page.locator("#screen[aria-pressed=true]").wait_for()
        await demo.page.locator("#camera[aria-pressed=false]").wait_for()
        shown = "document.querySelector('#camera-view').srcObject.getVideoTracks()[0]"
        assert await demo.page.evaluate(f"{shown}.getSettings().displaySurface") in {"monitor", "window", "browser"}
        await demo.write("What do you see now?")
        await demo.answered(turn=1)
        assert await demo.page.locator(".turn").nth(1).locator(".images img").count() == 1
        await demo.page.evaluate(f"{shown}.dispatchEvent(new Event('ended'))")
        await demo.page.locator("#screen[aria-pressed=false]").wait_for()
        await demo.page.locator("#camera-view").wait_for(state="hidden")


async def test_one_chooses_the_language_that_one_speaks() -> None:
    asr, llm = WordEngine(), RetortEngine("hola")
    asr._able = replace(asr.capabilities, languages=frozenset({"de", "en", "es"}), keywords=True)
    async with live_server(ComposedEngine(llm, asr=asr), still_answers=False) as server, demo_page() as demo:
        await demo.open(url(server))
        await demo.open_settings()
        chosen = demo.page.locator("select[name=language]")
        choices = await chosen.locator("option").all_inner_texts()
        assert choices == ["Any language: tell by the sound", "English", "German", "Spanish"]
        await chosen.select_option("es")
        await demo.page.get_by_label("Words to expect").fill("Zyntrix")
        await demo.page.locator("#close-settings").click()
        await demo.write("qué hora es")
        await demo.answered()
        assert (llm.requests[0].language, llm.requests[0].expected) == ("es", "Zyntrix.")


async def test_a_model_uses_the_tool_of_the_page() -> None:
    llm = ToolCallingEngine()
    engine = ComposedEngine(llm, tts=ReadingEngine())
    async with live_server(engine, still_answers=False) as server, demo_page() as demo:
        await demo.open(url(server))
        await demo.write("What time is it?")
        assert re.fullmatch(r"It is .+ at .+ \(.+\)\.", await demo.answered(turn=1))
        await demo.in_state("ready")
        assert "used local_time" in await demo.page.locator(".turn").nth(0).locator(".note").inner_text()
        assert not await demo.page.locator(".turn").nth(1).locator(".you").is_visible()
        await demo.page.locator(".call summary", has_text="local_time").first.click()
        assert "(" in await demo.page.locator(".call pre").last.inner_text()
        assert llm.requests[0].tools[0]["function"]["name"] == "local_time"


async def test_a_model_that_calls_without_end_gets_no_more_results() -> None:
    llm = ToolCallingEngine()
    llm.restless = True
    async with live_server(llm, still_answers=False) as server, demo_page() as demo:
        await demo.open(url(server))
        await demo.write("Go on")
        await demo.answered(turn=5)
        await demo.in_state("ready")
        assert len(llm.requests) == 6
        await demo.write("Once more")
        await demo.page.locator(".turn").nth(7).wait_for()
