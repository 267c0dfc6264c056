"""How the words that espeak-ng pronounces become those that Kokoro's network speaks."""

from __future__ import annotations

import pytest

from omni_ws.engine.tts.synthesiser import PronouncedWord

pytest.importorskip("hibari")
pytest.importorskip("onnxruntime")

from omni_ws.engine.tts.neural import pronounced_words


def said(text: str, *words: tuple[int, str]) -> list[tuple[str, str]]:
    return list(pronounced_words(text, [PronouncedWord(at, phonemes.split(".")) for at, phonemes in words]))


def test_each_word_has_its_phonemes_and_marks() -> None:
    assert said("«Hola, ¿qué tal?»", (1, "ˈo.l.a"), (8, "k.ˈe"), (12, "t.ˈa.l")) == [
        ("«Hola,", "“ˈola,"),
        ("¿qué", "kˈe"),
        ("tal?»", "tˈal?”"),
    ]


def test_a_number_is_one_word() -> None:
    assert said("a 21.", (0, "a"), (2, "b"), (3, "c")) == [("a", "a"), ("21.", "b c.")]


@pytest.mark.parametrize(
    ("phoneme", "sign"),
    [("tʃ", "ʧ"), ("ˈdʒ", "ˈʤ"), ("ts", "ʦ"), ("ɐ\u0303ʊ", "ɐ\u0303ʊ\u0303"), ("ʒə-", "ʒə"), ("ˌaɪ", "ˌI"), ("x", "x")],
)
def test_phonemes_are_in_the_alphabet_of_the_network(phoneme: str, sign: str) -> None:
    assert said("w", (0, phoneme)) == [("w", sign)]


def test_what_is_not_read_is_silent() -> None:
    assert said("a … b", (0, "a"), (4, "b")) == [("a", "a"), ("…", "…"), ("b", "b")]
    assert said("", (0, "a")) == []
    assert said("a b", (9, "z")) == [("a", ""), ("b", "z")]
