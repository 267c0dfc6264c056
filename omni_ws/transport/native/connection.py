"""StreamConnection: websockets' connection, with a way around its parser and its queue for whole data frames."""

from __future__ import annotations

import asyncio
import struct
import sys
from typing import Any, Final

from websockets.frames import CTRL_OPCODES, CloseCode, Frame, Opcode
from websockets.protocol import State

from omni_ws.core.quota import ByteBudget, Share
from omni_ws.errors import EngineOverloaded
from omni_ws.transport.http.hang_up import HangUp
from omni_ws.transport.native.frame_receiver import FrameReceiver
from omni_ws.transport.native.paced_connection import PacedConnection, Pause

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
_MESSAGES: Final = frozenset({_TEXT, _BINARY})
_USUAL: Final = _MESSAGES | {_FIN | opcode for opcode in CTRL_OPCODES}
_MASK_BIT: Final = 0x80
_LENGTH_16: Final = 126
_LENGTH_64: Final = 127
_SHORT_HEADER_BYTES: Final = 6
_LONG_HEADER_BYTES: Final = 14


#: What may wait to be written before the client, who sends pings and does not read their pongs, is read no further.
MAX_UNWRITTEN_BYTES: Final = 1 << 20
#: How long a client may take to close; what is left of it after that is dropped.
CLOSE_TIMEOUT_SEC: Final = 5.0
MAX_CLOSE_REASON_BYTES: Final = 120
#: Work for one connection in one turn. The library cannot be told to stop after some frames.
_FRAMES_PER_TURN: Final = range(64)
_LIBRARY_BYTES_PER_TURN: Final = 1024


