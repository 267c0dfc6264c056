"""What the page costs: time to first paint, bytes transferred, layout shift, and CPU time.

The server runs the embedded engine with rules in its own process, and Chromium has no graphics card. Each load is that
of a browser that has seen nothing. The layout shift (CLS) is that of one whole conversation: a question by text, its
answer, and a microphone that is opened. The CPU time is that of all of Chromium's processes: while the page
waits, while it speaks, and while it listens to a quiet room (with the threads of the sound and the network). What
listening costs at least is what it costs a page that does nothing but send its microphone (bare_microphone.html): both
listen in turn, since a machine that has other work makes all of it dearer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import wave
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from benchmarks.chromium import chromium_path
from benchmarks.server_process import cpu_seconds, free_port, serving

if TYPE_CHECKING:
    from playwright.async_api import ViewportSize

_TIMEOUT_MS: Final = 60_000
_WINDOW: Final[ViewportSize] = {"width": 1280, "height": 800}
#: After a state has begun, before it is measured.
_SETTLE_SEC: Final = 2.0
#: The page sends larger pieces once it has been quiet for four seconds.
_QUIET_SEC: Final = 6.0
_ROUNDS: Final = 3
_SPEAKING_SEC: Final = 3.0
_RATE: Final = 16_000

#: Targets: seconds, bytes, the score of layout shift, shares of a core.
MAX_FIRST_PAINT_SEC: Final = 0.5
MAX_BYTES: Final = 250_000
MAX_SHIFT: Final = 0.02
MAX_IDLE: Final = 0.03
MAX_LISTENING: Final = 0.08
#: Of what listening costs at least.
MAX_OF_LEAST: Final = 1.25

_WATCH: Final = """
window.shifts = [];
new PerformanceObserver((list) => {
  for (const one of list.getEntries()) if (!one.hadRecentInput) shifts.push(one.value);
}).observe({ type: "layout-shift", buffered: true });
"""
_PAINT: Final = """() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? null"""
_BYTES: Final = """() => [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
  .reduce((sum, { transferSize }) => sum + transferSize, 0)"""


def main(arguments: Sequence[str]) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks page", description=__doc__)
    parser.add_argument("--loads", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20, help="of each state whose processor time is measured")
    parser.add_argument("--quick", action="store_true", help="three loads, five seconds")
    options = parser.parse_args(arguments)
    path = chromium_path(parser)
    loads, seconds = (3, 5.0) if options.quick else (options.loads, options.seconds)
    port = free_port()
    with serving("--llm", "rules", port=port):
        return asyncio.run(_measure(path, f"http://127.0.0.1:{port}/", loads, seconds))


def _quiet_room(folder: str) -> Path:
    """A recording of faint noise: the page takes a microphone that sends only zeros for one that is switched off."""
    path = Path(folder, "room.wav")
    noise = np.random.default_rng(1).normal(0, 6, _RATE * 30).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE)
        file.writeframes(noise.tobytes())
    return path


async def _measure(path: str, url: str, loads: int, seconds: float) -> bool:
    from playwright.async_api import async_playwright

    with tempfile.TemporaryDirectory() as folder:
        switches = (
            *("--no-sandbox", "--disable-gpu", "--use-fake-device-for-media-stream"),
            f"--use-file-for-fake-audio-capture={_quiet_room(folder)}",
        )
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=path, args=[*switches])
            paints, weights = [], []
            for _ in range(loads):
                async with await browser.new_context(viewport=_WINDOW) as context:
                    page = await context.new_page()
                    await page.goto(url)
                    await page.locator("body[data-state=ready]").wait_for(timeout=_TIMEOUT_MS)
                    paints.append(float(await page.evaluate(_PAINT)) / 1000)
                    weights.append(int(await page.evaluate(_BYTES)))
            async with _with_microphone(browser) as page:
                shift, shares = await _talk(page, url, seconds)
            async with _bare_page() as bare:
                pairs = [[await _listening(browser, each, seconds) for each in (url, bare)] for _ in range(_ROUNDS)]
            shares |= dict(zip(("listening", "bare"), map(statistics.median, zip(*pairs, strict=True)), strict=True))
            await browser.close()
    return _report(paints, weights, shift, shares)


@asynccontextmanager
async def _with_microphone(browser: Any) -> AsyncIterator[Any]:
    async with await browser.new_context(viewport=_WINDOW, permissions=["microphone"]) as context:
        page = await context.new_page()
        page.set_default_timeout(_TIMEOUT_MS)
        yield page


@asynccontextmanager
async def _bare_page() -> AsyncIterator[str]:
    """The address of a page that sends its microphone, and nothing else; what it sends is dropped."""
    text = (Path(__file__).parent / "bare_microphone.html").read_bytes()

    def page(_connection: ServerConnection, request: Request) -> Response | None:
        headers = Headers({"Content-Type": "text/html", "Content-Length": str(len(text))})
        return None if "Upgrade" in request.headers else Response(200, "OK", headers, text)

    async def drop(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            async for _ in connection:
                pass

    async with serve(drop, "127.0.0.1", 0, process_request=page, compression=None) as server:
        (socket,) = server.sockets
        yield f"http://127.0.0.1:{socket.getsockname()[1]}/"


async def _listening(browser: Any, url: str, seconds: float) -> float:
    """The share of a core while a page listens."""
    async with _with_microphone(browser) as page:
        await page.add_init_script("localStorage.setItem('omni_ws.settings', '{\"greeting\":false}')")
        await page.goto(url)
        await page.locator("body[data-state=ready]").wait_for()
        await page.locator("#talk").click()
        await page.locator("body[data-state=listening]").wait_for()
        return await _share(seconds, settle=_QUIET_SEC)


async def _talk(page: Any, url: str, seconds: float) -> tuple[float, dict[str, float]]:
    """The layout shift of a conversation, and the share of a core in each state."""
    shares = {}
    await page.add_init_script(_WATCH)
    await page.goto(url)
    await page.locator("body[data-state=ready]").wait_for()
    shares["idle"] = await _share(seconds)
    await page.locator("#text").fill("Count to twenty.")
    await page.locator("#text").press("Enter")
    await page.locator("body[data-state=speaking]").wait_for()
    shares["speaking"] = await _share(_SPEAKING_SEC, settle=0.5)
    await page.locator("body[data-state=ready]").wait_for()
    await page.locator("#talk").click()
    await page.locator("body[data-state=listening]").wait_for()
    await asyncio.sleep(_SETTLE_SEC)
    return float(await page.evaluate("shifts.reduce((sum, one) => sum + one, 0)")), shares


def _chromium_seconds() -> float:
    """The processor time of all processes below this one, but the server's."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        children.setdefault(int(rest.split()[1]), []).append((int(entry.name), name))
    found, waiting = 0.0, [Path("/proc/self").resolve().name]
    while waiting:
        for pid, name in children.get(int(waiting.pop()), []):
            waiting.append(str(pid))
            if name.startswith("chrom"):
                try:
                    found += cpu_seconds(pid)
                except OSError:
                    continue
    return found


async def _share(seconds: float, settle: float = _SETTLE_SEC) -> float:
    await asyncio.sleep(settle)
    before = _chromium_seconds()
    await asyncio.sleep(seconds)
    return (_chromium_seconds() - before) / seconds


def _report(paints: list[float], weights: list[int], shift: float, shares: dict[str, float]) -> bool:
    rows = [
        ("first paint, median of the loads", statistics.median(paints), MAX_FIRST_PAINT_SEC, "{:.2f} s"),
        ("bytes of a first load", max(weights), MAX_BYTES, "{:,}"),
        ("layout shift of a conversation", shift, MAX_SHIFT, "{:.3f}"),
        ("share of a core, waiting", shares["idle"], MAX_IDLE, "{:.1%}"),
        ("share of a core, listening", shares["listening"], MAX_LISTENING, "{:.1%}"),
        ("the same of a page that only sends its microphone", shares["bare"], None, "{:.1%}"),
        ("the first as a part of the second", shares["listening"] / shares["bare"], MAX_OF_LEAST, "{:.2f}"),
        ("share of a core, speaking", shares["speaking"], None, "{:.1%}"),
    ]
    print(f"**The page in Chromium without a graphics card, {len(paints)} loads**\n")
    print("| | | |\n|---|---|---|")
    met = True
    for name, value, most, form in rows:
        verdict = "" if most is None else f"≤ {form.format(most)}: {'met' if value <= most else 'MISSED'}"
        met = met and (most is None or value <= most)
        print(f"| {name} | {form.format(value)} | {verdict} |")
    return met
