import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.engine.clauses import MAX_CLAUSE, ClauseSplitter


def clauses_of(*pieces: str) -> list[str]:
    splitter = ClauseSplitter()
    clauses = [clause for piece in pieces for clause in splitter.feed(piece)]
    rest = splitter.rest()
    return [*clauses, rest] if rest else clauses


def test_sentences_are_clauses() -> None:
    assert clauses_of("One. Two! Three? Four") == ["One.", "Two!", "Three?", "Four"]
    assert clauses_of('He said "stop." Then he left.') == ['He said "stop."', "Then he left."]
    assert clauses_of("first line\nsecond line") == ["first line", "second line"]
    assert clauses_of("你好。再见。") == ["你好。", "再见。"]


def test_a_sentence_is_complete_once_the_next_one_begins() -> None:
    splitter = ClauseSplitter()
    assert splitter.feed("It is 3.") == []
    assert splitter.feed("14 or so.") == []
    assert splitter.feed(" And") == ["It is 3.14 or so."]
    assert splitter.rest() == "And"
    assert splitter.rest() == ""


@pytest.mark.parametrize(
    "text", ["Dr. Smith is here.", "See e.g. the book.", "J. S. Bach wrote it.", "At 5 p.m. we go."]
)
def test_abbreviations_end_no_sentence(text: str) -> None:
    assert clauses_of(text) == [text]


def test_short_answers_do() -> None:
    assert clauses_of("It was I. So what.") == ["It was I.", "So what."]


def test_a_long_sentence_is_cut_at_a_comma() -> None:
    first = "this is a rather long beginning of a sentence that goes on and on"
    assert clauses_of(f"{first}, and then it ends, at last.") == [f"{first},", "and then it ends, at last."]


def test_what_looks_complete() -> None:
    splitter = ClauseSplitter()
    for text, complete in (
        ("Hello", False),
        (" there.", True),
        (" Mr.", False),
        (" X said 3", False),
        (" cats!", True),
    ):
        splitter.feed(text)
        assert splitter.looks_complete is complete, text


@given(st.lists(st.text(st.sampled_from("ab .,!?\n:"), max_size=400), max_size=6))
def test_nothing_is_lost_and_nothing_is_too_long(pieces: list[str]) -> None:
    clauses = clauses_of(*pieces)
    assert "".join("".join(clauses).split()) == "".join("".join(pieces).split())
    assert all(0 < len(clause) <= MAX_CLAUSE for clause in clauses)


@given(st.text(st.sampled_from("ab .,!?\n:"), max_size=700), st.integers(1, 40))
def test_the_cuts_of_the_input_do_not_matter(text: str, length: int) -> None:
    assert clauses_of(*(text[start : start + length] for start in range(0, len(text), length))) == clauses_of(text)
