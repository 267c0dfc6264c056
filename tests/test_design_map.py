"""What docs/design.md says of the code's places is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
SPECIFICATION = (ROOT / "protocol" / "README.md").read_text(encoding="utf-8")

#: It defines words, and asks nothing of the code.
NOT_IN_THE_MAP = {"Words"}
#: The last rows of the map are about things that the wire does not have.
NOT_IN_THE_SPECIFICATION = "Beside the specification"


def section(title: str) -> str:
    _, _, behind = DESIGN.partition(f"\n## {title}\n")
    return behind.partition("\n## ")[0]


def mapped() -> dict[str, list[tuple[str, list[str]]]]:
    """The rows of the map: by section of the specification, what it says and the places of that."""
    rows: dict[str, list[tuple[str, list[str]]]] = {}
    for said, places in re.findall(r"(?m)^\| (.+) \| (.*?) ?\|$", section("Where to find it"))[1:]:
        if not places:
            rows[said.strip("*")] = []
        else:
            rows[[*rows][-1]].append((said, re.findall(r"`([^`]+(?:\.py|/))`", places)))
    return rows


def specified() -> dict[str, list[str]]:
    """The headings of the specification, and the words in bold with which its paragraphs begin."""
    headings: dict[str, list[str]] = {}
    for line in SPECIFICATION[SPECIFICATION.index("\n## ") :].splitlines():
        if heading := re.fullmatch(r"###? (.+)", line):
            headings[heading[1]] = []
        elif lead := re.match(r"(?:- )?\*\*(.+?)[.:]?\*\*", line):
            headings[[*headings][-1]].append(lead[1])
    return {title: leads for title, leads in headings.items() if title not in NOT_IN_THE_MAP}


def test_the_map_has_the_sections_of_the_specification() -> None:
    assert [*mapped()] == [*specified(), NOT_IN_THE_SPECIFICATION]


@pytest.mark.parametrize("title", specified())
def test_the_map_names_what_paragraphs_begin_with(title: str) -> None:
    rows = mapped()[title]
    words = "\n".join(said for said, _ in rows).lower()
    assert [lead for lead in specified()[title] if lead.lower() not in words] == []
    assert [said for said, places in rows if not places] == []
    assert rows


@pytest.mark.parametrize("place", sorted({one for rows in mapped().values() for _, places in rows for one in places}))
def test_the_map_names_places_that_exist(place: str) -> None:
    assert (ROOT / "omni_ws" / place).exists(), f"docs/design.md names {place}, which does not exist"


def test_the_map_knows_every_wing() -> None:
    wings = [
        folder.relative_to(ROOT / "omni_ws").as_posix()
        for floor in ("service", "transport")
        for folder in (ROOT / "omni_ws" / floor).iterdir()
        if (folder / "__init__.py").exists()
    ]
    assert [wing for wing in wings if f"`{wing}`" not in section("Floors and wings")] == []
    assert wings
