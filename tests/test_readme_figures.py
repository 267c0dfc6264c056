"""What README.md says of speed and accuracy is what benchmarks/RESULTS.md has."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")

_WORDS: Final = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8"}
#: What a benchmark measures: a number with a unit of time, a share, a rate.
_FIGURE: Final = re.compile(r"\d[\d.,]*\s*(?:ms|µs|s|%|times|percent)(?![\w/])|\bone(?: word)? in \w+|\bper cent\b")
_NUMBER: Final = re.compile(rf"\d+(?:\.\d+)?|\b(?:{'|'.join(_WORDS)})\b")


Row = dict[str, str]


def one_wrong_in(recogniser: str) -> Callable[[Row], float]:
    """In how many words a recogniser has one wrong: its cell is "99 (3.6%)"."""
    return lambda row: int(row["words"]) / int(row[recogniser].split()[0])


def seconds(column: str) -> Callable[[Row], float]:
    return lambda row: float(row[column].removesuffix(" ms")) / 1000


@dataclass(frozen=True, slots=True)
class Claim:
    """Words of the README with a figure, and the row of the results that has it."""

    said: str
    command: str
    row: str
    figure: Callable[[Row], float]


_ASR: Final = "python -m benchmarks asr"
_SENTENCES: Final = "of these, sentences: clean read speech"
CLAIMS: Final = (
    Claim(r"of clean read speech Whisper mishears one word in (\w+)", _ASR, _SENTENCES, one_wrong_in("tiny.en")),
    Claim(r"with noise one in (\w+)", _ASR, "some of the sentences, made noisy", one_wrong_in("tiny.en")),
    Claim(r"from afar one in (\w+)", _ASR, "some of the sentences, made far", one_wrong_in("tiny.en")),
    Claim(
        r"begins to answer ([\d.]+) s after one has finished \(median\)",
        "python -m benchmarks embedded",
        "end of speech → first audio",
        seconds("p50"),
    ),
)
PEOPLE: Final = re.compile(r"On (\w+) cores it .*?, and (\w+) people can talk at once")


def written(command: str) -> str:
    """What a command wrote into the results."""
    _, found, behind = RESULTS.partition(f"<!-- written by: {command} -->\n")
    assert found, f"RESULTS.md has nothing that was written by {command}"
    return behind.partition("<!-- end -->")[0]


def row_of(command: str, first: str) -> Row:
    """The first row of what a command wrote that begins with this cell, by the heads of its columns."""
    head: list[str] = []
    for line in written(command).splitlines():
        cells = [one.strip() for one in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[0] == first:
            return dict(zip(head, cells, strict=True))
        head = head if cells and head else cells
    raise AssertionError(f"what {command} wrote has no row {first!r}")


def number(text: str) -> str:
    return _WORDS.get(text, text)


def prose() -> str:
    """The README without code, and with one space between words."""
    return " ".join(re.sub(r"```.*?```", "", README, flags=re.DOTALL).split())


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.said[:30])
def test_a_figure_is_that_of_the_results(claim: Claim) -> None:
    found = re.findall(claim.said, prose())
    assert len(found) == 1, f"the README does not say, or says twice: {claim.said}"
    said = number(found[0])
    digits = len(said.partition(".")[2])
    assert f"{claim.figure(row_of(claim.command, claim.row)):.{digits}f}" == said


def test_the_people_who_can_talk_at_once_are_those_who_did() -> None:
    cores, people = map(int, map(number, PEOPLE.findall(prose())[0]))
    results = written("python -m benchmarks embedded")
    talked = re.search(r"on a core, where (\d+) talk \| ([\d.]+) \|", results)
    machine = re.search(r"Machine: (\d+) CPUs", results)
    assert talked is not None
    assert machine is not None
    assert (int(machine[1]), int(talked[1])) == (cores, people)
    assert float(talked[2]) * cores >= people


def test_no_figure_is_left_over() -> None:
    """A figure of a benchmark that none of these tests compares would soon be wrong."""
    text = prose()
    for claim in CLAIMS:
        text = re.sub(claim.said, "", text)
    text = PEOPLE.sub("", text)
    assert _FIGURE.findall(text) == []
    beside_commands = re.findall(r"[^.;]*?\(`make bench[^)]*\)", text)
    assert beside_commands
    assert [_NUMBER.findall(re.sub(r"\(`make bench[^)]*\)", "", one)) for one in beside_commands] == [[]] * len(
        beside_commands
    )
