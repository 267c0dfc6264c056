"""Input that continues what was said before, and the turns of a history."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from msgspec.structs import replace

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.history import Message, Speech
from omni_ws.engine.base import InputSource


class EarlierParts(Protocol):
    """What was said before in the same message: in turns that nobody heard an answer to."""

    @property
    def known(self) -> bool:
        """Whether ``chunks`` returns without waiting: all of it has been written down."""
        ...

    async def chunks(self) -> tuple[InputChunk, ...]:
        """Wait until it is known, and return it in order: text, or audio whose words nobody knows."""
        ...


class ContinuedInput:
    """The input of a request that continues a message whose earlier parts were cut off.

    An InputSource: it has the chunks of ``earlier`` first, then those of ``own``. Texts that touch are joined by a
    blank.

    An engine that can do something with its own input before the earlier parts are known takes the two by themselves.
    """

    def __init__(self, earlier: EarlierParts, own: InputSource) -> None:
        self.earlier = earlier
        self.own = own

    def __aiter__(self) -> AsyncIterator[InputChunk]:
        return _Continued(self.earlier, aiter(self.own))


def own_part(source: InputSource) -> InputSource:
    """Return the input of a request without earlier parts: for engines that are no models, and know no conversation."""
    return source.own if isinstance(source, ContinuedInput) else source


class _Continued(AsyncIterator[InputChunk]):
    def __init__(self, earlier: EarlierParts, own: AsyncIterator[InputChunk]) -> None:
        self._earlier: EarlierParts | None = earlier
        self._own = own
        self._before: list[InputChunk] = []
        #: The last chunk, while all of them were earlier ones.
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
    """Return ``chunk`` with a blank in front of it, where it is text that would touch the text before it."""
    texts = before.modality is Modality.TEXT and chunk.modality is Modality.TEXT and chunk.tool_call_id is None
    if not texts or not chunk.payload or before.payload[-1:].isspace() or chunk.payload[:1].isspace():
        return chunk
    return replace(chunk, payload=b" " + chunk.payload)


# The turns of a history.


def whole_turns(history: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Return the turns, of which an engine may leave out the oldest; together they are the history.

    A turn begins with a user message and includes the answer, its tool calls, and their results, which cannot be left
    out one without the other.
    """
    turns: list[list[Message]] = []
    for message in history:
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return [tuple(turn) for turn in turns]


def earlier_speech(history: Sequence[Message]) -> list[Speech]:
    """Return the speech in it whose words nobody knows, the newest first."""
    return [part.speech for message in reversed(history) for part in reversed(message.parts) if part.speech is not None]


def unanswered(history: Sequence[Message]) -> str:
    """Return what the user said last where nothing was answered: who goes on after that continues it."""
    texts: list[str] = []
    for message in reversed(history):
        if message.role != "user":
            break
        texts.append(message.text)
    return " ".join(filter(None, reversed(texts)))
