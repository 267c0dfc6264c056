"""The page for everybody: axe-core finds nothing, and the keyboard alone reaches everything."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from support.chromium import IN_BROWSER, DemoPage, demo_page, load_axe, out_of_reach_by_keyboard, violations
from support.live_server import live_server
from support.scripted_engines import ReadingEngine, RetortEngine, WordEngine

from omni_ws.engine.composed.engine import ComposedEngine

if TYPE_CHECKING:
    from playwright.async_api import ViewportSize

pytestmark = IN_BROWSER

DESKTOP: Final[ViewportSize] = {"width": 1280, "height": 800}
PHONE: Final[ViewportSize] = {"width": 360, "height": 740}


@asynccontextmanager
async def page_with_a_conversation() -> AsyncIterator[DemoPage]:
    """A page whose server has all there is to show."""
    engine = ComposedEngine(RetortEngine(), asr=WordEngine(), tts=ReadingEngine())
    async with live_server(engine) as server, demo_page(viewport=DESKTOP) as demo:
        server.app.sessions.advise = lambda: "There is a better one."
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.locator("select[name=voice] option").first.wait_for(state="attached")
        yield demo


async def states(demo: DemoPage) -> AsyncIterator[str]:
    """Brings the page into each of its states, and names it."""
    page = demo.page
    yield "welcome"
    await demo.write("`hello` there")
    await demo.answered()
    await demo.in_state("ready")
    yield "conversation"
    await page.locator("#open-log").click()
    yield "the words of the moment"
    await page.locator("#open-log").click()
    await page.get_by_role("button", name="Change the question").click()
    await demo.message("Change the question")
    yield "a message"
    await page.get_by_role("button", name="Leave it").click()
    for opener, dialog in (("open-settings", "settings"), ("open-who", "who-dialog"), ("save", "save-dialog")):
        if opener == "open-settings":
            await demo.open_settings()
        else:
            await page.locator(f"#{opener}").click()
        yield dialog
        await page.keyboard.press("Escape")
    await page.evaluate("document.querySelector('#key-dialog').showModal()")
    yield "key-dialog"
    await page.keyboard.press("Escape")
    await page.locator("#open-developer").click()
    await page.locator("#wire details").first.click()
    await page.locator("#wire pre").wait_for()
    yield "developer"
    await page.locator("#close-developer").click()
    for state in ("hearing", "busy", "muted", "away"):
        await page.evaluate("(state) => (document.body.dataset.state = state)", state)
        yield state


async def test_axe_finds_nothing() -> None:
    """In the light on a desktop, and in the dark on a phone."""
    async with page_with_a_conversation() as demo:
        await demo.page.emulate_media(reduced_motion="reduce")  # what is on its way has no colour to be judged by
        await load_axe(demo.page)
        found: list[list[str]] = []
        async for state in states(demo):
            await demo.page.emulate_media(color_scheme="dark")
            await demo.page.set_viewport_size(PHONE)
            found += [[state, "dark, phone", *each] for each in await violations(demo.page)]
            await demo.page.emulate_media(color_scheme="light")
            await demo.page.set_viewport_size(DESKTOP)
            found += [[state, "light, desktop", *each] for each in await violations(demo.page)]
        assert not found, json.dumps(found, indent=1)
        # It does look: at a button without a name, and at text in the colour of a line.
        await demo.page.evaluate(
            """() => {
              for (const name of ["aria-label", "title"]) document.querySelector("#new").removeAttribute(name);
              document.querySelector("#round-trip").parentElement.style.color = "var(--line)";
            }"""
        )
        broken = await violations(demo.page)
        assert {each[0] for each in broken} == {"button-name", "color-contrast"}


async def test_the_keyboard_reaches_everything() -> None:
    async with page_with_a_conversation() as demo:
        async for state in states(demo):
            missed = await out_of_reach_by_keyboard(demo.page)
            assert not missed, f"{state}: {missed}"
        await demo.page.locator("#mode-open").focus()
        await demo.page.keyboard.press("ArrowRight")  # a group of radio buttons is one stop
        await demo.page.locator("#talk", has_text="Hold to talk").wait_for()
