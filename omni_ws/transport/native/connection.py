"""Connections of sessions: StreamConnection, a WebSocket with backpressure, and SoleConnection, a kind of Attachment.

A ``StreamConnection`` is websockets' ``ServerConnection``. The library does the handshake, control frames and the
closing handshake, and handles everything that is wrong or unusual. Whole data frames are handled in this module,
because each of many clients sends fifty small frames a second.

**Whole data frames bypass the parser.** The library wakes a task for each message, through a queue. Here
``data_received`` finds the frames in the bytes that were read, and calls the receiver. The parser is given only whole
control frames, so that it always stands at a boundary of frames. The bypass ends at the first frame that is neither a
whole message nor a control frame, is too large, or uses an extension: the parser takes over at that boundary for the
rest of the connection, and reports errors in its own words. The beginning of a frame waits in ``_incomplete`` for the
rest.

**Reading pauses for any of several reasons** (``Pause``): the engine is behind, too much output is unwritten, there is
no session yet, or the client sent more than its key allows. The socket is read again when the last reason is gone.
Bytes that were read before the pause wait in ``_pending``. As asyncio does not report the end of a socket that it does
not read, a Recheck asks the kernel.

**Work is limited in each pass of the event loop.** One read can hold tens of thousands of tiny frames. Those beyond
``_FRAMES_PER_PASS``, and those after a large frame, wait in ``_pending`` as well, so that other connections get their
share.

**Memory.** Unfinished messages are charged to the account of the session, or to the budget of the server before there
is a session. When the account or budget has no room, the session ends, and the rest of the input is discarded, as the
boundaries of its frames are lost. Unwritten output is charged as well: answers, pongs, errors. While more than
MAX_UNWRITTEN_BYTES are unwritten, the client's input is not read; a client that takes almost nothing for
``write_timeout`` seconds is a SlowConsumer.
"""

from __future__ import annotations

import asyncio
import enum
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from websockets.asyncio.server import ServerConnection
from websockets.frames import CTRL_OPCODES, CloseCode, Frame, Opcode
from websockets.protocol import State

from omni_ws.config.keys import ApiKey
from omni_ws.core.quota import ByteBudget, Share
from omni_ws.errors import EngineOverloaded, OmniError, PayloadTooLarge, SlowConsumer
from omni_ws.service.conversation.output_log import Attachment
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Session
from omni_ws.transport.http.application import ServeConnection, UpgradeDecision
from omni_ws.transport.http.connections import (
    HangUp,
    Recheck,
    hang_up,
)
from omni_ws.transport.native.keep_alive import KeepAlive, PeerRounds
from omni_ws.wire.frames import max_frame_bytes

try:
    from websockets.speedups import apply_mask
except ImportError:  # pragma: no cover
    from websockets.utils import apply_mask

# The interface between a connection and its session.


class Pause(enum.IntFlag):
    """Reasons not to read the socket."""

    NONE = 0
    #: The session has no room for input.
    SESSION = enum.auto()
    #: More than MAX_UNWRITTEN_BYTES wait to be written.
    UNWRITTEN = enum.auto()
    #: There is no session yet.
    EARLY = enum.auto()
    #: Bytes that were read wait for the next pass of the event loop.
    PASS = enum.auto()
    #: The client sent more than its key allows.
    PACE = enum.auto()
    #: Other connections have their turn first.
    TURN = enum.auto()


#: Reasons that may last long, so that the peer may hang up unnoticed.
RESTS: Final = Pause.SESSION | Pause.UNWRITTEN | Pause.PACE


class FrameReceiver(Protocol):
    """The receiver of a connection's messages. Its methods are called from socket callbacks and may not raise."""

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        """Receive one whole message."""

    def receive_pong(self, data: bytes) -> None:
        """Note that the peer has sent a pong."""

    def reading_changed(self) -> None:
        """Note that a possibly long pause in reading has begun or ended; see ``PausedReading.is_reading``."""

    def resume_output(self) -> None:
        """Resume writing, as the write buffer is below its low-water mark."""

    def input_refused(self, error: OmniError) -> None:
        """End the session with ``error``: a message is too long, there is no room for it, or the peer does not read."""

    def connection_closing(self) -> None:
        """Stop sending: the peer has closed, has broken the protocol, or is gone. May be called repeatedly."""


