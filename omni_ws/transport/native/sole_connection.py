"""SoleConnection: what the front ends share whose sessions end with their connection."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Protocol

from websockets.frames import CloseCode

from omni_ws.core.chunks import OutputChunk
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import OmniError
from omni_ws.service.sessions.live_session import LiveSession
from omni_ws.transport.native.frame_receiver import FrameReceiver
from omni_ws.transport.native.keep_alive import KeepAlive, KeepAliveSettings, PeerState
from omni_ws.transport.native.pause import Pause


class SoleLink(Protocol):
    """What carries the messages of a SoleConnection: a StreamConnection, or the data channel of a call."""

    @property
    def heard_at(self) -> float: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_reading(self) -> bool: ...
    @property
    def paused(self) -> bool: ...

    def attach(self, receiver: FrameReceiver, account: ByteBudget | None = None) -> None: ...
    def write_message(self, data: bytes, *, is_text: bool) -> None: ...
    def write_ping(self) -> None: ...
    def end_pass(self) -> None: ...
    def touch(self) -> float: ...
    def pause_reading(self, reason: Pause) -> None: ...
    def resume_reading(self, reason: Pause) -> None: ...
    def fail(self, code: CloseCode, reason: str) -> None: ...
    async def close_in_time(self, code: int, reason: str) -> None: ...


class SoleConnection(ABC):
    """The connection of a session that cannot be resumed: its pauses, its timers and its end. See Attachment.

    A subclass takes the messages, and writes what the outbox holds.
    """

    def __init__(self, connection: SoleLink, session: LiveSession, *, keep_alive: KeepAliveSettings) -> None:
        self._connection = connection
        self._session = session
        self._conversation = session.conversation
        self._outbox = session.outbox
        self._loop = asyncio.get_running_loop()
        self._keep_alive = KeepAlive(keep_alive, now=self._loop.time())
        self._reading_paused = False
        self._flush_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        #: The end of the session: its reason, or None for the client's own.
        self._over: asyncio.Future[OmniError | None] = self._loop.create_future()

    @abstractmethod
    def connection_closing(self) -> None:
        """The connection is lost, or being closed."""

    @abstractmethod
    def _flush(self) -> None:
        """Write what the outbox holds, and clear ``_flush_scheduled``."""

    @property
    def _input_blocked(self) -> bool:
        """Whether no more input is to be read."""
        return self._outbox.full or self._conversation.input_full()

    def session_over(self, error: OmniError | None) -> None:
        if not self._over.done():
            self._over.set_result(error)

    def replaced(self) -> None:
        raise AssertionError("the session cannot be resumed")

    @property
    def _listening(self) -> bool:
        return self._session.is_open

    # input

    def _pause_if_blocked(self) -> None:
        if not self._reading_paused and self._input_blocked:
            self._reading_paused = True
            self._connection.pause_reading(Pause.SESSION)

    def input_refused(self, error: OmniError) -> None:
        self._session.end(error)

    def input_may_continue(self) -> None:
        if self._reading_paused and not self._input_blocked:
            self._reading_paused = False
            self._connection.resume_reading(Pause.SESSION)

    output_has_room = input_may_continue

    def reading_changed(self) -> None:
        if not self._listening:
            return
        if self._connection.is_reading:
            self._conversation.stream.release_clocks(now=self._connection.touch())
        else:
            self._conversation.stream.hold_clocks(now=self._loop.time())
        self._arm(self._loop.time())

    def receive_pong(self, data: bytes) -> None:  # noqa: B027  # it was heard, and that is all
        pass

    # output

    def write_now(self, output: OutputChunk) -> bool:
        return False  # what an output becomes is rendered in ``_flush``, behind what is queued

    def output_ready(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    # time

    def timer_changed(self) -> None:
        if self._listening:
            self._arm(self._loop.time())

    def _arm(self, now: float) -> None:
        self._keep_alive.last_sign_of_life = self._connection.heard_at
        deadlines = (
            self._conversation.get_timer(),
            self._keep_alive.get_timer(listening=self._connection.is_reading),
        )
        self._disarm()
        when = min((deadline for deadline in deadlines if deadline is not None), default=None)
        self._timer = None if when is None else self._loop.call_at(max(when, now), self._on_timer, when)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self, due: float) -> None:
        self._timer = None
        if not self._listening:
            return
        now = max(self._loop.time(), due)  # a timer may fire a little early
        try:
            self._conversation.handle_timer(now)
        except OmniError as error:
            self._session.end(error)
            return
        self._keep_alive.last_sign_of_life = self._connection.heard_at
        match self._keep_alive.handle_timer(now, listening=self._connection.is_reading):
            case PeerState.SILENT if self._connection.is_open:
                self._connection.write_ping()
            case PeerState.GONE:
                self._connection.fail(CloseCode.INTERNAL_ERROR, "keepalive ping timeout")
                self.connection_closing()
        self._arm(now)
