"""The package omni-ws as TypeScript and a bundler see it: its types, and how large it is in a page."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from support.outside import run_outside, tool

PACKAGE = Path(__file__).parents[2] / "clients" / "js"
#: What its README promises of a bundle. 3 KB of it are the names by which answers find their turns: what is sent has
#: one, what a server says of it is matched, also where speech and text became one request, and the answers of servers
#: that name nothing still find theirs.
MAX_BUNDLE_BYTES = 49_000
#: The element with its orb and its words, which have 25 KB; and the hook for React.
MAX_WIDGET_BYTES = 80_000
MAX_HOOK_BYTES = 55_000

pytestmark = pytest.mark.slow


def program(name: str) -> str:
    return str(Path(tool("OUTSIDE_NODE")) / "node_modules" / ".bin" / name)


async def test_modules_are_typed_and_as_they_are_declared() -> None:
    assert await run_outside(program("tsc"), "--project", str(PACKAGE)) == ""


async def test_the_hook_is_typed_by_reacts_own_types(tmp_path: Path) -> None:
    await asyncio.to_thread(shutil.copytree, PACKAGE, tmp_path / "js")
    os.symlink(Path(tool("OUTSIDE_NODE")) / "node_modules", tmp_path / "node_modules")
    assert await run_outside(program("tsc"), "--project", str(tmp_path / "js" / "tsconfig.react.json")) == ""


@pytest.mark.parametrize(
    ("name", "module", "limit"),
    [
        ("VoiceClient", "client.js", MAX_BUNDLE_BYTES),
        ("VoiceChatElement", "widget.js", MAX_WIDGET_BYTES),
        ("useVoiceChat", "react.js", MAX_HOOK_BYTES),
    ],
)
async def test_a_bundle_is_small(tmp_path: Path, name: str, module: str, limit: int) -> None:
    page, bundle = tmp_path / "page.js", tmp_path / "bundle.js"
    page.write_text(f'import {{ {name} }} from "{PACKAGE}/{module}";\nglobalThis.client = {name};\n')
    options = ("--bundle", "--minify", "--format=esm", "--external:react", f"--outfile={bundle}")
    await run_outside(program("esbuild"), str(page), *options)
    assert 10_000 < bundle.stat().st_size < limit
