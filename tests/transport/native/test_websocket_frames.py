"""Frames that are taken apart before the library sees them are what the library would have made of them."""

from __future__ import annotations

import asyncio
import logging
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from websockets.asyncio.server import Server
from websockets.extensions.permessage_deflate import ServerPerMessageDeflateFactory
from websockets.frames import Close, Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from omni_ws.transport.native.connection import Pause, StreamConnection

HEAD = (
    b"GET /v1/streaming_input HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
MAX_SIZE = 100_000
MASK = b"\x01\x82\x04\xf8"


class RecordingTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.ended = False
        #: Whether the socket is read.
        self.reads = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class OneServer:
    """As much of a server as a connection needs before its handler runs."""

    logger = logging.getLogger(__name__)

    def __init__(self) -> None:
        self.handler_tasks: set[asyncio.Task[None]] = set()
        self.handlers: dict[Any, Any] = {}

    async def handler(self, connection: Any) -> None:
        pass


@dataclass
class Recorder:
    messages: list[tuple[bytes, bool]] = field(default_factory=list)
    #: How many messages had come when there was word that the connection closes.
    closing_after: int | None = None
    #: After how many messages the session has no room for more, and who is told.
    rests_at: int | None = None
    connection: StreamConnection | None = None

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        self.messages.append((bytes(data), is_text))
        if self.connection is not None and len(self.messages) == self.rests_at:
            self.connection.pause_reading(Pause.SESSION)

    def input_refused(self, error: Exception) -> None:
        raise AssertionError("nothing is counted here")

    def connection_closing(self) -> None:
        if self.closing_after is None:
            self.closing_after = len(self.messages)

    def reading_changed(self) -> None:
        pass

    def receive_pong(self, data: bytes) -> None:
        pass

    def resume_output(self) -> None:
        pass


class Session:
    """A connection with its handshake done. What comes ``early`` comes before there is a session to receive it.

    ``rests``: the session has no room when it comes. ``by_library``: the library takes the frames apart, as it does
    where extensions are in use.
    """

    def __init__(
        self,
        *,
        early: bytes = b"",
        with_head: bytes = b"",
        deflate: bool = False,
        by_library: bool = False,
        rests: bool = False,
    ) -> None:
        extensions = [ServerPerMessageDeflateFactory()] if deflate else None
        self.protocol = ServerProtocol(max_size=MAX_SIZE, extensions=extensions)
        self.connection = StreamConnection(self.protocol, cast("Server", OneServer()), ping_interval=None)
        self.transport = RecordingTransport()
        self.connection.connection_made(self.transport)
        head = HEAD
        if deflate:
            head = HEAD[:-2] + b"Sec-WebSocket-Extensions: permessage-deflate\r\n\r\n"
        self.connection.data_received(head + with_head)
        assert self.connection.request is not None
        response = self.protocol.accept(self.connection.request)
        self.protocol.send_response(response)
        self.connection.response = response
        self.connection.send_data()
        if early:
            self.connection.data_received(early)
        self.transport.written = b""
        self.recorder = Recorder()
        self.protocol.debug = by_library
        if rests:
            self.connection.pause_reading(Pause.SESSION)
        self.connection.attach(self.recorder)

    async def settle(self, byte_count: int = 0) -> None:
        """Everything that came, ``byte_count`` at once, has been looked at: hundreds of bytes in a turn of the loop."""
        for _ in range(200 + byte_count // 256):
            await asyncio.sleep(0)

    @property
    def outcome(self) -> tuple[Any, ...]:
        protocol, recorder = self.protocol, self.recorder
        ends = (protocol.state, protocol.close_sent, protocol.close_rcvd, protocol.close_rcvd_then_sent)
        return recorder.messages, self.transport.written, self.transport.ended, *ends


def frame(opcode: int, payload: bytes, *, fin: bool = True, rsv: int = 0, masked: bool = True, width: int = 0) -> bytes:
    """``width``: the bytes of the length, 0 for as many as it takes."""
    width = width or (1 if len(payload) < 126 else 2 if len(payload) < 65536 else 8)
    short = len(payload) if width == 1 else 126 if width == 2 else 127
    head = bytes([fin << 7 | rsv << 4 | opcode, masked << 7 | short])
    head += b"" if width == 1 else struct.pack(">H" if width == 2 else ">Q", len(payload))
    if not masked:
        return head + payload
    return head + MASK + bytes(byte ^ MASK[at % 4] for at, byte in enumerate(payload))


TEXT = frame(Opcode.TEXT, b'{"type":"finish"}')
LARGE = frame(Opcode.BINARY, bytes(range(256)) * 256 + b"!")
CLOSE = frame(Opcode.CLOSE, Close(1000, "bye").serialize())

payloads = st.one_of(
    st.binary(max_size=8), st.integers(0, 300).map(bytes), st.sampled_from([bytes(125), bytes(126), bytes(65536)])
)
usual = st.builds(frame, st.sampled_from([Opcode.TEXT, Opcode.BINARY]), payloads)
control = st.builds(frame, st.sampled_from([Opcode.PING, Opcode.PONG]), st.binary(max_size=125))
closing = st.one_of(st.just(CLOSE), st.builds(frame, st.just(Opcode.CLOSE), st.binary(max_size=4)))
anything = st.builds(
    frame,
    st.integers(0, 15),
    payloads,
    fin=st.booleans(),
    rsv=st.sampled_from([0, 0, 0, 4]),
    masked=st.sampled_from([True, True, True, False]),
    width=st.sampled_from([0, 0, 8]),
)
fragments = st.lists(payloads, min_size=2, max_size=4).map(
    lambda parts: b"".join(
        frame(Opcode.CONT if at else Opcode.BINARY, part, fin=at == len(parts) - 1) for at, part in enumerate(parts)
    )
)
too_large = st.just(frame(Opcode.BINARY, bytes(MAX_SIZE + 1)))
streams = st.lists(
    st.one_of(usual, usual, usual, control, fragments, closing, anything, too_large, st.binary(max_size=5)), max_size=8
).map(b"".join)


async def feed(session: Session, data: bytes, cuts: list[int]) -> None:
    for start, end in pairwise([0, *sorted(cuts), len(data)]):
        if start < end:
            session.connection.data_received(data[start:end])
    await session.settle(len(data))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(data=streams, places=st.lists(st.floats(0, 1), max_size=8))
@example(data=TEXT + CLOSE + TEXT, places=[])
@example(data=LARGE[:9], places=[0.5])
@example(data=frame(Opcode.TEXT, b"", masked=False), places=[0.5])
@example(data=frame(Opcode.TEXT, bytes(130), masked=False) + TEXT, places=[])
async def test_the_same_comes_out_as_from_the_library(data: bytes, places: list[float]) -> None:
    cuts = [round(place * len(data)) for place in places]
    direct, reference = Session(), Session(by_library=True)
    await feed(direct, data, cuts)
    await feed(reference, data, cuts)
    assert direct.outcome == reference.outcome
    assert (direct.recorder.closing_after is None) == (reference.recorder.closing_after is None)


@pytest.mark.parametrize(
    "data", [TEXT, LARGE, frame(Opcode.BINARY, bytes(126)), frame(Opcode.PING, b"?") + TEXT], ids=len
)
async def test_every_place_where_a_frame_can_be_cut(data: bytes) -> None:
    for cut in [*range(1, min(len(data), 40)), len(data) - 1]:
        session = Session()
        await feed(session, data + TEXT, [cut])
        assert session.recorder.messages[-1] == (b'{"type":"finish"}', True)
        assert session.protocol.state is State.OPEN


async def test_one_byte_at_a_time() -> None:
    session = Session()
    data = TEXT + frame(Opcode.PING, b"?") + frame(Opcode.BINARY, bytes(300)) + TEXT + CLOSE
    await feed(session, data, list(range(len(data))))
    assert session.recorder.messages == [
        (b'{"type":"finish"}', True),
        (bytes(300), False),
        (b'{"type":"finish"}', True),
    ]
    assert session.transport.written.startswith(Frame(Opcode.PONG, b"?").serialize(mask=False))
    assert session.recorder.closing_after == 3


async def test_the_first_bytes_of_a_wrong_frame_are_enough() -> None:
    for wrong in (b"\x83", frame(Opcode.PING, b"", masked=False), frame(Opcode.TEXT, b"", rsv=4)[:1] + b"\x80"):
        session = Session()
        await feed(session, TEXT + wrong, [])
        reference = Session(by_library=True)
        await feed(reference, TEXT + wrong, [])
        assert session.outcome == reference.outcome


async def test_a_frame_of_the_limit_is_taken_and_one_byte_more_is_not() -> None:
    session = Session()
    session.connection.data_received(frame(Opcode.BINARY, bytes(MAX_SIZE)))
    assert [len(message) for message, _ in session.recorder.messages] == [MAX_SIZE]
    await feed(session, frame(Opcode.BINARY, bytes(MAX_SIZE + 1))[:14], [])
    assert session.protocol.close_sent is not None
    assert session.protocol.close_sent.code == 1009


async def test_what_came_with_the_request_comes_first() -> None:
    # The rest of the message that begins there looks like a message itself.
    header = bytes([0x80 | Opcode.BINARY, 0x80 | len(TEXT)]) + bytes(4)
    session = Session(with_head=TEXT + header)
    await feed(session, TEXT + TEXT, [])
    assert session.recorder.messages == [(b'{"type":"finish"}', True), (TEXT, False), (b'{"type":"finish"}', True)]


async def test_compressed_frames_are_the_librarys() -> None:
    session = Session(deflate=True)
    [extension] = session.protocol.extensions
    encoded = extension.encode(Frame(Opcode.TEXT, b"to be compressed"))
    session.connection.data_received(frame(Opcode.TEXT, bytes(encoded.data), rsv=4))
    assert session.recorder.messages == [(b"to be compressed", True)]


@pytest.mark.parametrize("by_library", [False, True])
async def test_a_flood_is_looked_at_in_turns(by_library: bool) -> None:
    session = Session(by_library=by_library)
    small = frame(Opcode.TEXT, b"{}")
    session.connection.data_received(small * 10_000)
    turns = 0
    while len(session.recorder.messages) < 10_000:
        before = len(session.recorder.messages)
        await asyncio.sleep(0)
        assert len(session.recorder.messages) - before <= 1000
        turns += 1
        assert turns < 1000
    assert turns > 10


async def test_nothing_is_handed_over_while_the_session_rests() -> None:
    session = Session()
    session.connection.pause_reading(Pause.SESSION)
    # Some transports still deliver what they had read by then.
    session.connection.data_received(TEXT * 2)
    session.connection.data_received(TEXT[:5])
    await session.settle()
    assert session.recorder.messages == []
    session.connection.resume_reading(Pause.SESSION)
    session.connection.data_received(TEXT[5:])
    await session.settle()
    assert session.recorder.messages == [(b'{"type":"finish"}', True)] * 3


async def test_session_that_rests_in_the_middle_of_a_read() -> None:
    session = Session()
    session.recorder.rests_at = 3
    session.recorder.connection = session.connection
    session.connection.data_received(TEXT * 5 + LARGE[:100])
    await session.settle()
    assert len(session.recorder.messages) == 3
    session.connection.resume_reading(Pause.SESSION)
    await session.settle()
    assert len(session.recorder.messages) == 5
    session.connection.data_received(LARGE[100:])
    assert len(session.recorder.messages) == 6


async def test_session_that_rests_in_the_middle_of_a_frame() -> None:
    session = Session()
    session.connection.data_received(TEXT[:4])
    session.connection.pause_reading(Pause.SESSION)
    session.connection.data_received(TEXT[4:6])
    session.connection.resume_reading(Pause.SESSION)
    await session.settle()
    assert session.recorder.messages == []
    session.connection.data_received(TEXT[6:] + TEXT[:4])
    session.connection.pause_reading(Pause.SESSION)
    session.connection.data_received(TEXT[4:] + LARGE)
    session.connection.resume_reading(Pause.SESSION)
    await session.settle()
    assert [len(message) for message, _ in session.recorder.messages[:2]] == [len('{"type":"finish"}')] * 2
    assert len(session.recorder.messages) == 3


async def test_another_receiver_continues_within_a_frame_that_the_library_has_begun() -> None:
    like_a_frame = bytes(byte ^ MASK[at % 4] for at, byte in enumerate(TEXT))
    begun = frame(Opcode.BINARY, like_a_frame)
    session = Session()
    fragmented = frame(Opcode.TEXT, b"{", fin=False) + frame(Opcode.CONT, b"}")
    session.connection.data_received(fragmented + begun[: -len(TEXT)])
    await session.settle()
    assert session.recorder.messages == [(b"{}", True)]
    session.connection.attach(session.recorder)  # as a telephone call does after its start
    session.connection.data_received(begun[-len(TEXT) :])
    await session.settle()
    assert session.recorder.messages == [(b"{}", True), (like_a_frame, False)]


async def test_what_came_early_comes_in_order() -> None:
    session = Session(with_head=TEXT, early=frame(Opcode.BINARY, b"second") + TEXT[:4])
    assert session.recorder.messages == []
    session.connection.data_received(TEXT[4:])
    await session.settle()
    assert session.recorder.messages == [(b'{"type":"finish"}', True), (b"second", False), (b'{"type":"finish"}', True)]


async def test_what_comes_before_the_session_and_while_it_rests_stops_the_reading() -> None:
    session = Session(rests=True)
    session.connection.data_received(TEXT)
    assert (session.transport.reads, session.recorder.messages) == (False, [])
    session.connection.resume_reading(Pause.SESSION)
    await session.settle()
    assert (session.transport.reads, len(session.recorder.messages)) == (True, 1)
    waiting = Session(early=TEXT)
    await waiting.settle()
    assert (waiting.transport.reads, len(waiting.recorder.messages)) == (True, 1)