class StreamConnection(PacedConnection):
    """Hands messages to the session from inside ``data_received``: no task switch a frame.

    Everything else stays the library's: the handshake, control frames, the closing handshake, and whatever is wrong.

    The library's parser does not see the data frames, as long as nothing but they and whole control frames come: it
    always stands between two frames, and can be given everything else, for ever, at the first frame that is unusual.
    """

    def __init__(self, *arguments: Any, budget: ByteBudget | None = None, **options: Any) -> None:
        """``budget`` is what messages count in while they have not come whole."""
        super().__init__(*arguments, **options)
        self._unfinished = Share(budget or ByteBudget(sys.maxsize))
        #: Whether what comes is thrown away, since the rest of a message would be taken for another.
        self._refusing = False
        #: Whether there will be no session.
        self._deaf = False
        #: A message that has not come whole. The library holds it to the limit of a whole one.
        self._fragments = bytearray()
        self._fragments_are_text = False
        #: Whether frames are taken apart here; otherwise the library does it.
        self._takes_frames = False
        #: A frame that has not come whole, and how many bytes there must be before it is looked at again.
        self._incomplete = bytearray()
        self._wanted = 0
        self._max_size = sys.maxsize

    def attach(self, receiver: FrameReceiver) -> None:
        """From here on messages go to ``receiver``, beginning with those that came already."""
        self._receiver = receiver
        self.heard_at = self.loop.time()
        protocol = self.protocol
        self._takes_frames = not (protocol.extensions or protocol.debug)
        limits = (protocol.max_message_size, protocol.max_fragment_size)
        self._max_size = min((limit for limit in limits if limit is not None), default=sys.maxsize)
        self.resume_reading(Pause.EARLY)
        if self.protocol.state is not State.OPEN:
            receiver.connection_closing()

    def ignore_messages(self) -> None:
        """There will be no session."""
        self._deaf = True
        self.resume_reading(Pause.EARLY)

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

    @property
    def is_open(self) -> bool:
        """Whether what is written now is sent."""
        return self.state is State.OPEN and not self.transport.is_closing()

    def fail(self, code: CloseCode, reason: str) -> None:
        """Close from below, as the library does for its own errors: without an error frame, or a wait."""
        if self.is_open:
            self.protocol.fail(code, reason)
            self.send_data()

    async def close_in_time(self, code: int, reason: str) -> None:
        """Close, and drop what a peer that does not read has left unread by then; a long ``reason`` is cut."""
        reason = reason.encode()[:MAX_CLOSE_REASON_BYTES].decode("utf-8", "ignore")
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_SEC):
                if self._refusing:  # and would not see the client's part of a closing handshake
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

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        self.heard_at = self.loop.time()
        if receiver is None and self.request is None:
            # The front door hands the head over whole, perhaps with more behind it.
            head = data.find(b"\r\n\r\n") + 4
            super().data_received(data[:head])
            data = data[head:]
        if self._input_pace is not None and data and not self._gone:
            self._keep_pace(self._input_pace(len(data)))
        if self._pauses or (receiver is None and not self._deaf):
            self._pending += data
            if data and receiver is None and not self._deaf:
                self.pause_reading(Pause.EARLY)
            return
        if self._incomplete:  # as in _look_at, without a call more for each frame
            data = self._completed(data)
        if data:
            end = self._take_frames(data, 0) if self._takes_frames else self._take_slice(data, 0)
            if end < len(data):
                self._leave(data, end)

    def _look_at(self, data: bytes, start: int) -> None:
        if self._incomplete:  # then nothing of ``data`` was looked at
            data, start = self._completed(data), 0
        end = self._take_frames(data, start) if self._takes_frames else self._take_slice(data, start)
        if end < len(data):
            self._leave(data, end)

    def _look_after_unread(self, found: HangUp) -> None:
        if found is not HangUp.UNKNOWN:
            self._takes_frames = False
        super()._look_after_unread(found)

    def _completed(self, data: bytes) -> bytes:
        """What came of a frame before, and ``data``; nothing while that is too little to be looked at."""
        self._incomplete += data
        if len(self._incomplete) < self._wanted:
            self._count_unfinished(len(self._incomplete))
            return b""
        data = bytes(self._incomplete)
        self._incomplete.clear()
        self._unfinished.resize(0)
        return data

    def _take_frames(self, data: bytes, start: int) -> int:
        """Returns where it stopped."""
        receiver, available = self._receiver, len(data)
        assert receiver is not None
        for _ in _FRAMES_PER_TURN:
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
                self._takes_frames = False
                return start
            end = payload + size
            if end > available:
                return self._keep(data, start, end - start)
            if kind in _MESSAGES:
                unmasked = apply_mask(data[payload:end], data[payload - 4 : payload])
                receiver.receive_message(unmasked, is_text=kind == _TEXT)
            else:
                self._give_to_library(data[start:end])
                self._takes_frames = self.protocol.state is State.OPEN
            start = end
            if start == available or self._pauses & ~Pause.TURN or not self._takes_frames:
                break
        return start

    def _keep(self, data: bytes, start: int, wanted: int) -> int:
        """Wait for the rest of a frame, unless so much as its first bytes are wrong."""
        if start == len(data):
            return start
        if data[start] not in _USUAL or (len(data) > start + 1 and data[start + 1] < _MASK_BIT):
            self._takes_frames = False
            return start
        self._incomplete += data[start:]
        self._wanted = wanted if len(data) > start + 1 else 2
        self._count_unfinished(len(self._incomplete))
        return len(data)

    def _take_slice(self, data: bytes, start: int) -> int:
        """Returns where it stopped."""
        if self._refusing:
            return len(data)
        end = min(len(data), start + _LIBRARY_BYTES_PER_TURN)
        self._give_to_library(data[start:end])
        self._count_unfinished(len(self.protocol.reader.buffer) + len(self._fragments))
        return end

    def _count_unfinished(self, size: int) -> None:
        """So much is kept of a message that has not come whole."""
        try:
            self._unfinished.resize(size)
        except EngineOverloaded as error:
            self._refusing = True
            self._takes_frames = False
            self._forget_unfinished()
            if self._receiver is not None:
                self._receiver.input_refused(error)

    def _forget_unfinished(self) -> None:
        self._incomplete.clear()
        self._fragments.clear()
        self.protocol.reader.discard()
        self._unfinished.resize(0)

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
            if event.opcode is Opcode.PONG and self._receiver is not None:
                self._receiver.receive_pong(bytes(event.data))
        elif event.fin and event.opcode is not Opcode.CONT:
            self._hand_over(event.data, is_text=event.opcode is Opcode.TEXT)
        else:
            self._assemble(event)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_unfinished()

    def _assemble(self, fragment: Frame) -> None:
        if fragment.opcode is not Opcode.CONT:
            self._fragments_are_text = fragment.opcode is Opcode.TEXT
        self._fragments += fragment.data
        if fragment.fin:
            message, self._fragments = self._fragments, bytearray()
            self._hand_over(message, is_text=self._fragments_are_text)

    def _hand_over(self, message: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        self._unfinished.resize(0)
        if self._receiver is not None and not self._gone:
            self._receiver.receive_message(message, is_text=is_text)