_NO_PAUSE: Final = Pause.NONE  # compared faster than a combination of flags
_MOMENTARY: Final = Pause.PASS | Pause.TURN


class PausedReading:
    """Mixin of connections that pause reading for any of several reasons, and resume it when no reason is left."""

    #: Both are set by the connection. ``heard_at``: when the peer sent the input that is being processed.
    loop: asyncio.AbstractEventLoop
    heard_at: float
    _receiver: FrameReceiver | None = None
    _pauses = Pause.NONE
    _pass_scheduled = False
    _input_pace: Callable[[int], float] | None = None
    _pace_timer: asyncio.TimerHandle | None = None
    #: What checks during a pause whether the peer has hung up; None if the transport reports that itself.
    _watch: Recheck | None = None

    def _stop_reading(self) -> None:
        """Stop reading the socket: the first pause begins."""

    def _read_on(self) -> None:
        """Process pending input, then read the socket again. Called when no reason to pause but PASS is left."""

    def _next_pass(self) -> None:
        """Process input that was left for this pass of the event loop."""

    @property
    def is_reading(self) -> bool:
        """Whether the socket is read, apart from momentary pauses: only then is the peer's silence its own."""
        return self._pauses is _NO_PAUSE or not self._pauses & ~_MOMENTARY

    @property
    def held_to_pace(self) -> bool:
        """Whether reading is paused because the client sent more than its key allows."""
        return self._pauses is not _NO_PAUSE and Pause.PACE in self._pauses

    def limit_input(self, pace: Callable[[int], float] | None) -> None:
        """Limit the rate of input from now on. ``pace`` gets the size of a read, and returns the seconds to pause."""
        self._input_pace = pace

    def touch(self) -> float:
        """Measure the silence of the peer from now on, and return the current time."""
        self.heard_at = self.loop.time()
        return self.heard_at

    def pause_reading(self, reason: Pause) -> None:
        """Stop reading the socket until ``resume_reading`` has been called for each reason given."""
        if not self._pauses:
            self._stop_reading()
        rested = self._pauses & RESTS
        self._pauses |= reason
        if reason & RESTS:
            if self._watch is not None:
                self._watch.begin()
            if not rested and self._receiver is not None:
                self._receiver.reading_changed()

    def resume_reading(self, reason: Pause) -> None:
        """Remove a reason to pause, and read the socket again if no other reason is left."""
        if not self._pauses & reason:
            return
        self._pauses &= ~reason
        if not self._pauses & RESTS:
            if self._watch is not None:
                self._watch.end()
            if reason & RESTS and self._receiver is not None:
                self._receiver.reading_changed()
        if self._pauses in (Pause.NONE, Pause.PASS):
            self._read_on()

    def end_pass(self) -> None:
        """Let other connections have a turn before the next message, as the last message may have been much work."""
        self.pause_reading(Pause.TURN)
        self.loop.call_soon(self.resume_reading, Pause.TURN)

    def _schedule_pass(self) -> None:
        self.pause_reading(Pause.PASS)
        if not self._pass_scheduled:
            self._pass_scheduled = True
            self.loop.call_soon(self._next_pass)

    def _keep_pace(self, seconds: float) -> None:
        """Pause reading for ``seconds``. Bytes just received are processed after the pause: a burst gains nothing."""
        if seconds > 0:
            self.pause_reading(Pause.PACE)
            self._end_pace()
            self._pace_timer = self.loop.call_later(seconds, self.resume_reading, Pause.PACE)

    def _end_pace(self) -> None:
        if self._pace_timer is not None:
            self._pace_timer.cancel()

    def _refuse(self, error: OmniError) -> None:
        if self._receiver is not None:
            self._receiver.input_refused(error)


