"""The pages of recorded calls, over recordings in the folder of a real server."""

from __future__ import annotations

import asyncio
import io
import json
import wave
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pytest
import pytest_asyncio
from support.call_sound import NoiseEngine
from support.chromium import IN_BROWSER, DemoPage, demo_page, load_axe, out_of_reach_by_keyboard, violations
from support.live_server import LiveServer, live_server
from support.made_calls import Said, write_call
from support.raw_http import raw_client, request
from support.recordings import recordings
from support.scripted_engines import ToneEngine

from omni_ws.config.keys import ApiKey, digest

if TYPE_CHECKING:
    from playwright.async_api import Route, ViewportSize

pytestmark = IN_BROWSER

DESKTOP: Final[ViewportSize] = {"width": 1280, "height": 800}
PHONE: Final[ViewportSize] = {"width": 390, "height": 844}
SIZES: Final[tuple[ViewportSize, ...]] = (
    PHONE,
    {"width": 740, "height": 360},
    DESKTOP,
    {"width": 1920, "height": 1080},
)
_LOOKS: Final[tuple[tuple[Literal["dark", "light"], ViewportSize], ...]] = (("dark", PHONE), ("light", DESKTOP))

MARKUP: Final = "<script>window.hit=1</script><img src=x onerror=window.hit=1>"
TALK: Final = (
    Said("What is the capital of France?", "Paris. It has been that for a thousand years."),
    Said("Tell me a long story.", "Once upon a time there was a lighthouse keeper.", heard=4),
    Said("Stop please. What is the weather?", "It is eighteen degrees.", tool=("weather", '{"city": "Paris"}')),
)
LONG_TURNS: Final = 2000

