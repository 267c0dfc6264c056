"""What a listener says who wants the speaker to go on, or to stop."""

from __future__ import annotations

import pytest

from omni_ws.service.conversation.onsets import (
    LANGUAGES,
    LONGEST_BACKCHANNEL_MS,
    MOST_WORDS,
    SURE_BACKCHANNEL,
    SURE_WORDS,
    Verdict,
    asks,
    begins_with_stop_word,
    is_acknowledgement,
    is_stop_word,
    judged,
)


@pytest.mark.parametrize(
    "text",
    [
        "Yeah.",
        "Okay",
        "Right,",
        " I see.",
        "Uh-huh.",
        "Mm-hm",
        "Mm-hmm.",
        "Mhm.",
        "OK, yeah, right.",
        "That’s right.",
        "O.K.",
    ],
)
def test_it_is_known_however_recognisers_write_it(text: str) -> None:
    assert is_acknowledgement(text)


@pytest.mark.parametrize(
    "text", ["", " ", "?!", "No", "Stop", "Yeah, stop", "Right now", "Okay what time is it", "I see you", "Wait", "See"]
)
def test_what_is_more_or_other_is_none(text: str) -> None:
    assert not is_acknowledgement(text)


@pytest.mark.parametrize("past", [False, True])
def test_so_many_words_and_one_more(past: bool) -> None:
    assert is_acknowledgement("yeah " * (MOST_WORDS + past)) is not past
    assert is_stop_word("stop " * (MOST_WORDS + past)) is not past


@pytest.mark.parametrize(
    ("language", "acknowledgement", "stop", "other"),
    [
        ("en", "Yeah, I see.", "Okay, stop please.", "Yeah, but why?"),
        ("de", "Ja, genau.", "Moment mal, bitte!", "Ja, aber warum?"),
        ("es", "Sí, claro.", "Espera un momento.", "Sí, pero ¿por qué?"),
        ("fr", "Oui, d’accord.", "Arrête, s'il te plaît.", "Oui, mais pourquoi ?"),
        ("it", "Sì, ho capito.", "Aspetta un attimo.", "Sì, ma perché?"),
        ("pt", "Sim, entendi.", "Espera aí, por favor.", "Sim, mas por quê?"),
    ],
)
def test_each_language_has_its_words(language: str, acknowledgement: str, stop: str, other: str) -> None:
    texts = (acknowledgement, stop, other)
    assert [is_acknowledgement(text, language) for text in texts] == [True, False, False]
    assert [is_stop_word(text, language) for text in texts] == [False, True, False]
    assert begins_with_stop_word(stop, language)
    assert begins_with_stop_word(other, language)  # "but" interrupts
    assert not begins_with_stop_word(acknowledgement, language)
    assert language in LANGUAGES


def test_names_of_languages_may_have_regions_and_unknown_ones_know_hums_alone() -> None:
    assert is_acknowledgement("Ja, genau", "de-AT")
    assert is_acknowledgement("Mm-hm, okay", "hi")
    assert not is_acknowledgement("Ja, genau", "hi")
    assert not is_acknowledgement("yeah", "../../../audio")
    assert not is_stop_word("stop", "hi")


@pytest.mark.parametrize("text", ["Stop", "Wait, wait!", "Hold on.", "no, never mind", "Can you stop, please?", "Shh"])
def test_what_means_stop(text: str) -> None:
    assert is_stop_word(text)


@pytest.mark.parametrize("text", ["", "No.", "please", "Okay", "Stop the music", "Wait for me", "Quiet places in Rome"])
def test_what_does_not_mean_stop_alone(text: str) -> None:
    assert not is_stop_word(text)


@pytest.mark.parametrize("text", ["Wait", "stop talking about", "Okay, but", "No", "Yeah, what", "excuse me, is"])
def test_an_interim_that_begins_so_interrupts(text: str) -> None:
    assert begins_with_stop_word(text)


@pytest.mark.parametrize("text", ["", "Yeah", "My hammer", "the stop", "Nothing", "waiting"])
def test_an_interim_that_begins_otherwise_does_not_yet(text: str) -> None:
    assert not begins_with_stop_word(text)


@pytest.mark.parametrize(
    ("text", "language"),
    [("No way", "en"), ("Ach was", "de"), ("Qué bien", "es"), ("Ma certo", "it"), ("Que legal", "pt"), ("", "fr")],
)
def test_an_acknowledgement_that_begins_like_an_interruption_does_not_interrupt(text: str, language: str) -> None:
    assert not begins_with_stop_word(text, language)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Hör bitte auf!", "de"),
        ("Hang on a minute.", "en"),
        ("No sigas, por favor.", "es"),
        ("Attends un instant, s'il te plaît.", "fr"),
        ("Scusa, aspetta un secondo.", "it"),
        ("Só um instante, por favor.", "pt"),
    ],
)
def test_whole_phrases_mean_stop(text: str, language: str) -> None:
    assert is_stop_word(text, language)


def test_but_interrupts_in_italian() -> None:
    assert begins_with_stop_word("Però", "it")
    assert not is_acknowledgement("Però", "it")


def verdict(text: str | None, probability: float | None, *, voiced_ms: int = 400, question: bool = False) -> Verdict:
    return judged(text, probability, "en", voiced_ms=voiced_ms, after_question=question)


BACKCHANNEL, INTERRUPTION, STOP, UNSURE = Verdict
A_LITTLE = 0.001


@pytest.mark.parametrize("probability", [None, 0.0, 0.5, 1.0])
def test_known_words_beat_the_sound(probability: float | None) -> None:
    assert verdict("Yeah.", probability) is BACKCHANNEL
    assert verdict("Yeah, but why?", probability) is INTERRUPTION
    assert verdict("No.", probability) is INTERRUPTION
    assert verdict("Okay, stop.", probability) is STOP
    assert verdict("Stop.", probability, voiced_ms=2000, question=True) is STOP


