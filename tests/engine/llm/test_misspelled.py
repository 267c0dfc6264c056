import random

import pytest

from omni_ws.engine.llm.questions import expanded
from omni_ws.engine.llm.rules_engine import (
    Misspelled,
    catalogue,
)

PHRASES = [sentence for intent in catalogue() for phrase in intent.phrases for sentence in expanded(phrase)]
UNKNOWN = (
    "xyzzy frob nicate bar",
    "who painted the mona lisa",
    "my cat sat on the mat",
    "what should i wear to a wedding",
    "i went to the market with them",
)


@pytest.mark.parametrize(
    ("heard", "meant"),
    [("how or you", "how are you"), ("what dime is it", "what time is it"), ("tell me a choke", "tell me a joke")],
)
def test_what_is_misspelled_is_found(heard: str, meant: str) -> None:
    phrases = Misspelled(["good morning to you", "who are you", meant])
    assert phrases.nearest(heard) == phrases.nearest(meant) == meant


@pytest.mark.parametrize(("heard", "known"), [("i am not sad", "i am sad"), ("i am sad", "i am not sad")])
def test_what_denies_a_phrase_is_not_it(heard: str, known: str) -> None:
    assert Misspelled([known]).nearest(heard) is None
    assert Misspelled([known]).nearest(known) == known


@pytest.mark.parametrize("words", ["hi", "who are you 2", "who are you and who are they", "你好", ""])
def test_too_short_too_long_and_numbers_are_not_looked_up(words: str) -> None:
    assert Misspelled(["who are you"]).nearest(words) is None
    assert Misspelled([]).nearest("who are you") is None


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_what_is_no_phrase_is_none(unknown: str) -> None:
    assert Misspelled(PHRASES).nearest(unknown) is None


def test_most_phrases_with_a_letter_wrong_are_found() -> None:
    chance = random.Random(5)
    index = Misspelled(PHRASES)
    meant = chance.sample([phrase for phrase in PHRASES if len(phrase) > 11], 100)
    found = 0
    for phrase in meant:
        letters = list(phrase)
        letters[chance.randrange(len(letters))] = chance.choice("aeiouptdkmns")
        found += index.nearest("".join(letters)) is not None
    assert found > 85
