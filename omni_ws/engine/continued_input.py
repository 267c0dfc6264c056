"""ContinuedInput: the input of a request that continues a message whose earlier parts were cut off."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from msgspec.structs import replace

from omni_ws.core.chunks import InputChunk, Modality
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
    """An InputSource: the chunks of ``earlier`` first, then those of ``own``. Texts that touch are joined by a blank.

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
