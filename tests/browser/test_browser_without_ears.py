"""The page of a server that takes no speech: it offers no microphone and says why, and text is answered."""

from __future__ import annotations

import pytest
from support.chromium import IN_BROWSER, demo_page
from support.live_server import live_server

from omni_ws.config import load
from omni_ws.engine_choice import create_engine

pytestmark = [*IN_BROWSER, pytest.mark.usefixtures("no_weights")]

#: Counts the microphones that the page asks for.
_COUNT = "window.asked = 0; navigator.mediaDevices.getUserMedia = async () => { asked++; throw new Error(); };"


async def test_text_is_taken_and_no_microphone_is_offered() -> None:
    engine = create_engine(load(("--llm", "rules", "--embedded.voice", "none")).config)
    async with live_server(engine) as server, demo_page() as demo:
        await demo.page.add_init_script(_COUNT)
        await demo.open(f"http://127.0.0.1:{server.port}/")
        page = demo.page
        assert (
            await page.locator("#no-ears").inner_text() == "No microphone here: this server does not understand speech."
        )
        assert await page.get_by_label("What is missing here").inner_text() == (
            "What is missing here\nIt cannot hear: write to it.\nIt has no voice: answers come as text.\n"
            "No language model answers, only rules: they know the time, sums, units and plain facts."
        )
        for hidden in ("#talk", "#mute", "#modes", "#keys-of-talk"):
            assert not await page.locator(hidden).is_visible(), hidden
        assert await page.locator("#invitation").inner_text() == "Write something."
        await page.keyboard.press("Space")
        await page.keyboard.press("m")
        await demo.open_settings()
        assert not await page.locator("[name=microphone]").is_visible()
        assert not await page.locator("#input-level").is_visible()
        await page.locator("#close-settings").click()
        await demo.write("What is three plus four?")
        assert await demo.answered() == "That makes 7."
        assert await page.evaluate("asked") == 0
        await demo.in_state("ready")