def test_other_words_are_made_of_a_hum_if_it_surely_was_one() -> None:
    assert verdict("Pasta.", SURE_BACKCHANNEL) is BACKCHANNEL
    assert verdict("Pasta.", SURE_BACKCHANNEL - A_LITTLE) is INTERRUPTION
    assert verdict("Pasta.", None) is INTERRUPTION
    assert verdict("Pasta.", 1.0, voiced_ms=LONGEST_BACKCHANNEL_MS) is BACKCHANNEL
    assert verdict("Pasta.", 1.0, voiced_ms=LONGEST_BACKCHANNEL_MS + 1) is INTERRUPTION
    assert verdict("Let me hear it", 1.0) is BACKCHANNEL
    assert verdict("Let me hear it again", 1.0) is INTERRUPTION


def test_what_recognisers_often_make_of_a_hum_is_one_if_it_rather_sounded_so() -> None:
    assert verdict("My hammer.", 0.5) is BACKCHANNEL
    assert verdict("Yeah, my hammer.", 0.5) is BACKCHANNEL
    assert verdict("My hammer.", 0.5 - A_LITTLE) is INTERRUPTION
    assert verdict("My hammer.", None) is INTERRUPTION


def test_without_words_the_sound_decides() -> None:
    assert verdict(None, SURE_BACKCHANNEL) is BACKCHANNEL
    assert verdict(None, SURE_BACKCHANNEL - A_LITTLE) is UNSURE
    assert verdict(None, SURE_WORDS + A_LITTLE) is UNSURE
    assert verdict(None, SURE_WORDS) is INTERRUPTION
    assert verdict(None, None) is UNSURE


def test_long_sound_without_words_interrupts() -> None:
    assert verdict(None, 1.0, voiced_ms=LONGEST_BACKCHANNEL_MS) is BACKCHANNEL
    assert verdict(None, 1.0, voiced_ms=LONGEST_BACKCHANNEL_MS + 1) is INTERRUPTION
    assert verdict(None, None, voiced_ms=LONGEST_BACKCHANNEL_MS + 1) is INTERRUPTION
    assert verdict("Oh yeah, I see.", 0.05, voiced_ms=LONGEST_BACKCHANNEL_MS + 1) is BACKCHANNEL


def test_speech_in_which_no_words_were_recognised_leaves_no_turn() -> None:
    assert verdict("", SURE_WORDS + A_LITTLE) is BACKCHANNEL
    assert verdict("", None) is BACKCHANNEL
    assert verdict(" ?", None, question=True) is BACKCHANNEL


def test_speech_that_was_surely_words_interrupts_even_if_none_were_recognised() -> None:
    assert verdict("", SURE_WORDS) is INTERRUPTION


def test_an_acknowledgement_answers_a_question() -> None:
    assert verdict("Yeah.", 1.0, question=True) is INTERRUPTION
    assert verdict("My hammer.", 1.0, question=True) is INTERRUPTION
    assert verdict(None, 1.0, question=True) is UNSURE  # only the words tell "mm-hm" from a cough
    assert verdict(None, 0.0, question=True) is INTERRUPTION


def test_the_language_is_english_if_nobody_knows_it() -> None:
    assert judged("yeah", None, None, voiced_ms=300, after_question=False) is BACKCHANNEL


TEXT = "It rained. Shall I go on? The table is for two"


@pytest.mark.parametrize(
    ("heard", "asked"),
    [
        ("", False),
        ("It rained.", False),
        ("It rained. Shall I", False),
        ("It rained. Shall I go", True),
        ("It rained. Shall I go on?", True),
        ("It rained. Shall I go on? The table", True),  # the listener's answer takes a moment
        ("It rained. Shall I go on? The table is", False),
        (TEXT, False),
    ],
)
def test_the_last_sentence_that_was_heard_asks(heard: str, asked: bool) -> None:
    assert asks(TEXT, len(heard)) is asked


def test_a_question_of_two_words_asks_when_it_is_over() -> None:
    assert asks("Fine. Go on?", len("Fine. Go on?"))
    assert asks("Go on?", len("Go"))


@pytest.mark.parametrize(
    ("others", "probability", "after_question", "found"),
    [
        (["Got it."], 0.5, False, BACKCHANNEL),
        (["Got it."], None, False, BACKCHANNEL),
        (["Got it."], SURE_WORDS + 0.01, False, BACKCHANNEL),
        (["Got it."], SURE_WORDS, False, INTERRUPTION),
        (["Got it."], 0.5, True, INTERRUPTION),
        (["God in."], 0.5, False, INTERRUPTION),
        (["Got it.", "No, got it."], 0.5, False, INTERRUPTION),
        (["Got it.", "Stop it."], 0.5, False, INTERRUPTION),
    ],
)
def test_a_reading_that_is_almost_as_likely_is_an_acknowledgement(
    others: list[str], probability: float | None, after_question: bool, found: Verdict
) -> None:
    assert judged("God it.", probability, "en", voiced_ms=600, after_question=after_question, others=others) is found


@pytest.mark.parametrize(("said", "found"), [("a b c d e f", BACKCHANNEL), ("a b c d e f g", INTERRUPTION)])
def test_more_words_than_an_acknowledgement_has_are_none_in_another_reading(said: str, found: Verdict) -> None:
    assert judged(said, 0.5, "en", voiced_ms=600, after_question=False, others=["Got it."]) is found
    assert judged("God it.", 0.5, "en", voiced_ms=600, after_question=False, others=["Got it.", said]) is found
