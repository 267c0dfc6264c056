"""What docs/design.md says of the code's places is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    _, _, behind = DESIGN.partition(f"\n## {title}\n")
    return behind.partition("\n## ")[0]


def named_places() -> list[str]:
    """The patterns in the second column; a bare name is in the folder of the one before it in its row."""
    found: list[str] = []
    for row in section("Where to find it").splitlines():
        folder = ""
        for name in re.findall(r"`([^`]+(?:\.py|/))`", row.rpartition(" | ")[2]):
            if "/" in name:
                folder = name.rpartition("/")[0]
            elif folder and not (ROOT / "omni_ws" / name).exists():
                name = f"{folder}/{name}"
            found += (
                [name]
                if "{" not in name
                else [re.sub(r"\{[^}]*\}", one, name) for one in re.findall(r"\{([^}]*)\}", name)[0].split(",")]
            )
    return found


@pytest.mark.parametrize("place", named_places())
def test_the_map_names_places_that_exist(place: str) -> None:
    assert list((ROOT / "omni_ws").glob(place.rstrip("/"))), f"docs/design.md names {place}, which does not exist"


def test_the_map_knows_every_wing() -> None:
    wings = [
        folder.relative_to(ROOT / "omni_ws").as_posix()
        for floor in ("service", "transport")
        for folder in (ROOT / "omni_ws" / floor).iterdir()
        if (folder / "__init__.py").exists()
    ]
    assert [wing for wing in wings if f"`{wing}`" not in section("Floors and wings")] == []
    assert wings
