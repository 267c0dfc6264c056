"""StreamConnection: websockets' connection, with a way around its parser and its queue for whole data frames."""

from __future__ import annotations

import asyncio
import enum
import struct
import sys
from collections import deque
from typing import Any, Final, Protocol

from websockets.asyncio.server import ServerConnection
from websockets.frames import CTRL_OPCODES, Frame, Opcode
from websockets.protocol import State

try:
    from websockets.speedups import apply_mask
except ImportError:  # pragma: no cover
    from websockets.utils import apply_mask

_DATA: Final = frozenset({Opcode.TEXT, Opcode.BINARY, Opcode.CONT})

# The header of a client's frame (RFC 6455, 5.2): FIN, RSV and opcode; the mask bit and a short length; where that says
# so the length in 2 or 8 bytes; 4 bytes of mask.
_FIN: Final = 0x80
_TEXT: Final = _FIN | Opcode.TEXT
_BINARY: Final = _FIN | Opcode.BINARY
#: What a frame begins with that is a whole message, or a control frame, and uses no extension.
_USUAL: Final = frozenset({_TEXT, _BINARY, *(_FIN | opcode for opcode in CTRL_OPCODES)})
_MASK_BIT: Final = 0x80
_LENGTH_16: Final = 126
_LENGTH_64: Final = 127
_SHORT_HEADER_BYTES: Final = 6
_LONG_HEADER_BYTES: Final = 14


#: What may wait to be written before the client, who sends pings and does not read their pongs, is read no further.
MAX_UNWRITTEN_BYTES: Final = 1 << 20
#: What is kept of messages that came before there was a session.
_MAX_EARLY_BYTES: Final = 64 * 1024
_MESSAGE_OVERHEAD_BYTES: Final = 128


class Pause(enum.Flag):
    """Why the socket is not read."""

    NONE = 0
    SESSION = enum.auto()
    UNWRITTEN = enum.auto()
    EARLY = enum.auto()


class FrameReceiver(Protocol):
    """The session behind a connection. None of its methods may raise."""

    def receive_bytes(self) -> None:
        """The peer is alive."""

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None: ...

    def connection_closing(self) -> None:
        """Nothing can be sent any more: the peer closed the connection, broke the protocol, or is gone."""

    def resume_output(self) -> None:
        """The socket takes bytes again."""


