"""What the wheel leaves out of the files for browsers: nothing that esbuild, which reads them, would keep."""

from __future__ import annotations

import runpy
from pathlib import Path

from support.outside import run_outside, tool

ROOT = Path(__file__).parents[2]
#: Where the wheel has these folders.
FOLDERS = {"examples/browser": "omni_ws/web/browser", "clients/js/client": "omni_ws/web/client"}
FOLDERS |= {"clients/js/widget": "omni_ws/web/widget"}


def files_below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.*"))


async def minified(folder: Path, to: Path) -> dict[str, bytes]:
    """What esbuild makes of each file alone."""
    esbuild = str(Path(tool("OUTSIDE_NODE")) / "node_modules" / ".bin" / "esbuild")
    files = [str(file) for file in files_below(folder) if file.suffix in (".js", ".css")]
    await run_outside(esbuild, *files, "--minify", f"--outbase={folder}", f"--outdir={to}", cwd=folder)
    return {str(file.relative_to(to)): file.read_bytes() for file in files_below(to)}


async def test_comments_alone_are_left_out(tmp_path: Path) -> None:
    slim = runpy.run_path(str(ROOT / ".ci" / "slim_wheel.py"))["slim"]
    whole, left = tmp_path / "whole", tmp_path / "left"
    sizes = {whole: 0, left: 0}
    for place, folder in FOLDERS.items():
        for file in files_below(ROOT / place):
            name = f"{folder}/{file.relative_to(ROOT / place)}"
            for root, data in ((whole, file.read_bytes()), (left, slim(name, file.read_bytes()))):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(data)
                sizes[root] += len(data)
    made = await minified(whole, tmp_path / "of_whole")
    assert len(made) > 50
    assert await minified(left, tmp_path / "of_left") == made
    assert sizes[left] < 0.85 * sizes[whole]
