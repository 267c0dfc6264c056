"""Whether a speaker who pauses has more to say, by the words."""

from __future__ import annotations

import pytest

from omni_ws.audio.speech_watch import Unfinished
from omni_ws.service.conversation.turn_words import (
    LANGUAGES,
    dictates,
    how_unfinished,
)

NO, PERHAPS, YES = Unfinished.NO, Unfinished.PERHAPS, Unfinished.YES


@pytest.mark.parametrize(
    "text",
    [
        "Set a timer for.",
        "Set a timer for",
        "What is three plus?",
        "My number is.",
        "How much is?",
        "I was thinking, um.",
        "Turn on the",
        "I would like",
        "Could you remind me to call.",
        "Because",
        "I went home and...",
        "Well,",
        "One moment —",
        "Do you have it in a",
        # digits and letters in a row
        "My number is 415.",
        "415.",
        "415-330",
        "4, 4, 2.",
        "four four two",
        "It's spelled K-A-T.",
        "The code is seven.",
        "call 555 0199",
        "double four two",
        "My number is 415. 3.30",
        "My zip code is 9.4.",
        "831 2.2.6.",
        "It is spelled S-M-I.",
        "The serial number is B2.",
        "The code is 12345 B2.",
        # what comes next has only been named
        "Order number.",
        "My address is 42.",
        "I can do.",
        "The date is the 9th of May.",
        "He spells it.",
        # a telephone number, a code, a spelling, an address on the net
        "Plus 4.9.",
        "Plus 4.9. 1.71.",
        "+49",
        "Call 079.",
        "My licence plate is LK12.",
        "It is spelled SMI.",
        "It is spelled SMI. TH.",
        "B as in Bravo.",
        "Are as in Romeo.",
        "It's P for Peter.",
        "Go to www.",
        "Send it to john@",
        # a clause, an infinitive, or a preposition that has nothing behind it yet
        "Please tell my sister that.",
        "The reason is that.",
        "I hope that.",
        "What's the best way to?",
        "How long does it take to?",
        "Is there any?",
        "If it rains tomorrow.",
        "When I was in Rome.",
        "I'm free on.",
        "Turn the lights off in.",
    ],
)
def test_the_speaker_goes_on(text: str) -> None:
    assert how_unfinished(text, "en") is YES


@pytest.mark.parametrize(
    "text",
    [
        "What is three plus four?",
        "What is 3 + 4?",
        "What is 12 times 12?",
        "Wake me up at 7:30.",
        "Wake me up at 7 30.",
        "He was born in 1969.",
        "It costs 1,000 dollars or 98.6.",
        "Turn the lights on.",
        "Tell me a joke.",
        "So do I.",
        "A train leaves at 9.",
        "Yeah.",
        "Vitamin C.",
        "Vitamin B12.",
        "Turn to page 4a.",
        "Seven.",
        "What's my order number?",
        "Call my number.",
        "The party is on the 9th of May.",
        "The date is the 9th of May 1984.",
        "What is three plus 49?",
        "Call 79.",
        "I live in the USA.",
        "Plan B for Monday evening.",
        "I told you that.",
        "What is that?",
        "Tell me about that.",
        "If it rains tomorrow, stay.",
        "If possible.",
        "If you want.",
        "Stay here if it rains.",
        "Could you turn the heating off?",
        # clauses that are all there is to say, or belong to what was said
        "If you don't mind.",
        "If I remember correctly.",
        "When you are ready.",
        "Yes, please. If it rains tomorrow.",
        "If you see him tell him hello.",
        # what is named after a letter, or after a plus, and no spelling
        "Vitamin D for me.",
        "Plan B for everyone.",
        "It was as in Paris.",
        "Spell that.",
        "Please spell it.",
        "I can spell it.",
        "I can't spell.",
        "Check my spelling.",
        "It's spelled with a K.",
    ],
)
def test_a_sentence_is_whole(text: str) -> None:
    assert how_unfinished(text, "en") is NO


