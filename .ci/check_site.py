"""Checks the accessibility of the site with axe-core: `PYTHON .ci/check_site.py build/site`, with playwright.

axe-core judges the front page, the tutorial and a page of tables, light and dark, on a desk and on a phone. Without
Chromium it says so.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = ("index.html", "docs/tutorial.html", "docs/configuration.html")
LOOKS: Final[tuple[tuple[Any, int, int], ...]] = (("light", 1280, 800), ("dark", 390, 844))


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


async def problems(site: str, chromium: str) -> list[str]:
    from playwright.async_api import async_playwright
    from support.chromium import load_axe, violations

    found = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme, width, height in LOOKS:
            page = await browser.new_page(color_scheme=scheme, viewport={"width": width, "height": height})
            page.set_default_timeout(600_000)
            for name in PAGES:
                await page.goto(f"{site}/{name}")
                await load_axe(page)
                found += [f"{name}, {scheme}: {' '.join(one)}" for one in await violations(page)]
        await browser.close()
    return found


def main() -> int:
    (folder,) = sys.argv[1:]
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        print("the accessibility of the site was not checked: Chromium is not installed")
        return 0
    sys.path.insert(0, str(ROOT / "tests"))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        found = asyncio.run(problems(f"http://127.0.0.1:{server.server_port}", chromium))
        server.shutdown()
    print(*found, f"axe-core finds {len(found)} problems in {len(PAGES)} pages of the site", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
