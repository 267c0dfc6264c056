"""The settings that concern the person's own voice and the page's tools: the level of the microphone, what was said
again, switches."""

from __future__ import annotations

from support.chromium import IN_BROWSER, demo_page
from support.embedded_engine import EmbeddedEngine
from support.live_server import live_server
from support.scripted_engines import CapableEngine, ToolCallingEngine
from support.speech_clips import clip_bytes

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.base import TextOutput
from omni_ws.engine.fake import CAPABILITIES

pytestmark = IN_BROWSER

#: Keeps the tracks of every microphone that the page opens.
_KEEP_TRACKS = """
window.tracks = [];
const open = navigator.mediaDevices.getUserMedia;
navigator.mediaDevices.getUserMedia = async function (wanted) {
  const stream = await open.call(this, wanted);
  tracks.push(...stream.getTracks());
  return stream;
};
"""


async def test_the_settings_show_the_level_of_the_microphone() -> None:
    async with live_server() as server, demo_page(device=True) as demo:
        await demo.page.add_init_script(_KEEP_TRACKS)
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.open_settings()
        await demo.until("() => document.querySelector('#input-level').value > 0.1")  # Chromium's own device beeps
        await demo.page.locator("#close-settings").click()
        await demo.until("() => tracks.length === 1 && tracks[0].readyState === 'ended'")
        assert await demo.page.evaluate("document.querySelector('#input-level').value") == 0
        # Who talks by then goes on talking.
        await demo.open_settings()
        await demo.until("() => document.querySelector('#input-level').value > 0.1")
        await demo.page.evaluate("document.querySelector('#talk').click()")
        await demo.in_state("hearing", "listening")
        await demo.page.locator("#close-settings").click()
        await demo.until("() => document.querySelector('#input-level').value === 0")
        assert await demo.page.evaluate("tracks.at(-1).readyState") == "live"


async def test_no_microphone_is_asked_for_in_the_settings() -> None:
    async with live_server() as server, demo_page(allow=()) as demo:
        await demo.page.add_init_script(_KEEP_TRACKS)
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.locator("#open-settings").click()
        await demo.page.locator("#close-settings").click()
        assert await demo.page.evaluate("tracks.length") == 0
        assert await demo.page.locator(".message").count() == 0


async def test_what_was_said_can_be_heard_again() -> None:
    engine = EmbeddedEngine(voice=VoiceChoice.ESPEAK)
    page = demo_page(settings={"mode": "open", "answerWith": "text"})
    async with live_server(engine) as server, page as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.locator("#talk").click()
        await demo.say(clip_bytes("goforward"))
        await demo.answered()
        assert (await demo.played()).seconds == 0
        await demo.page.get_by_role("button", name="Hear what was said").click()
        await demo.in_state("muted")
        await demo.until_played(1.5)
        await demo.in_state("listening")
        assert (await demo.played()).level > 0.01
        assert await demo.page.locator(".turn").count() == 1


async def test_a_tool_is_switched_off() -> None:
    llm = ToolCallingEngine()
    async with live_server(llm, still_answers=False) as server, demo_page() as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.open_settings()
        await demo.page.get_by_role("checkbox", name="Look at the clock").uncheck()
        await demo.page.locator("#close-settings").click()
        await demo.write("What time is it?")
        await demo.answered()
        await demo.page.reload()
        await demo.in_state("ready")
        await demo.write("And now?")
        await demo.answered()
        assert all(not request.tools for request in llm.requests)


async def test_words_to_expect_and_how_to_say_words_are_told() -> None:
    engine = CapableEngine(
        [TextOutput("yes")], tasks=CAPABILITIES.tasks, output_modalities=CAPABILITIES.output_modalities
    )
    async with live_server(engine) as server, demo_page() as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.open_settings()
        too_long = "a" * 65
        await demo.page.get_by_label("Words to expect").fill(f"Siobhan Ng\n\n Zyntrix \nZyntrix\n{too_long}\n")
        await demo.page.get_by_label("How to say words").fill(
            f"nginx = engine x\na=b=c\nno sign\n= x\nx =\n{too_long} = x"
        )
        await demo.page.locator("#close-settings").click()
        await demo.write("one")
        await demo.answered("yes")
        await demo.open_settings()
        await demo.page.get_by_label("How to say words").fill("nginx = engine ecks")
        await demo.page.get_by_label("Words to expect").fill("")
        await demo.page.locator("#close-settings").click()
        await demo.write("two")
        await demo.until("() => document.querySelectorAll('.you').length === 2")
        await demo.in_state("ready")
        await demo.page.reload()
        await demo.in_state("ready")
        assert await demo.page.locator("textarea[name=lexicon]").input_value() == "nginx = engine ecks"
        told = [(request.expected, request.lexicon) for request in engine.requests]
        assert told == [
            ("Siobhan Ng, Zyntrix.", {"nginx": "engine x", "a": "b=c"}),
            ("", {"nginx": "engine ecks"}),
        ]


async def test_what_the_server_takes_no_words_for_is_not_offered() -> None:
    async with live_server(CapableEngine(keywords=False, lexicon=False)) as server, demo_page() as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.open_settings()
        await demo.page.get_by_label("Instructions").wait_for()
        for label in ("Words to expect", "How to say words"):
            assert not await demo.page.get_by_label(label).is_visible()
