"""TcpLink: the base class of links over TCP connections without WebSocket, whose bytes are frames of another kind.

TcpPort is the port on which they are accepted.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Final, cast

from websockets.frames import CloseCode

from omni_ws.core.quota import ByteBudget
from omni_ws.errors import OmniError
from omni_ws.transport.http.hang_up import HangUp, Recheck, hang_up, notice_dead_networks
from omni_ws.transport.native.connection import CLOSE_TIMEOUT_SEC, FrameReceiver, Pause, PausedReading

logger = logging.getLogger(__name__)

_FRAMES_PER_PASS: Final = 64


class TcpPort:
    """A port beside that of HTTP, which may stay closed."""

    def __init__(self, protocol: str, *, flag: str) -> None:
        """``protocol`` is its name for people, and ``flag`` the one that chooses the port."""
        self._protocol = protocol
        self._flag = flag
        self._server: asyncio.Server | None = None

    @property
    def number(self) -> int | None:
        """The port that is listened on; None if it is not open."""
        if self._server is None or not self._server.sockets:
            return None
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def open(self, make: Callable[[], asyncio.Protocol], host: str, port: int) -> None:
        """Listen, and ``make`` a protocol for each connection. Raises OSError with what to do if the port is taken."""
        try:
            self._server = await asyncio.get_running_loop().create_server(make, host, port)
        except OSError as error:
            raise OSError(
                f"{self._protocol} cannot listen on {host}, port {port}, {error.strerror}: stop the process that uses "
                f"the port, or choose another with {self._flag} (0: any)"
            ) from error
        for listening in self._server.sockets:
            notice_dead_networks(listening)
        logger.info("%s listens on %s, port %d", self._protocol, host, self.number)

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()

    async def wait_closed(self) -> None:
        """Wait until all connections are gone."""
        if self._server is not None:
            await self._server.wait_closed()


class TcpLink(PausedReading, asyncio.Protocol):
    """A TCP connection that takes the place of a WebSocket (see SoleLink): hands whole frames to its receiver.

    A subclass finds the frames. There are no pings, unless it sends some: the kernel notices dead networks.
    """

    _watch: Recheck

    def __init__(self, *, max_unsent: int) -> None:
        """``max_unsent`` are the unsent bytes at which writing stops."""
        self.loop = asyncio.get_running_loop()
        self._max_unsent = max_unsent
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._failed = False
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self._watch = Recheck(self._check_hang_up)
        #: Whether the peer has yet to take what was written.
        self.paused = False
        self.heard_at = self.loop.time()

    @property
    def client(self) -> str:
        """The address of the peer."""
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return peer[0] if peer else ""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def attach(self, receiver: FrameReceiver, account: ByteBudget | None = None) -> None:
        """Hand frames to ``receiver`` from now on."""
        self._receiver = receiver
        self.heard_at = self.loop.time()
        if not self.is_open:
            receiver.connection_closing()
        self.resume_reading(Pause.EARLY)

    # writing

    def write_message(self, data: bytes, *, is_text: bool) -> None:
        """Send a whole frame without waiting."""
        if self._transport is not None and self.is_open:
            self._transport.write(data)

    def write_ping(self) -> None:
        """Do nothing: see the class."""

    def _write_farewell(self) -> None:
        """Tell the peer that the connection is about to be closed, if the protocol has a frame for that."""

    def fail(self, code: CloseCode, reason: str) -> None:
        self.abort()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    async def close_in_time(self, code: int, reason: str) -> None:
        """Hang up; abort the connection if that takes longer than CLOSE_TIMEOUT_SEC. Ignores code and reason."""
        self._failed = True  # nothing more is taken
        if self._transport is None:
            return
        self._write_farewell()
        self._transport.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_SEC):
                await asyncio.shield(self._lost)
        if not self._lost.done():
            self._transport.abort()
            await self._lost

    # what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._max_unsent)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self._receiver is not None:
            self._receiver.resume_output()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.stop()
        self._end_pace()
        self._received.clear()
        if not self._lost.done():
            self._lost.set_result(None)
        if self._receiver is not None:
            self._receiver.connection_closing()

    def data_received(self, data: bytes) -> None:
        self.heard_at = self.loop.time()
        if self._failed:
            return
        self._received += data
        if self._input_pace is not None:
            self._keep_pace(self._input_pace(len(data)))
        if not self._pauses:
            self._take_frames()

    # reading

    def _stop_reading(self) -> None:
        if self._transport is not None and self.is_open:
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if self._pauses or self._received:
            self._schedule_pass()
        elif self._transport is not None and self.is_open:
            self._transport.resume_reading()

    def _check_hang_up(self) -> None:
        """Close the connection of a peer that has closed its sending side: it has hung up."""
        if self._transport is not None and hang_up(self._transport) is not HangUp.UNKNOWN:
            self._transport.abort()

    def _next_pass(self) -> None:
        self._pass_scheduled = False
        if self._pauses == Pause.PASS:
            self._pauses = Pause.NONE
            self._take_frames()
            if not self._pauses and self._transport is not None and self.is_open:
                self._transport.resume_reading()

    # frames

    @abstractmethod
    def _take_frame(self, received: bytearray, start: int) -> int:
        """Hand over the frame that begins at ``start``, and return where it ends; ``start`` while it is incomplete.

        Raises the error that ends the session, as the bounds of all further frames are lost.
        """

    def _frames_refused(self, error: OmniError) -> None:
        """Report an error of ``_take_frame``."""
        if self._receiver is not None:
            self._receiver.input_refused(error)

    def _take_frames(self) -> None:
        """Hand over whole frames, at most _FRAMES_PER_PASS in one pass of the event loop."""
        start = 0
        try:
            for _ in range(_FRAMES_PER_PASS):
                if self._failed or self._pauses:
                    return
                end = self._take_frame(self._received, start)
                if end == start:
                    return
                start = end
            self._schedule_pass()
        except OmniError as error:
            self._failed = True  # nothing more is taken
            self._frames_refused(error)
        finally:
            del self._received[:start]
