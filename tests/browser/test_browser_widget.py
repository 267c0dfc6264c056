"""The element <voice-chat> in a page of another origin, under a policy that allows nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from support.chromium import (
    IN_BROWSER,
    DemoPage,
    demo_page,
    hear_screen_reader,
    load_axe,
    said_by_screen_reader,
    violations,
)
from support.file_server import page_server
from support.live_server import LiveServer, live_server
from support.patience import PATIENCE_SEC
from support.raw_http import post
from support.scripted_engines import HearingEngine, spoken
from support.speech_clips import clip_bytes

from omni_ws.config.keys import ApiKey, digest
from omni_ws.engine.base import TranscriptOutput

pytestmark = IN_BROWSER

ROOT: Final = Path(__file__).parents[2]
EXAMPLE: Final = ROOT / "examples" / "widget" / "index.html"
#: What docs/browser.md says that a page has to allow. Nothing inline, no blobs, no styles.
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
    folder: Path,
    engine: HearingEngine,
    *,
    attributes: str = "",
    allowed: bool = True,
    allow: tuple[str, ...] = ("microphone", "camera"),
    **fields: Any,
) -> AsyncIterator[Embedded]:
    """``allowed`` by the server's ``--allow-origin``; ``allow`` are the permissions of the page."""
    with page_server(folder) as site:
        fields["allow_origin"] = (site.origin,) if allowed else ()
        async with (
            live_server(engine, **fields) as server,
            demo_page(allow=allow, device=not allow, expect_problems=not allowed or bool(attributes)) as demo,
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
    engine = HearingEngine(
        heard=[TranscriptOutput("Go forward <i>ten</i> meters."), *spoken(" ".join(words), word_ms=300)]
    )
    async with embedded(tmp_path, engine) as here:
        demo = here.demo
        keyboard = demo.page.keyboard
        await load_axe(demo.page)
        await hear_screen_reader(demo.page, "voice-chat")
        found = [await violations(demo.page)]
        assert not here.server.sessions  # nobody has begun
        await keyboard.press("Tab")
        await keyboard.press("Enter")
        await here.shows("Listening")
        await demo.say(clip_bytes("goforward"))
        await here.until_told("answer", {"text": " ".join(words), "final": True})
        await here.shows("Go forward <i>ten</i> meters.")  # what is said is never markup
        await demo.until("(words) => words.every((word) => marked.has(word))", list(words))
        await here.shows("Listening")
        assert (await demo.played()).seconds > 0.7
        for scheme in ("light", "dark"):
            await demo.page.emulate_media(color_scheme=scheme)
            found.append(await violations(demo.page))
        await keyboard.press("Tab")
        await keyboard.press("Enter")
        await here.shows("Muted")
        await keyboard.press("Shift+Tab")
        await keyboard.press("Enter")
        await here.shows("Ready")
        states = [detail["state"] for detail in await here.told("state")]
        assert [
            one for one in ("connecting", "listening", "hearing", "speaking", "muted", "ready") if one not in states
        ] == []
        assert await here.told("error") == []
        assert await said_by_screen_reader(demo.page) == ["Listening", "Muted", "Ready"]
        assert found == [[]] * 3


async def test_a_server_with_keys_takes_a_client_secret_and_no_key(tmp_path: Path) -> None:
    """What the secret sets holds, unless an attribute says otherwise; one that has expired is told, and replaced."""
    engine = HearingEngine(spoken("Yes.", word_ms=300), voices=("tone", "bell"), languages=frozenset({"en", "de"}))
    keys = (ApiKey(name="shop", key_sha256=digest("sesame")),)
    async with embedded(tmp_path, engine, attributes="key=sesame", keys=keys) as here:
        page = here.demo.page
        made = {"session": {"instructions": "Be brief.", "voice": "bell"}}
        answer = await post(
            here.server.port, "/v1/streaming_input/client_secrets", made, "Authorization: Bearer sesame"
        )
        change = """([name, value]) => {
          const widget = document.querySelector("voice-chat");
          value === null ? widget.removeAttribute(name) : widget.setAttribute(name, value);
        }"""
        await here.shows("key: a key does not belong into a page")
        await load_axe(page)
        assert await violations(page) == []
        assert await page.get_by_role("button", name="Start talking").is_disabled()
        await page.evaluate(change, ["key", None])
        await page.evaluate(change, ["client-secret", "sesame"])
        await here.until_told("error", {"code": "invalid_attribute"})
        await here.shows("client-secret: this is none")
        await page.evaluate(change, ["instructions", None])
        await page.evaluate(change, ["client-secret", "ek_" + 32 * "0"])
        await page.get_by_label("Write").fill("Hello")
        await page.keyboard.press("Enter")
        await here.until_told("error", {"code": "unauthenticated"})
        await here.shows("its client secret is missing or has expired")
        assert not here.server.sessions
        await page.evaluate(change, ["client-secret", answer.json()["value"]])
        later: list[dict[str, str | None]] = [
            {},
            {"voice": "tone", "language": "de", "instructions": "Be long."},
            {"voice": None, "language": None},
        ]
        for number, changes in enumerate(later):
            for name, value in changes.items():
                await page.evaluate(change, [name, value])
            await page.get_by_label("Write").fill(f"Hello {number}")
            await page.keyboard.press("Enter")
            await here.demo.until(
                "(count) => told.filter(([name, { final }]) => name === 'answer' && final).length > count", number
            )
        asked = [(one.voice_named, one.voice, one.language, one.instructions) for one in engine.requests]
        assert asked == [
            (True, "bell", None, "Be brief."),
            (True, "tone", "de", "Be long."),
            (False, "tone", None, "Be long."),
        ]


async def test_a_page_that_is_not_allowed_is_told(tmp_path: Path) -> None:
    async with embedded(tmp_path, HearingEngine(), allowed=False) as here:
        await here.demo.page.get_by_role("button", name="Start talking").click()
        await here.until_told("error", {"code": "origin_not_allowed"})
        await here.shows("--allow-origin")
        await here.demo.page.get_by_role("button", name="Stop").click()  # it does not try for ever
        await here.shows("Ready")
        assert await here.demo.page.evaluate("document.querySelector('voice-chat').state") == "idle"


async def test_who_refuses_the_microphone_can_write(tmp_path: Path) -> None:
    async with embedded(tmp_path, HearingEngine(spoken("Yes.", word_ms=300)), allow=()) as here:
        await here.demo.page.get_by_role("button", name="Start talking").click()
        await here.until_told("error", {"code": "NotAllowedError"})
        await here.shows("does not let this page use the microphone")
        await here.demo.page.get_by_label("Write").fill("Hello")
        await here.demo.page.keyboard.press("Enter")
        await here.until_told("answer", {"text": "Yes.", "final": True})
        assert await here.demo.page.locator("voice-chat .error").is_hidden()


async def test_it_takes_its_colours_from_the_page_and_ends_with_its_element(tmp_path: Path) -> None:
    """Moved in the page it goes on. A page that opens and closes it again and again does not grow."""
    async with embedded(tmp_path, HearingEngine(spoken("Yes.", word_ms=300))) as here:
        page = here.demo.page
        await page.evaluate("""() => {
          const sheet = new CSSStyleSheet();
          sheet.replaceSync("voice-chat { --voice-chat-you: rebeccapurple; --voice-chat-paper: color(srgb 0 0.2 1); }");
          document.adoptedStyleSheets = [sheet];
          window.contexts = [];
          window.AudioContext = class extends AudioContext {
            constructor(options) {
              super(options);
              contexts.push(this);
            }
          };
        }""")
        await page.get_by_label("Write").fill("Hello")
        await page.keyboard.press("Enter")
        await here.until_told("answer", {"final": True})
        orb = page.locator("voice-chat .orb")
        colours = await orb.evaluate(
            "(orb) => ['--orb-you', '--paper'].map((name) => orb.style.getPropertyValue(name))"
        )
        assert colours == ["#663399", "#0033ff"]
        await page.evaluate("document.body.append(document.querySelector('voice-chat'))")
        await page.get_by_label("Write").fill("Still there?")
        await page.keyboard.press("Enter")
        await here.demo.until("() => document.querySelector('voice-chat').transcript.length === 4")
        assert here.server.sessions == 1
        (living,) = here.server.native._live._living.values()
        await here.server.native._live.end(living.session, deleted=True)
        await here.shows("This conversation was deleted.")
        await page.get_by_label("Write").fill("Anew?")
        await page.keyboard.press("Enter")
        await here.demo.until("() => document.querySelector('voice-chat').transcript.length === 6")
        await page.evaluate("(window.widget = document.querySelector('voice-chat')).remove()")
        await here.server.until(lambda: not here.server.sessions)
        states = "(states) => contexts.map(({ state }) => state).join() === states"
        await here.demo.until(states, "closed")
        await page.evaluate("document.body.append(widget)")
        await page.get_by_label("Write").fill("And now?")
        await page.keyboard.press("Enter")
        await here.demo.until("() => widget.transcript.length === 8 && widget.transcript[7].spoken")
        await here.demo.until(states, "closed,running")
        await page.evaluate("""() => {
          const widget = document.createElement("voice-chat");
          widget.setAttribute("src", location.href);
          document.body.append(widget);
          widget.remove();
          window.gone = new WeakRef(widget);
        }""")
        debugger = await page.context.new_cdp_session(page)
        async with asyncio.timeout(PATIENCE_SEC):
            while not await page.evaluate("gone.deref() === undefined"):
                await debugger.send("HeapProfiler.collectGarbage")