# The WebSocket.

_DATA: Final = frozenset({Opcode.TEXT, Opcode.BINARY, Opcode.CONT})
# The header of a client's frame (RFC 6455, 5.2): FIN, RSV and opcode; mask bit and length; 126 or 127 stands for a
# length in the next 2 or 8 bytes; 4 bytes of mask.
_FIN: Final = 0x80
_TEXT: Final = _FIN | Opcode.TEXT
_BINARY: Final = _FIN | Opcode.BINARY
_CLOSE: Final = _FIN | Opcode.CLOSE
_PONG: Final = _FIN | Opcode.PONG
_EMPTY_PING: Final = bytes((_FIN | Opcode.PING, 0))
#: The ping of ``answers``, whose pong has the same payload.
_CALL: Final = bytes((_FIN | Opcode.PING, 4)) + b"call"
#: Time for the pong to ``_CALL``.
ANSWER_SEC: Final = 5.0
#: The first bytes of whole messages, and of all frames that are taken here.
_MESSAGES: Final = frozenset({_TEXT, _BINARY})
_USUAL: Final = _MESSAGES | {_FIN | opcode for opcode in CTRL_OPCODES}
_MASK_BIT: Final = 0x80
_LENGTH_16, _LENGTH_64 = 126, 127
_SHORT_HEADER_BYTES, _LONG_HEADER_BYTES = 6, 14

#: Unwritten bytes (mostly of pongs) above which the client's input is not read.
MAX_UNWRITTEN_BYTES: Final = 1 << 20
#: A client that takes fewer unwritten bytes than this in ``write_timeout`` counts as not reading.
_PROGRESS_BYTES: Final = 1 << 16
#: Time for the closing handshake, after which the connection is aborted.
CLOSE_TIMEOUT_SEC: Final = 5.0
MAX_CLOSE_REASON_BYTES: Final = 120
#: Work for one connection in one pass. The library's parser cannot be stopped after some frames.
_FRAMES_PER_PASS: Final = range(64)
#: The size of a frame after which the next frame waits for another pass: a hundred connections may each have several.
_MUCH_FOR_A_PASS: Final = 8192
_PARSER_BYTES_PER_PASS: Final = 1024


class Parsing(enum.Enum):
    """The way in which received bytes are parsed: the state of a StreamConnection's input.

    Transitions::

        DIRECT -> LIBRARY           ``attach`` with extensions; ``ignore_messages``; an unusual or a closing frame
        DIRECT, LIBRARY -> DEPARTED the peer hangs up while reading is paused
        any -> DISCARDED            the budget has no room for a message
    """

    DIRECT = "frames are found here"
    LIBRARY = "the library parses them"
    DEPARTED = "the library parses them, for a closing frame only"
    DISCARDED = "dropped: the boundaries of frames are lost"


#: Found faster than a member of an enum.
_DIRECT: Final = Parsing.DIRECT


