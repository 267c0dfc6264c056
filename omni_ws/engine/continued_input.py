"""Input that continues an earlier, unanswered message; the turns of a history; notes on the language of the user."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Final

from msgspec import structs

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.history import Message, Speech
from omni_ws.core.json_values import language_name
from omni_ws.engine.base import Engine, GenerationRequest, HeardLanguage, InputSource


class EarlierParts(ABC):
    """The earlier parts of a user message: turns whose answers were cut off before the user heard any of them."""

    @property
    @abstractmethod
    def known(self) -> bool:
        """Whether ``chunks`` returns without waiting: the speech of all earlier parts is transcribed."""

    @abstractmethod
    async def chunks(self) -> tuple[InputChunk, ...]:
        """Wait for the transcripts, and return the parts in order: text, or audio if it has no transcript."""


class ContinuedInput:
    """The input of a request that continues a message: an InputSource of ``earlier`` parts and the request's ``own``.

    A blank separates the texts of the two. An engine that can process ``own`` before the earlier parts are known reads
    the two attributes instead.
    """

    def __init__(self, earlier: EarlierParts, own: InputSource) -> None:
        self.earlier = earlier
        self.own = own

    def __aiter__(self) -> AsyncIterator[InputChunk]:
        return _Continued(self.earlier, aiter(self.own))


def own_part(source: InputSource) -> InputSource:
    """Return the input of a request without the earlier parts of its message, for engines that ignore those."""
    return source.own if isinstance(source, ContinuedInput) else source


class _Continued(AsyncIterator[InputChunk]):
    def __init__(self, earlier: EarlierParts, own: AsyncIterator[InputChunk]) -> None:
        self._earlier: EarlierParts | None = earlier
        self._own = own
        self._before: list[InputChunk] = []
        #: The last chunk of the earlier parts, until the first of the own ones.
        self._last: InputChunk | None = None

    async def __anext__(self) -> InputChunk:
        if self._earlier is not None:
            self._before = [*await self._earlier.chunks()]
            self._earlier = None
        if self._before:
            self._last = self._before.pop(0)
            return self._last
        chunk = await anext(self._own)
        last, self._last = self._last, None
        return chunk if last is None else apart(last, chunk)


def apart(before: InputChunk, chunk: InputChunk) -> InputChunk:
    """Return ``chunk``, with a blank in front of its text if that would touch the text in ``before``."""
    texts = before.modality is Modality.TEXT and chunk.modality is Modality.TEXT and chunk.tool_call_id is None
    if not texts or not chunk.payload or before.payload[-1:].isspace() or chunk.payload[:1].isspace():
        return chunk
    return structs.replace(chunk, payload=b" " + chunk.payload)


# The turns of a history.


def whole_turns(history: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Cut a history into turns; an engine may drop the oldest turns to fit its context.

    A turn begins with a user message. It includes the answer with its tool calls and their results, which must not be
    separated.
    """
    turns: list[list[Message]] = []
    for message in history:
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return [tuple(turn) for turn in turns]


def earlier_speech(history: Sequence[Message]) -> list[Speech]:
    """Return the speech in ``history`` that has no transcript, newest first."""
    return [part.speech for message in reversed(history) for part in reversed(message.parts) if part.speech is not None]


def unanswered(history: Sequence[Message]) -> str:
    """Return the text of the user messages at the end of ``history``, to which there is no answer."""
    texts: list[str] = []
    for message in reversed(history):
        if message.role != "user":
            break
        texts.append(message.text)
    return " ".join(filter(None, reversed(texts)))


# How a text model is told which language the user speaks: by a note at the end of the message that was spoken.
#
# The note stands where the language changes, English being the first, and stands there again whenever the message comes
# back in the history. So the prompt only grows at its end, and what the model has computed of it stays good; and a
# model needs nothing to read it but text. A conversation in English has no notes.

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