_SPOKEN: Final = "[...(CSS.highlights.get('spoken') ?? [])].map(String)"
#: The middle of a word in what was said by a side of a turn.
_PLACE_OF_WORD: Final = """([place, side, word]) => {
  const node = document.querySelector(`li[data-place="${place}"] .${side} .words`);
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const from = text.data.indexOf(word);
    if (from < 0) continue;
    const range = document.createRange();
    range.setStart(text, from);
    range.setEnd(text, from + word.length);
    const { left, right, top, bottom } = range.getBoundingClientRect();
    return [(left + right) / 2, (top + bottom) / 2];
  }
}"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveServer]:
    """A server with calls of all kinds in its folder."""
    folder = tmp_path_factory.mktemp("recordings")
    folder.chmod(0o700)
    write_call(folder, TALK, call_id="sess_talk")
    frame = json.dumps({"type": MARKUP})
    write_call(folder, [Said(MARKUP, MARKUP)], call_id="sess_markup", key=MARKUP, frame=frame)
    write_call(
        folder, [Said("Hi.", f"Answer {number}.") for number in range(LONG_TURNS)], call_id="sess_long", sparse=True
    )
    write_call(folder, (), call_id="sess_empty", payloads=False)
    write_call(folder, [Said("What is the capital of France?", "It is Paris.")], call_id="sess_other")
    async with live_server(record=folder) as running:
        yield running


@asynccontextmanager
async def call_page(server: LiveServer, call_id: str, moment: str = "", **options: Any) -> AsyncIterator[DemoPage]:
    """The page of a call once it is there."""
    async with demo_page(tapped=False, sample_rate=None, **options) as demo:
        await demo.page.goto(f"http://127.0.0.1:{server.port}/calls/{call_id}{moment}")
        await demo.until("() => document.title.startsWith('Call of')")
        yield demo


async def now_ms(demo: DemoPage) -> float:
    return 1000 * float(await demo.page.evaluate("document.querySelector('#sound').currentTime"))


async def described(server: LiveServer, call_id: str) -> Any:
    async with raw_client(server.port) as client:
        await client.send(request("GET", f"/calls/{call_id}/call.json"))
        return (await client.response()).json()


async def test_calls_are_listed_newest_first_and_searched(server: LiveServer) -> None:
    async with demo_page(tapped=False, sample_rate=None) as demo:
        await demo.page.goto(f"http://127.0.0.1:{server.port}/calls")
        await demo.page.locator("#about", has_text="5 calls").wait_for()
        times = await demo.page.locator("time").evaluate_all("(all) => all.map((one) => one.dateTime)")
        assert times == sorted(times, reverse=True)
        await demo.page.locator("#search").fill("capital")
        await demo.page.locator("#about", has_text="2 of 5").wait_for()
        entry = demo.page.locator("a[href$=sess_talk]")
        told = (await entry.inner_text()).split("\n")
        assert told[0] == TALK[0].question
        assert "3 turns · websocket · fake" in told
        await entry.click()
        await demo.page.locator(".turn .words", has_text="Paris.").wait_for()


async def test_a_click_on_a_word_plays_from_it(server: LiveServer) -> None:
    turns = (await described(server, "sess_talk"))["turns"]
    async with call_page(server, "sess_talk") as demo:
        for place, side, word in ((0, "answer", "thousand"), (1, "user", "long"), (0, "user", "capital")):
            await demo.page.mouse.click(*await demo.page.evaluate(_PLACE_OF_WORD, [place, side, word]))
            await demo.until(f"(word) => {_SPOKEN}.includes(word)", word)
            (start,) = [one["start_ms"] for one in turns[place][side]["words"] if one["text"] == word]
            assert abs(await now_ms(demo) - start) < 2
            assert await demo.page.locator("li[aria-current]").get_attribute("data-place") == str(place)
        await demo.page.get_by_role("button", name="Turn 3: play from").click()
        assert abs(await now_ms(demo) - turns[2]["user"]["start_ms"]) < 2
        assert await demo.page.locator("#turn-title").inner_text() == "Turn 3 of 3"


async def test_words_light_up_as_they_sound(server: LiveServer) -> None:
    keep = f"""() => {{
      window.lit = [];
      const look = () => {{
        for (const word of {_SPOKEN}) if (lit.at(-1) !== word) lit.push(word);
        requestAnimationFrame(look);
      }};
      look();
    }}"""
    async with call_page(server, "sess_talk", "#t=1.2") as demo:
        await demo.page.evaluate(keep)
        await demo.page.get_by_role("button", name="Play", exact=True).click()
        await demo.until("() => window.lit.includes('been')")
        await demo.page.get_by_role("button", name="Pause").click()
        lit = await demo.page.evaluate("window.lit")
    wanted = ["capital", "of", "France?", "Paris.", "It", "has", "been"]
    assert [word for word in lit if word in wanted] == wanted


async def test_what_was_not_heard_is_struck_through(server: LiveServer) -> None:
    async with call_page(server, "sess_talk", "#turn=2") as demo:
        turn = demo.page.locator("li[data-place='1']")
        assert (await turn.locator("del").inner_text()).strip() == "there was a lighthouse keeper."
        assert "cut after 1.0" in await turn.locator(".note").inner_text()
        assert await demo.page.locator("li[data-place='0'] del").count() == 0
        await demo.page.locator("#turn-fall li", has_text="turn decision").get_by_text("300").wait_for()
        call = demo.page.locator("li[data-place='2'] .call")
        await call.locator("summary").click()
        assert '"city": "Paris"' in await call.locator("pre").inner_text()


async def test_what_was_recorded_is_text_and_no_markup(server: LiveServer) -> None:
    async with demo_page(tapped=False, sample_rate=None) as demo:
        await demo.page.goto(f"http://127.0.0.1:{server.port}/calls")
        await demo.page.locator(".facts", has_text=f"key {MARKUP}").wait_for()
        await demo.page.goto(f"http://127.0.0.1:{server.port}/calls/sess_markup")
        await demo.page.locator(".turn .user .words", has_text=MARKUP).wait_for()
        assert await demo.page.locator(".turn .answer .words").inner_text() == MARKUP
        assert f"key {MARKUP}" in (await demo.page.locator("#about").inner_text())
        await demo.page.locator("#wire-filter").fill('onerror=window.hit=1>"')
        await demo.page.locator("#wire summary", has_text="onerror").first.click()
        assert MARKUP in await demo.page.locator("#wire pre").inner_text()
        assert await demo.page.evaluate("window.hit") is None
        assert await demo.page.locator("body script, body img").count() == 0


async def test_a_long_call_keeps_the_page_small(server: LiveServer) -> None:
    nodes = "document.querySelectorAll('*').length"
    async with call_page(server, "sess_long", f"#turn={LONG_TURNS // 2}", viewport=DESKTOP) as demo:
        await demo.page.locator(".turn", has_text=f"Answer {LONG_TURNS // 2 - 1}.").wait_for()
        assert await demo.page.locator("#turn-title").inner_text() == f"Turn {LONG_TURNS // 2} of {LONG_TURNS}"
        counts = [await demo.page.evaluate(nodes)]
        scroll = """([name, share]) => {
          const node = document.querySelector(name);
          node.scrollTop = share * (node.scrollHeight - node.clientHeight);
        }"""
        for share in (0, 0.3, 0.71, 1):
            await demo.page.evaluate(scroll, ["#conversation", share])
            await demo.page.evaluate(scroll, ["#wire", share])
            await demo.page.evaluate(
                "() => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))"
            )
            counts.append(await demo.page.evaluate(nodes))
            seen = await demo.page.locator(".turn").evaluate_all(
                "(all) => all.filter((one) => one.getBoundingClientRect().bottom > 200).length"
            )
            assert seen >= 3
        await demo.page.locator(".turn", has_text=f"Answer {LONG_TURNS - 1}.").wait_for()
        await demo.page.locator("#wire-filter").fill("response_started")
        await demo.page.locator("#frame-count", has_text=f"{LONG_TURNS:,} of").wait_for()
        counts.append(await demo.page.evaluate(nodes))
        assert max(counts) < 1000
        # The height of what is above becomes known on the way back, and nothing jumps or is left out.
        await demo.page.locator("#conversation").focus()
        await demo.page.keyboard.press("Home")
        await demo.page.locator(".turn", has_text="Answer 0.").wait_for()


async def test_a_link_leads_to_its_moment(server: LiveServer) -> None:
    allow = ("clipboard-read", "clipboard-write")
    async with call_page(server, "sess_talk", "#t=2.5", allow=allow) as demo:
        assert abs(await now_ms(demo) - 2500) < 2
        await demo.page.get_by_role("button", name="Copy a link to this moment").click()
        await demo.message("The link was copied: #t=2.5")
        link = await demo.page.evaluate("navigator.clipboard.readText()")
        assert link.endswith("/calls/sess_talk#t=2.5")
        await demo.page.locator("li[data-place='1'] button[name=link]").click()
        await demo.message("The link was copied: #turn=2")
        await demo.page.evaluate("navigator.clipboard.readText().then((link) => (location.href = link))")
        await demo.page.locator("li[data-place='1'][aria-current]").wait_for()


async def test_the_keyboard_plays_and_jumps(server: LiveServer) -> None:
    turns = (await described(server, "sess_talk"))["turns"]
    async with call_page(server, "sess_talk") as demo:
        keys = demo.page.keyboard
        await demo.page.locator("#conversation").focus()
        await keys.press("j")
        assert abs(await now_ms(demo) - turns[1]["user"]["start_ms"]) < 2
        await keys.press(".")
        assert abs(await now_ms(demo) - turns[1]["user"]["words"][1]["start_ms"]) < 2
        await keys.press(",")
        assert abs(await now_ms(demo) - turns[1]["user"]["words"][0]["start_ms"]) < 2
        await keys.press("k")
        assert abs(await now_ms(demo) - turns[0]["user"]["start_ms"]) < 2
        await demo.page.locator("#wave").focus()
        await keys.press("ArrowRight")
        assert abs(await now_ms(demo) - turns[0]["user"]["start_ms"] - 5000) < 2
        await keys.press("Home")
        assert await now_ms(demo) == 0
        assert await demo.page.locator("#wave").get_attribute("aria-valuetext") == "0:00 of 0:13"
        await keys.press("Space")
        await demo.page.get_by_role("button", name="Pause").wait_for()
        await demo.until("() => document.querySelector('#sound').currentTime > 0.2")
        await keys.press("Space")
        await demo.page.get_by_role("button", name="Play", exact=True).wait_for()
        # What is written is no command.
        await demo.page.locator("#wire-filter").fill("")
        at = await now_ms(demo)
        await keys.press("j")
        assert await now_ms(demo) == at


async def test_the_wave_shows_both_sides_and_is_pressed(server: LiveServer) -> None:
    inked = """() => {
      const canvas = document.querySelector("#wave");
      const { width, height } = canvas;
      const pen = canvas.getContext("2d");
      const ink = (left, top) => pen.getImageData(left * width, top * height, width * 0.05, height * 0.3).data
        .reduce((sum, byte, place) => sum + (place % 4 === 3 && byte > 0), 0);
      return [ink(0.05, 0.1), ink(0.05, 0.6), ink(0.25, 0.1), ink(0.25, 0.6)];
    }"""
    async with call_page(server, "sess_talk", "#t=12") as demo:
        length = (await described(server, "sess_talk"))["duration_ms"]
        await demo.until(
            f"() => {{ const [a, b, c, d] = ({inked})(); return a > 20 && b === 0 && c === 0 && d > 20; }}"
        )
        box = await demo.page.locator("#wave").bounding_box()
        assert box is not None
        await demo.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 10)
        assert abs(await now_ms(demo) - length / 2) < length / box["width"]


async def test_the_wave_is_read_in_whatever_pieces_it_comes(server: LiveServer) -> None:
    """And what is no WAV file of 16-bit samples has none."""
    frames = 4800
    samples = np.zeros((frames, 2), "<i2")
    samples[: frames // 2, 0], samples[frames // 2 :, 1] = 16384, -8192
    whole = io.BytesIO()
    with wave.open(whole, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(samples.tobytes())
    other = whole.getvalue()[:34] + b"\x08" + whole.getvalue()[35:]  # 8 bits a sample
    read = """async ([bytes, size]) => {
      const { peaksOf } = await import("/browser/calls/wave.js");
      const all = Uint8Array.from(bytes);
      let place = 0;
      const pieces = new ReadableStream({
        pull(controller) {
          if (place >= all.length) return controller.close();
          controller.enqueue(all.slice(place, (place += size)));
        },
      });
      const peaks = await peaksOf(new Response(pieces));
      const quarters = (side) => [0.1, 0.4, 0.6, 0.9].map((share) => side[Math.floor(share * side.length)]);
      return peaks && peaks.map(quarters);
    }"""
    async with call_page(server, "sess_talk") as demo:
        for size in (7, 4096, 1 << 20):
            found = await demo.page.evaluate(read, [list(whole.getvalue()), size])
            assert found == [[0.5, 0.5, 0, 0], [0, 0, 0.25, 0.25]], size
        for odd in (other, b"no sound at all" * 10):
            assert await demo.page.evaluate(read, [list(odd), 4096]) is None


async def test_a_call_without_payloads_says_so(server: LiveServer) -> None:
    async with call_page(server, "sess_empty") as demo:
        await demo.message("Only the structure of this call was recorded")
        assert not await demo.page.locator("#player").is_visible()


async def test_a_call_that_is_not_there(server: LiveServer) -> None:
    async with demo_page(tapped=False, sample_rate=None, expect_problems=True) as demo:
        await demo.page.goto(f"http://127.0.0.1:{server.port}/calls/sess_gone")
        await demo.message("there is no recorded call with this id")


async def test_all_of_it_is_one_download(server: LiveServer, tmp_path: Path) -> None:
    async with call_page(server, "sess_talk") as demo:
        async with demo.page.expect_download() as waiting:
            await demo.page.get_by_role("link", name="Download the call").click()
        await (await waiting.value).save_as(tmp_path / "call.zip")
    names = zipfile.ZipFile(tmp_path / "call.zip").namelist()
    assert {"call/sound.wav", "call/call.json", "call/transcript.txt"} <= set(names)


async def test_a_key_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    write_call(folder, TALK, call_id="sess_talk")
    keys = (
        ApiKey(name="caller", key_sha256=digest("caller-key")),
        ApiKey(name="operator", key_sha256=digest("operator-key"), admin=True),
    )
    async with (
        live_server(keys=keys, record=folder) as server,
        demo_page(tapped=False, sample_rate=None, expect_problems=True) as demo,
    ):
        await demo.page.goto(f"http://127.0.0.1:{server.port}/calls/sess_talk")
        await demo.page.get_by_role("button", name="Not now").click()
        await demo.message("Recorded calls are shown only to operators")
        await demo.page.get_by_role("button", name="Try again").click()
        for key in ("wrong", "caller-key"):
            await demo.page.locator("#key-dialog[open]").wait_for()
            await demo.page.locator("#key").fill(key)
            await demo.page.get_by_role("button", name="Show the call").click()
            await demo.until("() => document.querySelector('#key-problem').textContent !== ''")
            assert await demo.page.locator(".turn").count() == 0
            await demo.page.evaluate("document.querySelector('#key-problem').textContent = ''")
        await demo.page.locator("#key").fill("operator-key")
        await demo.page.get_by_role("button", name="Show the call").click()
        await demo.page.locator(".turn .words", has_text="Paris.").wait_for()
        await demo.until("() => document.querySelector('#sound').duration > 10")
        async with demo.page.expect_download() as waiting:
            await demo.page.get_by_role("link", name="Download the call").click()
        assert (await waiting.value).suggested_filename == "sess_talk.zip"


async def test_an_answer_by_another_voice_stands_beside_the_first(server: LiveServer) -> None:
    """The page's part of a fork: the request that it makes, and both answers. The other call is a recorded one."""
    asked: list[Any] = []
    call = {**await described(server, "sess_talk"), "can_fork": True}

    async def forked(route: Route) -> None:
        asked.append(route.request.post_data_json)
        await route.fulfill(json={"id": "sess_other"})

    async with demo_page(tapped=False, sample_rate=None) as demo:
        await demo.page.route("**/sess_talk/call.json", lambda route: route.fulfill(json=call))
        await demo.page.route("**/sess_talk/fork", forked)
        await demo.page.goto(f"http://127.0.0.1:{server.port}/calls/sess_talk")
        await demo.page.locator("li[data-place='0'] button[name=fork]").click()
        await demo.page.get_by_label("Voice").fill("amber")
        await demo.page.get_by_role("button", name="Ask again").click()
        cards = demo.page.locator(".answer-card")
        await cards.nth(1).wait_for()
        assert asked == [{"turn": 1, "voice": "amber"}]
        texts = [text.split("\n\n")[:2] for text in await cards.all_inner_texts()]
        assert texts == [["As it was", TALK[0].answer], ["voice: amber", "It is Paris."]]
        assert await demo.page.get_by_role("link", name="Open the new call").get_attribute("href") == (
            f"http://127.0.0.1:{server.port}/calls/sess_other"
        )
    call["can_fork"] = False
    async with demo_page(tapped=False, sample_rate=None) as demo:
        await demo.page.route("**/sess_talk/call.json", lambda route: route.fulfill(json=call))
        await demo.page.goto(f"http://127.0.0.1:{server.port}/calls/sess_talk")
        await demo.page.locator(".turn").first.wait_for()
        assert await demo.page.locator("button[name=fork], #fork").locator("visible=true").count() == 0