class StreamConnection(ServerConnection):
    """Hands messages to the session from inside ``data_received``: no task switch a frame.

    Everything else stays the library's: the handshake, control frames, the closing handshake, and whatever is wrong.

    The library's parser does not see the data frames, as long as nothing but they and whole control frames come: it
    always stands between two frames, and can be given everything else, for ever, at the first frame that is unusual.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._receiver: FrameReceiver | None = None
        #: Messages that came before there was a session, and whether each is text.
        self._early: deque[tuple[bytes | bytearray | memoryview, bool]] = deque()
        self._early_bytes = 0
        #: Whether there will be no session.
        self._deaf = False
        #: A message that has not come whole. The library holds it to the limit of a whole one.
        self._fragments = bytearray()
        self._fragments_are_text = False
        self._pauses = Pause.NONE
        #: Whether anything came behind the request before there was a session: the library may be inside a frame then.
        self._began_early = False
        #: Whether frames are taken apart here; otherwise the library does it.
        self._takes_frames = False
        #: A frame that has not come whole, and how many bytes there must be before it is looked at again.
        self._incomplete = bytearray()
        self._wanted = 0
        self._max_size = sys.maxsize

    def attach(self, receiver: FrameReceiver) -> None:
        """From here on frames go to ``receiver``, beginning with those that came already."""
        self._receiver = receiver
        protocol = self.protocol
        self._takes_frames = not (self._began_early or protocol.extensions or protocol.debug)
        limits = (protocol.max_message_size, protocol.max_fragment_size)
        self._max_size = min((limit for limit in limits if limit is not None), default=sys.maxsize)
        while self._early:
            message, is_text = self._early.popleft()
            receiver.receive_message(message, is_text=is_text)
        self.resume_reading(Pause.EARLY)
        if self.protocol.state is not State.OPEN:
            receiver.connection_closing()

    def ignore_messages(self) -> None:
        """There will be no session."""
        self._deaf = True
        self._early.clear()
        self.resume_reading(Pause.EARLY)

    @property
    def is_reading(self) -> bool:
        return not self._pauses

    def pause_reading(self, reason: Pause) -> None:
        if not self._pauses:
            self.transport.pause_reading()
        self._pauses |= reason

    def resume_reading(self, reason: Pause) -> None:
        """Read again, unless there is another reason not to."""
        if reason in self._pauses:
            self._pauses &= ~reason
            if not self._pauses and not self.transport.is_closing():
                self.transport.resume_reading()

    def write_message(self, data: bytes, *, is_text: bool) -> None:
        """Send a whole message, in an order with everything else that is sent. The connection must be open."""
        protocol = self.protocol
        if protocol.extensions or protocol.debug:
            (protocol.send_text if is_text else protocol.send_binary)(data)
            self.send_data()
            return
        kind, size = _TEXT if is_text else _BINARY, len(data)
        if size < _LENGTH_16:
            header = bytes((kind, size))
        elif size < 1 << 16:
            header = struct.pack(">BBH", kind, _LENGTH_16, size)
        else:
            header = struct.pack(">BBQ", kind, _LENGTH_64, size)
        self.transport.write(header + data)

    async def close_within(self, seconds: float, code: int, reason: str = "") -> None:
        """Close, and drop what a peer that does not read has left unread by then."""
        try:
            async with asyncio.timeout(seconds):
                await self.close(code, reason)
        except TimeoutError:
            pass
        finally:
            if self.protocol.state is not State.CLOSED:
                self.transport.abort()
                await self.wait_closed()

    def data_received(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.receive_bytes()
        if not self._takes_frames:
            if self._receiver is None:
                alone = self.request is None and data.find(b"\r\n\r\n") + 4 == len(data)
                self._began_early = self._began_early or not alone
            self._give_to_library(data)
            return
        if self._incomplete:
            self._incomplete += data
            if len(self._incomplete) < self._wanted:
                return
            data = bytes(self._incomplete)
            self._incomplete.clear()
        self._take_frames(data)

    def _take_frames(self, data: bytes) -> None:
        receiver, available, start = self._receiver, len(data), 0
        assert receiver is not None
        while start < available:
            payload = start + _SHORT_HEADER_BYTES
            if payload > available:
                self._keep(data[start:], _SHORT_HEADER_BYTES)
                return
            kind, size = data[start], data[start + 1] - _MASK_BIT
            if size == _LENGTH_16:
                size = int.from_bytes(data[start + 2 : start + 4])
                payload += 2
            elif size == _LENGTH_64:
                payload = start + _LONG_HEADER_BYTES
                if payload > available:
                    self._keep(data[start:], _LONG_HEADER_BYTES)
                    return
                size = int.from_bytes(data[start + 2 : start + 10])
            if kind not in _USUAL or not 0 <= size <= self._max_size:
                self._leave_to_library(data[start:])
                return
            end = payload + size
            if end > available:
                self._keep(data[start:], end - start)
                return
            if kind in (_TEXT, _BINARY):
                unmasked = apply_mask(data[payload:end], data[payload - 4 : payload])
                receiver.receive_message(unmasked, is_text=kind == _TEXT)
            else:
                self._give_to_library(data[start:end])
                if self.protocol.state is not State.OPEN:
                    self._leave_to_library(data[end:])
                    return
            start = end

    def _keep(self, incomplete: bytes, wanted: int) -> None:
        """Wait for the rest of a frame, unless so much as its first bytes are wrong."""
        if incomplete[0] not in _USUAL or (len(incomplete) > 1 and incomplete[1] < _MASK_BIT):
            self._leave_to_library(incomplete)
            return
        self._incomplete += incomplete
        self._wanted = wanted

    def _leave_to_library(self, data: bytes) -> None:
        self._takes_frames = False
        self._give_to_library(data)

    def _give_to_library(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.get_write_buffer_size() > MAX_UNWRITTEN_BYTES:
            self.pause_reading(Pause.UNWRITTEN)
        if self._receiver is not None and self.protocol.state is not State.OPEN:
            self._receiver.connection_closing()

    def process_event(self, event: Any) -> None:
        if self.request is None or not isinstance(event, Frame):
            super().process_event(event)
            return
        if event.opcode not in _DATA:
            super().process_event(event)
        elif event.fin and event.opcode is not Opcode.CONT:
            self._hand_over(event.data, is_text=event.opcode is Opcode.TEXT)
        else:
            self._assemble(event)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._receiver is not None:
            self._receiver.connection_closing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.resume_reading(Pause.UNWRITTEN)
        if self._receiver is not None:
            self._receiver.resume_output()

    def _assemble(self, fragment: Frame) -> None:
        if fragment.opcode is not Opcode.CONT:
            self._fragments_are_text = fragment.opcode is Opcode.TEXT
        self._fragments += fragment.data
        if fragment.fin:
            message, self._fragments = self._fragments, bytearray()
            self._hand_over(message, is_text=self._fragments_are_text)

    def _hand_over(self, message: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        if self._receiver is not None:
            self._receiver.receive_message(message, is_text=is_text)
        elif not self._deaf:
            self._early.append((message, is_text))
            self._early_bytes += len(message) + _MESSAGE_OVERHEAD_BYTES
            if self._early_bytes > _MAX_EARLY_BYTES:
                self.pause_reading(Pause.EARLY)
