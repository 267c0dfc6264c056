"""The tables of RESULTS.md as bars, in SVG. ``python -m benchmarks.plots`` draws all of them anew.

A table is drawn if a column of figures begins with "median"; the columns ``lowest`` and ``highest`` become a line. Its
picture, named after the heading, is shown below it. The same tables make the same bytes, on every machine.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

from benchmarks.results import RESULTS

FOLDER: Final = "plots"
_SVG: Final = "http://www.w3.org/2000/svg"
_IMAGE: Final = re.compile(rf"!\[[^\]]*\]\({FOLDER}/[\w-]+\.svg\)")
_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")
_WIDTH, _LEFT, _RIGHT, _ROW, _BAR, _TOP = 720, 220, 80, 26, 16, 34
#: Readable on light and on dark pages.
_BAR_COLOUR, _OURS_COLOUR, _TEXT_COLOUR = "#8aa4c8", "#2f6fd0", "#7a7f87"
_SANS: Final = "system-ui, sans-serif"


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    written: str
    spread: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Plot:
    """A table as a picture. ``unit`` is the rest of the heading of its column."""

    title: str
    unit: str
    bars: list[Bar]

    def svg(self) -> str:
        height = _TOP + _ROW * len(self.bars) + 8
        attributes = {"xmlns": _SVG, "viewBox": f"0 0 {_WIDTH} {height}", "role": "img", "font-family": _SANS}
        root = ET.Element("svg", attributes)
        ET.SubElement(root, "title").text = f"{self.title}: {self.unit}"
        _text(root, 0, 18, f"{self.title} ({self.unit})", size=14, bold=True)
        most = max(max((bar.value, *(bar.spread or ()))) for bar in self.bars)
        scale = (_WIDTH - _LEFT - _RIGHT) / most if most > 0 else 0.0
        for number, bar in enumerate(self.bars):
            self._draw(root, bar, _TOP + number * _ROW, scale)
        ET.indent(root)
        return ET.tostring(root, encoding="unicode") + "\n"

    def _draw(self, root: ET.Element, bar: Bar, top: int, scale: float) -> None:
        middle = top + _BAR / 2
        _text(root, _LEFT - 8, middle + 4, bar.label, anchor="end")
        width = max(0.0, bar.value) * scale
        colour = _OURS_COLOUR if bar.label.startswith("omni_ws") else _BAR_COLOUR
        rectangle = {"x": f"{_LEFT}", "y": f"{top}", "width": f"{width:.1f}", "height": f"{_BAR}", "fill": colour}
        ET.SubElement(root, "rect", rectangle)
        end = width
        if bar.spread is not None:
            low, high = (max(0.0, value) * scale for value in bar.spread)
            end = max(end, high)
            line = {"x1": f"{_LEFT + low:.1f}", "x2": f"{_LEFT + high:.1f}", "y1": f"{middle:g}", "y2": f"{middle:g}"}
            ET.SubElement(root, "line", {**line, "stroke": _TEXT_COLOUR, "stroke-width": "2"})
        _text(root, _LEFT + end + 6, middle + 4, bar.written)


def _text(
    root: ET.Element, x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", bold: bool = False
) -> None:
    attributes = {"x": f"{x:.1f}", "y": f"{y:g}", "font-size": f"{size}", "text-anchor": anchor, "fill": _TEXT_COLOUR}
    if bold:
        attributes["font-weight"] = "bold"
    ET.SubElement(root, "text", attributes).text = text


def plot_of(title: str, table: Sequence[str]) -> Plot | None:
    """The plot of the lines of a table; None if there is nothing in it to draw."""
    head, _, *rows = map(_cells, table)
    at = next((place for place, cell in enumerate(head) if cell.startswith("median ")), None)
    if at is None or at == 0:
        return None
    bars = []
    for row in rows:
        if len(row) == len(head) and _NUMBER.fullmatch(row[at]):
            bars.append(Bar(", ".join(row[:at]), float(row[at]), row[at], _spread(head, row)))
    return Plot(title, head[at].removeprefix("median "), bars) if len(bars) > 1 else None


def _spread(head: Sequence[str], row: Sequence[str]) -> tuple[float, float] | None:
    if not {"lowest", "highest"} <= {*head}:
        return None
    low, high = row[head.index("lowest")], row[head.index("highest")]
    if not _NUMBER.fullmatch(low) or not _NUMBER.fullmatch(high):
        return None
    return float(low), float(high)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def illustrated(document: str) -> tuple[str, dict[str, str]]:
    """The document with a picture below each table that is drawn, and the pictures by name."""
    lines = [*_without_pictures(document.splitlines())]
    pictures: dict[str, str] = {}
    written: list[str] = []
    title, at = "", 0
    while at < len(lines):
        line = lines[at]
        if heading := re.match(r"#+ (.+)|\*\*(.+)\*\*$", line):
            title = heading[1] or heading[2]
        table = [*takewhile(lambda one: one.startswith("|"), lines[at:])]
        written += table or [line]
        at += len(table) or 1
        plot = plot_of(title, table) if len(table) > 2 else None
        if plot is not None:
            name = _file_name(title, pictures)
            pictures[name] = plot.svg()
            written += ["", f"![{title}]({FOLDER}/{name})"]
    return "\n".join(written) + "\n", pictures


def _without_pictures(lines: Sequence[str]) -> Iterator[str]:
    """Leaves out the pictures, each with the empty line before it."""
    for number, line in enumerate(lines):
        before_picture = number + 1 < len(lines) and _IMAGE.fullmatch(lines[number + 1]) is not None
        if not _IMAGE.fullmatch(line) and not (before_picture and not line):
            yield line


def _file_name(title: str, taken: dict[str, str]) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    names = (f"{words}.svg", *(f"{words}-{number}.svg" for number in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def draw(file: Path = RESULTS) -> None:
    """Draws the tables of a document into the folder beside it, and removes the pictures that it has no more."""
    document, pictures = illustrated(file.read_text(encoding="utf-8"))
    folder = file.parent / FOLDER
    folder.mkdir(exist_ok=True)
    for name, picture in pictures.items():
        (folder / name).write_text(picture, encoding="utf-8")
    for left in folder.glob("*.svg"):
        if left.name not in pictures:
            left.unlink()
    file.write_text(document, encoding="utf-8")


if __name__ == "__main__":
    draw()
