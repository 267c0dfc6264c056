"""Pictures of the tables in benchmarks/RESULTS.md."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks.plots import FOLDER, draw, illustrated, plot_of
from benchmarks.results import RESULTS

TABLE = """\
| server | frames | median µs a frame | lowest | highest |
|---|---|---|---|---|
| omni_ws | json | 14.8 | 12.6 | 17.9 |
| a & b | json | 30.0 | 25.1 | 40.0 |
""".splitlines()


def test_the_pictures_are_those_of_the_results() -> None:
    document = RESULTS.read_text(encoding="utf-8")
    drawn, pictures = illustrated(document)
    assert drawn == document, "run: .venv/bin/python -m benchmarks.plots"
    there = {file.name: file.read_text(encoding="utf-8") for file in (RESULTS.parent / FOLDER).glob("*.svg")}
    assert there == pictures, "run: .venv/bin/python -m benchmarks.plots"
    assert pictures


def test_bars_are_as_long_as_their_figures_say() -> None:
    plot = plot_of("Frames", TABLE)
    assert plot is not None
    assert plot.unit == "µs a frame"
    root = ET.fromstring(plot.svg())
    ours, theirs = (float(bar.attrib["width"]) for bar in root.iter("{http://www.w3.org/2000/svg}rect"))
    assert abs(ours / theirs - 14.8 / 30.0) < 0.001
    low, high = ((float(line.attrib["x1"]), float(line.attrib["x2"])) for line in root.findall("{*}line"))
    assert low[0] < low[1] < high[0] < high[1]
    assert "a & b, json" in [text.text for text in root.findall("{*}text")]


def test_tables_without_figures_to_compare_are_not_drawn() -> None:
    assert plot_of("One row", TABLE[:3]) is None
    assert plot_of("No median", [line.replace("median", "most") for line in TABLE]) is None
    assert plot_of("No numbers", [*TABLE[:2], *("| x | y | – | – | – |",) * 2]) is None


def test_a_row_without_a_figure_is_left_out() -> None:
    plot = plot_of("Frames", [*TABLE, "| x | y | – | – | – |", "| z | y | 1.5 | – | – |"])
    assert plot is not None
    assert [(bar.written, bar.spread) for bar in plot.bars[2:]] == [("1.5", None)]


def test_drawing_again_changes_nothing_and_removes_what_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "RESULTS.md"
    file.write_text(
        "\n".join(["## Frames", "", *TABLE, "", "Behind.", "", "### Frames", "", *TABLE, "", "<!-- end -->"])
    )
    draw(file)
    first = file.read_text()
    (tmp_path / FOLDER / "old.svg").write_text("")
    draw(file)
    assert file.read_text() == first
    assert sorted(one.name for one in (tmp_path / FOLDER).iterdir()) == ["frames-2.svg", "frames.svg"]
    assert re.findall(r"\((.*?)\)\n\n(.*)", first) == [
        ("plots/frames.svg", "Behind."),
        ("plots/frames-2.svg", "<!-- end -->"),
    ]
