import random

import pytest

from omni_ws.engine.llm.intents.catalogue import catalogue
from omni_ws.engine.llm.intents.matcher import expanded
from omni_ws.engine.llm.plain_words import MAX_SOUNDS, SoundIndex, distance, sounds_of

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
    [("hell are you", "how are you"), ("what dime is it", "what time is it"), ("tell me a choke", "tell me a joke")],
)
def test_what_sounds_alike_is_found(heard: str, meant: str) -> None:
    index = SoundIndex([("good morning to you", "other"), (meant, "meant")])
    found = index.nearest(heard)
    assert found is not None
    assert found[1] == "meant"
    assert 0 < found[0] < 0.2
    assert index.nearest(meant) == (0.0, "meant")


def test_of_sentences_that_sound_the_same_the_first_is_found() -> None:
    assert SoundIndex([("who are you", 1), ("hoo are yew", 2)]).nearest("who are you") == (0.0, 1)
    assert SoundIndex([("hoo are yew", 2), ("who are you", 1)]).nearest("who are you") == (0.0, 2)


@pytest.mark.parametrize("words", ["hi", "who are you 2", "what is the name of the tallest mountain there is", "你好"])
def test_too_short_too_long_and_soundless_is_not_looked_up(words: str) -> None:
    assert SoundIndex([(words, 1), ("who are you", 2)]).nearest(words) is None
    assert SoundIndex[int]([]).nearest("who are you") is None


def test_the_nearest_of_all_is_found() -> None:
    """What is not compared is farther."""
    chance = random.Random(5)
    sentences = chance.sample(PHRASES, 150)
    index = SoundIndex((sentence, sentence) for sentence in sentences)
    near = 0
    for _ in range(60):
        letters = list(chance.choice(sentences))
        for _ in range(chance.randint(1, 3)):
            letters[chance.randrange(len(letters))] = chance.choice("aeiouptdkmns ")
        sounds = sounds_of("".join(letters))
        distances = [distance(sounds_of(sentence), sounds, limit=99) for sentence in sentences]
        least = min(far for far in distances if far is not None)
        found = index.nearest("".join(letters))
        near += found is not None
        if found is not None:
            assert found[0] * len(sounds) == pytest.approx(least)
        elif 9 <= len(sounds) <= MAX_SOUNDS:
            assert least > 1.6
    assert 20 < near < 60


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_few_of_many_sentences_are_compared(unknown: str) -> None:
    index = SoundIndex((sentence, sentence) for sentence in PHRASES)
    sounds = sounds_of(unknown)
    assert len(index.candidates(sounds, 1.6)) < len(PHRASES) / 100
