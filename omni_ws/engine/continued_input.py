"""Input that continues an earlier, unanswered message, and the turns of a history."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence

from msgspec.structs import replace

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.history import Message, Speech
from omni_ws.engine.base import InputSource


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
    return replace(chunk, payload=b" " + chunk.payload)


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