async def test_the_turn_of_the_dialog_is_asked_and_answered_there(server: LiveServer) -> None:
    """Whatever turn sounds by then; an answer that comes when the dialog is about another turn is not shown."""
    asked: list[Any] = []
    goes_on = asyncio.Event()
    call = {**await described(server, "sess_talk"), "can_fork": True}

    async def forked(route: Route) -> None:
        asked.append(route.request.post_data_json)
        await goes_on.wait()
        await route.fulfill(json={"id": "sess_other"})

    async with demo_page(tapped=False, sample_rate=None) as demo:
        await demo.page.route("**/sess_talk/call.json", lambda route: route.fulfill(json=call))
        await demo.page.route("**/sess_talk/fork", forked)
        await demo.page.goto(f"http://127.0.0.1:{server.port}/calls/sess_talk")
        await demo.until("() => document.querySelector('#sound').duration > 0")
        await demo.page.locator("li[data-place='0'] button[name=fork]").click()
        await demo.page.evaluate(
            """(from) => Object.assign(document.querySelector("#sound"), { muted: true, currentTime: from }).play()""",
            call["turns"][1]["times"]["request_started"] / 1000,
        )
        await demo.until("() => document.querySelector('#turn-title').textContent.startsWith('Turn 2')")
        await demo.page.get_by_role("button", name="Ask again").click()
        await demo.until("() => document.querySelector('#fork-go').disabled")
        await demo.page.locator("#close-fork").click()
        await demo.page.locator("li[data-place='1'] button[name=fork]").click()
        goes_on.set()
        await demo.page.locator("#fork-go:not([disabled])").wait_for()
        assert asked == [{"turn": 1}]
        assert await demo.page.locator("#fork-title").inner_text() == "Go on from turn 2 with…"
        assert await demo.page.locator(".answer-card").count() == 0


