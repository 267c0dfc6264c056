"""The profiler's page on a phone: all figures in sight."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from support import ways_in
from support.chromium import IN_BROWSER
from support.live_server import live_server
from support.raw_http import post

from omni_ws.profiler.__main__ import main

if TYPE_CHECKING:
    from playwright.async_api import Browser

pytestmark = IN_BROWSER

#: What of these is cut off or lies on something else at the width of the window.
_HIDDEN = """() => {
  const cells = [...document.querySelectorAll("td, .scale span")].filter((one) => one.checkVisibility());
  const boxes = cells.map((one) => one.getBoundingClientRect());
  const over = ([a, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  return {
    cells: cells.length,
    width: document.documentElement.scrollWidth,
    outside: cells.filter((one, place) => boxes[place].left < 0 || boxes[place].right > innerWidth
      || one.scrollWidth > one.clientWidth + 1 && one.matches("td")).map((one) => one.textContent),
    overlapping: cells.slice(1).filter((_, place) => over(boxes.slice(place, place + 2))).map((one) => one.textContent),
  };
}"""


async def test_a_phone_shows_every_figure(browser: Browser, tmp_path: Path) -> None:
    async with live_server(profiler={"root": tmp_path}) as server:
        started = (await post(server.port, "/start_request_profile", {"run_id": "phone"})).json()
        await ways_in.run_mixed(server, [ways_in.typed(), ways_in.speech()], 6)
        await post(server.port, "/stop_request_profile", {})
    page_file = tmp_path / "page.html"
    assert main([str(Path(started["event_file"]).parent), "--format", "html", "--out", str(page_file)]) == 0
    async with await browser.new_page(viewport={"width": 360, "height": 640}) as page:
        await page.goto(page_file.as_uri())
        # The axis with the widest times that it can have.
        await page.locator(".scale span").evaluate_all(
            "times => times.forEach((time) => { time.textContent = '0.888\\u00a0ms'; })"
        )
        found = await page.evaluate(_HIDDEN)
        assert found["cells"] > 30
        assert (found["width"], found["outside"], found["overlapping"]) == (360, [], [])
        headings = await page.locator("td:not(.text):not(.share)").evaluate_all(
            "cells => new Set(cells.map((cell) => getComputedStyle(cell, '::before').content.slice(1, -1))).size"
        )
        assert headings == 6  # count, avg, p50, p95, max, total