class StreamConnection(PausedReading, ServerConnection):
    """A WebSocket connection that passes whole messages to its receiver within ``data_received``; see the module."""

    # With these attributes among its own, each connection would have a dictionary of 1.6 KB.
    __slots__ = (
        *("_receiver", "heard_at", "_parsing", "_max_size", "_pending", "_position", "_incomplete", "_wanted"),
        *("_fragments", "_fragments_are_text", "_unfinished", "_pauses", "_pass_scheduled"),
        *("_input_pace", "_pace_timer", "_watch", "_unwritten", "_write_timeout", "_stall_timer", "_answer"),
    )
    _watch: Recheck

    def __init__(
        self,
        *arguments: Any,
        budget: ByteBudget | None = None,
        input_pace: Callable[[int], float] | None = None,
        write_timeout: float | None = None,
        **options: Any,
    ) -> None:
        """``budget`` is charged for unfinished messages and unwritten output. ``write_timeout`` is in seconds.

        ``input_pace`` is called with the size of each read in bytes, and returns for how many seconds to pause reading.
        """
        super().__init__(*arguments, **options)
        self._receiver: FrameReceiver | None = None
        self.heard_at = self.loop.time()
        self._parsing = Parsing.DIRECT
        self._max_size = sys.maxsize
        #: Bytes that were read; those from ``_position`` on are not processed yet.
        self._pending = b""
        self._position = 0
        #: The beginning of an incomplete frame, and the length at which to parse it again.
        self._incomplete = bytearray()
        self._wanted = 0
        #: The first fragments of a message. The library limits their sum to the size of a whole message.
        self._fragments = bytearray()
        self._fragments_are_text = False
        self._unfinished = Share(budget or ByteBudget(sys.maxsize))
        #: Charged for unwritten bytes; None until some had to wait.
        self._unwritten: Share | None = None
        self._write_timeout = write_timeout
        self._stall_timer: asyncio.TimerHandle | None = None
        #: The transport is read until the first data, so that the end of a peer that sends nothing is noticed.
        self._pauses = Pause.EARLY
        self._pass_scheduled = False
        self._input_pace = input_pace
        self._pace_timer: asyncio.TimerHandle | None = None
        self._watch = Recheck(self._check_hang_up)
        #: Done when the peer sends anything, or is gone; None unless ``answers`` waits for that.
        self._answer: asyncio.Future[None] | None = None

    def attach(self, receiver: FrameReceiver, account: ByteBudget | None = None) -> None:
        """Pass messages to ``receiver`` from now on, beginning with those that have arrived already.

        ``account`` is the byte budget of the session, which is charged from now on. The headers of the handshake are
        dropped, to save memory.
        """
        if account is not None:
            self._unfinished.move(account)
            if self._unwritten is not None:
                self._unwritten.move(account)
        for handshake in (self.request, self.response):  # the library would keep 2.5 KB of headers to the end
            if handshake is not None:
                handshake.headers.clear()
        self._receiver = receiver
        self.heard_at = self.loop.time()
        protocol = self.protocol
        if protocol.extensions or protocol.debug:
            self._parsing = Parsing.LIBRARY  # and never back: the library may have begun a frame
        limits = (protocol.max_message_size, protocol.max_fragment_size)
        self._max_size = min((limit for limit in limits if limit is not None), default=sys.maxsize)
        self.resume_reading(Pause.EARLY)
        if protocol.state is not State.OPEN:
            receiver.connection_closing()

    def ignore_messages(self) -> None:
        """Drop all messages from now on, as there will be no session."""
        self._parsing = Parsing.LIBRARY
        self.resume_reading(Pause.EARLY)

    @property
    def is_open(self) -> bool:
        """Whether messages that are written now are sent."""
        return self.state is State.OPEN and not self.transport.is_closing()

    async def answers(self) -> bool:
        """Ping a peer that has no session yet. Returns whether it sends anything but a close within ANSWER_SEC."""
        if not self.is_open:
            return False
        before = len(self._pending)
        self._answer = self.loop.create_future()
        self.transport.resume_reading()  # to the next data alone
        self.transport.write(_CALL)
        try:
            async with asyncio.timeout(ANSWER_SEC):
                await self._answer
        except TimeoutError:
            return False
        finally:
            self._answer = None
        return self.is_open and len(self._pending) > before and not _has_farewell(self._pending)

    def _end_answer(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def write_message(self, data: bytes, *, is_text: bool) -> None:
        """Send a whole message without waiting. The connection must be open."""
        protocol = self.protocol
        if protocol.extensions or protocol.debug:
            (protocol.send_text if is_text else protocol.send_binary)(data)
            self.send_data()
            if self.paused:
                self._count_unwritten()
            return
        kind, size = _TEXT if is_text else _BINARY, len(data)
        if size < _LENGTH_16:
            header = bytes((kind, size))
        elif size < 1 << 16:
            header = struct.pack(">BBH", kind, _LENGTH_16, size)
        else:
            header = struct.pack(">BBQ", kind, _LENGTH_64, size)
        self.transport.write(header + data)
        if self.paused:
            self._count_unwritten()

    def write_ping(self) -> None:
        """Send an empty ping without waiting, if the connection is open."""
        if self.is_open:
            self.transport.write(_EMPTY_PING)

    def fail(self, code: CloseCode, reason: str) -> None:
        """Send a closing frame with this code, as the library does for protocol errors, without waiting."""
        if self.is_open:
            self.protocol.fail(code, reason)
            self.send_data()

    async def close_in_time(self, code: int, reason: str) -> None:
        """Close the connection; abort it if that takes longer than CLOSE_TIMEOUT_SEC. Truncates a long ``reason``."""
        reason = reason.encode()[:MAX_CLOSE_REASON_BYTES].decode(errors="ignore")
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_SEC):
                if self._parsing is Parsing.DISCARDED:  # the peer's closing frame is discarded, too
                    self.protocol.fail(code, reason)
                    self.send_data()
                    await self.wait_closed()
                else:
                    await self.close(code, reason)
        except TimeoutError:
            pass
        finally:
            if self.protocol.state is not State.CLOSED:
                self.transport.abort()
                await self.wait_closed()

    def _stop_reading(self) -> None:
        self.transport.pause_reading()

    def _read_on(self) -> None:
        if self._pending:
            self._schedule_pass()
        elif not self._pauses and not self.transport.is_closing():
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self.heard_at = self.loop.time()
        if self.request is None:
            # The front door hands over the whole head, perhaps with frames behind it.
            head = data.find(b"\r\n\r\n") + 4
            super().data_received(data[:head])
            data = data[head:]
        if self._input_pace is not None and data and self._parsing is not Parsing.DEPARTED:
            self._keep_pace(self._input_pace(len(data)))
        if self._pauses:
            self._pending += data
            if data:
                self._stop_reading()  # which EARLY alone has not done
                self._end_answer()
            return
        if self._incomplete:  # as in _process, but without another call for each frame
            data = self._completed(data)
        if data:
            end = self._take_frames(data, 0) if self._parsing is _DIRECT else self._take_slice(data, 0)
            if end < len(data):
                self._defer(data, end)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._count_unwritten()

    def _count_unwritten(self) -> None:
        """Charge the unwritten bytes, and pause reading while there are more than MAX_UNWRITTEN_BYTES."""
        size = self.transport.get_write_buffer_size()
        self._unwritten = self._unwritten or Share(self._unfinished.budget)
        self._unwritten.force(size)
        if size > MAX_UNWRITTEN_BYTES:
            self.pause_reading(Pause.UNWRITTEN)
            if self._stall_timer is None and self._write_timeout is not None:
                self._stall_timer = self.loop.call_later(self._write_timeout, self._check_stall, size)

    def _check_stall(self, before: int) -> None:
        self._stall_timer = None
        size = self.transport.get_write_buffer_size()
        assert self._write_timeout is not None
        assert self._unwritten is not None
        if before - size >= _PROGRESS_BYTES:
            self._unwritten.force(size)
            self._stall_timer = self.loop.call_later(self._write_timeout, self._check_stall, size)
        else:
            self._refuse(SlowConsumer(f"the client has not read for {self._write_timeout:g} seconds"))

    def _all_written(self) -> None:
        if self._unwritten is not None:
            self._unwritten.force(0)
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def resume_writing(self) -> None:
        super().resume_writing()
        self._all_written()
        self.resume_reading(Pause.UNWRITTEN)
        if self._receiver is not None:
            self._receiver.resume_output()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._all_written()
        self._pending = b""
        self._watch.stop()
        self._end_pace()
        self._end_answer()
        if self._receiver is not None:
            self._receiver.connection_closing()
        self._drop_unfinished()

    def _process(self, data: bytes, start: int) -> None:
        """Process ``data`` from ``start`` on, as far as one pass of the event loop allows, and keep the rest."""
        if self._incomplete:  # the frame begins before ``data``
            data, start = self._completed(data), 0
        end = self._take_frames(data, start) if self._parsing is _DIRECT else self._take_slice(data, start)
        if end < len(data):
            self._defer(data, end)

    def _defer(self, data: bytes, position: int) -> None:
        self._pending, self._position = data, position
        self._schedule_pass()

    def _next_pass(self) -> None:
        self._pass_scheduled = False
        if self._pauses != Pause.PASS or self.protocol.state is State.CLOSED:
            return
        self.heard_at = self.loop.time()
        data, start, self._pending, self._position = self._pending, self._position, b"", 0
        self._process(data, start)
        if not self._pending:
            self.resume_reading(Pause.PASS)

    def _check_hang_up(self) -> None:
        """If the peer has hung up during a pause, read the rest of its input, but only to find a closing frame."""
        if hang_up(self.transport) is not HangUp.UNKNOWN:
            if self._parsing in (Parsing.DIRECT, Parsing.LIBRARY):
                self._parsing = Parsing.DEPARTED
            self.resume_reading(RESTS)

    # frames

    def _take_frames(self, data: bytes, start: int) -> int:
        """Pass on the frames of ``data`` from ``start`` on. Returns the position of the first byte left over."""
        receiver, available = self._receiver, len(data)
        assert receiver is not None
        for _ in _FRAMES_PER_PASS:
            payload = start + _SHORT_HEADER_BYTES
            if payload > available:
                return self._keep(data, start, _SHORT_HEADER_BYTES)
            kind, size = data[start], data[start + 1] - _MASK_BIT
            if size == _LENGTH_16:
                size = data[start + 2] << 8 | data[start + 3]
                payload += 2
            elif size == _LENGTH_64:
                payload = start + _LONG_HEADER_BYTES
                if payload > available:
                    return self._keep(data, start, _LONG_HEADER_BYTES)
                size = int.from_bytes(data[start + 2 : start + 10])
            if kind not in _USUAL or not 0 <= size <= self._max_size:
                self._parsing = Parsing.LIBRARY
                return start
            end = payload + size
            if end > available:
                return self._keep(data, start, end - start)
            if kind in _MESSAGES:
                unmasked = apply_mask(data[payload:end], data[payload - 4 : payload])
                receiver.receive_message(unmasked, is_text=kind == _TEXT)
            elif kind == _PONG and not size:  # answers ``write_ping``, of which the library knows nothing
                receiver.receive_pong(b"")
            else:
                self._parse(data[start:end])
                if self.protocol.state is not State.OPEN:
                    self._parsing = Parsing.LIBRARY
            start = end
            if (
                start == available
                or size > _MUCH_FOR_A_PASS
                or self._pauses & ~Pause.PASS
                or self._parsing is not _DIRECT
            ):
                break
        return start

    def _keep(self, data: bytes, start: int, wanted: int) -> int:
        """Keep the beginning of a frame until ``wanted`` bytes have arrived; leave invalid bytes to the library.

        Returns the position of the first byte of ``data`` that was not kept.
        """
        if start == len(data):
            return start
        if data[start] not in _USUAL or (len(data) > start + 1 and data[start + 1] < _MASK_BIT):
            self._parsing = Parsing.LIBRARY
            return start
        self._incomplete += data[start:]
        self._wanted = wanted if len(data) > start + 1 else 2
        self._charge_unfinished(len(self._incomplete))
        return len(data)

    def _completed(self, data: bytes) -> bytes:
        """Append ``data`` to the incomplete frame. Returns both together, or b"" if the frame is still incomplete."""
        self._incomplete += data
        if len(self._incomplete) < self._wanted:
            self._charge_unfinished(len(self._incomplete))
            return b""
        data = bytes(self._incomplete)
        self._incomplete.clear()
        self._unfinished.resize(0)
        return data

    def _charge_unfinished(self, size: int) -> None:
        """Charge the budget for ``size`` bytes of an unfinished message; if there is no room, discard all input."""
        try:
            self._unfinished.resize(size)
        except (EngineOverloaded, PayloadTooLarge) as error:
            self._parsing = Parsing.DISCARDED
            self._drop_unfinished()
            self._refuse(error)

    def _drop_unfinished(self) -> None:
        self._incomplete.clear()
        self._fragments.clear()
        self.protocol.reader.discard()
        self._unfinished.resize(0)

    # the library's parser

    def _take_slice(self, data: bytes, start: int) -> int:
        """Let the library parse some of ``data`` from ``start`` on. Returns the position of the first byte left."""
        if self._parsing is Parsing.DISCARDED:
            return len(data)
        end = min(len(data), start + _PARSER_BYTES_PER_PASS)
        self._parse(data[start:end])
        self._charge_unfinished(len(self.protocol.reader.buffer) + len(self._fragments))
        return end

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self.paused:
            self._count_unwritten()
        if self._receiver is not None and self.protocol.state is not State.OPEN:
            self._receiver.connection_closing()

    def process_event(self, event: Any) -> None:
        if self.request is None or not isinstance(event, Frame):
            super().process_event(event)
        elif event.opcode not in _DATA:
            super().process_event(event)
            if event.opcode is Opcode.PONG and self._receiver is not None:
                self._receiver.receive_pong(bytes(event.data))
        elif event.fin and event.opcode is not Opcode.CONT:
            self._hand_over(event.data, is_text=event.opcode is Opcode.TEXT)
        else:
            self._assemble(event)

    def _assemble(self, fragment: Frame) -> None:
        if fragment.opcode is not Opcode.CONT:
            self._fragments_are_text = fragment.opcode is Opcode.TEXT
        self._fragments += fragment.data
        if fragment.fin:
            message, self._fragments = self._fragments, bytearray()
            self._hand_over(message, is_text=self._fragments_are_text)

    def _hand_over(self, message: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        self._unfinished.resize(0)
        if self._receiver is not None and self._parsing is not Parsing.DEPARTED:
            self._receiver.receive_message(message, is_text=is_text)


def _has_farewell(data: bytes) -> bool:
    """Return whether ``data`` contains a closing frame. ``data`` consists of frames, the last possibly incomplete."""
    start = 0
    while start + 1 < len(data):
        if data[start] == _CLOSE:
            return True
        payload, size = start + _SHORT_HEADER_BYTES, data[start + 1] - _MASK_BIT
        if size < 0:  # not of a client
            return False
        if size >= _LENGTH_16:
            payload += 2 if size == _LENGTH_16 else 8
            size = int.from_bytes(data[start + 2 : payload - 4])
        start = payload + size
    return False


def stream_accepted(
    sessions: SessionFactory,
    key: ApiKey | None,
    *,
    serve: ServeConnection,
    route: str,
    subprotocol: str | None = None,
    max_size: int | None = None,
) -> UpgradeDecision:
    """Accept a handshake: ``serve`` gets a StreamConnection, which keeps to the limits of ``key``.

    ``max_size`` limits a message, in bytes; None for the size of the longest chunk.
    """
    settings = sessions.config.streaming_input
    return UpgradeDecision(
        connection=partial(
            StreamConnection,
            input_pace=sessions.admission.input_pace(key),
            budget=sessions.budget,
            write_timeout=settings.write_timeout_sec,
        ),
        serve=serve,
        subprotocol=subprotocol,
        route=route,
        max_size=max_frame_bytes(settings.max_chunk_bytes) if max_size is None else max_size,
    )


# Sessions that end with their connection.


class SoleLink(Protocol):
    """The link that carries a SoleConnection's messages: a StreamConnection, an AudioSocketLink, or a CallChannel."""

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


class WatchedPeer(ABC):
    """Mixin of receivers that ping a silent peer, to find out whether it is gone. Subclasses set the attributes."""

    _connection: SoleLink
    _keep_alive: KeepAlive
    _rounds: PeerRounds

    @property
    @abstractmethod
    def _listening(self) -> bool:
        """Whether the connection still has a session to serve."""

    @abstractmethod
    def connection_closing(self) -> None:
        """Note that the peer is gone."""

    def _watch_peer(self) -> None:
        """Schedule the next ``check_peer``, for when the peer may have been silent too long."""
        self._keep_alive.heard(self._connection.heard_at)
        self._rounds.watch(self.check_peer, self._keep_alive.get_timer(listening=self._connection.is_reading))

    def _ignore_peer(self) -> None:
        self._rounds.forget(self.check_peer)

    def check_peer(self, now: float) -> float | None:
        """Ping a silent peer, or close the connection if the peer did not answer a ping. See CheckPeer."""
        if not self._listening:
            return None
        listening = self._connection.is_reading
        self._keep_alive.heard(self._connection.heard_at)
        if not self._keep_alive.check(now, self._connection.write_ping, listening=listening):
            self._connection.fail(CloseCode.INTERNAL_ERROR, "keepalive ping timeout")
            self.connection_closing()
            return None
        return self._keep_alive.get_timer(listening=listening)


class ConnectedSession(WatchedPeer, Attachment):
    """Base class of Attachments of sessions to connections: handles pauses, writes output in the next pass of the loop.

    A subclass receives the messages of the client, and writes the messages of the outbox.
    """

    def __init__(self, connection: SoleLink, session: Session, *, rounds: PeerRounds) -> None:
        """``rounds`` are shared by all connections of a front end."""
        self._connection = connection
        self._session = session
        self._conversation = session.conversation
        self._outbox = session.outbox
        self._loop = asyncio.get_running_loop()
        self._rounds = rounds
        self._keep_alive = KeepAlive(rounds.settings, now=self._loop.time())
        self._reading_paused = False
        self._flush_scheduled = False

    @abstractmethod
    def _flush(self) -> None:
        """Write the messages of the outbox, and clear ``_flush_scheduled``."""

    @property
    def _input_blocked(self) -> bool:
        """Whether reading must pause: the outbox is full, or the conversation has no room for input."""
        return self._outbox.full or self._conversation.input_full()

    def _pause_reading(self) -> None:
        if not self._reading_paused:
            self._reading_paused = True
            self._connection.pause_reading(Pause.SESSION)

    def input_may_continue(self) -> None:
        if self._reading_paused and not self._input_blocked:
            self._reading_paused = False
            self._connection.resume_reading(Pause.SESSION)

    output_has_room = input_may_continue

    def input_refused(self, error: OmniError) -> None:
        self._session.end(error)

    def reading_changed(self) -> None:
        if not self._listening:
            return
        if self._connection.is_reading:
            self._conversation.hold_time(False, now=self._connection.touch())
        else:
            self._conversation.hold_time(True, now=self._loop.time())

    def output_ready(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def time_is_up(self, error: OmniError) -> None:
        self._session.end(error)


class SoleConnection(ConnectedSession):
    """Base class of Attachments of sessions that end with their connection."""

    def __init__(self, connection: SoleLink, session: Session, *, rounds: PeerRounds) -> None:
        super().__init__(connection, session, rounds=rounds)
        #: Done when the session ends, with the reason to close with; None if the client ended it.
        self._over: asyncio.Future[OmniError | None] = self._loop.create_future()

    @abstractmethod
    def connection_closing(self) -> None:
        """End the session: the connection is lost, or being closed."""

    def session_over(self, error: OmniError | None) -> None:
        if not self._over.done():
            self._over.set_result(error)

    def replaced(self) -> None:
        raise AssertionError("the session cannot be resumed")

    @property
    def _listening(self) -> bool:
        return self._session.is_open

    def _pause_if_blocked(self) -> None:
        if self._input_blocked:
            self._pause_reading()

    def reading_changed(self) -> None:
        super().reading_changed()
        if self._listening:
            self._watch_peer()

    def receive_pong(self, data: bytes) -> None:
        pass  # ``heard_at`` of the connection is all that counts
