"""A shared conversation: one file, opened from a disk without a network, of the page and of a recorded call."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import pytest
import pytest_asyncio
from support.chromium import IN_BROWSER, DemoPage, demo_page, load_axe, out_of_reach_by_keyboard, violations
from support.embedded_engine import EmbeddedEngine
from support.live_server import LiveServer, live_server
from support.speech_clips import WORDS, clip_bytes

from omni_ws.config.keys import ApiKey, digest
from omni_ws.config.model import VoiceChoice

if TYPE_CHECKING:
    from playwright.async_api import Page, ViewportSize

pytestmark = IN_BROWSER

DESKTOP: Final[ViewportSize] = {"width": 1280, "height": 800}
PHONE: Final[ViewportSize] = {"width": 390, "height": 844}
KEY: Final = "operator-key-of-this-test"
SCRIPT: Final = "<script>window.hit=1</script>"
STYLE: Final = '"></style><img src=x onerror=window.hit=1>'
SPOKEN: Final = f"go {SCRIPT} {STYLE} meters"
ID: Final = re.compile(r"\b[a-z]+_[0-9a-f]{16,}")
_LIT: Final = "[...(CSS.highlights.get('spoken') ?? [])].map(String)"
_KEEP_LIT: Final = f"""() => {{
  window.lit = [];
  const look = () => {{
    for (const word of {_LIT}) if (lit.at(-1) !== word) lit.push(word);
    requestAnimationFrame(look);
  }};
  look();
}}"""


@dataclass(frozen=True)
class Talked:
    """A conversation that was had: its file, the server that still runs, and what must not be in a file."""

    server: LiveServer
    file: Path
    session_id: str
    secrets: tuple[str, ...]


async def saved(page: Page, button: str, folder: Path) -> Path:
    """Press a button, and return the file that it makes."""
    async with page.expect_download() as coming:
        await page.locator(button).click()
    download = await coming.value
    assert re.fullmatch(r"conversation-\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.html", download.suggested_filename)
    path = folder / download.suggested_filename
    await download.save_as(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def talked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Talked]:
    """Somebody writes markup, asks for a long answer, and interrupts it by speech that is heard as markup."""
    folder = tmp_path_factory.mktemp("shared")
    keys = (ApiKey(name="operator", key_sha256=digest(KEY), admin=True),)
    engine = EmbeddedEngine(voice=VoiceChoice.ESPEAK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WORDS, "goforward", SPOKEN)
        async with live_server(
            engine, keys=keys, record=folder / "calls", streaming_input={"resume_grace_sec": 30}
        ) as server:
            async with demo_page(settings={"mode": "open"}, own_context=True) as demo:
                frames: list[str | bytes] = []
                demo.page.on("websocket", lambda wire: wire.on("framereceived", lambda one: frames.append(one)))
                await demo.open(f"http://127.0.0.1:{server.port}/#key={KEY}")
                await demo.write(f"Hello {SCRIPT} {STYLE}")
                await demo.answered(turn=0)
                await demo.in_state("ready")
                await demo.write("Count to twenty.")
                await demo.until_played(0.3)  # what is interrupted before it is heard is answered with what follows
                await demo.page.locator("#talk").click()
                await demo.say(clip_bytes("goforward"))
                await demo.answered(turn=1, state="stopped")
                await demo.heard(SPOKEN, turn=2)
                await demo.answered(turn=2)
                await demo.in_state("listening")
                await demo.page.locator("#talk").click()
                await demo.in_state("ready")
                session_id = await demo.page.locator("#figure-session").evaluate("(node) => node.textContent")
                await demo.page.locator("#save").click()
                file = await saved(demo.page, "#save-page", folder)
            tokens = re.findall(r'"resume_token":"([^"]+)"', " ".join(one for one in frames if isinstance(one, str)))
            yield Talked(server, file, session_id, (KEY, session_id, *tokens))


@asynccontextmanager
async def opened(
    file: Path, viewport: ViewportSize = DESKTOP, scheme: Literal["dark", "light"] = "light"
) -> AsyncIterator[DemoPage]:
    """A file, opened from the disk with the network off. It asks for nothing but itself."""
    async with demo_page(
        tapped=False, sample_rate=None, own_context=True, offline=True, viewport=viewport, color_scheme=scheme
    ) as demo:
        asked: list[str] = []
        demo.page.on("request", lambda request: asked.append(request.url.partition(":")[0]))
        await demo.page.goto(file.as_uri())
        await demo.until("() => document.title.startsWith('Conversation of')")
        yield demo
        assert asked.count("file") == 1
        assert set(asked) <= {"file", "data"}


def told(file: Path) -> Any:
    """What a file has of its conversation."""
    (data,) = re.findall(r'<script type="application/json" id="call">(.*?)</script>', file.read_text(), re.DOTALL)
    return json.loads(data)


async def check_plays(demo: DemoPage, turns: list[Any], place: int) -> None:
    """A turn is played from the file, and its words are marked as they sound."""
    words = [word["text"].strip() for word in turns[place]["answer"]["words"]]
    assert len(words) > 1
    await demo.page.evaluate(_KEEP_LIT)
    await demo.page.get_by_role("button", name=f"Turn {place + 1}: play from").click()
    await demo.page.get_by_role("button", name="Play", exact=True).click()
    await demo.until("(words) => words.every((word) => window.lit.includes(word))", words[:2])
    await demo.page.get_by_role("button", name="Pause").click()
    lit = await demo.page.evaluate("window.lit")
    assert lit.index(words[0]) < lit.index(words[1])


async def check_is_text(demo: DemoPage) -> None:
    """Markup that was said and written is read as text, and does nothing."""
    said = demo.page.locator(".turn .user .words")
    assert await said.first.inner_text() == f"Hello {SCRIPT} {STYLE}"
    assert await said.nth(2).inner_text() == SPOKEN
    assert await demo.page.evaluate("window.hit") is None
    assert await demo.page.locator("img").count() == 0
    assert await demo.page.locator("script").count() == 2


def check_tells_nothing(file: Path, secrets: tuple[str, ...]) -> None:
    """No key, token or id of the conversation is in a file."""
    text = file.read_text()
    without_sound = re.sub(r'src="data:audio/ogg;base64,[^"]+"', "", text)
    assert text != without_sound
    assert len(secrets) >= 3
    assert [secret for secret in secrets if secret in text] == []
    assert ID.findall(without_sound) == []
    assert "sessionStorage" not in text
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)[0]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert not re.search(r"\*|https?:|'self'|unsafe|connect-src", policy)


async def test_a_conversation_is_heard_from_a_file_without_a_network(talked: Talked) -> None:
    turns = told(talked.file)["turns"]
    async with opened(talked.file) as demo:
        assert "that of the person who talked" in await demo.page.locator("#whose").inner_text()
        await check_is_text(demo)
        await check_plays(demo, turns, 1)
        cut = demo.page.locator(".turn").nth(1)
        assert "cut after" in await cut.locator(".note").inner_text()
        assert await cut.locator("del").inner_text()
        await demo.page.keyboard.press("j")
        await demo.page.locator("#turn-fall li", has_text="turn decision").wait_for()
        length = await demo.page.evaluate("document.querySelector('#sound').duration")
    assert abs(length - told(talked.file)["duration_ms"] / 1000) < 0.05
    check_tells_nothing(talked.file, talked.secrets)


async def test_the_same_of_a_recorded_call(talked: Talked, tmp_path: Path) -> None:
    async with demo_page(tapped=False, sample_rate=None, expect_problems=True) as demo:
        await demo.page.goto(f"http://127.0.0.1:{talked.server.port}/calls/{talked.session_id}")
        await demo.page.locator("#key").fill(KEY)
        await demo.page.locator("#key").press("Enter")
        await demo.page.locator(".turn").nth(2).wait_for()
        file = await saved(demo.page, "#share", tmp_path)
    async with opened(file) as demo:
        await check_is_text(demo)
        await check_plays(demo, told(file)["turns"], 1)
    check_tells_nothing(file, talked.secrets)


async def test_everybody_can_use_it(talked: Talked) -> None:
    """axe-core finds nothing, in the light on a desk and in the dark on a phone, and keys reach everything."""
    looks: tuple[tuple[Literal["dark", "light"], ViewportSize], ...] = (("light", DESKTOP), ("dark", PHONE))
    for scheme, viewport in looks:
        async with opened(talked.file, viewport, scheme) as demo:
            await load_axe(demo.page)
            assert await violations(demo.page) == []
            assert await out_of_reach_by_keyboard(demo.page) == []
            assert await demo.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


#: The file of so many turns of ten seconds, each with speech, or of none that is heard.
_MADE: Final = """async ([count, speech]) => {
  const { sharedFile } = await import("/browser/calls/shared-file.js");
  const template = await (await fetch("/browser/calls/shared.html")).text();
  const samples = speech && new Int16Array(Uint8Array.from(atob(speech), (letter) => letter.charCodeAt(0)).buffer);
  const turns = Array.from({ length: count }, (_, place) => ({
    user: { text: "And then?", start_ms: 10_000 * place, end_ms: 10_000 * place + 4000 },
    answer: { text: "Then it went on.", start_ms: 10_000 * place + 5000, end_ms: 10_000 * place + 10_000 },
  }));
  const sound = samples && {
    rate: 16_000,
    *read(from, frames) {
      for (let at = 0; at < frames; at += samples.length) yield { user: samples.subarray(0, frames - at) };
    },
  };
  const call = { started: "2026-01-02T03:04:05Z", duration_ms: 10_000 * count, turns };
  return (await sharedFile(template, call, sound)).text();
}"""


async def test_two_minutes_are_half_a_megabyte_and_a_long_one_says_what_is_missing(talked: Talked) -> None:
    speech = base64.b64encode(clip_bytes("librivox_ss_0870")).decode()
    async with demo_page(tapped=False, sample_rate=None, own_context=True, expect_problems=True) as demo:
        await demo.page.goto(f"http://127.0.0.1:{talked.server.port}/openapi.json")

        async def made(turns: int, speech: str | None = None) -> Any:
            text = await demo.page.evaluate(_MADE, [turns, speech])
            (data,) = re.findall(r'id="call">(.*?)</script>', text, re.DOTALL)
            return {**json.loads(data), "bytes": len(text)}

        two_minutes = await made(12, speech)
        print(f"two minutes of speech: {two_minutes['bytes']:,} bytes, without sound {(await made(12))['bytes']:,}")
        assert 300_000 < two_minutes["bytes"] < 700_000
        assert two_minutes["left_out"] == []
        assert (await made(180))["left_out"] == []
        longer = await made(182)
        assert longer["left_out"] == ["The begin is left out: 2 of 182 turns, 1 min."]
        assert [len(longer["turns"]), longer["duration_ms"]] == [180, 1_800_000]
        assert longer["turns"][0]["user"]["start_ms"] == 0
        await demo.page.evaluate("delete globalThis.AudioEncoder")
        silent = await made(12, speech)
        assert silent["left_out"] == ["The sound is left out: the browser that made this file cannot compress sound."]
        assert "peaks" not in silent
