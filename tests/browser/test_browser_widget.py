"""The element <voice-chat> in a page of another origin, under a policy that allows nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from support.accessibility import load_axe, violations
from support.capable_engine import HearingEngine
from support.chromium import IN_BROWSER, DemoPage, demo_page
from support.live_server import LiveServer, live_server
from support.page_server import page_server
from support.speech_clips import clip_bytes

from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import Word
from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput

pytestmark = IN_BROWSER

ROOT: Final = Path(__file__).parents[2]
EXAMPLE: Final = ROOT / "examples" / "widget" / "index.html"
#: What docs/browser.md says that a page has to allow. Nothing inline, no blobs, no styles.
SHOTS = True
POLICY: Final = (
    "default-src 'none'; script-src {http}; connect-src {http} {ws}; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'"
)
#: Keeps what the element tells, and each word that it marks.
WATCH: Final = """() => {
  const widget = document.querySelector("voice-chat");
  window.told = [];
  window.marked = new Set();
  for (const name of ["state", "transcript", "answer", "error"]) {
    widget.addEventListener(name, ({ detail }) => told.push([name, detail]));
  }
  setInterval(() => {
    for (const range of CSS.highlights.get("spoken") ?? []) marked.add(range.toString());
  }, 5);
}"""


def spoken(*words: str, milliseconds: int = 300) -> list[Any]:
    """An answer of these words, each so long."""
    sound = (0.3 * np.sin(np.arange(24 * milliseconds) / 10)).astype(np.float32)
    return [
        TextOutput(" ".join(words)),
        *(
            AudioOutput(sound, 24_000, (Word(word, place * milliseconds, (place + 1) * milliseconds),))
            for place, word in enumerate(words)
        ),
    ]


@dataclass(frozen=True)
class Embedded:
    """The example's page on another origin, and the server that it talks with."""

    demo: DemoPage
    server: LiveServer

    async def told(self, name: str) -> list[Any]:
        """The details of all events of this name."""
        found: list[Any] = await self.demo.page.evaluate("(name) => told.filter((one) => one[0] === name)", name)
        return [detail for _, detail in found]

    async def until_told(self, name: str, detail: dict[str, Any]) -> None:
        """Wait for an event that has these in its detail."""
        await self.demo.until(
            "([name, detail]) => told.some((one) => one[0] === name && "
            "Object.entries(detail).every(([key, value]) => one[1][key] === value))",
            [name, detail],
        )

    async def shows(self, words: str) -> None:
        await self.demo.page.locator("voice-chat").get_by_text(words).first.wait_for()


@asynccontextmanager
async def embedded(
    folder: Path, engine: HearingEngine, *, attributes: str = "", allowed: bool = True, **fields: Any
) -> AsyncIterator[Embedded]:
    with page_server(folder) as site:
        fields["allow_origin"] = (site.origin,) if allowed else ()
        async with (
            live_server(engine, **fields) as server,
            demo_page(expect_problems=not allowed or bool(attributes)) as demo,
        ):
            text = EXAMPLE.read_text(encoding="utf-8").replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")
            await asyncio.to_thread(
                (folder / "index.html").write_text, text.replace("<voice-chat", f"<voice-chat {attributes}")
            )
            address = f"127.0.0.1:{server.port}"
            site.headers["Content-Security-Policy"] = POLICY.format(http=f"http://{address}", ws=f"ws://{address}")
            await demo.page.goto(site.origin)
            await demo.page.evaluate(WATCH)
            yield Embedded(demo, server)


async def test_a_page_of_ten_lines_is_talked_to_by_keyboard(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 10
    words = ("Ten", "<b>meters</b>", "then.")
    engine = HearingEngine(heard=[TranscriptOutput("Go forward <i>ten</i> meters."), *spoken(*words)])
    async with embedded(tmp_path, engine) as here:
        demo = here.demo
        keyboard = demo.page.keyboard
        await load_axe(demo.page)
        found = [await violations(demo.page)]
        assert not here.server.sessions  # nobody has begun
        await keyboard.press("Tab")
        await keyboard.press("Enter")
        await here.shows("Listening")
        await demo.say(clip_bytes("goforward"))
        await here.until_told("answer", {"text": " ".join(words), "final": True})
        await here.shows("Go forward <i>ten</i> meters.")  # what is said is never markup
        if SHOTS: await demo.page.screenshot(path="/tmp/widget-speaking.png")
        await demo.until("(words) => words.every((word) => marked.has(word))", list(words))
        await here.shows("Listening")
        assert (await demo.played()).seconds >= 0.8
        for scheme in ("light", "dark"):
            await demo.page.emulate_media(color_scheme=scheme)
            if SHOTS: await demo.page.screenshot(path=f"/tmp/widget-{scheme}.png")
            found.append(await violations(demo.page))
        await keyboard.press("Tab")
        await keyboard.press("Enter")
        await here.shows("Muted")
        await keyboard.press("Shift+Tab")
        await keyboard.press("Enter")
        await here.shows("Ready")
        states = [detail["state"] for detail in await here.told("state")]
        assert [one for one in ("connecting", "listening", "hearing", "speaking", "muted", "ready") if one not in states] == []
        assert await here.told("error") == []
        assert found == [[]] * 3