async def test_the_server_answers_a_turn_again(tmp_path: Path) -> None:
    """The whole way: the dialog, the server's own engine, and both answers, which can be heard."""
    write_call(tmp_path / "recordings", TALK, call_id="sess_talk")
    async with (
        live_server(NoiseEngine(0.5), record=tmp_path / "recordings") as server,
        demo_page(tapped=False, sample_rate=None) as demo,
    ):
        await demo.page.goto(f"http://127.0.0.1:{server.port}/calls/sess_talk")
        await demo.page.locator("li[data-place='2'] button[name=fork]").click()
        assert not await demo.page.get_by_label("Model").is_visible()  # this server has no other
        await demo.page.get_by_label("Instructions").fill("Be short.")
        await demo.page.get_by_role("button", name="Ask again").click()
        cards = demo.page.locator(".answer-card")
        await cards.nth(1).wait_for()
        assert await cards.nth(0).locator("p").inner_text() == TALK[2].answer
        assert await cards.nth(1).locator("h3").inner_text() == "instructions: Be short."
        for number in (0, 1):
            await cards.nth(number).get_by_role("button", name="Play").click()
        await demo.until("() => document.querySelector('#fork-problem').textContent === ''")
        await cards.nth(1).get_by_role("link", name="Open the new call").click()
        await demo.page.wait_for_url("**/calls/sess_*")
        await demo.page.locator(".turn").first.wait_for()
        assert await demo.page.locator(".turn").count() == 1


