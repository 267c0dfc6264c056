"""PacedConnection: websockets' connection, read a turn at a time, and not at all while anything speaks against it."""

from __future__ import annotations

import abc
import asyncio
import enum
from collections.abc import Callable
from typing import Any, Final

from websockets.asyncio.server import ServerConnection
from websockets.protocol import State

from omni_ws.transport.http.hang_up import HangUp, HangUpWatch
from omni_ws.transport.native.frame_receiver import FrameReceiver


class Pause(enum.IntFlag):
    """Why the socket is not read."""

    NONE = 0
    #: The session has no room for more.
    SESSION = enum.auto()
    #: Too much waits to be written.
    UNWRITTEN = enum.auto()
    #: There is no session yet.
    EARLY = enum.auto()
    #: What was read is still being looked at.
    TURN = enum.auto()
    #: More came than may come in a second.
    PACE = enum.auto()


#: These may last.
_RESTS: Final = Pause.SESSION | Pause.UNWRITTEN | Pause.PACE


class PacedConnection(ServerConnection, abc.ABC):
    """What comes is looked at for a while, and the rest of it in the next turns of the loop.

    One read can hold tens of thousands of tiny frames, and the audio of the other connections must not wait until all
    of them are looked at.
    """

    def __init__(self, *arguments: Any, input_pace: Callable[[int], float] | None = None, **options: Any) -> None:
        """``input_pace`` is told how many bytes came, and says for how many seconds no more should be read."""
        super().__init__(*arguments, **options)
        self._input_pace = input_pace
        self._watch = HangUpWatch(self.loop, self._look_after_unread)
        #: Whether the peer went while it was not read.
        self._gone = False
        self._pace_timer: asyncio.TimerHandle | None = None
        self._receiver: FrameReceiver | None = None
        #: When the peer was last heard of: the time of what is looked at now, on the loop's clock.
        self.heard_at = self.loop.time()
        #: What was read and not looked at yet begins at ``_position`` of ``_pending``.
        self._pending = b""
        self._position = 0
        self._turn_due = False
        self._pauses = Pause.NONE

    @abc.abstractmethod
    def _look_at(self, data: bytes, start: int) -> None:
        """Look at ``data`` from ``start`` for a while, and ``_leave`` what is too much."""

    @property
    def is_reading(self) -> bool:
        """Whether the peer's silence would be heard."""
        return not self._pauses & ~Pause.TURN

    @property
    def held_to_pace(self) -> bool:
        """Whether the peer is not read because it sent more than it may in a second."""
        return bool(self._pauses & Pause.PACE)

    def pause_reading(self, reason: Pause) -> None:
        if not self._pauses:
            self.transport.pause_reading()
        self._pauses |= reason
        if reason & _RESTS:
            self._watch.begin(self.transport)

    def resume_reading(self, reason: Pause) -> None:
        """Read again, unless there is another reason not to."""
        if self._pauses & reason:
            self._pauses &= ~reason
            if not self._pauses & _RESTS:
                self._watch.end()
            if self._pending and self._pauses in (Pause.NONE, Pause.TURN):
                self._schedule_turn()
            elif not self._pauses and not self.transport.is_closing():
                self.transport.resume_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.resume_reading(Pause.UNWRITTEN)
        if self._receiver is not None:
            self._receiver.resume_output()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._pending = b""
        self._watch.stop()
        if self._pace_timer is not None:
            self._pace_timer.cancel()
        if self._receiver is not None:
            self._receiver.connection_closing()

    def _keep_pace(self, seconds: float) -> None:
        """What came is looked at when its time has come, too: nobody gains by sending it all at once."""
        if seconds > 0:
            self.pause_reading(Pause.PACE)
            if self._pace_timer is not None:
                self._pace_timer.cancel()
            self._pace_timer = self.loop.call_later(seconds, self._pace_kept)

    def _pace_kept(self) -> None:
        self._pace_timer = None
        if self._receiver is not None:
            self._receiver.pace_kept()
        self.resume_reading(Pause.PACE)

    def _look_after_unread(self, found: HangUp) -> None:
        """Once a peer that is not being read has gone, only a closing frame in what it sent still says something."""
        if found is not HangUp.UNKNOWN:
            self._gone = True
            self.resume_reading(_RESTS)

    def _leave(self, data: bytes, position: int) -> None:
        """What may not be done at this stretch is for the next turns of the loop."""
        self._pending, self._position = data, position
        self._schedule_turn()

    def _schedule_turn(self) -> None:
        self.pause_reading(Pause.TURN)
        if not self._turn_due:
            self._turn_due = True
            self.loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn_due = False
        if self._pauses != Pause.TURN or self.protocol.state is State.CLOSED:
            return
        self.heard_at = self.loop.time()
        data, start = self._pending, self._position
        self._pending, self._position = b"", 0
        self._look_at(data, start)
        if not self._pending:
            self.resume_reading(Pause.TURN)