@pytest.mark.parametrize(
    "text",
    [
        "",
        "...?!"[3:],
        "What is this for?",
        "Who did you give it to?",
        "How many continents are there?",
        "Tell me what it is.",
        "Where do you come from?",
        "Is the light on?",
        "Who did you speak to?",
        # recognisers that write no marks
        "turn the lights on",
        "if it rains call me",
        "how do you spell it",
        # what follows may be a part of it, and may be missing
        "Tell him that.",
        "She told me that.",
        "Can you tell me that?",
        "The light is on.",
        "From now on.",
        "I'm off.",
        "Where to?",
        "Where are you going to?",
    ],
)
def test_words_that_do_not_tell(text: str) -> None:
    assert how_unfinished(text, "en") is PERHAPS


@pytest.mark.parametrize(
    ("asked", "text", "found"),
    [
        ("What is your phone number?", "Seven.", YES),
        ("Sure. Could you spell your last name for me?", "A.", YES),
        ("When did you move here?", "When I was ten.", NO),
        ("Okay.", "When I was ten.", YES),
        ("What's your address?", "It's 12.", YES),
        ("What is your phone number?", "I don't know.", NO),
        ("Your number is saved. How many people?", "Seven.", NO),
        ("How many people?", "Seven.", NO),
    ],
)
def test_the_assistant_has_asked_for_something_that_is_dictated(asked: str, text: str, found: Unfinished) -> None:
    assert how_unfinished(text, "en", asked=asked) is found


@pytest.mark.parametrize(
    ("language", "open_text", "row", "whole"),
    [
        ("es", "Pon un temporizador de", "Mi número es 612.", "¿Cuál es la capital de Francia?"),
        ("fr", "Mets un minuteur pour", "Mon numéro est le 06 12.", "Quelle est la capitale de la France ?"),
        ("it", "Metti un timer di", "Il mio numero è 347.", "Qual è la capitale della Francia?"),
        ("pt", "Ponha um alarme para", "O meu número é 912.", "Qual é a capital da França?"),
        ("de", "Stell einen Wecker für", "Meine Nummer ist 0171.", "Was ist die Hauptstadt von Frankreich?"),
    ],
)
def test_other_languages(language: str, open_text: str, row: str, whole: str) -> None:
    assert [how_unfinished(text, language) for text in (open_text, row, whole)] == [YES, YES, NO]


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("es", "¿Qué hora es?"),
        ("es", "Dime qué hora es"),
        ("es", "¿Dónde está?"),
        ("fr", "Qu'est-ce que c'est ?"),
        ("fr", "Dis-moi où il est"),
        ("it", "Che ore sono?"),
        ("it", "Perché?"),
        ("it", "Qual è?"),
        ("pt", "Que horas são?"),
        ("pt", "O que é?"),
        ("pt", "Não quero."),
        ("es", "No quiero."),
        ("de", "Mach das Licht aus."),
        ("de", "Schalte die Heizung ein."),
        ("de", "Ich weiß nicht, wer ich bin."),
        ("de", "Kommst du aus?"),
        ("de", "Das Licht ist aus."),
    ],
)
def test_a_sentence_may_end_in_a_word_behind_which_others_go_on(language: str, text: str) -> None:
    assert how_unfinished(text, language) is PERHAPS


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("es", "Cuéntame algo más."),
        ("es", "Quiero hacer una llamada."),
        ("fr", "Répète encore une fois."),
        ("fr", "Je n'en veux plus."),
        ("fr", "Il arrive quand ?"),
        ("it", "Mi piace molto."),
        ("it", "Un po' di più."),
        ("pt", "Eu gosto muito."),
        ("pt", "Um pouco mais."),
        ("de", "Sag das noch mal."),
        ("de", "Wenn es möglich ist, komme ich."),
        ("es", "El puente mide 340 m de largo."),
        ("es", "Si es posible."),
        ("fr", "Si tu veux."),
        ("it", "Tre più 39."),
        ("pt", "Se for possível."),
        ("es", "Si no es molestia."),
        ("fr", "Si vous voulez bien."),
        ("it", "Se non ti dispiace."),
        ("pt", "Se não me engano."),
        ("de", "Wenn es sein muss."),
        ("de", "Größe M wie immer."),
        ("es", "Plan B de emergencia."),
        ("fr", "Je l'ai écrit."),
        ("it", "Mio fratello scrive."),
        ("it", "Mi piacciono le lettere."),
        ("de", "Er hat einen Brief geschrieben."),
        ("es", "Sopa de letras."),
        ("pt", "Mais dois."),
        ("es", "Son dos punto cinco."),
        ("fr", "Trois point cinq."),
        ("it", "Due punto cinque."),
        ("pt", "Dois ponto cinco."),
        ("fr", "Il a écrit à la SNCF."),
        ("de", "Sie schreibt dem ADAC."),
        ("it", "Mi scrive dagli USA."),
    ],
)
def test_common_ends_of_sentences_are_whole(language: str, text: str) -> None:
    assert how_unfinished(text, language) is NO


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("es", "La capital de Francia es"),
        ("es", "Quiero"),
        ("fr", "Mon adresse est"),
        ("fr", "Je viens avec"),
        ("it", "Il mio indirizzo è"),
        ("pt", "A minha rua é"),
        ("pt", "Eu preciso"),
        ("de", "Ich hätte gern ein"),
        ("de", "Ich fahre nach"),
        ("es", "La fecha es el 9 de mayo."),
        ("fr", "La date est le 9 mai."),
        ("it", "La data è il 9 maggio."),
        ("pt", "A data é 9 de maio."),
        ("de", "Das Datum ist der neunte Mai."),
        ("de", "Meine Kundennummer."),
        ("de", "Plus 49."),
        ("es", "Más 34."),
        ("fr", "Plus 33."),
        ("it", "Più 39."),
        ("pt", "Mais 35."),
        ("de", "A wie Anton."),
        ("es", "B de Barcelona."),
        ("fr", "B comme Bernard."),
        ("it", "B come Bologna."),
        ("pt", "B de Brasil."),
        ("de", "Wenn es morgen regnet."),
        ("es", "Si llueve mañana."),
        ("fr", "S'il pleut demain."),
        ("it", "Se piove domani."),
        ("pt", "Se chover amanhã."),
    ],
)
def test_speakers_of_other_languages_go_on(language: str, text: str) -> None:
    assert how_unfinished(text, language) is YES


