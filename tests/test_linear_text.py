"""What reads a text of a client or of a model takes time in proportion to it, whatever the text is."""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

import pytest

from omni_ws.engine.answer_limit import AnswerLimit, WordCounter
from omni_ws.engine.clauses import ClauseSplitter
from omni_ws.engine.embedded.arithmetic import NotArithmetic, evaluate, parse_number
from omni_ws.engine.embedded.brain import answer
from omni_ws.engine.embedded.flite import speakable
from omni_ws.engine.text_pieces import pieces_of

#: Characters of the shorter text; the longer one has eight times as many.
SHORT = 4_000
TIMES = 8
#: Twice what a text of eight times the length should take; quadratic work takes four times as much as this.
MAX_GROWTH = 2 * TIMES
#: Processor time that is too short to compare.
NOISE_SEC = 0.004
TRIALS = 4

REPEATED = {
    "words": "word ",
    "one word": "w",
    "full stops": ".",
    "mixed marks": ".,!?;",
    "marks and quotes": '."',
    "quotes": '"',
    "curly quotes": "”",
    "commas": ",",
    "commas and spaces": ", ",
    "digits": "1",
    "grouped digits": ",123",
    "decimals": "1.",
    "brackets": "(",
    "pairs of brackets": "[]",
    "braces": "{",
    "spaces": " ",
    "tabs": "\t",
    "line ends": "\n",
    "carriage returns": "\r",
    "combining characters": "\u0301",
    "ideographs": "好。",
    "abbreviations": "Dr. ",
    "numbers or not": "no. ",
    "initials": "a.",
    "courtesies": "please ",
    "thanks": " thank you,",
    "hyphens": "-",
    "hyphened numbers": "twenty-",
    "backslashes": "\\",
    "angles": "<",
    "escapes": "\\u0000",
    "NUL": "\0",
}
BEGINNINGS = ("", "Wait", "what is 1", "count from one ", "say ", "spell ", "please ", "no. ", "a, ")


def fed_to_splitter(text: str) -> None:
    splitter = ClauseSplitter()
    splitter.feed(text)
    splitter.rest()


def fed_to_splitter_by_character(text: str) -> None:
    splitter = ClauseSplitter()
    for character in text:
        splitter.feed(character)
        assert splitter.looks_complete in (True, False)
    splitter.rest()


def answered(text: str) -> None:
    for sentence in answer(text, (), datetime(2031, 3, 4)):
        assert sentence


def calculated(text: str) -> None:
    parse_number(text)
    with suppress(NotArithmetic, ZeroDivisionError):
        evaluate(text)


def limited(text: str) -> None:
    """With stop strings of the greatest length that nearly match."""
    stops = [text[:4] * 60 + "!?" + str(number) for number in range(4)]
    limit = AnswerLimit({"stop": stops, "max_tokens": 10**6})
    for piece in pieces_of(text):
        limit.feed(piece)
    limit.finish()


def limited_by_character(text: str) -> None:
    limit = AnswerLimit({"stop": [text[:4] * 60 + "!?"], "max_tokens": 10**6})
    counter = WordCounter()
    for character in text:
        limit.feed(character)
        counter.feed(character)
    limit.finish()


READERS: tuple[Callable[[str], object], ...] = (
    fed_to_splitter,
    fed_to_splitter_by_character,
    answered,
    calculated,
    limited,
    limited_by_character,
    speakable,
)
NAMES = ("clauses", "clauses by character", "brain", "arithmetic", "limit", "limit by character", "flite")


def processor_sec(read: Callable[[str], object], text: str) -> float:
    """Time of this thread."""
    before = time.thread_time()
    read(text)
    return time.thread_time() - before


def assert_linear(read: Callable[[str], object], make: Callable[[int], str], length: int) -> None:
    """Reads texts of ``length`` and of eight times as many characters. The best of several times counts."""
    short = min(processor_sec(read, make(length)) for _ in range(3))
    text, most = make(TIMES * length), MAX_GROWTH * max(short, NOISE_SEC / TIMES)
    times: list[float] = []
    while not times or (times[-1] >= most and len(times) < TRIALS):
        times.append(processor_sec(read, text))
    assert min(times) < most, f"{length} characters {short} s, {TIMES} times as many {times} s"


def made(beginning: str, repeated: str) -> Callable[[int], str]:
    return lambda length: (beginning + repeated * (length // len(repeated) + 1))[:length]


@pytest.mark.parametrize("repeated", REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize("read", READERS, ids=NAMES)
def test_time_grows_with_the_text(read: Callable[[str], object], repeated: str) -> None:
    assert_linear(read, made("Wait", repeated), SHORT)


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("repeated", [",", " ", "1", "a", ".", " to", " please"])
def test_time_of_the_rules_grows_with_the_text(beginning: str, repeated: str) -> None:
    assert_linear(answered, made(beginning, repeated), SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("repeated", ["w", "."])
@pytest.mark.parametrize("read", READERS, ids=NAMES)
def test_time_grows_with_a_text_of_a_megabyte(read: Callable[[str], object], repeated: str) -> None:
    assert_linear(read, made("", repeated), (1 << 20) // TIMES)