async def test_the_demo_page_says_that_it_is_recorded(tmp_path: Path) -> None:
    """On the server's own machine it leads to the call, which can be heard while it goes on."""
    keys = (ApiKey(name="caller", key_sha256=digest("caller-key")),)
    async with live_server(ToneEngine(), record=tmp_path / "open") as server, demo_page() as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        assert await demo.page.locator("#recorded").inner_text() == "Recorded"
        await demo.write("it's a tone")
        await demo.answered()
        await demo.in_state("ready")
        address = await demo.page.locator("#recorded").evaluate("(link) => link.href")
        await server.until(
            lambda: any(b'\\"final\\":true' in one.read_bytes() for one in recordings(tmp_path / "open"))
        )
        async with demo_page(tapped=False, sample_rate=None) as call:
            await call.page.goto(address)
            await call.page.locator(".turn .user .words", has_text="it's a tone").wait_for()
            await call.until("() => document.querySelector('#sound').duration > 0")
            # What took no time has no label of its own, as sending on a quick machine.
            await call.page.locator("#turn-fall > *").first.wait_for(state="attached")
    async with (
        live_server(ToneEngine(), keys=keys, record=tmp_path / "keys") as server,
        demo_page(tapped=False, expect_problems=True) as demo,
    ):
        await demo.page.goto(f"http://127.0.0.1:{server.port}/#key=caller-key")
        await demo.in_state("ready")
        await demo.page.locator("#recorded").wait_for()
        assert await demo.page.locator("#recorded").get_attribute("href") is None
    async with live_server(ToneEngine()) as server, demo_page(tapped=False) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        assert not await demo.page.locator("#recorded").is_visible()


