"""WyomingLink: a TCP connection that carries the events of Wyoming."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from omni_ws.core.quota import ByteBudget, Share, beyond_ordinary
from omni_ws.errors import SlowConsumer
from omni_ws.transport.native.connection import Pause
from omni_ws.transport.native.tcp_link import TcpLink
from omni_ws.wire.wyoming import EventBounds, encode_event

#: Unsent bytes at which writing stops: a second of 16-bit audio at 24 kHz.
MAX_UNSENT_BYTES: Final = 48_000
#: Bytes of a frame behind which the next one waits for another pass of the event loop.
_MUCH_FOR_A_PASS: Final = 64 * 1024


class WyomingLink(TcpLink):
    """A TcpLink whose frames are whole events. ``accepted`` is called once the link is connected.

    The peer is not read while it does not read, so that no answer to an event, such as a pong, is kept for it; if that
    lasts for ``write_timeout`` seconds, it is a SlowConsumer. The bytes of an incomplete event are charged to
    ``budget``.
    """

    def __init__(self, accepted: Callable[[WyomingLink], None], *, budget: ByteBudget, write_timeout: float) -> None:
        super().__init__(max_unsent=MAX_UNSENT_BYTES)
        self._accepted = accepted
        self._bounds = EventBounds()
        self._unfinished = Share(budget)
        self._write_timeout = write_timeout
        self._stall: asyncio.TimerHandle | None = None

    def write_ping(self) -> None:
        self.write_message(encode_event("ping"), is_text=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._accepted(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self._write_timeout, self._stalled)
        self.pause_reading(Pause.UNWRITTEN)

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()
        self.touch()  # what it sent meanwhile was not read
        self.resume_reading(Pause.UNWRITTEN)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_stall()
        self._unfinished.resize(0)
        super().connection_lost(exc)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _stalled(self) -> None:
        self._stall = None
        self._refuse(SlowConsumer(f"the client did not read for {self._write_timeout:g} seconds"))
        self.abort()  # what waits for it cannot be sent

    def _take_frame(self, received: bytearray, start: int) -> int:
        end = self._bounds.end(received, start)
        if end is None:
            self._unfinished.resize(beyond_ordinary(len(received) - start))
            return start
        if self._unfinished.size:
            self._unfinished.resize(0)
        if self._receiver is not None:
            self._receiver.receive_message(bytes(received[start:end]), is_text=False)
        if end - start > _MUCH_FOR_A_PASS:
            self.end_pass()
        return end
