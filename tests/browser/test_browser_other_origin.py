"""Pages of another origin than the server's, with the client library alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from support.chromium import IN_BROWSER
from support.file_server import page_server
from support.live_server import live_server

if TYPE_CHECKING:
    from playwright.async_api import Browser

pytestmark = IN_BROWSER

PACKAGE = Path(__file__).parents[2] / "clients" / "js"
CONNECT = """async (url) => {
  const { VoiceClient } = await import("/js/client.js");
  const client = new VoiceClient({ url });
  return await new Promise((resolve) => {
    client.addEventListener("error", ({ detail }) => resolve([client.state, detail.error.code, detail.error.message]));
    client.session.addEventListener("created", () => resolve(["created"]));
    client.open();
  }).finally(() => client.close());
}"""


async def test_a_page_of_an_origin_that_is_refused_learns_why(browser: Browser, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "js")
    (tmp_path / "index.html").write_text("<!doctype html>")
    with page_server(tmp_path) as site:
        page = await browser.new_page()
        await page.goto(site.origin)
        async with live_server() as server:
            refused = await page.evaluate(CONNECT, f"http://127.0.0.1:{server.port}")
        async with live_server(allow_origin=(site.origin,)) as server:
            allowed = await page.evaluate(CONNECT, f"http://127.0.0.1:{server.port}")
        await page.close()
    state, code, message = refused
    assert (state, code) == ("waiting", "origin_not_allowed")
    assert f"--allow-origin {site.origin}" in message
    assert allowed == ["created"]
