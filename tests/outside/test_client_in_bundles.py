"""omni-ws in pages that bundlers have made: a turn is said into the microphone, and its answer is heard.

The page is of another origin than the server, as that of an application is. Vite copies the files of the audio thread,
or writes the small ones into the bundle; esbuild loses them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.chromium import TIMEOUT_MS, chromium
from support.live_server import live_server
from support.outside import run_outside, tool

from omni_ws.engine.fake import EchoEngine

PACKAGE = Path(__file__).parents[2] / "clients" / "js"
ORIGIN = "http://app.localhost"
PAGE = '<!doctype html><meta charset="utf-8"><script type="module" src="./main.js"></script>'
MAIN = 'import { VoiceClient } from "omni-ws";\nglobalThis.Client = VoiceClient;\n'
SAY = """async (url) => {
  const client = new Client({ url, mode: "hold" });
  const { talk, speaker, session } = client;
  const found = { errors: [], peak: 0 };
  client.addEventListener("error", ({ detail }) => found.errors.push(detail.error.code));
  speaker.addEventListener("level", ({ detail }) => (found.peak = Math.max(found.peak, detail.peak)));
  const ended = new Promise((resolve) => speaker.addEventListener("ended", ({ detail }) => resolve(detail.playedMs)));
  client.open();
  await new Promise((resolve) => session.addEventListener("created", resolve, { once: true }));
  await client.listen();
  let loud = 0; // pieces of 20 ms
  await new Promise((resolve) => {
    talk.addEventListener("level", ({ detail }) => detail.peak > 0.1 && ++loud === 10 && resolve());
  });
  talk.stop();
  found.playedMs = await ended;
  client.close();
  return found;
}"""

pytestmark = [pytest.mark.slow, pytest.mark.real_time]


def program(name: str) -> str:
    return str(Path(tool("OUTSIDE_NODE")) / "node_modules" / ".bin" / name)


async def by_vite(project: Path) -> Path:
    await run_outside(program("vite"), "build", str(project), "--logLevel=warn", cwd=project)
    return project / "dist"


async def by_esbuild(project: Path) -> Path:
    folder = project / "dist"
    options = ("--bundle", "--minify", "--format=esm")
    await run_outside(program("esbuild"), "main.js", *options, f"--outfile={folder}/main.js", cwd=project)
    shutil.copy(project / "index.html", folder)
    return folder


@pytest.mark.parametrize(
    ("build", "policy", "asks_server"),
    [
        pytest.param(by_vite, None, False, id="vite"),
        pytest.param(by_esbuild, None, False, id="esbuild"),
        pytest.param(by_esbuild, "script-src 'self' {server}", True, id="esbuild, no copies allowed"),
    ],
)
async def test_a_bundle_hears_and_speaks(
    tmp_path: Path, build: Callable[[Path], Any], policy: str | None, asks_server: bool
) -> None:
    (tmp_path / "node_modules").mkdir()
    shutil.copytree(PACKAGE, tmp_path / "node_modules" / "omni-ws")
    (tmp_path / "package.json").write_text('{"type": "module", "private": true}')
    (tmp_path / "index.html").write_text(PAGE)
    (tmp_path / "main.js").write_text(MAIN)
    folder = await build(tmp_path)
    async with (
        live_server(EchoEngine(), allow_origin=(ORIGIN,)) as server,
        chromium("--use-fake-ui-for-media-stream", "--autoplay-policy=no-user-gesture-required") as browser,
    ):
        url = f"http://127.0.0.1:{server.port}"
        page = await (await browser.new_context(permissions=["microphone"])).new_page()
        page.set_default_timeout(TIMEOUT_MS)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))

        async def give(route: Any) -> None:
            file = folder / (route.request.url.removeprefix(f"{ORIGIN}/") or "index.html")
            if not file.is_file():
                await route.fulfill(status=404)
                return
            headers = {"Content-Security-Policy": policy.format(server=url)} if policy else {}
            await route.fulfill(path=file, headers=headers)

        await page.route(f"{ORIGIN}/**", give)
        await page.goto(f"{ORIGIN}/")
        found = await page.evaluate(SAY, url)
    assert found["errors"] == []
    assert found["playedMs"] >= 200
    assert found["peak"] > 0.1
    assert any(one.startswith(f"{url}/client/") for one in asked) == asks_server
