"""Generated documents match the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_ws.config.loading import SETTINGS
from omni_ws.errors import leaves
from omni_ws.tools.documents import GENERATED, configuration_reference, error_codes, main

REPOSITORY = Path(__file__).parents[1]
FIRST = next(iter(GENERATED))


@pytest.mark.parametrize("path", GENERATED)
def test_document_is_up_to_date(path: str) -> None:
    written = (REPOSITORY / path).read_text(encoding="utf-8")
    assert written == GENERATED[path](), "run: python -m omni_ws.tools.documents"


def test_every_setting_is_in_the_reference() -> None:
    text = configuration_reference()
    assert [setting.variable for setting in SETTINGS.values() if f"| `{setting.variable}" not in text] == []


def test_every_error_has_one_row() -> None:
    rows = [line.split(" ")[1] for line in error_codes().splitlines() if line.startswith("| `")]
    assert rows == [f"`{error.wire.code}`" for error in leaves()]
    assert len(set(rows)) == len(rows)


def test_check_tells_stale_documents_and_writing_mends_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pyproject.toml").touch()
    root = ["--root", str(tmp_path)]
    assert main(["--check", *root]) == 1
    assert f"{FIRST} is out of date" in capsys.readouterr().out
    assert not (tmp_path / FIRST).exists()
    assert main(root) == 0
    assert main(["--check", *root]) == 0
    (tmp_path / FIRST).write_text("by hand", encoding="utf-8")
    assert main(["--check", *root]) == 1


def test_it_works_on_a_repository_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--root", str(tmp_path)])
    assert "is not the repository" in capsys.readouterr().err
