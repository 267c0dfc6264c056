"""Modules for browsers that become one file."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources.abc import Traversable
from pathlib import Path

import pytest
from support.outside import node_command, run_outside

from omni_ws.web import folders, one_file

#: More is a sign that something came along which a page does not need. It is 37 KB compressed.
MAX_WIDGET_BYTES = 128_000
MODULES = {
    "entry.js": '/* Ours. */\nimport { twice } from "./parts/twice.js";\nimport { PLACE } from "./parts/place.js";\n\n'
    'const KEPT = "a // b  /* c */";\nexport { twice };\nexport const found = [twice(4), PLACE, KEPT];\n',
    "parts/twice.js": 'import { KEPT } from "../kept.js";\n\n// No comment.\nexport function twice(one) {\n'
    "  return KEPT * one;\n}\n",
    "parts/place.js": 'export const PLACE = new URL("./file.js", import.meta.url).pathname;\n'
    "class A {}\nexport { A };\n",
    "kept.js": "export const KEPT = 2;\n",
}


def written(folder: Path, modules: dict[str, str]) -> Path:
    for path, text in modules.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def reader(folder: Traversable) -> Callable[[str], str]:
    return lambda path: folder.joinpath(path).read_text(encoding="utf-8")


async def test_it_does_what_the_modules_do(tmp_path: Path) -> None:
    """Names that two modules have are each its own; an address beside a module is the same."""
    command = await node_command()
    folder = written(tmp_path, MODULES)
    (folder / "one.mjs").write_text(one_file(reader(folder), "entry.js"), encoding="utf-8")
    (folder / "package.json").write_text('{"type": "module"}')
    results = []
    for name in ("entry.js", "one.mjs"):
        script = f'import("./{name}").then((found) => console.log(JSON.stringify([found.found, found.twice(5)])))'
        results.append(json.loads(await run_outside(*command, "-e", script, cwd=folder)))
    assert results == [[[8, f"{folder}/parts/file.js", "a // b  /* c */"], 10]] * 2
    assert "comment" not in (folder / "one.mjs").read_text()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('import * as all from "./kept.js";', "cannot be made a part of one file: import"),
        ('import { KEPT as two } from "../kept.js";', "cannot be made a part of one file: import"),
        ("export { twice as double };", "cannot be made a part of one file: export"),
        ("export default 3;", "cannot be made a part of one file: export"),
        ('const late = () => import("./kept.js");', "cannot be made a part of one file: import"),
        ('import { found } from "../entry.js";', "imports itself, by entry.js and parts/twice.js"),
    ],
)
def test_what_is_not_understood_is_said(tmp_path: Path, line: str, why: str) -> None:
    folder = written(tmp_path, {**MODULES, "parts/twice.js": f"{line}\n{MODULES['parts/twice.js']}"})
    with pytest.raises(ValueError, match=why):
        one_file(reader(folder), "entry.js")


def test_the_widget_is_small() -> None:
    assert 50_000 < len(one_file(reader(folders()[1]), "widget.js").encode()) < MAX_WIDGET_BYTES
