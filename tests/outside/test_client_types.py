"""The package omni-ws as TypeScript and a bundler see it: its types, and how large it is in a page."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.outside import run_outside, tool

PACKAGE = Path(__file__).parents[2] / "clients" / "js"
#: What its README promises of a bundle. 3 KB of it are the names by which answers find their turns: what is sent has
#: one, what a server says of it is matched, also where speech and text became one request, and the answers of servers
#: that name nothing still find theirs.
MAX_BUNDLE_BYTES = 48_000

pytestmark = pytest.mark.slow


def program(name: str) -> str:
    return str(Path(tool("OUTSIDE_NODE")) / "node_modules" / ".bin" / name)


async def test_modules_are_typed_and_as_they_are_declared() -> None:
    assert await run_outside(program("tsc"), "--project", str(PACKAGE)) == ""


async def test_a_bundle_is_small(tmp_path: Path) -> None:
    page, bundle = tmp_path / "page.js", tmp_path / "bundle.js"
    page.write_text(f'import {{ VoiceClient }} from "{PACKAGE}/client.js";\nglobalThis.client = VoiceClient;\n')
    await run_outside(program("esbuild"), str(page), "--bundle", "--minify", "--format=esm", f"--outfile={bundle}")
    assert 10_000 < bundle.stat().st_size < MAX_BUNDLE_BYTES