async def test_what_fails_is_said(server: LiveServer) -> None:
    """The sound, the download and a fork, each by the sentence of the server."""
    call = {**await described(server, "sess_talk"), "can_fork": True}
    refused = {"error": {"code": "engine_overloaded", "message": "the disk is full"}}
    async with demo_page(tapped=False, sample_rate=None, expect_problems=True) as demo:
        await demo.page.route("**/sess_talk/call.json", lambda route: route.fulfill(json=call))
        for name in ("sound.wav", "fork"):
            await demo.page.route(f"**/sess_talk/{name}", lambda route: route.fulfill(status=503, json=refused))
        await demo.page.goto(f"http://127.0.0.1:{server.port}/calls/sess_talk")
        await demo.message("The sound cannot be had: the disk is full")
        await demo.page.locator("#fork").click()
        await demo.page.get_by_role("button", name="Ask again").click()
        await demo.page.locator("#fork-problem", has_text="the disk is full").wait_for()
        await demo.page.locator("#fork-go:not([disabled])").wait_for()


async def states(demo: DemoPage, port: int) -> AsyncIterator[str]:
    """Brings the pages into each of their states, and names it."""
    page = demo.page
    await page.goto(f"http://127.0.0.1:{port}/calls")
    await page.locator(".entry").first.wait_for()
    await load_axe(page)
    yield "list"
    await page.goto(f"http://127.0.0.1:{port}/calls/sess_talk#t=2.6")
    await page.locator(".turn").first.wait_for()
    await load_axe(page)
    await page.locator(".call summary").click()
    await page.locator("#wire-filter").fill("speech_started")  # the frames in sight are all that there are
    await page.locator("#frame-count", has_text="3 of").wait_for()
    for pane in ("conversation", "turn", "frames"):
        await page.evaluate("(name) => document.querySelector(`#pane-${name}`).click()", pane)
        yield pane
    await page.evaluate("document.querySelector('#fork').parentElement.hidden = false")
    await page.evaluate("document.querySelector('#fork').click()")
    yield "fork"
    await page.keyboard.press("Escape")
    await page.evaluate("document.querySelector('#key-dialog').showModal()")
    yield "key"
    await page.keyboard.press("Escape")


