import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core.chunks import InputChunk
from omni_ws.engine.base import InputSource
from omni_ws.engine.channel import Channel
from omni_ws.engine.clauses import (
    BEGIN_AFTER,
    COMMA_AFTER,
    MAX_CLAUSE,
    PHRASE_GRACE,
    ClauseSplitter,
    Phrase,
    TextClause,
    _is_abbreviation,
    clauses_as_they_come,
    first_clause_of,
    is_speakable,
)
from omni_ws.engine.spoken.languages import abbreviations_of, phrase_words_of

ENGLISH, _ = abbreviations_of("en")
#: Words between which the splitter has to decide: abbreviations, numbers, list numbers, quotes, long words.
PIECES = ("Dr.", "No.", "e.g.", "3.5", "1,000", "5", "1.", "so,", 'end."', "what?!", "ok:", "\n", "好。", "w" * 70, "a")


def clauses_of(*pieces: str, splitter: ClauseSplitter | None = None) -> list[str]:
    """The clauses of a text that comes in pieces. Each ends where it says."""
    splitter = splitter or ClauseSplitter()
    clauses = [clause for piece in pieces for clause in splitter.feed(piece)]
    if (rest := splitter.rest()).text:
        clauses.append(rest)
    text, begin = "".join(pieces), 0
    for clause in clauses:
        assert text[begin : clause.end].lstrip() == clause.text
        begin = clause.end
    return texts(clauses)


def as_written(text: AsyncIterator[str], source: InputSource) -> AsyncGenerator[TextClause, None]:
    """The clauses of a text that is decoded from ``source``, each as it comes."""
    comma_after, begin_after_sec = first_clause_of(source)
    return clauses_as_they_come(text, ClauseSplitter(first_comma_after=comma_after), begin_after_sec=begin_after_sec)


def texts(clauses: Iterable[TextClause]) -> list[str]:
    return [clause.text for clause in clauses]


def test_sentences_are_clauses() -> None:
    assert clauses_of("One. Two! Three? Four") == ["One.", "Two!", "Three?", "Four"]
    assert clauses_of('He said "stop." Then he left.') == ['He said "stop."', "Then he left."]
    assert clauses_of("first line\nsecond line") == ["first line", "second line"]
    assert clauses_of("你好。再见。") == ["你好。", "再见。"]


def test_a_sentence_is_complete_once_the_next_one_begins() -> None:
    splitter = ClauseSplitter()
    assert splitter.feed("It is 3.") == []
    assert splitter.feed("14 or so.") == []
    assert splitter.feed(" And") == [("It is 3.14 or so.", 17)]
    assert splitter.rest() == ("And", 21)
    assert splitter.rest() == ("", 21)


@pytest.mark.parametrize(
    "text",
    [
        "Dr. Smith is here.",
        "See e.g. the book.",
        "J. S. Bach wrote it.",
        "At 5 p.m. we go.",
        "It is no. 5 of them.",
        "See fig. 12 for that.",
        "1. Take the first one.",
        "She has a Ph.D. in it.",
    ],
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


def test_no_is_an_answer_unless_a_number_follows() -> None:
    assert clauses_of("No. I did not.") == ["No.", "I did not."]
    splitter = ClauseSplitter()
    assert splitter.feed("No. ") == []
    assert splitter.looks_complete
    assert texts(splitter.feed("I")) == ["No."]


@pytest.mark.parametrize("text", ["It costs 1,000 dollars or 3.5 times that", "At 10:30, not at 11:45"])
def test_numbers_are_not_cut(text: str) -> None:
    splitter = ClauseSplitter(first_comma_after=4)
    clauses = clauses_of(text, splitter=splitter)
    for number in ("1,000", "3.5", "10:30", "11:45"):
        assert any(number in clause for clause in clauses) is (number in text)


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("", []),
        ("  \n ", []),
        ("Yes", ["Yes"]),
        ("Yes.", ["Yes."]),
        ("Well, yes, of course, sir.", ["Well, yes,", "of course, sir."]),
        ("Well then, and so on, and on, for long.", ["Well then,", "and so on, and on, for long."]),
        ("Hi. That, as you know, is it.", ["Hi.", "That, as you know, is it."]),
        ("one two three four five six seven", ["one two three four", "five six seven"]),
    ],
)
def test_the_first_clause_may_be_shorter(text: str, clauses: list[str]) -> None:
    splitter = ClauseSplitter(first_comma_after=9, first_longest=18)
    assert clauses_of(text, splitter=splitter) == clauses


