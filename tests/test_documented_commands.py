"""Commands in documents work after ``make serve`` in a bare clone, which adds nothing to PATH.

Two documents are about the installed package.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OF_THE_PACKAGE = (ROOT / "README.md", ROOT / "docs" / "install.md")
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")} - {*OF_THE_PACKAGE})

#: Programs of the project's environment, called without it.
_BARE = re.compile(r"(?m)^(?:\w+=\S+ )*(?:omni-ws|pip3? install|python3? -m (?:omni_ws|pip)|python3? examples/).*$")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_name_the_environment(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)
    assert [line for block in blocks for line in _BARE.findall(block)] == []


def test_the_files_of_features_exist() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Where to find what")[1].split("\n## ")[0]
    named = re.findall(r"`([\w/]+(?:\.py|/))`", table)
    assert len(named) > 40
    assert [name for name in named if name != "omni_ws/" and not (ROOT / "omni_ws" / name).exists()] == []
