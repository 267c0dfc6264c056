"""Opens the page of a running server in Chromium and talks to it: `PYTHON .ci/try_page.py http://127.0.0.1:PORT`.

PYTHON is that of an environment with playwright. Where that or Chromium is missing it says so, and tries nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import wave
from pathlib import Path
from urllib.parse import urlsplit

REPOSITORY = Path(__file__).resolve().parents[1]
SPEECH = REPOSITORY / "tests" / "data" / "goforward.wav"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PAUSE_SEC = 5
WAIT_MS = 60_000


def main(address: str) -> str:
    """What was said and answered, or why nothing was."""
    browser = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return "the page was not opened: no playwright"
    if browser is None:
        return "the page was not opened: no Chromium"
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=browser,
            args=[
                *("--no-sandbox", "--disable-dev-shm-usage", "--use-fake-device-for-media-stream"),
                f"--use-file-for-fake-audio-capture={spoken_once(Path(folder))}",
                # Another host is a failed request, which the console tells.
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            ],
        )
        page = chromium.new_context(permissions=["microphone"]).new_page()
        page.set_default_timeout(WAIT_MS)
        asked, problems = set[str](), list[str]()
        page.on("request", lambda request: asked.add(request.url))
        page.on("websocket", lambda socket: asked.add(socket.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        answer = page.goto(address + "/")
        policy = (answer.headers if answer else {}).get("content-security-policy", "")
        if not policy.startswith("default-src 'none'; script-src 'self';"):
            raise SystemExit(f"the page has no strict policy: {policy!r}")
        page.locator("body[data-state=ready]").wait_for(state="attached")
        page.locator("#open-log").click()
        page.locator("#talk").click()
        # Not any turn: one without words may come before it.
        turn = page.locator(".turn").filter(has=page.locator(".you .settled:not(:empty)")).first
        turn.wait_for()
        turn.locator(".server .words:not(:empty)").first.wait_for()
        page.locator("#first-sound:not(:text('–'))").wait_for()
        heard = turn.locator(".you .settled").first.text_content()
        said = turn.locator(".server .words").first.text_content()
        chromium.close()
    if not heard or not said:
        raise SystemExit(f"the page heard {heard!r} and showed the answer {said!r}")
    elsewhere = {
        url for url in asked if urlsplit(url).netloc != urlsplit(address).netloc and not url.startswith("blob:")
    }
    if elsewhere or problems:
        raise SystemExit(f"requests to other hosts: {sorted(elsewhere)}; errors: {problems}")
    return f"said to the page {heard!r}; answered aloud {said!r}; {len(asked)} requests, all to {address}"


def spoken_once(folder: Path) -> Path:
    """A recording for the microphone, with a silence behind it that ends the turn."""
    path = folder / "microphone.wav"
    with wave.open(str(SPEECH)) as speech, wave.open(str(path), "wb") as file:
        file.setparams(speech.getparams())
        file.writeframes(speech.readframes(speech.getnframes()))
        file.writeframes(bytes(2 * PAUSE_SEC * speech.getframerate()))
    return path


if __name__ == "__main__":
    print(main(sys.argv[1]))
