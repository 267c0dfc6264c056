"""Bounds on what an MCP server sends: bytes, time, the pace of a stream without end, and JSON values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from omni_ws.core.json_values import check_values
from omni_ws.core.quota import TokenBucket
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import InvalidFrame

#: The most bytes of one HTTP response that is no stream of events, and of one event.
MAX_RESPONSE_BYTES: Final = 1024 * 1024
#: The most bytes of a stream of events that answers one call.
MAX_STREAM_BYTES: Final = 8 * 1024 * 1024
#: Bytes a second of a stream of events that is open as long as the session, behind its first MAX_STREAM_BYTES: its
#: events are parsed on the loop.
_STREAM_RATE: Final = 256 * 1024
#: What ends an event of a stream.
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
#: Longer JSON is examined in a thread.
_INLINE_BYTES: Final = 64 * 1024


def _end_of_events(data: bytearray, start: int) -> int:
    """Return the end of the last whole event in ``data``, of which none ends before ``start``; 0 if there is none."""
    return max((at + len(end) for end in _EVENT_ENDS if (at := data.rfind(end, start)) >= 0), default=0)


async def _check(data: bytes) -> None:
    """Raise InvalidFrame for JSON of more values than are parsed on the loop, as the package does."""
    if len(data) <= _INLINE_BYTES:
        check_values(data)
    else:
        await run_work(Work.BODIES, check_values, data)


class BoundedBody:
    """The body of a response. Without ``ends_at``, a stream of events that may be open as long as the session.

    The one to a POST (``posted``) ends at ``ends_at``, by the clock of the loop, when nobody waits for it any more: to
    raise an error then would end the connection, and with it other calls. Raises errors of httpx2.
    """

    def __init__(self, stream: Any, *, events: bool, posted: bool, ends_at: float | None) -> None:
        self._stream, self._events, self._posted, self._ends_at = stream, events, posted, ends_at
        self._left = MAX_STREAM_BYTES if events else MAX_RESPONSE_BYTES
        self._pace = TokenBucket(rate=_STREAM_RATE, capacity=MAX_STREAM_BYTES, now=asyncio.get_running_loop().time())

    async def __aiter__(self) -> AsyncIterator[bytes]:
        import httpx2

        pieces, held = aiter(self._stream), bytearray()
        while True:
            try:
                async with asyncio.timeout_at(self._ends_at):
                    piece = await anext(pieces, None)
            except TimeoutError:
                if self._posted:
                    return
                raise httpx2.ReadTimeout("the stream was open for too long") from None
            if piece is None:
                break
            await self._count(len(piece))
            before = len(held)
            held += piece
            if self._events and (end := _end_of_events(held, max(0, before - 3))):
                yield await self._checked(bytes(held[:end]))
                del held[:end]
            if len(held) > MAX_RESPONSE_BYTES:
                raise httpx2.ReadError("the response is too long")
        if held:
            yield await self._checked(bytes(held))

    async def _count(self, size: int) -> None:
        import httpx2

        if self._ends_at is None:
            await asyncio.sleep(self._pace.spend(size, now=asyncio.get_running_loop().time()))
            return
        self._left -= size
        if self._left < 0:
            raise httpx2.ReadError("the response is too long")

    async def _checked(self, data: bytes) -> bytes:
        import httpx2

        try:
            await _check(data)
        except InvalidFrame as error:
            raise httpx2.ReadError(error.message) from None
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()
