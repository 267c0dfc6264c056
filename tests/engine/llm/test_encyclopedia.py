"""The encyclopedia of the rules: what is read of summaries, under which names it is found, and what is spoken of it."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.embedded_engine import is_unknown
from support.engine_answers import answered, text
from support.real_models import fetched

from omni_ws.core.history import Message
from omni_ws.engine.composed.parts import parts_of
from omni_ws.engine.llm.questions import (
    Article,
    Encyclopedia,
    first_sentence,
    load_encyclopedia,
)
from omni_ws.engine.llm.rules_engine import (
    RulesEngine,
    answer,
    exact_answer,
)

NOW = datetime(2031, 3, 4, 15, 7)
CREDITED = "rules and Wikipedia (CC BY-SA 4.0)"


def summary(extract: str, description: str = "", topic: str = "Geography") -> dict[str, str]:
    return {"extract": extract, "description": description, "topic": topic}


SUMMARIES = {
    "Mars (mythology)": summary("In ancient Roman religion, Mars is the god of war.", "Roman god of war"),
    "Mars": summary("Mars is the fourth planet from the Sun.", "Fourth planet from the Sun", "Uncategorized"),
    "Mercury (element)": summary("Mercury is a chemical element; it has symbol Hg.", "Chemical element"),
    "Mercury (planet)": summary("Mercury is the first planet from the Sun.", "First planet", "Uncategorized"),
    "Crane (bird)": summary("Cranes are a type of large bird.", "Bird"),
    "Crane (machine)": summary("A crane is a machine used to move things.", "Machine"),
    "Kiwi (bird)": summary("Kiwi are flightless birds of New Zealand.", "Order of birds"),
    "Ring (mathematics)": summary("In mathematics, a ring is an algebraic structure.", "Algebraic structure"),
    "Mahatma Gandhi": summary("Mohandas Gandhi was an Indian lawyer. He led.", "Activist (1869–1948)", "Uncategorized"),
    "Indira Gandhi": summary("Indira Gandhi was an Indian stateswoman.", "Minister (1966–1977)", "People"),
    "Isaac Newton": summary("Sir Isaac Newton was an English polymath.", "English polymath (1642–1727)", "People"),
    "Newton (unit)": summary("The newton is the unit of force in physics.", "Unit of force in physics"),
    "Aristotle": summary("Aristotle was a Greek philosopher.", "Greek philosopher (384–322 BC)", "People"),
    "World War II": summary(
        "World War II, or the Second World War, was a global conflict.", "Global conflict (1939–1945)", "Uncategorized"
    ),
    "United Kingdom": summary(
        "The United Kingdom, known as the United Kingdom (UK), is a country.", "Country in Europe"
    ),
    "The Beatles": summary("The Beatles were an English rock band.", "English rock band (1960–1970)", "Uncategorized"),
    "Hamlet": summary("Hamlet is a tragedy written by Shakespeare.", "Tragedy by William Shakespeare", "Arts"),
    "News": summary("News is information about current events.", "Information about current events"),
    "Moon": summary("The Moon is the only natural satellite of Earth.", "Natural satellite orbiting Earth"),
    "Timbuktu": summary("Timbuktu is an ancient city in Mali.", "City in Mali"),
    "Who": summary("Who is a word of the English language.", "Pronoun"),
}


@pytest.fixture
def summaries(tmp_path: Path) -> Path:
    path = tmp_path / "summaries.json"
    path.write_text(json.dumps(SUMMARIES), "utf-8")
    return path


@pytest.fixture
def book(summaries: Path) -> Encyclopedia:
    found = load_encyclopedia(summaries)
    assert found is not None
    return found


def reply(said: str, book: Encyclopedia | None, *history: Message) -> str:
    return " ".join(answer(said, history, NOW, encyclopedia=book))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("What is Mars?", "Mars is the fourth planet from the Sun."),
        ("What is the planet Mars?", "Mars is the fourth planet from the Sun."),
        ("um can you tell me something about mars please", "Mars is the fourth planet from the Sun."),
        ("Mercury is what?", None),
        ("What is mercury?", "Mercury is the first planet from the Sun."),
        ("What is the element mercury?", "Mercury is a chemical element; it has symbol Hg."),
        ("What is a crane?", None),  # nobody knows which
        ("What are kiwis?", "Kiwi are flightless birds of New Zealand."),
        ("What is a ring?", None),  # it is not that of mathematics
        ("What is a ring in mathematics?", "In mathematics, a ring is an algebraic structure."),
        ("Who was Gandhi?", "Mohandas Gandhi was an Indian lawyer."),
        ("Who was Indira Gandhi?", "Indira Gandhi was an Indian stateswoman."),
        ("Who is Newton?", "Sir Isaac Newton was an English polymath."),
        ("What is the unit newton?", "The newton is the unit of force in physics."),
        ("What is an Aristotle?", None),
        ("What was the Second World War?", "World War II, or the Second World War, was a global conflict."),
        ("what was world war two", "World War II, or the Second World War, was a global conflict."),
        ("What's the UK?", "The United Kingdom, known as the United Kingdom, is a country."),
        ("Who were the Beatles?", "The Beatles were an English rock band."),
        ("What is the moon?", "The Moon is the only natural satellite of Earth."),
        ("Where is Timbuktu?", "Timbuktu is an ancient city in Mali."),
        ("Where is Hamlet?", None),
        ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet."),
        ("Who is the author of Hamlet?", "William Shakespeare wrote Hamlet."),
        ("Who painted Hamlet?", None),
        ("When was Newton born?", "Isaac Newton was born in 1642."),
        ("When did Aristotle die?", "Aristotle died in 322 BC."),
        ("When was Aristotle born?", "Aristotle was born in 384 BC."),
        ("When was Indira Gandhi born?", None),  # these are the years in which she governed
        ("When did World War II end?", "World War II ended in 1945."),
        ("When was the Second World War?", "World War II was from 1939 to 1945."),
        ("When was Hamlet?", None),
        ("Who is who?", None),
        ("What is a snark?", None),
    ],
)
def test_what_is_asked_in_the_usual_forms(asked: str, said: str | None, book: Encyclopedia) -> None:
    found = reply(asked, book)
    assert found == said if said is not None else is_unknown(found), found


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("What's the news?", "I don't get any news. I only know what I was built with."),
        ("What is your name?", "I have no name. I am the voice of this speech server."),
        ("What is three plus four?", "That makes 7."),
        ("Who are you?", "I'm a voice assistant, a computer program."),
    ],
)
def test_what_the_rules_know_comes_first(asked: str, said: str, book: Encyclopedia) -> None:
    assert reply(asked, book) == said


def test_a_question_may_go_on_from_the_last_one(book: Encyclopedia) -> None:
    history = [Message("user", "What is Mars?"), Message("assistant", "Mars is the fourth planet from the Sun.")]
    assert reply("Where is it?", book, *history) == reply("Where is nothing?", book)  # a planet is no place
    assert reply("And mercury?", book, *history) == "Mercury is the first planet from the Sun."


def test_who_is_he(book: Encyclopedia) -> None:
    history = [Message("user", "Who was Newton?"), Message("assistant", "Sir Isaac Newton was an English polymath.")]
    assert reply("When was he born?", book, *history) == "Isaac Newton was born in 1642."
    assert is_unknown(reply("When was he born?", book))


@pytest.mark.parametrize(
    ("extract", "spoken"),
    [
        ("Rain (from Old English regn (see below)) is water. It falls.", "Rain is water."),
        ("J. R. R. Tolkien was an English writer. He lived.", "J. R. R. Tolkien was an English writer."),
        ("Washington, D.C., is the capital.", "Washington, D.C., is the capital."),
        (
            "One is a thing " + "with another " * 6 + ", which " + "goes on " * 12 + ".",
            "One is a thing" + " with another" * 6 + ".",
        ),
        ("One is a thing" + ", a thing" * 14 + " and more.", None),  # a list is not cut
        ("The field of dimension  is  given.", None),  # a formula was here
        ("Monkey may refer to many animals of a kind.", None),
        ("Short is.", None),
        ("", None),
    ],
)
def test_the_first_sentence_is_cut_for_the_ear(extract: str, spoken: str | None) -> None:
    assert first_sentence(extract) == spoken


def test_what_cannot_be_cut_is_described(tmp_path: Path) -> None:
    path = tmp_path / "summaries.json"
    path.write_text(
        json.dumps({"Thing": summary("A thing is" + " a thing, and" * 20 + ".", "Whatever (1900)")}), "utf-8"
    )
    assert reply("What is a thing?", load_encyclopedia(path)) == "Thing: Whatever."


def test_what_is_spoken_is_kept_beside_the_summaries(summaries: Path) -> None:
    first = load_encyclopedia(summaries)
    (kept,) = set(summaries.parent.iterdir()) - {summaries}
    content = kept.read_bytes()
    summaries.write_text("{}", "utf-8")
    assert load_encyclopedia(summaries) == first
    for broken in (content[: len(content) // 2], b"", b'{"articles":[],"names":{"mars":3},"people":{}}', b"\xff[]"):
        kept.write_bytes(broken)
        again = load_encyclopedia(summaries)
        assert again is not None
        assert again.articles == ()  # made of the summaries again, which are empty


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"Mars": 3}', b'{"Mars": {}}', b'{"Mars": {"extract": 7}}', b"\xff"]
)
def test_broken_summaries_are_no_encyclopedia(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "summaries.json"
    path.write_bytes(content)
    assert load_encyclopedia(path) is None


def test_without_the_file_the_rules_answer_as_ever(tmp_path: Path) -> None:
    assert load_encyclopedia(None) is None
    assert load_encyclopedia(tmp_path / "nothing") is None
    assert is_unknown(reply("What is Mars?", None))


def test_a_folder_that_cannot_be_written_is_no_obstacle(summaries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("omni_ws.engine.llm.questions.replace_file", refuse)
    assert reply("What is Mars?", load_encyclopedia(summaries)) == "Mars is the fourth planet from the Sun."
    assert list(summaries.parent.iterdir()) == [summaries]


async def test_the_engine_answers_and_credits(summaries: Path) -> None:
    engine = RulesEngine(summaries=summaries, now=lambda: NOW)
    await engine.start()
    try:
        assert (await answered(engine, text("What is Mars?"))).text == "Mars is the fourth planet from the Sun."
        llm = parts_of(engine)["llm"]
        assert llm is not None
        assert (llm.name, llm.model, engine.model) == ("rules", CREDITED, "rules")
    finally:
        await engine.stop()
    assert parts_of(RulesEngine())["llm"].model == "rules"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("asked", "cited"),
    [
        ("What is Mars?", ["Mars"]),
        ("What is the element mercury?", ["Mercury (element)"]),
        ("When was Newton born?", ["Isaac Newton"]),
        ("Who wrote Hamlet?", ["Hamlet"]),
        ("Where is Timbuktu?", ["Timbuktu"]),
        ("What is Mars and what is the moon?", ["Mars", "Moon"]),
        ("Hello. What is Mars? What time is it?", ["Mars"]),
        ("What is three plus four?", []),
        ("What is a crane?", []),
    ],
)
async def test_answers_name_the_articles_that_they_are_taken_from(
    asked: str, cited: list[str], summaries: Path
) -> None:
    engine = RulesEngine(summaries=summaries, now=lambda: NOW)
    await engine.start()
    try:
        given = await answered(engine, text(asked))
    finally:
        await engine.stop()
    pages = given.finished.citations
    assert [page.title for page in pages] == cited
    for page in pages:
        sentence = given.text[page.start : page.end]
        assert sentence.endswith(".")
        assert sentence.count(".") == 1
        assert page.license == "CC-BY-SA-4.0"
        assert page.url == f"https://en.wikipedia.org/wiki/{page.title.replace(' ', '_')}"


@pytest.mark.parametrize(
    ("sampling", "cited"),
    [
        ({"max_tokens": 3}, [("Mars", 11)]),
        ({"stop": ["Mars is"]}, []),
        ({"stop": ["The Moon"]}, [("Mars", 39)]),
        ({"max_tokens": 8}, [("Mars", 39)]),
        ({"max_tokens": 9}, [("Mars", 39), ("Moon", 43)]),
    ],
)
async def test_what_is_not_said_is_not_named(
    sampling: dict[str, Any], cited: list[tuple[str, int]], summaries: Path
) -> None:
    engine = RulesEngine(summaries=summaries, now=lambda: NOW)
    await engine.start()
    try:
        given = await answered(engine, text("What is Mars and what is the moon?"), sampling=sampling)
    finally:
        await engine.stop()
    assert [(page.title, page.end) for page in given.finished.citations] == cited


def test_addresses_have_no_signs_that_end_them() -> None:
    titles = {
        "AC/DC": "AC/DC",
        "C (programming language)": "C_(programming_language)",
        "Who's Afraid?": "Who's_Afraid%3F",
        "Les Misérables": "Les_Mis%C3%A9rables",
        'The "X" <b>#1': "The_%22X%22_%3Cb%3E%231",
    }
    for title, path in titles.items():
        article = Article(title, title, "", "", is_person=False)
        assert article.url == f"https://en.wikipedia.org/wiki/{path}"


def test_rules_in_front_of_a_model_leave_definitions_to_the_model(book: Encyclopedia) -> None:
    for asked in ("What is Mars?", "Who was Gandhi?", "Tell me about Mars.", "Describe a kiwi."):
        assert exact_answer(asked, (), NOW, encyclopedia=book) is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("What is the capital of Australia?", "The capital of Australia is Canberra."),
        ("what's the capital city of the united states", "The capital of the United States is Washington, D.C."),
        ("What is France's capital?", "The capital of France is Paris."),
        ("Which country is Vienna the capital of?", "Vienna is the capital of Austria."),
        ("Which language do they speak in Brazil?", "In Brazil they speak Portuguese."),
        ("What languages are spoken in Switzerland?", "In Switzerland they speak German, French and Italian."),
        ("What is the currency of Japan?", "The currency of Japan is the Japanese Yen."),
        ("What currency do they use in the UK?", "The currency of the United Kingdom is the British Pound."),
        ("How far away is the moon?", "The Moon is about 384,000 kilometers away, or 239,000 miles."),
        ("What is the largest planet?", "Jupiter is the largest planet of the Solar System."),
        ("What is the largest plant?", None),
        ("What is the capital of Atlantis?", None),
        ("What language do you speak?", "I only speak English."),
    ],
)
def test_plain_facts(asked: str, said: str | None) -> None:
    found = reply(asked, None)
    assert found == said if said is not None else is_unknown(found), found


@pytest.mark.parametrize("unit", ["a", "the ", "what is ", "(", "((", ", which ", "word ", "1 ", "é"])
def test_hostile_text_takes_a_moment(unit: str, tmp_path: Path, book: Encyclopedia) -> None:
    started = time.process_time()
    assert len(reply(f"What is {unit * 4000}?"[:4000], book)) < 200
    first_sentence(f"It is {unit * 40_000}.")
    path = tmp_path / "long.json"
    path.write_text(
        json.dumps({f"It {unit * 20_000}": summary(f"It is {unit * 20_000}.", f"by {unit * 20_000}")}), "utf-8"
    )
    load_encyclopedia(path)
    assert time.process_time() - started < 2


def test_the_whole_encyclopedia() -> None:
    folder = fetched("encyclopedia")
    book = load_encyclopedia(folder / "summaries_en-us.json")
    assert book is not None
    assert len(book.articles) > 9_800
    assert max(len(article.sentence.split()) for article in book.articles) < 40
    assert not any(mark in article.sentence for article in book.articles for mark in "(){}[]\n")
    for asked, said in {
        "What is Mars?": "Mars is the fourth planet from the Sun.",
        "Who was Mozart?": "Wolfgang Amadeus Mozart was a Classical composer and musician.",
        "Who was Shakespeare?": "William Shakespeare was an English playwright, poet and actor.",
        "When did World War Two end?": "World War II ended in 1945.",
        "Who painted the Mona Lisa?": "Leonardo da Vinci painted the Mona Lisa.",
    }.items():
        assert reply(asked, book) == said
    started = time.process_time()
    for _ in range(1000):
        book.find("photosynthesis")
    assert time.process_time() - started < 1  # < 1 ms each
