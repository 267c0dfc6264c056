"""What a text model is told of the language that the user speaks."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine_answers import Input, request_of
from support.scripted_engines import RetortEngine

from omni_ws.core.chunks import Modality
from omni_ws.core.history import Message
from omni_ws.engine.base import HeardLanguage
from omni_ws.engine.clauses import told_language

SPANISH, ENGLISH = "\n(The user speaks Spanish.)", "\n(The user speaks English.)"


async def told(history: tuple[Message, ...], heard: str | None, **able: Any) -> tuple[list[str], str]:
    """The texts of the history, and the text of the input, as a model gets them."""
    llm = RetortEngine(**able)
    request = request_of(Input("hola"), history=history, heard_language=HeardLanguage(code=heard))
    request = told_language(request, llm)
    said = "".join([chunk.payload.decode() async for chunk in request.input])
    return [message.text for message in request.history], said


def asked(said: str, language: str | None = None) -> tuple[Message, Message]:
    return Message("user", said, language=language), Message("assistant", f"{said}?")


@pytest.mark.parametrize(
    ("history", "heard", "texts", "said"),
    [
        ((), None, [], "hola"),
        ((), "en", [], "hola"),  # a conversation in English has no notes
        ((), "es", [], "hola" + SPANISH),
        (asked("hi", "en"), "es", ["hi", "hi?"], "hola" + SPANISH),
        (asked("uno", "es"), "es", ["uno" + SPANISH, "uno?"], "hola"),
        (asked("uno", "es"), "en", ["uno" + SPANISH, "uno?"], "hola" + ENGLISH),
        (asked("uno", "es") + asked("two", "en"), "en", ["uno" + SPANISH, "uno?", "two" + ENGLISH, "two?"], "hola"),
        (asked("uno", "es") + asked("typed"), "es", ["uno" + SPANISH, "uno?", "typed", "typed?"], "hola"),
    ],
)
async def test_a_note_stands_where_the_language_changes(
    history: tuple[Message, ...], heard: str | None, texts: list[str], said: str
) -> None:
    assert await told(history, heard) == (texts, said)


async def test_what_was_told_once_is_told_in_the_same_words_for_ever() -> None:
    """So that what a model has computed of the prompt stays good."""
    history: tuple[Message, ...] = ()
    before: list[str] = []
    for language in ("en", "es", "es", "en", "de"):
        texts, said = await told(history, language)
        assert texts == before
        before = [*texts, said, "sí"]
        history += (Message("user", "hola", language=language), Message("assistant", "sí"))


@pytest.mark.parametrize("first", ["es", None])
async def test_the_note_follows_the_last_part_of_a_message(first: str | None) -> None:
    more = (Message("user", "segundo", language="es"),)
    request = request_of(Input("hola"), history=(Message("user", "primero", language=first, more=more),))
    request = told_language(request, RetortEngine())
    assert [part.text for part in request.history[0].parts] == ["primero", "segundo" + SPANISH]


@pytest.mark.parametrize(
    "able", [{"reads_language": True}, {"input_modalities": frozenset({Modality.TEXT, Modality.AUDIO})}]
)
async def test_who_hears_or_reads_the_language_gets_no_notes(able: dict[str, Any]) -> None:
    assert await told(asked("uno", "es"), "de", **able) == (["uno", "uno?"], "hola")
