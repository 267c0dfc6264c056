"""Lobby: what receives the events of a connection that has no session."""

from __future__ import annotations

import asyncio
from typing import Final

from omni_ws.errors import OmniError, SessionTimeout
from omni_ws.service.failure import unexpected
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.transport.native.connection import Pause
from omni_ws.transport.wyoming.connection import UNSERVED, answer_without_session
from omni_ws.transport.wyoming.link import WyomingLink
from omni_ws.wire.wyoming import decode_event

#: Events that need a session, be it to be refused. Others are passed over.
_OF_SESSIONS: Final = frozenset({"transcribe", "audio-start", "transcript", "run-pipeline", *UNSERVED}) | {
    f"synthesize{step}" for step in ("", "-start", "-chunk", "-stop")
}


class Lobby:
    """A FrameReceiver that answers what needs no session, up to the first event that does."""

    def __init__(self, link: WyomingLink, factory: SessionFactory) -> None:
        self._link = link
        self._factory = factory
        self._loop = asyncio.get_running_loop()
        #: When the last event came: bytes of an incomplete one are no sign of life.
        self._heard_at = self._loop.time()
        #: The first event that needs a session; None if the peer is gone.
        self._first: asyncio.Future[bytes | None] = self._loop.create_future()
        link.attach(self)

    async def first_request(self, timeout: float | None) -> bytes | None:
        """Wait for the event that needs a session; None if the peer disconnects before one.

        Raises SessionTimeout if no event comes for ``timeout`` seconds, and the error of a peer that is refused.
        """
        while not self._first.done():
            left = None if timeout is None else self._heard_at + timeout - self._loop.time()
            if left is not None and left <= 0:
                raise SessionTimeout(f"the client was silent for {timeout:g} seconds")
            await asyncio.wait([self._first], timeout=left)
        return self._first.result()

    def refuse(self, error: OmniError) -> None:
        """Make ``first_request`` raise ``error``."""
        if not self._first.done():
            self._first.set_exception(error)

    # what the link calls

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        if self._first.done():
            return
        self._heard_at = self._link.heard_at
        try:
            event = decode_event(bytes(data))
            if not answer_without_session(event, self._link, self._factory) and event.type in _OF_SESSIONS:
                self._link.pause_reading(Pause.EARLY)
                self._first.set_result(bytes(data))
        except OmniError as error:
            self.refuse(error)
        except Exception as error:
            self.refuse(unexpected(error, where="the input of a Wyoming connection"))

    def input_refused(self, error: OmniError) -> None:
        self.refuse(error)

    def connection_closing(self) -> None:
        if not self._first.done():
            self._first.set_result(None)

    def receive_pong(self, data: bytes) -> None:
        """Do nothing: Wyoming's pongs are messages."""

    def reading_changed(self) -> None:
        """Do nothing: what the peer is read for does not depend on it."""

    def resume_output(self) -> None:
        """Do nothing: no output waits."""
