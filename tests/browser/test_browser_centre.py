"""The middle of the page: what stays in its place, the words of the moment, a greeting, and how near everything is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final

import pytest_asyncio
from support.chromium import IN_BROWSER, DemoPage, demo_page
from support.live_server import LiveServer, live_server
from support.scripted_engines import ReadingEngine, RetortEngine, WordEngine

from omni_ws.engine.base import TextOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.errors import EngineFailed

pytestmark = IN_BROWSER

#: Whoever comes for the first time.
FRESH: Final[dict[str, Any]] = {"log": False}
GREETING: Final = "Hello. What can I do for you?"
PLACES: Final = """() => ["#orb", "#talk", "#stop", "#text"].map((name) => {
  const { left, top, width, height } = document.querySelector(name).getBoundingClientRect();
  return [left, top, width, height];
})"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[LiveServer]:
    ears = WordEngine()
    ears._able = replace(ears.capabilities, languages=frozenset({"en", "es"}))
    engine = ComposedEngine(RetortEngine("It is so. " * 30), asr=ears, tts=ReadingEngine())
    async with live_server(engine, still_answers=False) as running:
        yield running


async def opened(demo: DemoPage, server: LiveServer) -> None:
    await demo.open(f"http://127.0.0.1:{server.port}/")
    await demo.page.locator("[data-say]").first.wait_for()


async def test_nothing_moves_from_the_first_view_to_the_last_word(server: LiveServer) -> None:
    """The words of the moment are those of the newest turn, with the word that sounds; the log is a key away."""
    async with demo_page(settings=FRESH) as demo:
        await opened(demo, server)
        before = await demo.page.evaluate(PLACES)
        await demo.write("what is it")
        live = demo.page.locator("#live")
        await live.locator(".live-said", has_text="what is it").wait_for()
        await demo.until(
            """() => [...(CSS.highlights.get("spoken") ?? [])].some((range) =>
              document.querySelector("#live .live-answer").contains(range.startContainer))"""
        )
        assert await demo.page.evaluate(PLACES) == before
        assert not await demo.page.locator("#welcome, #log").first.is_visible()
        marked = """() => [...(CSS.highlights.get("spoken") ?? [])].some((range) =>
          document.querySelector("#log").contains(range.startContainer))"""
        await demo.page.locator("#text").blur()
        await demo.page.keyboard.press("l")
        await demo.until(marked)
        await demo.page.keyboard.press("l")
        await demo.page.locator("#stop").click()
        await demo.in_state("ready")
        assert not await demo.page.evaluate(marked)
        assert await demo.page.evaluate(PLACES) == before
        await demo.page.keyboard.press("l")
        await demo.answered("It is so.", state="stopped")
        assert await demo.page.evaluate("JSON.parse(localStorage.getItem('omni_ws.settings')).log") is True


async def test_it_says_hello_once_when_somebody_begins_to_talk(server: LiveServer) -> None:
    async with demo_page(settings={**FRESH, "greeting": True}) as demo:
        await opened(demo, server)
        await demo.page.locator("#talk").click()
        await demo.page.locator("#live .live-answer", has_text=GREETING).wait_for()
        await demo.in_state("listening")
        for state in ("ready", "listening"):
            await demo.page.locator("#talk").click()
            await demo.in_state(state)
        await demo.page.locator("#open-log").click()
        assert await demo.page.locator(".turn").count() == 1
        assert await demo.answered() == GREETING
    async with demo_page(settings={**FRESH, "greeting": True, "mode": "hold"}) as demo:
        await opened(demo, server)
        await demo.page.locator("#talk").press("Enter")  # it does not talk over whoever holds the button
        await demo.in_state("hearing")
        assert await demo.page.locator("#live .live-answer").inner_text() == ""


async def test_everything_is_two_clicks_away(server: LiveServer) -> None:
    async with demo_page(settings=FRESH) as demo:
        await opened(demo, server)
        await demo.page.evaluate("window.clicks = 0; addEventListener('click', () => clicks++, true)")

        async def clicks() -> int:
            count: int = await demo.page.evaluate("clicks")
            await demo.page.evaluate("clicks = 0")
            return count

        # Another voice and another language, where they are chosen by the keyboard or a list that the system shows.
        await demo.page.locator("#voice-choice select").select_option("bell")
        await demo.page.locator("#language-choice select").select_option("es")
        assert await demo.page.evaluate("JSON.parse(localStorage.getItem('omni_ws.settings')).voice") == "bell"
        await demo.page.get_by_role("button", name="Look at something with me").click()
        await demo.page.locator("#camera[aria-pressed=true]").wait_for()
        assert await clicks() <= 2  # the suggestion presses the button of the camera
        await demo.page.locator("[data-say]").first.click()
        await demo.until_played(0.3)  # else there is nothing to see of it
        await demo.page.locator("#stop").click()
        await demo.in_state("ready")
        assert await clicks() == 2  # to ask, and to interrupt
        await demo.page.locator("#open-developer").click()
        await demo.page.locator("#waterfall .waterfall li", has_text="playing").wait_for()
        assert await clicks() == 1  # why it took so long
        await demo.page.locator("#close-developer").click()
        await clicks()
        await demo.page.locator("#open-settings").click()
        assert await demo.page.locator("#settings select[name=voice]").input_value() == "bell"
        assert await demo.page.locator("#settings select[name=language]").input_value() == "es"
        assert await demo.page.locator("#settings :is(select, input, textarea):visible").count() == 2