def test_a_clause_that_did_not_wait_for_its_end_is_the_first_one() -> None:
    splitter = ClauseSplitter(first_comma_after=12, first_longest=20)
    assert (splitter.rest(), splitter.feed("Hello!"), splitter.rest()) == (("", 0), [], ("Hello!", 6))
    text = "Well then my dear, let me think."
    assert (splitter.feed(text), splitter.rest()) == ([], (text, 6 + len(text)))


@given(st.lists(st.sampled_from(PIECES), max_size=30), st.randoms(use_true_random=False), st.booleans())
def test_any_cut_of_an_awkward_text_gives_the_same_clauses(words: list[str], random: Random, early: bool) -> None:
    text = " ".join(words)
    cuts = sorted(random.randint(0, len(text)) for _ in range(random.randint(0, 20)))
    limits: dict[str, Any] = {"first_comma_after": 5, "first_longest": 40} if early else {}
    whole, cut = ClauseSplitter(**limits), ClauseSplitter(**limits)
    expected = clauses_of(text, splitter=whole)
    assert clauses_of(*(text[start:end] for start, end in pairwise((0, *cuts, len(text)))), splitter=cut) == expected
    assert "".join("".join(expected).split()) == "".join(text.split())
    assert all(len(clause) <= MAX_CLAUSE for clause in expected)


#: The rules of the splitter as one regular expression for a whole text: the incremental result must be the same.
ENDING = re.compile(r"([.!?…]+[\"'”’)\]]*(?=\s)|[。！？]|\n)|([,;:—–]+[\"'”’)\]]*(?=\s)|[，、；：])")
BEFORE_NUMBERS = ("no", "vol", "fig", "pp", "ch", "sec", "eq")


def end_of_first_clause(text: str, comma_after: int, longest: int) -> int | None:
    for ending in ENDING.finditer(text):
        start, end = ending.start(), ending.end()
        if end > longest:
            break
        if ending[2] is not None:
            if start >= comma_after:
                return end
            continue
        word = re.split(r"\s", text[max(0, start - 20) : start])[-1].lstrip("\"'“‘([").lower()
        word = word if text[start] == "." else ""
        if _is_abbreviation(word, ENGLISH) or re.fullmatch(r"\d{1,3}", text[:start]):
            continue
        if word in BEFORE_NUMBERS:
            following = text[end:].lstrip()
            if not following:
                return None
            if following[0].isdigit():
                continue
        return end
    if len(text) <= longest:
        return None
    space = text.rfind(" ", 1, longest + 1)
    return space if space > 0 else longest


def expected_clauses(text: str, comma_after: int, longest: int) -> list[str]:
    clauses = []
    text = text.lstrip()
    while (end := end_of_first_clause(text, comma_after, longest)) is not None:
        clauses.append(text[:end].strip())
        text = text[end:].lstrip()
        comma_after, longest = COMMA_AFTER, MAX_CLAUSE
    return [*clauses, text.strip()] if text.strip() else clauses


@given(
    st.lists(
        st.sampled_from((*PIECES, "...", " ", "\t", "(", ")", '"', "—", "，", "。”", "fig.", "x" * 290, "")),
        max_size=60,
    ),
    st.sampled_from(["", " ", "\n"]),
    st.randoms(use_true_random=False),
    st.sampled_from([(COMMA_AFTER, MAX_CLAUSE), (5, 40), (0, 1)]),
)
def test_the_pieces_come_to_what_the_whole_does(
    words: list[str], between: str, random: Random, limits: tuple[int, int]
) -> None:
    text = between.join(words)
    splitter = ClauseSplitter(first_comma_after=limits[0], first_longest=limits[1])
    cuts = sorted(random.randint(0, len(text)) for _ in range(random.choice((0, 5, len(text)))))
    pieces = (text[start:end] for start, end in pairwise((0, *cuts, len(text))))
    assert clauses_of(*pieces, splitter=splitter) == expected_clauses(text, *limits)


