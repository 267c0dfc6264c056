"""HibariReader: the phonemes of a text, and which of them are which word."""

from __future__ import annotations

import json
import re
import time
from importlib import resources

import pytest
from support.speech_clips import ODD_TEXTS

pytest.importorskip("hibari")

from omni_ws.engine.tts.neural import (
    MAX_PHONEMES,
    Alphabet,
    HibariReader,
    ReadPiece,
)

pytestmark = pytest.mark.slow  # its dictionary takes a second to load


@pytest.fixture(scope="module")
def reader() -> HibariReader:
    return HibariReader()


@pytest.fixture(scope="module")
def phonemes() -> dict[int, str]:
    vocabulary = json.loads((resources.files("hibari") / "assets" / "vocab.json").read_text(encoding="utf-8"))
    return {number: phoneme for phoneme, number in vocabulary.items()}


def written(piece: ReadPiece, phonemes: dict[int, str]) -> str:
    assert (piece.ids[0], piece.ids[-1]) == (0, 0)
    return "".join(phonemes[number] for number in piece.ids[1:-1])


def test_phonemes_are_those_of_the_package(reader: HibariReader, phonemes: dict[int, str]) -> None:
    from hibari.g2p import G2P

    own = G2P()
    for text in (
        "Go forward ten meters, please.",
        "I read it — the record — in Reading; “why?” she used to ask.",
        "The U.S. team won 3-1 on March 5th at 7:30 pm!",
    ):
        (piece,) = reader.pieces(text)
        assert written(piece, phonemes) == own(text)


def test_each_word_has_its_own_phonemes(reader: HibariReader, phonemes: dict[int, str]) -> None:
    (piece,) = reader.pieces("Hello there, you!")
    sounds = ["".join(phonemes[number] for number in piece.ids[word.first : word.last + 1]) for word in piece.words]
    assert [word.text for word in piece.words] == ["Hello", "there", "you"]
    assert sounds == ["həlˈO", "ðˈɛɹ", "ju"]


def test_a_word_that_is_read_as_several_has_them_all(reader: HibariReader, phonemes: dict[int, str]) -> None:
    (piece,) = reader.pieces("Come at 7:30 sharp")
    sounds = {w.text: "".join(phonemes[number] for number in piece.ids[w.first : w.last + 1]) for w in piece.words}
    assert list(sounds) == ["Come", "at", "7:30", "sharp"]
    assert sounds["7:30"].count(" ") == 1
    assert " " not in sounds["sharp"]


def test_long_texts_are_cut_at_pauses_else_between_words(reader: HibariReader) -> None:
    sentence = "this is a part of a long sentence with some words"
    with_pauses = list(reader.pieces(", ".join([sentence] * 12)))
    assert len(with_pauses) > 2
    assert all(piece.words[0].text == "this" and piece.words[-1].text == "words" for piece in with_pauses)
    without = list(reader.pieces(" ".join([sentence] * 12)))
    for pieces in (with_pauses, without):
        assert all(len(piece.ids) <= MAX_PHONEMES + 3 for piece in pieces)
        assert [word.text for piece in pieces for word in piece.words] == sentence.split() * 12
        for piece in pieces:
            places = [place for word in piece.words for place in (word.first, word.last)]
            assert places == sorted(places)
            assert 1 <= places[0] <= places[-1] < len(piece.ids) - 1


def test_a_long_text_behind_an_early_pause_is_cut_again() -> None:
    alphabet = Alphabet()
    words = [alphabet.word("Oh,", "O,"), *(alphabet.word(f"w{n}", "b" * 30) for n in range(6))]
    pieces = list(alphabet.pieces([*words, alphabet.word("last", "b" * 48)]))
    assert all(len(piece.ids) <= MAX_PHONEMES + 3 for piece in pieces)
    assert [[word.text for word in piece.words] for piece in pieces] == [["Oh"], [f"w{n}" for n in range(6)], ["last"]]


def test_long_words_and_numbers_are_read_to_their_ends(reader: HibariReader) -> None:
    (once,) = reader.pieces("ba" * 12)
    assert sum(len(piece.ids) for piece in reader.pieces("ba" * 60)) > 4 * len(once.ids)
    (piece,) = reader.pieces("It is 1234567890123456.")
    assert [word.text for word in piece.words] == ["It", "is", "1234567890123456"]


def test_a_number_on_which_the_package_breaks_costs_no_other_word(reader: HibariReader) -> None:
    (piece,) = reader.pieces(f"It is {','.join(['9' * 15] * 3)} or more.")
    assert [word.text for word in piece.words] == ["It", "is", "or", "more"]


@pytest.mark.parametrize("text", [",1+X " * 60, "!/’Y" * 75, ":@i/" * 75])
def test_marks_that_the_package_joins_make_no_endless_word(reader: HibariReader, text: str) -> None:
    assert all(len(piece.ids) < 3 * MAX_PHONEMES for piece in reader.pieces(text))


@pytest.mark.parametrize("text", ODD_TEXTS, ids=lambda text: text[:16].encode("unicode_escape").decode())
def test_odd_texts_break_nothing(reader: HibariReader, text: str) -> None:
    began = time.process_time()
    pieces = list(reader.pieces(text))
    assert time.process_time() - began < 5
    assert pieces or not re.search(r"[a-z]{2}", text)
    for piece in pieces:
        places = [place for word in piece.words for place in (word.first, word.last)]
        assert places == sorted(places)
        assert all(1 <= place < len(piece.ids) - 1 for place in places)
    (after,) = reader.pieces("Hello there.")
    assert [word.text for word in after.words] == ["Hello", "there"]


def test_nothing_in_a_text_means_phonemes(reader: HibariReader) -> None:
    (plain,) = reader.pieces("(hello)(/ʊps/)")
    (link,) = reader.pieces("[hello](/ʊps/)")
    assert link.ids == plain.ids


def test_british_voices_read_by_british_rules(reader: HibariReader) -> None:
    text = "After the bath, I can't dance."
    assert list(HibariReader(british=True).pieces(text)) != list(reader.pieces(text))
