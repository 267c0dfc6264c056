"""The soft sound of the page while an answer is thought about for long: the real browser."""

from __future__ import annotations

import asyncio

from support.chromium import IN_BROWSER, demo_page
from support.live_server import live_server
from support.part_engines import ReadingEngine, RetortEngine

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


async def test_it_is_soft_and_ends_with_the_first_sound() -> None:
    llm = RetortEngine("Here it is.")
    llm.gate = asyncio.Event()
    engine = ComposedEngine(llm, tts=ReadingEngine())
    async with live_server(engine, still_answers=False) as server, demo_page(settings={"thinkingSound": True}) as demo:
        await demo.page.add_init_script(_LISTEN)
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.evaluate("window.asked = performance.now()")
        await demo.write("Where is it?")
        await demo.until("() => notes.length === 2")
        assert await demo.page.evaluate("performance.now() - asked") >= 2000
        await demo.until("() => notes.length === 4")
        times = await demo.page.evaluate("notes.map(({ at }) => at)")
        assert times[2] - times[0] >= 1.4
        await demo.until("() => notes[3].context.currentTime > notes[3].at + 0.5")
        assert 0.005 < await demo.page.evaluate("loudest()") < 0.011
        llm.gate.set()
        await demo.answered()
        await demo.in_state("ready")
        begun = await demo.page.evaluate("notes.length")
        await demo.page.evaluate("window.later = notes[0].context.currentTime + 2")
        await demo.until("() => notes[0].context.currentTime > later")
        assert await demo.page.evaluate("notes.length") == begun


async def test_it_can_be_switched_off_while_it_sounds() -> None:
    llm = RetortEngine("Here it is.")
    llm.gate = asyncio.Event()
    engine = ComposedEngine(llm, tts=ReadingEngine())
    async with live_server(engine, still_answers=False) as server, demo_page(settings={"thinkingSound": True}) as demo:
        await demo.page.add_init_script(_LISTEN)
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.write("Where is it?")
        await demo.until("() => notes.length >= 2")
        await demo.page.locator("#open-settings").click()
        await demo.page.get_by_label("A soft sound while it thinks").uncheck()
        begun = await demo.page.evaluate("notes.length")
        await demo.page.evaluate("window.later = notes[0].context.currentTime + 2")
        await demo.until("() => notes[0].context.currentTime > later")
        assert await demo.page.evaluate("notes.length") == begun
        llm.gate.set()
        await demo.answered()