@pytest.mark.parametrize("space", [" ", "\n", "\t"])
def test_white_space_without_end_is_not_kept(space: str) -> None:
    splitter = ClauseSplitter()
    assert splitter.feed("See no." + space * 1000) == [("See no.", 7)]
    assert splitter.rest() == ("", 1007)


def test_what_can_be_spoken() -> None:
    assert all(map(is_speakable, ("5", "好", "* one")))
    assert not any(map(is_speakable, ("", "...", "***", "—", "🙂")))


@pytest.mark.virtual_clock
@pytest.mark.usefixtures("no_task_left")
class TestAsTheyCome:
    async def test_a_whole_sentence_does_not_wait_for_the_next_word(self) -> None:
        text: Channel[str] = Channel(1000, cost=len)
        loop = asyncio.get_running_loop()
        async with aclosing(clauses_as_they_come(aiter(text), ClauseSplitter(), grace_sec=0.2)) as clauses:
            text.put_nowait("Hello there")
            text.put_nowait(".")
            before = loop.time()
            assert await anext(clauses) == ("Hello there.", 12)
            assert loop.time() - before == pytest.approx(0.2)
            # An incomplete sentence waits for its end, however long that takes.
            text.put_nowait("And then he")
            loop.call_later(60, text.put_nowait, " left. So")
            assert (await anext(clauses)).text == "And then he left."
            assert loop.time() - before > 60
            text.close()
            assert [clause.text async for clause in clauses] == ["So"]

    async def test_words_in_time_are_one_sentence_with_what_follows_an_abbreviation(self) -> None:
        text: Channel[str] = Channel(1000, cost=len)
        for delay, piece in enumerate(("It is 3.", "14", " or so", ".", " End")):
            asyncio.get_running_loop().call_later(0.1 * delay, text.put_nowait, piece)
        asyncio.get_running_loop().call_later(0.6, text.close)
        async with aclosing(clauses_as_they_come(aiter(text), ClauseSplitter(), grace_sec=0.15)) as clauses:
            assert [clause.text async for clause in clauses] == ["It is 3.14 or so.", "End"]

    async def test_what_is_being_written_begins_after_its_first_clause_or_a_pause(self) -> None:
        loop = asyncio.get_running_loop()
        for written, spoken, waited in (
            ("Well, I", "Well,", 0),
            ("Listen: th", "Listen:", 0),
            ("Oh so\nand", "Oh so", 0),
            ("Done. And", "Done.", 0),
            ("3.5 apples", "3.5", BEGIN_AFTER),
            ("My dear frie", "My dear", BEGIN_AFTER),
            ("My dear friend ", "My dear friend", BEGIN_AFTER),
            ("1,000 people, who", "1,000 people,", 0),
            ("Why so?! He", "Why so?!", 0),
        ):
            text: Channel[str] = Channel(1000, cost=len)
            source: Channel[InputChunk] = Channel(1000, cost=lambda chunk: len(chunk.payload))
            async with aclosing(as_written(aiter(text), source)) as clauses:
                text.put_nowait(written[:4])
                loop.call_later(0.3, text.put_nowait, written[4:])
                before = loop.time()
                assert (await anext(clauses)).text == spoken
                assert loop.time() - before == pytest.approx(0.3 + waited)
                # Once begun, what follows is read as it always is.
                text.put_nowait(" of mine, the")
                loop.call_later(30, text.close)
                [rest] = [clause.text async for clause in clauses]
                assert rest.endswith("of mine, the")
                assert loop.time() - before > 30

    async def test_a_word_that_may_go_on_and_what_is_whole_wait(self) -> None:
        loop = asyncio.get_running_loop()
        text: Channel[str] = Channel(1000, cost=len)
        source: Channel[InputChunk] = Channel(1000, cost=lambda chunk: len(chunk.payload))
        async with aclosing(as_written(aiter(text), source)) as clauses:
            text.put_nowait("Donau")
            loop.call_later(20, text.put_nowait, "dampfschiff f")
            before = loop.time()
            assert (await anext(clauses)).text == "Donaudampfschiff"
            assert loop.time() - before == pytest.approx(20 + BEGIN_AFTER)
        source.close()
        text = Channel(1000, cost=len)
        text.put_nowait("Well, this is all there is to be read.")
        text.close()
        assert [clause.text async for clause in as_written(aiter(text), source)] == [
            "Well, this is all there is to be read."
        ]

    @pytest.mark.parametrize(
        ("written", "phrase", "rest"),
        [
            ("The sky looks blue today because a", "The sky looks blue today", "because air"),
            ("You can keep the milk, if it is", "You can keep the milk,", "if it is air"),
            ('This is called "the big bang," and ', 'This is called "the big bang,"', "and air"),
            ("It is a process by which a", "It is a process", "by which air"),
            # Too few words, a word that may go on, or a number that may.
            ("It is cold because of the air, ", "It is cold because of the air,", "air"),
            ("The sky looks blue today becau", "", "The sky looks blue today becau air"),
            ("The ship sank on April 15, 1912 in the", "", "The ship sank on April 15, 1912 in the air"),
            ("Well, as the sky is blue", "", "Well, as the sky is blue air"),
        ],
    )
    async def test_the_first_phrase_does_not_wait_for_the_sentence(self, written: str, phrase: str, rest: str) -> None:
        """Where a model takes its time; what follows is cut as always."""
        loop = asyncio.get_running_loop()
        text: Channel[str] = Channel(1000, cost=len)
        come = clauses_as_they_come(aiter(text), ClauseSplitter(), phrase_words=phrase_words_of("en"))
        async with aclosing(come) as clauses:
            text.put_nowait(written)
            before = loop.time()
            loop.call_later(9, text.put_nowait, "ir" if written.endswith(" a") else f"{' ' * (written[-1] != ' ')}air")
            loop.call_later(20, text.close)
            if phrase:
                first = await anext(clauses)
                assert (first.text, isinstance(first, Phrase)) == (phrase, True)
                assert loop.time() - before == pytest.approx(PHRASE_GRACE)
                assert first.end == len(phrase)
            last = await anext(clauses)
            assert (last.text, isinstance(last, Phrase)) == (rest, False)
            assert loop.time() - before == pytest.approx(20)

    async def test_a_sentence_that_comes_at_once_is_not_cut(self) -> None:
        """Nor one that comes in time."""
        text: Channel[str] = Channel(1000, cost=len)
        written = "The sky looks blue today, because air scatters the light of the sun."
        for number, piece in enumerate(re.findall(r" ?\S+", written)):
            asyncio.get_running_loop().call_later(0.9 * PHRASE_GRACE * number, text.put_nowait, piece)
        asyncio.get_running_loop().call_later(1, text.close)
        come = clauses_as_they_come(aiter(text), ClauseSplitter(), phrase_words=phrase_words_of("en"))
        assert [clause.text async for clause in come] == [written]

    async def test_nothing_comes_of_nothing(self) -> None:
        text: Channel[str] = Channel(1000, cost=len)
        text.put_nowait(" ")
        text.close()
        assert [clause async for clause in clauses_as_they_come(aiter(text), ClauseSplitter())] == []

    async def test_an_error_of_the_source_comes_through(self) -> None:
        text: Channel[str] = Channel(1000, cost=len)
        text.put_nowait("One. Two")
        text.fail(ConnectionError("gone"))
        clauses = clauses_as_they_come(aiter(text), ClauseSplitter())
        assert (await anext(clauses)).text == "One."
        with pytest.raises(ConnectionError, match="gone"):
            await anext(clauses)
