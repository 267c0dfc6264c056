"""How benchmarks write what they print into a document."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import printed, write_results

COMMAND = "python -m benchmarks frames --echo"


def test_a_command_replaces_what_it_wrote_before(tmp_path: Path) -> None:
    file = tmp_path / "RESULTS.md"
    file.write_text("# Results\n\nBefore.\n")
    write_results(COMMAND, "first\n", file)
    write_results("python -m benchmarks frames", "other\n", file)
    file.write_text(file.read_text() + "\nBehind.\n")
    write_results(COMMAND, "second \\1\n", file)
    assert file.read_text() == (
        "# Results\n\nBefore.\n\n"
        f"<!-- written by: {COMMAND} -->\n\nsecond \\1\n\n<!-- end -->\n\n"
        "<!-- written by: python -m benchmarks frames -->\n\nother\n\n<!-- end -->\n"
        "\nBehind.\n"
    )


def test_what_is_printed_is_kept(capsys: object) -> None:
    with printed() as text:
        print("a table")
    assert text.getvalue() == "a table\n"
