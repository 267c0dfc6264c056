"""How the page opens: the installed app with the microphone, a link without it; and its QR code for a phone."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import segno
from support.chromium import IN_BROWSER, demo_page, load_axe, violations
from support.live_server import LiveServer, live_server
from support.patience import PATIENCE_SEC
from support.raw_http import call

from omni_ws.config.keys import ApiKey, digest

pytestmark = IN_BROWSER

OPEN = {"mode": "open"}
KEY = "key-of-this-test"
#: What Safari tells the page of an app; Chromium tells it by a media feature, which cannot be set from outside.
AS_APP = "Object.defineProperty(navigator, 'standalone', { value: true })"
TELL_OF_A_MESSAGE = """new MutationObserver(() => {
  const message = document.querySelector(".message");
  if (message) showed(message.textContent);
}).observe(document, { childList: true, subtree: true })"""
PHONE_URL = "https://192.0.2.7:8443/"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[LiveServer]:
    keys = (ApiKey(name="one", key_sha256=digest(KEY)),)
    async with live_server(keys=keys, http={"phone_url": PHONE_URL}) as running:
        yield running


async def test_the_installed_app_opens_listening(server: LiveServer) -> None:
    """Browsers let an installed app sound without a touch; the tests' one is told to."""
    async with demo_page("--autoplay-policy=no-user-gesture-required", settings=OPEN) as demo:
        await demo.page.add_init_script(AS_APP)
        await demo.open(f"http://127.0.0.1:{server.port}/?listen#key={KEY}", state="listening")


async def test_a_link_opens_no_microphone_without_a_button(server: LiveServer) -> None:
    async with demo_page(settings=OPEN, own_context=True) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/?listen#key={KEY}")
        await demo.message("The microphone opens when you press the button.")
        await demo.page.get_by_role("button", name="Start talking").last.click()
        await demo.in_state("listening")
        await demo.page.locator(".message[data-name=listen]").wait_for(state="detached")


@pytest.mark.parametrize("allow", [(), ("microphone",)], ids=["not to hear", "not to sound"])
async def test_an_app_that_may_not_yet_shows_the_button(server: LiveServer, allow: tuple[str, ...]) -> None:
    async with demo_page(settings=OPEN, own_context=True, allow=allow) as demo:
        shown: asyncio.Queue[str] = asyncio.Queue()
        await demo.page.expose_function("showed", shown.put_nowait)
        await demo.page.add_init_script(AS_APP)
        await demo.page.add_init_script(TELL_OF_A_MESSAGE)
        # Nothing looks into the page meanwhile: to Chromium that is a touch, after which it may sound.
        await demo.page.goto(f"http://127.0.0.1:{server.port}/?listen#key={KEY}")
        async with asyncio.timeout(PATIENCE_SEC):
            assert "The microphone opens when you press the button." in await shown.get()


async def test_the_shortcut_for_writing_has_the_line_ready(server: LiveServer) -> None:
    async with demo_page(settings=OPEN, own_context=True) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/?write#key={KEY}")
        await demo.until("() => document.activeElement?.id === 'text'")


async def test_the_code_for_a_phone_is_shown_when_it_is_asked_for(server: LiveServer) -> None:
    async with demo_page(own_context=True) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/#key={KEY}")
        await demo.page.locator("#open-settings").click()
        await demo.page.get_by_text("Page and connection").click()
        code = demo.page.locator("#phone-code")
        assert await code.get_attribute("src") is None
        await demo.page.get_by_text("Open this page on a phone").click()
        await demo.until("() => document.querySelector('#phone-code').naturalWidth > 100")
        assert await demo.page.locator("#phone-key").is_visible()
        await load_axe(demo.page)
        assert await violations(demo.page) == []
        await demo.page.get_by_text("Open this page on a phone").click()
        await demo.until("() => !document.querySelector('#phone-code').hasAttribute('src')")


async def test_the_code_has_the_key_of_who_asks_and_no_other(server: LiveServer) -> None:
    response = await call(server.port, "GET", "/phone", None, f"Authorization: Bearer {KEY}")
    expected = io.BytesIO()
    code = segno.make_qr(f"{PHONE_URL}#key={KEY}", error="l")
    code.save(expected, kind="svg", scale=8, border=4, light="#fff", dark="#000")
    assert response.json() == {"svg": expected.getvalue().decode()}
    assert (await call(server.port, "GET", "/phone")).status == 401
    elsewhere = await call(
        server.port, "GET", "/phone", None, f"Authorization: Bearer {KEY}", "Origin: https://x.example"
    )
    assert elsewhere.status == 403


async def test_without_an_address_there_is_no_code() -> None:
    async with live_server() as server, demo_page() as demo:
        assert (await call(server.port, "GET", "/phone")).json() == {"svg": None}
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.locator("#open-settings").click()
        await demo.page.get_by_text("Page and connection").click()
        assert not await demo.page.locator("#phone").is_visible()
