"""omni-ws/react as an application has it: packed by npm, built by Vite, on another origin, under a strict policy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import pytest
from support.chromium import demo_page, load_axe, violations
from support.file_server import page_server
from support.live_server import live_server
from support.outside import run_outside, tool
from support.scripted_engines import HearingEngine, spoken
from support.speech_clips import clip_bytes

from omni_ws.engine.base import TranscriptOutput

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

ROOT: Final = Path(__file__).parents[2]
EXAMPLE: Final = ROOT / "examples" / "react"
#: What docs/browser.md says that the page of such an application has to allow.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; connect-src {http} {ws}; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'"
)
#: Keeps each word that is marked: a busy machine may look only when the next one is.
WATCH: Final = """() => {
  window.marked = new Set();
  const look = () => document.querySelectorAll("mark").forEach(({ textContent }) => marked.add(textContent));
  new MutationObserver(look).observe(document.body, { childList: true, subtree: true, characterData: true });
}"""


async def build(folder: Path, port: int) -> None:
    """Check the types of the example, for the server at this port, and build it into app/dist."""
    node = Path(tool("OUTSIDE_NODE")) / "node_modules"
    os.symlink(node, folder / "node_modules")
    app = folder / "app"
    shutil.copytree(EXAMPLE, app)
    main = app / "App.tsx"
    main.write_text(main.read_text(encoding="utf-8").replace("127.0.0.1:8080", f"127.0.0.1:{port}"), encoding="utf-8")
    packed = await run_outside("npm", "pack", "--offline", "--silent", str(ROOT / "clients" / "js"), cwd=folder)
    shutil.unpack_archive(folder / packed.strip(), folder)
    (app / "node_modules").mkdir()
    (folder / "package").rename(app / "node_modules" / "omni-ws")
    assert await run_outside(str(node / ".bin" / "tsc"), "--project", str(app)) == ""
    await run_outside(str(node / ".bin" / "vite"), "build", str(app), "--logLevel=warn", cwd=app)


async def test_an_app_of_thirty_lines_is_talked_to_by_keyboard(tmp_path: Path) -> None:
    assert len((EXAMPLE / "App.tsx").read_text(encoding="utf-8").splitlines()) <= 30
    words = ("Ten", "<b>meters</b>", "then.")
    engine = HearingEngine(heard=[TranscriptOutput("Go forward ten meters."), *spoken(" ".join(words), word_ms=300)])
    with page_server(tmp_path / "app" / "dist") as site:
        async with live_server(engine, allow_origin=(site.origin,)) as server:
            await build(tmp_path, server.port)
            address = f"127.0.0.1:{server.port}"
            site.headers["Content-Security-Policy"] = POLICY.format(http=f"http://{address}", ws=f"ws://{address}")
            async with demo_page("--autoplay-policy=no-user-gesture-required", tapped=False) as demo:
                page = demo.page
                await page.goto(site.origin)
                await page.get_by_text("idle").wait_for()
                await load_axe(page)
                assert await violations(page) == []
                await page.keyboard.press("Tab")
                await page.keyboard.press("Enter")
                await page.get_by_text("listening").wait_for()
                await page.evaluate(WATCH)
                await demo.say(clip_bytes("goforward"))
                await demo.until("(words) => words.every((word) => marked.has(word))", list(words))
                await page.get_by_text(f"Answer: {' '.join(words)}").wait_for()
                await page.get_by_text("You: Go forward ten meters.").wait_for()
                await page.get_by_text("listening").wait_for()
                assert await violations(page) == []
                await page.keyboard.press("Tab")
                await page.keyboard.press("Enter")
                await page.get_by_text("muted", exact=True).wait_for()
                await page.keyboard.press("Tab")
                await page.keyboard.type("Hello")
                await page.keyboard.press("Enter")
                await page.get_by_text("You: Hello").wait_for()
                await page.get_by_role("button", name="Stop").focus()
                await page.keyboard.press("Enter")
                await page.get_by_text("ready").wait_for()
