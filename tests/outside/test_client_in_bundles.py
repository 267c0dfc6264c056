"""omni-ws in pages that bundlers have made: a turn is said into the microphone, and its answer is heard.

The page is of another origin than the server, as that of an application is. Vite copies the files of the audio thread,
or writes the small ones into the bundle; esbuild loses them.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.chromium import PATIENCE_MS, chromium
from support.file_server import page_server
from support.live_server import live_server
from support.outside import run_outside, tool

from omni_ws.engine.fake import EchoEngine

PACKAGE = Path(__file__).parents[2] / "clients" / "js"
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
LISTEN = """async (url) => {
  const client = new Client({ url });
  const errors = [];
  client.addEventListener("error", ({ detail }) => errors.push(detail.error.code));
  client.open();
  await new Promise((resolve) => client.session.addEventListener("created", resolve, { once: true }));
  const rejected = await client.listen().then(() => null, ({ name }) => name);
  client.close();
  return { rejected, errors };
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


async def in_page(project: Path, build: Callable[[Path], Awaitable[Path]], script: str, policy: str = "") -> Any:
    """What a function returns in a page that was built with the package; ``{server}`` of its policy is the server."""
    (project / "node_modules").mkdir()
    shutil.copytree(PACKAGE, project / "node_modules" / "omni-ws")
    (project / "package.json").write_text('{"type": "module", "private": true}')
    (project / "index.html").write_text(PAGE)
    (project / "main.js").write_text(MAIN)
    with page_server(await build(project)) as site:
        async with (
            live_server(EchoEngine(), allow_origin=(site.origin,)) as server,
            chromium("--use-fake-ui-for-media-stream", "--autoplay-policy=no-user-gesture-required") as browser,
        ):
            url = f"http://127.0.0.1:{server.port}"
            if policy:
                site.headers["Content-Security-Policy"] = policy.format(server=url)
            page = await (await browser.new_context(permissions=["microphone"])).new_page()
            page.set_default_timeout(PATIENCE_MS)
            await page.goto(site.origin)
            return await page.evaluate(script, url)


@pytest.mark.parametrize(
    ("build", "policy"),
    [
        pytest.param(by_vite, "", id="vite"),
        pytest.param(by_esbuild, "", id="esbuild"),
        pytest.param(by_esbuild, "script-src 'self' {server}", id="esbuild, and no copies allowed"),
    ],
)
async def test_a_bundle_hears_and_speaks(tmp_path: Path, build: Callable[[Path], Awaitable[Path]], policy: str) -> None:
    found = await in_page(tmp_path, build, SAY, policy)
    assert found["errors"] == []
    assert found["playedMs"] >= 200
    assert found["peak"] > 0.1


async def test_a_page_whose_policy_allows_no_place_says_so(tmp_path: Path) -> None:
    found = await in_page(tmp_path, by_esbuild, LISTEN, "script-src 'self'")
    assert found == {"rejected": "SoundUnavailable", "errors": ["SoundUnavailable"]}