async def test_what_went_wrong_is_seen_while_the_log_is_closed() -> None:
    engine = ScriptedEngine([TextOutput("I think"), EngineFailed("the model fell over")])
    async with live_server(engine, expect_errors=True) as server, demo_page(settings=FRESH) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.write("hello")
        await demo.page.locator("#live .wrong", has_text="the model fell over").wait_for()


async def test_the_picture_of_the_moment_is_that_of_the_newest_question(server: LiveServer) -> None:
    """A turn that is spoken has its picture before its first word, with which it takes the place of the one before."""
    look = """async () => {
      const { LiveView } = await import("/browser/live-view.js");
      const picture = () => {
        const drawing = '<svg xmlns="http://www.w3.org/2000/svg"/>';
        return URL.createObjectURL(new Blob([drawing], { type: "image/svg+xml" }));
      };
      const answer = { state: "none", text: "", words: [], calls: [], annotations: [] };
      const turns = ["one", "two"].map((text, number) =>
        ({ number, kind: "spoken", user: { text, interim: "", done: true, images: [picture()] }, answer }));
      const [host, conversation] = [document.createElement("div"), { turns: [] }];
      const live = new LiveView(host, conversation);
      return turns.map((turn) => {
        conversation.turns.push(turn);
        live.show();
        return [...host.querySelectorAll("img")].map(({ src }) => src).join() === turn.user.images.join();
      });
    }"""
    async with demo_page() as demo:
        await opened(demo, server)
        assert await demo.page.evaluate(look) == [True, True]


async def test_a_microphone_that_is_plugged_in_can_be_used(server: LiveServer) -> None:
    devices = """
    window.plugged = [];
    const list = navigator.mediaDevices.enumerateDevices.bind(navigator.mediaDevices);
    navigator.mediaDevices.enumerateDevices = async () => [...(await list()), ...plugged];
    """
    async with demo_page(settings=FRESH) as demo:
        await demo.page.add_init_script(devices)
        await opened(demo, server)
        await demo.page.locator("#talk").click()
        await demo.in_state("listening")
        await demo.page.evaluate(
            """() => {
              plugged.push({ kind: "audioinput", deviceId: "headset", label: "A headset" });
              navigator.mediaDevices.dispatchEvent(new Event("devicechange"));
            }"""
        )
        await demo.message("A microphone was plugged in: A headset.")
        await demo.page.get_by_role("button", name="Use it").click()
        chosen = "() => JSON.parse(localStorage.getItem('omni_ws.settings')).microphone === 'headset'"
        await demo.until(chosen)
        await demo.in_state("listening")


async def test_the_edge_of_the_orb_is_the_spectrum_of_the_voice(server: LiveServer) -> None:
    """Of a tone, its own band is the highest; silence has none; without the samples the level moves all of them."""
    look = """async () => {
      const { bandsOf } = await import("/widget/spectrum.js");
      const sample = (frequency, seconds) => 9000 * Math.sin(2 * Math.PI * frequency * seconds);
      const tone = (frequency, rate) =>
        bandsOf(Int16Array.from({ length: rate / 40 }, (_, place) => sample(frequency, place / rate)), rate);
      const highest = (bands) => bands.indexOf(Math.max(...bands));
      return [
        [140, 450, 1000, 2600, 5000].map((frequency) => highest(tone(frequency, 16_000))),
        [140, 450, 1000, 2600, 5000].map((frequency) => highest(tone(frequency, 48_000))),
        Math.max(...bandsOf(new Int16Array(400), 16_000)),
        Math.max(...bandsOf(new Int16Array(0), 16_000)),
      ];
    }"""
    async with demo_page() as demo:
        await opened(demo, server)
        assert await demo.page.evaluate(look) == [[0, 2, 4, 6, 7], [0, 2, 4, 6, 7], 0, 0]


async def test_what_is_played_again_while_the_sound_wakes_is_played_once(server: LiveServer) -> None:
    look = """async () => {
      const { Replay } = await import("/browser/replay.js");
      const quiet = [];
      const { Sound } = await import("/client/sound.js");
      const client = Object.assign(new EventTarget(), { sound: new Sound(location.href) });
      const replay = new Replay(client, { quiet: (on) => quiet.push(on) });
      const turn = { sound: { user: [new Int16Array(48_000)] }, heardMs: null };
      await Promise.all([replay.play(turn, "user"), replay.play(turn, "user")]);
      replay.stop();
      return quiet;
    }"""
    async with demo_page() as demo:
        await opened(demo, server)
        assert await demo.page.evaluate(look) == [True, False, True, False]
