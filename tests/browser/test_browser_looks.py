"""How the page looks and reads: small screens, both colour schemes, names for screen readers, keys."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

from PIL import Image
from support.chromium import IN_BROWSER, DemoPage, demo_page
from support.growing_llm import OFFERED, Mind, auto
from support.live_server import live_server
from support.scripted_engines import ReadingEngine, RetortEngine, ToneEngine, WordEngine

from omni_ws.core.chunks import FinishReason, UrlCitation, Usage
from omni_ws.engine.base import Finished, TextOutput, TranscriptOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.engine.llm.rules_engine import RulesEngine
from omni_ws.weights import Progress

pytestmark = IN_BROWSER

LONG = "Donaudampfschifffahrtsgesellschaft" * 4 + " and some shorter words behind it"

#: WCAG's contrast of each text on the page against the first background behind it.
_CONTRASTS = """() => {
  const luminance = (colour) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue] = [...canvas.getImageData(0, 0, 1, 1).data].map((byte) => {
      const part = byte / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const { backgroundColor } = getComputedStyle(node);
      if (backgroundColor !== "rgba(0, 0, 0, 0)") return backgroundColor;
    }
    return "white";
  };
  const found = {};
  for (const node of document.querySelectorAll("h1, h2, p, span, b, kbd, button")) {
    const own = [...node.childNodes].filter((child) => child.nodeType === 3 && child.data.trim());
    if (!own.length || !node.checkVisibility() || node.matches(":disabled, :disabled + span, .for-readers")) continue;
    const [light, dark] = [luminance(getComputedStyle(node).color), luminance(behind(node))].sort((a, b) => b - a);
    found[own[0].data.trim()] = (light + 0.05) / (dark + 0.05);
  }
  return found;
}"""

_WIDTHS = "[...document.querySelectorAll('*')].map((one) => one.scrollWidth)"


async def conversation(demo: DemoPage, port: int) -> None:
    await demo.open(f"http://127.0.0.1:{port}/")
    await demo.write(LONG)
    await demo.answered("shorter")


async def test_a_fresh_page() -> None:
    """It can be installed: Chromium reads the manifest under the page's policy and finds nothing that is missing. Every
    control has a name, and where there is no advice there is no room for it."""
    async with live_server() as server, demo_page() as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        devtools = await demo.page.context.new_cdp_session(demo.page)
        manifest = await devtools.send("Page.getAppManifest")
        assert manifest["errors"] == []
        assert manifest["manifest"]["startUrl"] == f"http://127.0.0.1:{server.port}/?listen"
        problems = await devtools.send("Page.getInstallabilityErrors")
        # The tests' browser has no profile that lasts.
        assert {one["errorId"] for one in problems["installabilityErrors"]} <= {"in-incognito"}
        assert await demo.page.locator("#who").inner_text() == "Heard and answered and spoken by fake."
        assert not await demo.page.locator("#advice").is_visible()
        assert not await demo.page.locator("#lacks").is_visible()
        await demo.open_settings()
        nameless = await demo.page.evaluate(
            """[...document.querySelectorAll("button, input:not([hidden]), select, textarea, canvas, video")]
              .filter((one) => !one.closest("[aria-hidden=true]"))
              .filter((one) => !one.getAttribute("aria-label") && !one.textContent.trim())
              .filter((one) => !one.labels?.[0]?.textContent.trim())
              .map((one) => one.outerHTML)"""
        )
        assert nameless == []


async def test_a_narrow_screen_needs_no_scrolling_sideways_and_the_newest_line_stays_in_sight() -> None:
    """Also where the keyboard of a phone takes half of the screen."""
    async with live_server() as server, demo_page(viewport={"width": 360, "height": 640}) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        assert max(await demo.page.evaluate(_WIDTHS)) <= 360
        await demo.open_settings()
        assert max(await demo.page.evaluate(_WIDTHS)) <= 360
        await conversation(demo, server.port)
        assert max(await demo.page.evaluate(_WIDTHS)) <= 360
        for place in ("#talk", "#text", "#stop", "#mute", "#open-settings", "#save"):
            box = await demo.page.locator(place).bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360
            assert box["y"] + box["height"] <= 640
            assert min(box["width"], box["height"]) >= 44, f"{place} is too small for a finger"
        for line in ("one", "two", "three"):
            await demo.write(line)
            await demo.answered(line)
        await demo.page.set_viewport_size({"width": 360, "height": 420})
        await demo.until(
            """() => {
              const log = document.querySelector("#log");
              return innerHeight === 420 && log.scrollHeight - log.scrollTop - log.clientHeight < 2;
            }"""
        )
        await demo.write("six")
        await demo.answered("six")
        seen = """() => {
          const [log, last] = ["#log", ".turn:last-child .server"].map((one) => document.querySelector(one));
          return last.getBoundingClientRect().bottom <= log.getBoundingClientRect().bottom;
        }"""
        await demo.until(seen)


async def test_long_lines_and_little_room_leave_everything_in_sight() -> None:
    """A phone with an answer of code, and a laptop at 200 %."""
    code = f"- {'some words ' * 8}\n\n```\n{'wide = 1; ' * 20}\n```"
    settings = {"answerWith": "text"}
    async with (
        live_server(ScriptedEngine([TextOutput(code)])) as server,
        demo_page(viewport={"width": 360, "height": 740}, settings=settings) as demo,
    ):
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.write("code")
        await demo.answered("some words")
        end = "(found) => Math.max(...found.map((one) => one.getBoundingClientRect().right))"
        assert await demo.page.locator(".turn, .server, li, pre").evaluate_all(end) <= 360
        await demo.page.set_viewport_size({"width": 640, "height": 400})
        for mode in ("open", "hold"):
            await demo.page.locator(f"#mode-{mode}").evaluate("(mode) => mode.click()")
            boxes = [await demo.page.locator(place).bounding_box() for place in ("#mute", "#talk", "#stop", "#write")]
            for left, right in pairwise(box for box in boxes if box):
                assert left["x"] + left["width"] <= right["x"]


#: The word that sounds is in the part of the conversation that is seen, and more stands below that.
_READS_ALONG = """() => {
  const [word] = CSS.highlights.get("spoken") ?? [];
  const log = document.querySelector("#log");
  if (!word || log.scrollHeight - log.scrollTop - log.clientHeight < 100) return false;
  const [seen, line] = [log, word].map((one) => one.getBoundingClientRect());
  return line.top >= seen.top && line.bottom <= seen.bottom && log.scrollTop > 0;
}"""


async def test_the_word_that_sounds_stays_in_sight_until_it_is_cut_off() -> None:
    engine = ComposedEngine(RetortEngine("some words " * 300), asr=WordEngine(), tts=ReadingEngine())
    async with live_server(engine) as server, demo_page(viewport={"width": 360, "height": 740}) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.evaluate(
            """() => {
              const status = document.querySelector("#status");
              window.said = [];
              new MutationObserver(() => said.push(status.textContent)).observe(status, { childList: true });
            }"""
        )
        await demo.write("read")
        # At once, by the page itself: a busy machine may come back only when all has been read.
        await demo.until(f"() => ({_READS_ALONG})() && (document.querySelector('#stop').click(), true)")
        await demo.answered(state="stopped")
        await demo.until("() => said.includes('Interrupted')")
        marked = """(within) => ["cut", "unheard"].map((name) => String([...CSS.highlights.get(name)].find((range) =>
          document.querySelector(within).contains(range.startContainer))))"""
        last, rest = await demo.page.evaluate(marked, "#log")
        assert [last, rest] == await demo.page.evaluate(marked, "#live")
        assert last in {"some", "words"}
        assert rest.strip()


async def test_all_text_can_be_read() -> None:
    """In both colour schemes, before a conversation and within."""
    async with live_server() as server, demo_page(reduced_motion="reduce") as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        for begun in (False, True):
            if begun:
                await conversation(demo, server.port)
            for scheme in ("light", "dark"):
                await demo.page.emulate_media(color_scheme=scheme)
                found = await demo.page.evaluate(_CONTRASTS)
                assert len(found) > 8
                poor = {text: round(ratio, 2) for text, ratio in found.items() if ratio < 4.5}
                assert not poor, (begun, scheme)
                paper = await demo.page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (sum(map(int, paper[4:-1].split(","))) < 3 * 128) == (scheme == "dark")


async def test_the_centre_moves_and_stands_still_on_request() -> None:
    """No frames at all where less motion is wanted, nor while nothing goes on."""
    async with live_server(ToneEngine()) as server, demo_page(reduced_motion="reduce") as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.write("tone")
        await demo.answered()
        await demo.in_state("ready")
        orb = "() => document.querySelector('#orb').orb.cost"
        still = await demo.page.evaluate(orb)
        frames = "const frame = () => (--left ? requestAnimationFrame(frame) : go()); frame();"
        await demo.page.evaluate(f"new Promise((go) => {{ let left = 20; {frames} }})")
        assert (await demo.page.evaluate(orb))["frames"] - still["frames"] <= 1
        await demo.page.emulate_media(reduced_motion="no-preference")
        await demo.write("tone")
        await demo.answered(turn=1)
        assert (await demo.page.evaluate(orb))["frames"] > still["frames"]
        await demo.in_state("ready")
        stands = "last === (last = document.querySelector('#orb').orb.cost.frames) ? (same += 1) : (same = 0)"
        frames = (
            f"const frame = () => (({stands}) >= 20 || !--left ? go(left) : requestAnimationFrame(frame)); frame();"
        )
        assert await demo.page.evaluate(f"new Promise((go) => {{ let last = -1, same = 0, left = 600; {frames} }})")


#: The levels of an answer to what was written: the server's side alone has any.
_LOUD_BELOW_THE_LINE = """() => {
  const canvas = document.querySelector("#levels");
  const { width, height } = canvas;
  const half = Math.floor(height / 2) - 2;
  if (half < 1) return false;
  const inked = (top) => canvas.getContext("2d").getImageData(0, top, width, half).data.some((byte) => byte > 0);
  return !inked(0) && inked(height - half);
}"""


async def test_developers_see_frames_latency_and_the_same_request() -> None:
    async with live_server(ToneEngine()) as server, demo_page() as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.locator("#open-developer").click()
        await demo.write("it's a tone")
        await demo.answered()
        await demo.page.locator("#waterfall .waterfall li", has_text="playing").wait_for()
        await demo.until(_LOUD_BELOW_THE_LINE)
        assert (await demo.page.locator("#waterfall-median").inner_text()).startswith("Median of 1: ")
        await demo.page.locator("#wire-filter").fill('"final":true')
        frame = demo.page.locator("#wire details")
        await demo.until("() => document.querySelectorAll('#wire details').length === 1")
        await frame.click()
        assert '"finish_reason": "stop"' in await frame.locator("pre").inner_text()
        assert "it'\\''s a tone" in await demo.page.locator("#request").inner_text()
        for language, call in (("python", 'session.ask_text("it\'s a tone")'), ("js", 'client.write("it\'s a tone")')):
            await demo.page.locator("#request-language").select_option(language)
            await demo.page.locator("#request", has_text=call).wait_for()


async def test_a_frame_that_is_read_stays_open_while_others_come() -> None:
    async with live_server(ToneEngine()) as server, demo_page() as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.locator("#open-developer").click()
        created = demo.page.locator("#wire details", has_text="session_created")
        say = await demo.page.locator("[data-say]").first.text_content()
        await created.locator("summary").focus()
        await demo.page.keyboard.press("Enter")
        await created.locator("pre").wait_for()
        for number in range(2):
            await demo.page.evaluate("document.querySelector('[data-say]').click()")
            await demo.answered(turn=number)
            await demo.page.locator("#waterfall li > details").nth(number).wait_for()
        assert await created.locator("pre").is_visible()
        assert "session_created" in await demo.page.evaluate("document.activeElement.textContent")
        rows = await demo.page.locator("#waterfall .title").all_inner_texts()
        assert rows == [say, say]
        assert await demo.page.locator("#waterfall details[open]").count() == 1


async def test_what_is_said_to_screen_readers() -> None:
    engine = ScriptedEngine([TranscriptOutput("hello"), TextOutput("Good morning.")])
    async with live_server(engine) as server, demo_page(settings={"answerWith": "text"}) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        assert await demo.page.locator("#status").inner_text() == "Ready"
        await demo.write("hello")
        await demo.page.locator("#announcement", has_text="Good morning.").wait_for(state="attached")
        names = await demo.page.locator(".turn").aria_snapshot()
        assert "You:" in names
        assert "Server:" in names


async def test_keys() -> None:
    async with live_server() as server, demo_page(settings={"mode": "hold"}) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.keyboard.press("/")
        await demo.page.keyboard.type("a b /m")  # in a text these are letters
        assert await demo.page.locator("#text").input_value() == "a b /m"
        assert await demo.page.locator(".turn").count() == 0
        await demo.page.locator("#text").blur()
        # A tap begins a turn, the next one ends it. The key is up before the page has looked at the press.
        await asyncio.gather(demo.page.keyboard.down("Space"), demo.page.keyboard.up("Space"))
        await demo.in_state("hearing")
        await demo.page.keyboard.press("Space")
        await demo.answered()
        await demo.page.locator("#open-settings").click()
        await demo.page.keyboard.press("Escape")
        assert not await demo.page.locator("#settings").is_visible()


async def test_several_pictures_are_chosen_and_one_is_taken_back(tmp_path: Path) -> None:
    files = [tmp_path / f"{colour}.png" for colour in ("red", "green", "blue")]
    for file in files:
        Image.new("RGB", (40, 30), file.stem).save(file)
    async with live_server() as server, demo_page() as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.locator("#image-file").set_input_files(files)
        waiting = demo.page.get_by_role("button", name="Remove this picture")
        await waiting.nth(2).wait_for()
        assert await waiting.first.get_attribute("title") == "Remove this picture"
        assert await waiting.first.evaluate("(one) => getComputedStyle(one, '::after').content") == '"×"'
        await waiting.first.click()
        await demo.until("() => document.querySelectorAll('#pictures button').length === 2")
        await demo.write("look")
        await demo.answered("look")
        assert await demo.page.locator(".you .images img").count() == 2


async def test_settings_are_remembered_and_told() -> None:
    engine = ScriptedEngine([TextOutput("yes")])
    async with live_server(engine) as server, demo_page() as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.open_settings()
        await demo.page.locator("select[name=task]").select_option("speech")
        await demo.page.locator("textarea[name=instructions]").fill("Be brief.")
        await demo.page.locator("#close-settings").click()
        await demo.page.reload()
        await demo.in_state("ready")
        await demo.write("do you know")
        await demo.answered("yes")
        (asked,) = engine.requests
        assert (asked.task, asked.instructions) == ("speech", "Be brief.")


async def test_a_model_is_fetched_by_a_button_and_answers_on_the_same_page() -> None:
    mind = Mind(planned=OFFERED, told=(Progress("qwen", "model", 300_000_000, 1_100_000_000),))
    async with live_server(ComposedEngine(auto(mind))) as server, demo_page() as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        page = demo.page
        await page.locator("#who", has_text="Answered by rules.").wait_for()
        await page.locator("#coming-fetch").click()
        await page.locator("#coming-how", has_text="0.3 of 1.1 GB").wait_for()
        await page.get_by_role("button", name="model 27 %").wait_for()
        assert not await page.locator("#coming-fetch").is_visible()
        mind.go_on.set()
        await page.locator("#who", has_text="Answered by a model.").wait_for()
        await page.locator("#coming").wait_for(state="hidden")
        await demo.write("tell me about foxes")
        assert await demo.answered() == "As the model says."
        assert mind.fetches == 1


async def test_who_listens_answers_and_speaks_is_told() -> None:
    engine = ComposedEngine(RetortEngine(), asr=WordEngine(), tts=ToneEngine())
    async with live_server(engine) as server, demo_page() as demo:
        server.app.sessions.advise = lambda: "There is a better one."
        await demo.open(f"http://127.0.0.1:{server.port}/")
        assert await demo.page.locator("#who").inner_text() == "Heard by words, answered by retort, spoken by tone."
        await demo.page.get_by_role("button", name="words · retort · tone").click()
        told = await demo.page.locator("#who-dialog").inner_text()
        assert "What you say and write stays on this machine.\n" in told
        assert "There is a better one." in told
        assert "It can hear you." in told
        await demo.page.keyboard.press("Escape")
        assert await demo.page.locator("#advice").inner_text() == "There is a better one."
        await demo.open_settings()
        figures = [demo.page.locator(f"#figure-{verb}") for verb in ("heard", "answered", "spoken")]
        assert [await figure.inner_text() for figure in figures] == ["words", "retort", "tone"]
        # Whoever wrote or said something sees the conversation.
        await demo.page.locator("#close-settings").click()
        await demo.write("hello")
        await demo.answered()
        assert not await demo.page.locator("#who, #advice").first.is_visible()


async def test_that_rules_answer_is_said_once() -> None:
    advice = ["rules answer at once, and a model soon"]
    async with live_server(ComposedEngine(RulesEngine())) as server, demo_page() as demo:
        server.app.sessions.advise = lambda: advice[-1]
        for expected in (advice[-1], "Rules answer here, and no language model. There is a better one."):
            await demo.open(f"http://127.0.0.1:{server.port}/")
            assert await demo.page.locator("#who-advice").text_content() == expected
            advice.append("There is a better one.")


class FarRetort(RetortEngine):
    """An LLM that other machines work for."""

    hosts = ("api.example.com", "api2.example.com")


async def test_people_are_told_which_hosts_get_their_voice_and_words() -> None:
    module = """async ([parts, takes, host]) => {
      const { places } = await import("/browser/who.js");
      return places({ parts, capabilities: { input_modalities: takes } }, host);
    }"""
    ears, llm, voice = ({"hosts": [f"{name}.example"]} for name in ("ears", "llm", "voice"))
    here: dict[str, list[str]] = {"hosts": []}
    both = ["text", "audio"]
    cases = [
        (here, here, here, both, "localhost", "What you say and write stays on this machine."),
        (here, here, here, both, "a.example", "What you say and write goes to a.example, and stays there."),
        (
            *(ears, llm, voice, both, "127.0.0.1"),
            "Your voice goes to ears.example; what you say or write goes to llm.example; the words of the answers go "
            "to voice.example.",
        ),
        # A model that hears by itself, on a server beyond the page's.
        (
            *(None, llm, None, [*both, "image"], "a.example"),
            "Your voice and words go to a.example; your voice and what you say, write or show go to llm.example.",
        ),
        (
            here,
            llm,
            llm,
            both,
            "a.example",
            "Your voice goes to a.example; what you say or write and the words of the answers go to llm.example.",
        ),
        (here, here, voice, ["text"], "localhost", "The words of the answers go to voice.example."),
    ]
    engine = ComposedEngine(FarRetort(), asr=WordEngine(), tts=ToneEngine())
    async with live_server(engine) as server, demo_page() as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        told = (
            "Your voice stays on this machine; what you say, write or show goes to api.example.com or api2.example.com."
        )
        assert await demo.page.locator("#where").inner_text() == told
        await demo.page.locator("#open-who").click()
        assert await demo.page.locator("#who-places").inner_text() == told
        for asr, answers, tts, takes, host, told in cases:
            parts = {"asr": asr, "llm": answers, "tts": tts}
            assert await demo.page.evaluate(module, [parts, takes, host]) == told


_PAPER = "getComputedStyle(document.body).backgroundColor"


async def test_a_theme_is_chosen_and_kept() -> None:
    async with live_server() as server, demo_page(color_scheme="light") as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        light = await demo.page.evaluate(_PAPER)
        await demo.open_settings()
        theme = demo.page.get_by_label("Theme")
        await theme.select_option("Dark")
        await demo.until(f"(light) => {_PAPER} !== light", light)
        dark = await demo.page.evaluate(_PAPER)
        assert await demo.page.locator("meta[name=color-scheme]").get_attribute("content") == "dark"
        bars = "[...document.querySelectorAll('meta[name=theme-color]')].filter((one) => matchMedia(one.media).matches)"
        assert await demo.page.evaluate(f"{bars}.map((one) => one.dataset.scheme)") == ["dark"]
        await demo.page.reload()
        await demo.in_state("ready")
        assert await demo.page.evaluate(_PAPER) == dark
        await demo.open_settings()
        assert await theme.input_value() == "dark"
        await theme.select_option("System default")
        await demo.until(f"(light) => {_PAPER} === light", light)
        await demo.page.emulate_media(color_scheme="dark")
        await demo.until(f"(dark) => {_PAPER} === dark", dark)
        await theme.select_option("Light")
        await demo.until(f"(light) => {_PAPER} === light", light)


async def test_a_voice_can_be_tried_out() -> None:
    """It is named with its language, heard through the real endpoint, and not by an open microphone."""
    engine = ComposedEngine(RetortEngine(), asr=WordEngine(), tts=ReadingEngine())
    async with live_server(engine) as server, demo_page(expect_problems=True) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.locator("#open-settings").click()
        voice = demo.page.locator("select[name=voice]")
        await voice.locator("option").first.wait_for(state="attached")
        names = await voice.locator("option").all_inner_texts()
        assert names == ["Default: Tone (English)", "Bell (Dutch)", "Tone (English)"]
        await voice.select_option("bell")
        await demo.page.evaluate(
            """() => {
              const mute = document.querySelector("#mute");
              window.mutes = [];
              const note = () => mutes.push(mute.ariaPressed);
              new MutationObserver(note).observe(mute, { attributeFilter: ["aria-pressed"] });
            }"""
        )
        async with demo.page.expect_response("**/v1/audio/speech") as answered:
            await demo.page.get_by_role("button", name="Listen").click()
        answer = await answered.value
        assert answer.status == 200
        assert answer.request.post_data_json == {
            "input": "Hallo. Zo klink ik.",
            "response_format": "wav",
            "voice": "bell",
        }
        # At its end the microphone hears again.
        await demo.page.get_by_role("button", name="Listen").wait_for()
        await demo.until("() => mutes.includes('true') && mutes.at(-1) === 'false'")
        assert not demo.problems
        server.app.sessions.admission.drain()
        await demo.page.get_by_role("button", name="Listen").click()
        await demo.message("The server is being shut down.")
        await demo.page.get_by_role("button", name="Listen").wait_for()
        server.app.sessions.admission.draining = False


async def test_the_pages_that_an_answer_is_taken_from_are_linked_below_it() -> None:
    pages = (
        UrlCitation("Twice", "https://example.com/a?b=c&d", 0, 4),
        UrlCitation("Once", "https://example.com/a?b=c&d", 4, 8, "CC-BY-SA-4.0"),
        UrlCitation("Plain", "http://example.com/", 0, 4),
        UrlCitation("Code", "javascript:document.title='ran'", 0, 4),
        UrlCitation("Nowhere", "https://", 0, 4),
        UrlCitation("", "https://example.org/", 0, 4),
    )
    engine = ScriptedEngine([TextOutput("It is so."), Finished(FinishReason.STOP, Usage(), citations=pages)])
    async with live_server(engine) as server, demo_page() as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.write("what is it")
        await demo.answered("It is so.")
        sources = demo.page.get_by_role("list", name="Sources")
        assert (await sources.inner_text()).splitlines() == [
            "Once (example.com, CC-BY-SA-4.0)",
            "https://example.org/ (example.org)",
        ]
        links = sources.get_by_role("link")
        assert await links.evaluate_all("(all) => all.map(({ href, target, rel }) => [href, target, rel])") == [
            ["https://example.com/a?b=c&d", "_blank", "noopener noreferrer"],
            ["https://example.org/", "_blank", "noopener noreferrer"],
        ]


async def test_a_title_with_markup_is_text() -> None:
    title = "<script>document.title = 'ran'</script><b>C&amp;A</b>"
    page = UrlCitation(title, "https://example.com/", 0, 4, "CC-BY-SA-4.0")
    engine = ScriptedEngine([TextOutput("It is so."), Finished(FinishReason.STOP, Usage(), citations=(page,))])
    async with live_server(engine) as server, demo_page() as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.write("what is it")
        await demo.answered("It is so.")
        sources = demo.page.get_by_role("list", name="Sources")
        assert await sources.inner_text() == f"{title} (example.com, CC-BY-SA-4.0)"
        assert await sources.locator("script, b").count() == 0
        assert await demo.page.title() == "omni_ws"
        await demo.page.get_by_role("button", name="Save the conversation").click()
        async with demo.page.expect_download() as saved:
            await demo.page.get_by_role("button", name="Text (.txt)").click()
        text = (await (await saved.value).path()).read_text()
        assert f"Source: {title}, https://example.com/ (CC-BY-SA-4.0)" in text
