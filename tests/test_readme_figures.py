"""What README.md says of speed and accuracy is what benchmarks/RESULTS.md has."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from omni_ws.scenarios.form import read_file

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
    #: The heading of the table, where the results of the command have several with such a row.
    table: str = ""


def number_of(column: str) -> Callable[[Row], float]:
    return lambda row: float(row[column])


_PEERS: Final = "python -m benchmarks voice_servers --rounds 2 --turns-each 2 --turn-seconds 6"
_SOONER: Final = "Voice servers, 4 talkers: from the end of speech to the answer"
_LESS: Final = "Voice servers, 4 talkers: CPU time of the server and its parts"
_SOUND: Final = number_of("median ms to the first sound")
_CPU: Final = number_of("median ms a second")
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
    Claim(r"four talkers on two cores hear an answer after (\d+) ms in the median", _PEERS, "omni_ws", _SOUND, _SOONER),
    Claim(r"(\d+) by Pipecat", _PEERS, "pipecat", _SOUND, _SOONER),
    Claim(r"(\d+) by LiveKit's agents", _PEERS, "livekit-agents", _SOUND, _SOONER),
    Claim(r"for (\d+) ms of CPU time a second", _PEERS, "omni_ws", _CPU, _LESS),
    Claim(r"\(Pipecat (\d+), LiveKit \d+", _PEERS, "pipecat", _CPU, _LESS),
    Claim(r"\(Pipecat \d+, LiveKit (\d+)", _PEERS, "livekit-agents", _CPU, _LESS),
)
PEOPLE: Final = re.compile(r"On (\w+) cores it .*?, and (\w+) people can talk at once")


def written(command: str) -> str:
    """What a command wrote into the results."""
    _, found, behind = RESULTS.partition(f"<!-- written by: {command} -->\n")
    assert found, f"RESULTS.md has nothing that was written by {command}"
    return behind.partition("<!-- end -->")[0]


def row_of(command: str, first: str, table: str = "") -> Row:
    """The first row of what a command wrote that begins with this cell, by the heads of its columns."""
    head: list[str] = []
    _, found, results = written(command).partition(f"### {table}\n" if table else "\n")
    assert found, f"what {command} wrote has no table {table!r}"
    for line in results.splitlines():
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
    assert f"{claim.figure(row_of(claim.command, claim.row, claim.table)):.{digits}f}" == said


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
    for claim in reversed(CLAIMS):  # the last is said within the one before
        text = re.sub(claim.said, "", text)
    text = PEOPLE.sub("", text)
    assert _FIGURE.findall(text) == []
    beside_commands = re.findall(r"[^.;]*?\(`make bench[^)]*\)", text)
    assert beside_commands
    assert [_NUMBER.findall(re.sub(r"\(`make bench[^)]*\)", "", one)) for one in beside_commands] == [[]] * len(
        beside_commands
    )


def test_the_front_page_of_the_site_says_the_same() -> None:
    front = " ".join((ROOT / "docs" / "site" / "front.md").read_text(encoding="utf-8").split())
    fleet, sooner, tested = front.split("<div markdown>")[1:]
    (readme,) = re.findall(r"- \*\*Sooner, for less.*?\n- ", README, re.DOTALL)
    assert set(re.findall(r"\d+", sooner)) == set(re.findall(r"\d+", readme))
    words, faults = re.findall(r"in ([\d,]+), at (\d+) faults", fleet)[0]
    (command,) = re.findall(r"`(python -m benchmarks fleet [^`]*)`", fleet)
    robustness = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")
    (row,) = [line.split(" | ") for line in robustness.splitlines() if line.startswith(f"| `{command}`")]
    assert (row[2], row[4], row[6]) == (faults, words, "0 |")
    scenarios = [one for file in ROOT.glob("examples/scenarios/*.yaml") for one in read_file(file).scenarios]
    assert "Thirty" in tested
    assert len(scenarios) == 30
