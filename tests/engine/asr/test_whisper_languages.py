"""The language of an utterance: which languages are tried, and which text is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omni_ws.engine.asr.whisper import (
    MARGIN_OF_CHANGE,
    POSSIBLE_LANGUAGE,
    SURE_OF_LANGUAGE,
    _clearest,
    _Decoded,
    possible_languages,
)

SURE, UNSURE = SURE_OF_LANGUAGE, SURE_OF_LANGUAGE - 0.01


@pytest.mark.parametrize(
    ("chances", "before", "possible"),
    [
        # The first utterance: in one language if that is sure, else in one of two.
        ({"es": SURE, "it": 1 - SURE}, None, ("es",)),
        ({"es": UNSURE, "it": 1 - UNSURE}, None, ("es", "it")),
        ({"es": 1.0}, None, ("es",)),
        ({"es": 0.6, "it": 0.3, "pt": 0.1}, None, ("es", "it")),
        # The language is that of before, or nothing else is likely.
        ({"es": UNSURE, "it": 1 - UNSURE}, "es", ("es",)),
        ({"it": POSSIBLE_LANGUAGE - 0.01, "pt": 0.3, "es": 0.21}, "es", ("es",)),
        # Another one is likely, or even sure: both are tried, the better guess first.
        ({"it": POSSIBLE_LANGUAGE, "pt": 0.3, "es": 0.2}, "es", ("es", "it")),
        ({"it": UNSURE, "es": 1 - UNSURE}, "es", ("es", "it")),
        ({"it": SURE, "es": 1 - SURE}, "es", ("it", "es")),
        # A language before that is not among those that count.
        ({"it": SURE, "es": 1 - SURE}, "xx", ("it",)),
    ],
)
def test_which_languages_are_tried(chances: dict[str, float], before: str | None, possible: tuple[str, ...]) -> None:
    found = possible_languages(chances, before=before)
    assert tuple(found) == possible
    assert list(found.values()) == pytest.approx([chances[one] for one in found])


@pytest.mark.parametrize(
    ("among", "possible"),
    [
        ({"es", "it"}, ("it",)),  # of both together, 0.4 are 0.8
        ({"es", "it", "xx"}, ("it",)),
        ({"en"}, ("en",)),
        ({"xx"}, ("en", "it")),  # none that the model knows: all count
        (set(), ("en", "it")),
    ],
)
def test_only_some_languages_count(among: set[str], possible: tuple[str, ...]) -> None:
    found = possible_languages({"en": 0.5, "it": 0.4, "es": 0.1}, among)
    assert tuple(found) == possible
    if len(among) == 2:
        assert found == {"it": pytest.approx(0.8)}


def decoded(language: str, score: float, text: str = "two words") -> _Decoded:
    return _Decoded(language, [], [], text, 0.0, score)


EVEN = dict.fromkeys(("en", "es", "it"), 0.5)


def test_the_likelier_text_is_taken() -> None:
    spanish, italian = decoded("es", -0.3), decoded("it", -0.2)
    assert _clearest([spanish, italian], EVEN, None) is italian
    assert _clearest([italian, spanish], EVEN, None) is italian


def test_the_language_before_has_a_margin() -> None:
    spanish = decoded("es", -0.5)
    above = decoded("it", spanish.score + MARGIN_OF_CHANGE + 0.001)
    within = decoded("it", spanish.score + MARGIN_OF_CHANGE - 0.001)
    assert _clearest([above, spanish], EVEN, "es") is above
    assert _clearest([within, spanish], EVEN, "es") is spanish


def test_what_was_detected_counts_beside_the_text() -> None:
    """Figures of a recording in Spanish, which Whisper translates if it is told to expect English."""
    spanish, english = decoded("es", -0.285), decoded("en", -0.303)
    assert _clearest([spanish, english], {"es": 0.94, "en": 0.04}, "en") is spanish
    assert _clearest([spanish, english], {"es": 0.6, "en": 0.4}, "en") is english
    assert _clearest([spanish, english], {"es": 1.0, "en": 0.0}, "en") is spanish


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        *(("Okay.", False), ("It's.", False), ("Okay then.", True), ("…", False)),
        *(("好", False), ("你好", False), ("はい。", False), ("สวัสดี!", False), ("안녕 하세요", True)),
        *(("ごめんね", False), ("ごめんなさい", True), ("你好 我是", True)),
    ],
)
def test_a_word_changes_nothing(text: str, changes: bool) -> None:
    spanish = decoded("es", -2.0)
    english = replace(decoded("en", -0.1), text=text)
    assert (_clearest([english, spanish], EVEN, "es") is english) is changes
    assert _clearest([english, spanish], EVEN, None) is english  # the first word of a conversation tells what there is
