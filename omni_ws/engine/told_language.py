"""How a text model is told which language the user speaks: by a note at the end of the message that was spoken.

The note stands where the language changes, English being the first, and stands there again whenever the message comes
back in the history. So the prompt only grows at its end, and what the model has computed of it stays good; and a model
needs nothing to read it but text. A conversation in English has no notes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.history import Message
from omni_ws.core.json_values import language_name
from omni_ws.engine.base import Engine, GenerationRequest, HeardLanguage

#: The language of a conversation before anybody speaks: nothing is said of it until it changes.
_FIRST: Final = "en"


def told_language(request: GenerationRequest, llm: Engine) -> GenerationRequest:
    """Return ``request`` with notes about the language for ``llm``, unless it hears, or reads ``heard_language``."""
    able = llm.capabilities
    if able.reads_language or Modality.AUDIO in able.input_modalities or request.options.interprets_into:
        return request
    history, told = _noted(request.history)
    source = _NotedInput(aiter(request.input), request.heard_language, told=told)
    return replace(request, input=source, history=history)


def language_note(language: str) -> str:
    """Return the note that the user speaks ``language`` (primary subtag of RFC 5646)."""
    return f"\n(The user speaks {language_name(language).title()}.)"


def _noted(history: tuple[Message, ...]) -> tuple[tuple[Message, ...], str]:
    """Return the history with a note wherever the language changes, and its last language."""
    noted, told = [], _FIRST
    for message in history:
        spoken_in = message.parts[-1].language
        if spoken_in is not None and spoken_in != told:
            told = spoken_in
            message = _with_note(message, language_note(told))
        noted.append(message)
    return tuple(noted), told


def _with_note(message: Message, note: str) -> Message:
    if not message.more:
        return replace(message, text=message.text + note)
    last = message.more[-1]
    return replace(message, more=(*message.more[:-1], replace(last, text=last.text + note)))


class _NotedInput(AsyncIterator[InputChunk]):
    """The input of a request, with a note at its end if it was spoken in another language than ``told``."""

    def __init__(self, source: AsyncIterator[InputChunk], heard: HeardLanguage, *, told: str) -> None:
        self._source = source
        self._heard = heard
        self._told = told

    async def __anext__(self) -> InputChunk:
        try:
            return await anext(self._source)
        except StopAsyncIteration:
            spoken_in = self._heard.code
            if spoken_in is None or spoken_in == self._told:
                raise
        self._told = spoken_in
        return InputChunk(Modality.TEXT, language_note(spoken_in).encode())