async def test_axe_finds_nothing_and_the_keyboard_reaches_everything(server: LiveServer) -> None:
    found: list[Any] = []
    async with demo_page(tapped=False, sample_rate=None, viewport=DESKTOP) as demo:
        async for state in states(demo, server.port):
            for scheme, size in _LOOKS:
                await demo.page.emulate_media(color_scheme=scheme)
                await demo.page.set_viewport_size(size)
                found += [[state, scheme, *each] for each in await violations(demo.page)]
                missed = await out_of_reach_by_keyboard(demo.page)
                assert not missed, f"{state}, {scheme}: {missed}"
    assert not found, json.dumps(found, indent=1)


async def test_nothing_is_beside_the_window(server: LiveServer) -> None:
    outside = """() => [...document.querySelectorAll("button, a, input, select, canvas, .words, h2")]
      .filter((one) => one.checkVisibility() && one.getBoundingClientRect().width > 0)
      .filter((one) => one.getBoundingClientRect().right > innerWidth + 1 || one.getBoundingClientRect().left < -1)
      .map((one) => one.id || one.textContent.slice(0, 40))"""
    async with call_page(server, "sess_talk") as demo:
        for size in SIZES:
            await demo.page.set_viewport_size(size)
            for pane in ("conversation", "turn", "frames"):
                await demo.page.evaluate("(name) => document.querySelector(`#pane-${name}`).click()", pane)
                assert await demo.page.evaluate(outside) == [], (size, pane)
                assert await demo.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
