"""The soft sound of the page while an answer is thought about for long: the real browser."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from support.chromium import IN_BROWSER, DemoPage, demo_page
from support.live_server import live_server
from support.scripted_engines import ReadingEngine, RetortEngine

from omni_ws.engine.composed.engine import ComposedEngine

pytestmark = IN_BROWSER

#: Keeps when notes begin, and how loud they are together with all else that is played.
_LISTEN = """
window.notes = [];
const start = OscillatorNode.prototype.start;
OscillatorNode.prototype.start = function (at) {
  notes.push({ at, context: this.context });
  return start.call(this, at);
};
const louder = (most, one) => Math.max(most, Math.abs(one));
window.loudest = () => Math.max(0, ...tapped.pieces.map((piece) => piece.reduce(louder, 0)));
"""


@contextlib.asynccontextmanager
async def listened_page() -> AsyncIterator[tuple[DemoPage, asyncio.Event]]:
    """The page with its notes kept, of a server that answers once the event is set."""
    llm = RetortEngine("Here it is.")
    llm.gate = asyncio.Event()
    engine = ComposedEngine(llm, tts=ReadingEngine())
    async with live_server(engine, still_answers=False) as server, demo_page(settings={"thinkingSound": True}) as demo:
        await demo.page.add_init_script(_LISTEN)
        await demo.open(f"http://127.0.0.1:{server.port}/")
        yield demo, llm.gate


async def no_further_note_begins(demo: DemoPage) -> None:
    """For two seconds of the page's audio."""
    begun = await demo.page.evaluate("notes.length")
    await demo.page.evaluate("window.later = notes[0].context.currentTime + 2")
    await demo.until("() => notes[0].context.currentTime > later")
    assert await demo.page.evaluate("notes.length") == begun


async def test_it_is_soft_and_ends_with_the_first_sound() -> None:
    async with listened_page() as (demo, answers):
        await demo.page.evaluate("window.asked = performance.now()")
        await demo.write("Where is it?")
        await demo.until("() => notes.length === 2")
        assert await demo.page.evaluate("performance.now() - asked") >= 2000
        await demo.until("() => notes.length === 4")
        times = await demo.page.evaluate("notes.map(({ at }) => at)")
        assert times[2] - times[0] >= 1.4
        await demo.until("() => notes[3].context.currentTime > notes[3].at + 0.5")
        assert 0.005 < await demo.page.evaluate("loudest()") < 0.011
        answers.set()
        await demo.answered()
        await demo.in_state("ready")
        await no_further_note_begins(demo)


async def test_it_can_be_switched_off_while_it_sounds() -> None:
    async with listened_page() as (demo, answers):
        await demo.write("Where is it?")
        await demo.until("() => notes.length >= 2")
        await demo.open_settings()
        await demo.page.get_by_label("A soft sound while it thinks").uncheck()
        await no_further_note_begins(demo)
        answers.set()
        await demo.answered()
