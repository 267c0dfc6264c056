"""Sidebands: further WebSockets of a session that a call carries, which are sent its events and command it.

**Joining.** A sideband is found by the id of the call and the key that opened it; for any other key there is no such
call. It is sent events from then on, and nothing of the past.

**Commands** go through the session's own dialect, like those of the caller, and what answers them is sent to all. Only
the error of an event that is refused goes to its sender alone. Commands wait while the session has no room for input.

**Slow readers.** What a sideband has not read waits in the buffer of its own connection, charged to the server and not
to the session. Beyond ``MAX_BEHIND_BYTES`` the sideband is dropped: the session neither waits for it nor ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from websockets.frames import CloseCode

from omni_ws.errors import (
    InvalidValue,
    OmniError,
    SessionConflict,
    SessionNotFound,
    SlowConsumer,
    websocket_close_code,
)
from omni_ws.service.failure import new_id
from omni_ws.transport.native.connection import Pause, StreamConnection, WatchedPeer
from omni_ws.transport.native.keep_alive import KeepAlive, PeerRounds
from omni_ws.transport.realtime.items import Event
from omni_ws.wire.realtime_events import encode_event, error_event

#: Events of the Live API that mirror the audio of a call. They have no id.
MIRRORED_AUDIO: Final = frozenset({"session.input_audio.append", "session.output_audio.delta"})
#: Sidebands that a session may have at a time.
MAX_SIDEBANDS: Final = 2
#: Bytes that a sideband may leave unread.
MAX_BEHIND_BYTES: Final = 1 << 20


class Commanded(Protocol):
    """A receiver of the events of a session: those of its caller, and those of a ``sideband``."""

    def receive_message(
        self, data: bytes | bytearray | memoryview, *, is_text: bool, sideband: Sideband | None = None
    ) -> None: ...


class Sidebands:
    """The sidebands of one session.

    ``greeting`` returns the events that a sideband is sent first. ``refused`` are the types of events that it may not
    send, each with the reason.
    """

    def __init__(
        self, owner: Commanded, greeting: Callable[[], Iterable[Event]], *, refused: Mapping[str, str]
    ) -> None:
        self.owner = owner
        self.greeting = greeting
        self.refused = refused
        self._joined: list[Sideband] = []
        #: Whether commands have to wait.
        self._held = False
        self._ended = False

    def __bool__(self) -> bool:
        return bool(self._joined)

    def check_room(self) -> None:
        """Raise SessionNotFound if the session has ended, and SessionConflict if no other sideband may join."""
        if self._ended:
            raise SessionNotFound("the call has ended")
        if len(self._joined) >= MAX_SIDEBANDS:
            raise SessionConflict(f"a call has at most {MAX_SIDEBANDS} sidebands")

    def join(self, sideband: Sideband) -> None:
        """Send events to ``sideband`` from now on. Raises what ``check_room`` raises."""
        self.check_room()
        self._joined.append(sideband)
        if self._held:
            sideband.hold(True)

    def leave(self, sideband: Sideband) -> None:
        """Send nothing more to ``sideband``."""
        if sideband in self._joined:
            self._joined.remove(sideband)

    def write(self, event: Event) -> None:
        """Send an event to all sidebands. It gets an id if it has none."""
        if self._joined:
            data = _encoded(event)
            for sideband in tuple(self._joined):
                sideband.write(data)

    def hold(self, held: bool) -> None:
        """Stop reading commands, or go on."""
        if held is not self._held:
            self._held = held
            for sideband in self._joined:
                sideband.hold(held)

    def end(self, code: int, reason: str) -> None:
        """Close all sidebands, and let no other join. May be called repeatedly."""
        self._ended = True
        for sideband in tuple(self._joined):
            sideband.end(code, reason)


class Sideband(WatchedPeer):
    """One sideband: the receiver of its connection."""

    def __init__(self, connection: StreamConnection, sidebands: Sidebands, *, rounds: PeerRounds) -> None:
        self._connection: StreamConnection = connection
        self._sidebands = sidebands
        self._loop = asyncio.get_running_loop()
        self._rounds = rounds
        self._keep_alive = KeepAlive(rounds.settings, now=self._loop.time())
        #: Done with the code and the reason to close with.
        self._over: asyncio.Future[tuple[int, str]] = self._loop.create_future()

    async def run(self) -> None:
        """Serve the sideband until it ends, or its session, and close its connection."""
        try:
            self._sidebands.join(self)
        except OmniError as error:
            self._connection.ignore_messages()
            self.send(error_event(error))
            self.input_refused(error)
        else:
            for event in self._sidebands.greeting():
                self.send(event)
            self._connection.attach(self)
            self._watch_peer()
        try:
            await self._connection.close_in_time(*await self._over)
        finally:
            self._ignore_peer()
            self._sidebands.leave(self)

    def end(self, code: int, reason: str) -> None:
        """Send nothing more, and close the connection."""
        self._sidebands.leave(self)
        if not self._over.done():
            self._over.set_result((code, reason))

    # output

    def send(self, event: Event) -> None:
        """Send an event to this sideband alone."""
        self.write(_encoded(event))

    def write(self, data: bytes) -> None:
        """Send an encoded event without waiting; drop the sideband if it leaves too much unread."""
        if self._connection.is_open:
            self._connection.write_message(data, is_text=True)
            if self._connection.transport.get_write_buffer_size() > MAX_BEHIND_BYTES:
                self.input_refused(SlowConsumer(f"the sideband has left {MAX_BEHIND_BYTES} bytes unread"))

    # commands

    @property
    def heard_at(self) -> float:
        """When it last sent something."""
        return self._connection.heard_at

    def check(self, kind: str) -> None:
        """Raise InvalidValue for an event that sidebands may not send."""
        if (reason := self._sidebands.refused.get(kind)) is not None:
            raise InvalidValue(reason, param="type")

    def end_pass(self) -> None:
        self._connection.end_pass()

    def hold(self, held: bool) -> None:
        """Stop reading commands, or go on."""
        (self._connection.pause_reading if held else self._connection.resume_reading)(Pause.SESSION)

    # the connection's receiver

    @property
    def _listening(self) -> bool:
        return not self._over.done()

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        if self._listening:
            self._sidebands.owner.receive_message(data, is_text=is_text, sideband=self)

    def receive_pong(self, data: bytes) -> None:
        pass  # ``heard_at`` of the connection is all that counts

    def reading_changed(self) -> None:
        if self._listening:
            if self._connection.is_reading:
                self._connection.touch()
            self._watch_peer()

    def resume_output(self) -> None:
        pass  # nothing waits but in the connection's own buffer

    def input_refused(self, error: OmniError) -> None:
        self.end(websocket_close_code(error) or CloseCode.INTERNAL_ERROR, error.message)

    def connection_closing(self) -> None:
        self.end(CloseCode.NORMAL_CLOSURE, "")


def _encoded(event: Event) -> bytes:
    given = event if event["type"] in MIRRORED_AUDIO else {"event_id": new_id("event_"), **event}
    return encode_event(given)
