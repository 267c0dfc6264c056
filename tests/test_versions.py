"""One version: of the package, of the client library, and of the changelog."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from omni_ws import __version__

ROOT = Path(__file__).parents[1]


def test_the_client_library_has_the_version_of_the_server() -> None:
    package = json.loads((ROOT / "clients" / "js" / "package.json").read_text(encoding="utf-8"))
    assert package["version"] == __version__


def test_the_packaging_takes_the_version_from_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "omni_ws/__init__.py"


def test_the_changelog_has_what_is_unreleased_then_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"(?m)^## (.+)$", text)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])
