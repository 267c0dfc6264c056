"""Where things stand on the page: nothing is covered, and what can be used is in reach, however small the window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from support.chromium import IN_BROWSER, DemoPage, demo_page
from support.live_server import live_server
from support.scripted_engines import ReadingEngine, ToneEngine, ToolCallingEngine

from omni_ws.engine.base import TextOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.fake import ScriptedEngine

if TYPE_CHECKING:
    from playwright.async_api import ViewportSize

pytestmark = IN_BROWSER

DESKTOP: Final[ViewportSize] = {"width": 1280, "height": 800}
PHONE: Final[ViewportSize] = {"width": 360, "height": 740}
LEAST_PHONE: Final[ViewportSize] = {"width": 320, "height": 568}
TABLET: Final[ViewportSize] = {"width": 900, "height": 700}
#: A phone on its side, a laptop at 200 %, and a phone with little height.
SMALL: Final[tuple[ViewportSize, ...]] = (
    {"width": 740, "height": 360},
    {"width": 640, "height": 400},
    {"width": 375, "height": 667},
    PHONE,
)

#: Whether an element is wholly in the window and at its middle covered by nothing. A hidden one is not.
_IN_REACH: Final = """(name) => {
  const node = document.querySelector(name);
  const { left, right, top, bottom, width } = node.getBoundingClientRect();
  if (!width || left < 0 || top < 0 || right > innerWidth || bottom > innerHeight) return false;
  const found = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
  return node === found || node.contains(found) || found.contains(node);
}"""
#: Of what has the focus, whether any corner or its middle is to be seen.
_FOCUS_IS_SEEN: Final = """() => {
  const node = document.activeElement;
  if (node === document.body) return true;
  const { left, right, top, bottom } = node.getBoundingClientRect();
  const across = [left + 2, (left + right) / 2, right - 2];
  const down = [top + 2, (top + bottom) / 2, bottom - 2];
  return across.some((x) => down.some((y) => node.contains(document.elementFromPoint(x, y)) ||
    node.parentElement === document.elementFromPoint(x, y)));
}"""


async def out_of_reach(demo: DemoPage, *names: str) -> list[str]:
    return [name for name in names if not await demo.page.evaluate(_IN_REACH, name)]


async def test_how_to_talk_can_be_chosen_on_every_screen() -> None:
    """Nor does the camera cover the centre, or its word."""
    hands = ("label:has(#mode-open)", "label:has(#mode-hold)", "#talk", "#stop", "#mute", "#text", "#status")
    async with live_server() as server, demo_page() as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        for turns in range(2):
            for size in SMALL:
                await demo.page.set_viewport_size(size)
                assert not await out_of_reach(demo, *hands), (turns, size)
            if turns == 0:
                await demo.write("hello")
                await demo.answered("hello")
                await demo.in_state("ready")
        await demo.page.locator("#camera").click()
        await demo.until("() => document.querySelector('#camera-view').videoWidth > 0")
        overlaps = """() => {
          const box = (name) => document.querySelector(name).getBoundingClientRect();
          const [video, orb, word] = ["#camera-view", "#orb", "#status"].map(box);
          const radius = 0.35 * Math.min(orb.width, orb.height); // of the body while it speaks
          const [x, y] = [(orb.left + orb.right) / 2, (orb.top + orb.bottom) / 2];
          const covers = ({ left, right, top, bottom }) =>
            video.left < right && video.right > left && video.top < bottom && video.bottom > top;
          const beside = Math.max(video.left - x, 0, x - video.right);
          const above = Math.max(video.top - y, 0, y - video.bottom);
          return [Math.hypot(beside, above) < radius, covers(word), video.right > innerWidth || video.width < 60];
        }"""
        for size in (*SMALL, DESKTOP):
            await demo.page.set_viewport_size(size)
            assert await demo.page.evaluate(overlaps) == [False, False, False], size
        await demo.page.locator("#camera").click()
        # A laptop at 400 % scrolls.
        await demo.page.set_viewport_size({"width": 320, "height": 256})
        for name in hands:
            await demo.page.locator(name).scroll_into_view_if_needed()
            assert not await out_of_reach(demo, name)
        await demo.page.set_viewport_size(LEAST_PHONE)
        assert not await out_of_reach(demo, *hands)
        box = await demo.page.locator("#stop").bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 320 - 12


async def test_a_welcome_is_read_from_its_beginning_and_an_answer_to_its_end() -> None:
    """In the words of the moment, and in the log that takes their place on a phone."""
    async with live_server() as server, demo_page(viewport=LEAST_PHONE, settings={"log": False}) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        welcome = demo.page.locator("#welcome")
        assert await welcome.evaluate("(welcome) => welcome.scrollHeight > welcome.clientHeight")
        for size in (SMALL[1], LEAST_PHONE):
            await demo.page.set_viewport_size(size)
            assert not await out_of_reach(demo, "#invitation"), size
        await welcome.evaluate("(welcome) => (welcome.scrollTop = 20)")
        await demo.write("word " * 200)
        at_end = "(box) => box.clientHeight > 0 && box.scrollHeight - box.scrollTop - box.clientHeight < 2"
        await demo.until(at_end, await demo.page.locator("#live").element_handle())
        await demo.page.locator(".turn .server[data-state=done]").wait_for(state="attached")  # Escape would stop it
        await demo.page.keyboard.press("Escape")
        await demo.page.locator("#open-log").click()
        await demo.answered("word")
        await demo.until(at_end, await demo.page.locator("#log").element_handle())


async def test_what_is_written_has_room_on_a_phone() -> None:
    async with live_server() as server, demo_page(viewport=PHONE) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        assert not await out_of_reach(demo, "#image", "#camera")
        await demo.page.locator("#text").fill("a longer question")
        box = await demo.page.locator("#text").bounding_box()
        assert box is not None
        assert box["width"] > 220
        assert not await demo.page.locator("#camera").is_visible()
        await demo.page.locator("#text").fill("")
        await demo.page.locator("#camera").click()
        await demo.page.locator("#camera[aria-pressed=true]").wait_for()
        await demo.page.locator("#text").fill("what is it")
        assert await demo.page.locator("#camera").is_visible()  # it can be switched off


async def test_the_panel_for_developers_covers_nothing() -> None:
    async with live_server(ToneEngine()) as server, demo_page() as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.write("it's a tone")
        await demo.answered()
        await demo.in_state("ready")
        await demo.page.locator("#camera").click()
        await demo.until("() => document.querySelector('#camera-view').videoWidth > 0")
        covered = """() => {
          const box = (name) => document.querySelector(name).getBoundingClientRect();
          const [video, log] = [box("#camera-view"), box("#log")];
          return video.right > log.left && video.left < log.right && video.bottom > log.top + 1;
        }"""
        for size in (*SMALL, TABLET, DESKTOP):
            await demo.page.set_viewport_size(size)
            await demo.page.locator("#open-developer").click()
            await demo.page.locator("#wire summary").first.wait_for()
            assert not await out_of_reach(demo, "#status", "#talk", "#stop", "#close-developer"), size
            assert not await demo.page.evaluate(covered), size
            for _ in range(30):
                await demo.page.keyboard.press("Tab")
                try:
                    await demo.until(_FOCUS_IS_SEEN)  # a frame that has just been listed may move it
                except TimeoutError as error:
                    focused = await demo.page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
                    error.add_note(f"At {size} nothing is seen of what has the focus: {focused}")
                    raise
            await demo.page.locator("#close-developer").click()
        # The field for text is left where there is height for it.
        await demo.page.set_viewport_size(PHONE)
        await demo.page.locator("#open-developer").click()
        assert not await out_of_reach(demo, "#text")


async def test_the_panel_for_developers_shows_levels_below_many_turns() -> None:
    async with live_server(ToneEngine()) as server, demo_page(viewport=DESKTOP) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.locator("#open-developer").click()
        for turn in range(4):
            await demo.write("it's a tone")
            await demo.answered(turn=turn)
        await demo.page.locator("#waterfall .strip").nth(3).wait_for()
        assert not await out_of_reach(demo, "#levels")
        scrolls = (
            "(name) => { const node = document.querySelector(name); return node.scrollHeight > node.clientHeight; }"
        )
        assert await demo.page.evaluate(scrolls, "#waterfall")
        lines = await demo.page.locator("#wire summary").evaluate_all("(all) => all.map((one) => one.offsetHeight)")
        assert min(lines) >= 24


async def test_the_panel_for_developers_is_left_by_the_keyboard() -> None:
    focused = "document.activeElement.id"
    async with live_server() as server, demo_page(settings={"answerWith": "text"}) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        panel = demo.page.locator("#developer")
        await demo.page.locator("#open-developer").press("Enter")
        assert await demo.page.evaluate(focused) == "close-developer"
        await demo.page.keyboard.press("Escape")
        assert not await panel.is_visible()
        assert await demo.page.evaluate(focused) == "open-developer"
        # What is looked for goes first, and with nothing to stop the key works from anywhere.
        await demo.page.keyboard.press("Enter")
        await demo.page.locator("#wire-filter").fill("pong")
        await demo.page.keyboard.press("Escape")
        assert await demo.page.locator("#wire-filter").input_value() == ""
        assert await panel.is_visible()
        await demo.page.locator("#text").press("Escape")
        assert not await panel.is_visible()
        assert await demo.page.evaluate(focused) == "text"


async def test_a_click_beside_a_dialog_closes_it_and_one_within_does_not() -> None:
    async with live_server() as server, demo_page(viewport=DESKTOP) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.write("hello")
        await demo.answered()
        for opener, name in (("open-settings", "settings"), ("open-who", "who-dialog"), ("save", "save-dialog")):
            await demo.page.locator(f"#{opener}").click()
            dialog = demo.page.locator(f"#{name}")
            await dialog.wait_for()
            await dialog.evaluate("(dialog) => Promise.all(dialog.getAnimations().map((one) => one.finished))")
            box = await dialog.bounding_box()
            assert box is not None
            await demo.page.mouse.click(box["x"] + 4, box["y"] + box["height"] - 4)
            assert await dialog.is_visible(), name
            await demo.page.mouse.click(box["x"] - 20, box["y"] + 20)
            await dialog.wait_for(state="hidden")


async def test_the_centre_that_stands_still_tells_hearing_from_listening() -> None:
    """By what is drawn strongly, farthest from the middle."""
    reach = """(state) => new Promise((done) => {
      const orb = document.querySelector("#orb");
      const canvas = orb.querySelector("canvas:last-of-type");
      orb.orb.show(state);
      requestAnimationFrame(() => requestAnimationFrame(() => {
        const { width, height } = canvas;
        const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
        let farthest = 0;
        for (let place = 3; place < data.length; place += 4) {
          if (data[place] < 130) continue;
          const [x, y] = [((place - 3) / 4) % width, Math.floor((place - 3) / 4 / width)];
          farthest = Math.max(farthest, Math.hypot(x - width / 2, y - height / 2));
        }
        done(farthest);
      }));
    })"""
    lamp = """(state) => {
      document.body.dataset.state = state;
      return getComputedStyle(document.querySelector(".lamp")).backgroundColor;
    }"""
    async with live_server() as server, demo_page(reduced_motion="reduce") as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        listening, hearing = [await demo.page.evaluate(reach, state) for state in ("listening", "hearing")]
        assert hearing > 1.2 * listening  # without rings it is 1.1
        assert await demo.page.evaluate(lamp, "ready") != await demo.page.evaluate(lamp, "listening")


async def test_wide_things_stay_in_their_place() -> None:
    """A table scrolls by itself; the result of a tool goes on in the next line; a note breaks between its parts."""
    row = "| " + " | ".join(["a longer cell"] * 8) + " |"
    table = f"> said\n\n{row}\n|{'---|' * 8}\n{row}\n\n1. one\n   - two\n3. three"
    settings: dict[str, Any] = {"answerWith": "text"}
    async with (
        live_server(ScriptedEngine([TextOutput(table)])) as server,
        demo_page(viewport=PHONE, settings=settings) as demo,
    ):
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.write("table")
        await demo.answered("three")
        box = demo.page.get_by_role("group", name="Table")
        wide, seen, right = await box.evaluate(
            "(box) => [box.scrollWidth, box.clientWidth, box.getBoundingClientRect().right]"
        )
        assert wide > seen
        assert right <= 360
        await box.focus()
        await demo.page.keyboard.press("ArrowRight")
        await demo.until("() => document.querySelector('#log .table').scrollLeft > 0")
        assert await demo.page.evaluate("document.documentElement.scrollWidth") == 360
    engine = ComposedEngine(ToolCallingEngine("One moment."), tts=ReadingEngine())
    async with live_server(engine, still_answers=False) as server, demo_page(viewport=PHONE) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.write("What time is it?")
        await demo.answered("It is", turn=1)
        await demo.page.locator(".call summary").first.click()
        cut = "(all) => all.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"
        assert await demo.page.locator(".call pre").evaluate_all(cut) == []
        note = await demo.page.locator(".turn .note", has_text="first sound").last.text_content()
        assert note is not None
        assert "first\u00a0sound\u00a0after\u00a0" in note