@pytest.mark.parametrize(
    ("language", "text", "found"),
    [
        ("en", "My number is 415.", True),
        ("en", "The guests are...", True),
        ("en", "The reason is that.", False),
        # If a number follows, its digits tell.
        ("en", "Order number.", False),
        ("en", "My card.", False),
        ("en", "The car's plate is.", True),
        ("en", "My name is.", False),
        ("en", "The capital of France is", False),
        ("en", "You are", False),
        ("en", "Tell me where the keys are", False),
        ("es", "Mi color favorito es", False),
        ("es", "Tal como son", False),
        ("fr", "Mon nom est", False),
        ("it", "Io sono", False),
        ("de", "Mein Name ist", False),
        ("en", "It's P for Peter.", True),
        ("en", "What is the capital of France?", False),
        ("en", "What are?", False),
        ("en", "What are", False),
        ("en", "Set a timer for.", False),
        ("en", "", False),
        ("de", "Die Gäste sind", True),
        ("es", "Los ingredientes son", True),
        ("fr", "Les invités sont", True),
        ("it", "Gli ospiti sono", True),
        ("pt", "Os convidados são", True),
    ],
)
def test_who_dictates(language: str, text: str, found: bool) -> None:
    assert dictates(text, language) is found


@pytest.mark.parametrize(("asked", "found"), [("", False), ("What is your number?", True)])
def test_who_is_asked_dictates(asked: str, found: bool) -> None:
    assert dictates("Seven.", "en", asked=asked) is found


def test_nothing_is_known_of_a_language_without_lists() -> None:
    assert "ja" not in LANGUAGES
    assert not dictates("415 330", "ja")
    assert how_unfinished("415", "ja") is how_unfinished("Set a timer for", "") is PERHAPS


@pytest.mark.parametrize(("signs", "found"), [("4 4", NO), ("4 4 2", YES)])
def test_so_many_digits_are_a_row(signs: str, found: Unfinished) -> None:
    assert how_unfinished(f"I said {signs}.", "en") is found


def test_only_the_end_of_a_long_text_is_read() -> None:
    assert how_unfinished("set a timer for " * 100_000, "en") is YES
    assert how_unfinished("The end of it all. " * 100_000, "en") is NO
    assert how_unfinished("." * 1_000_000 + " That is all of it.", "en") is NO
