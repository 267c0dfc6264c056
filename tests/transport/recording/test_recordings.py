"""A connection that is recorded: every message, in its order, whatever else the connection does."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from websockets.datastructures import Headers
from websockets.frames import Close
from websockets.http11 import Request

from omni_ws.service.recording import SessionRecording
from omni_ws.transport.recording import recorded


class Notes:
    """A session's recording, which notes what it is called with."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def connection(self) -> Notes:
        return self

    def opened(self, target: str, *, subprotocol: str | None, last_output: int | None) -> None:
        self.lines.append(("opened", target, subprotocol, last_output))

    def received(self, data: bytes, *, is_text: bool) -> None:
        self.lines.append(("received", data, is_text))

    def sent(self, data: bytes, *, is_text: bool) -> None:
        self.lines.append(("sent", data, is_text))

    def closed(self, by: str, code: int) -> None:
        self.lines.append(("closed", by, code))


class ClosingFrames:
    """As much of a protocol as knows how a connection has ended."""

    close_rcvd: Close | None = None
    close_sent: Close | None = None
    close_rcvd_then_sent: bool | None = None


class Connection:
    """A connection without a socket."""

    subprotocol = "omni.v1+json"
    paused = False

    def __init__(self, target: str = "/v1/streaming_input") -> None:
        self.request: Request | None = Request(target, Headers())
        self.protocol: Any = ClosingFrames()
        self.connection_lost_waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.receiver: Any = None
        self.written: list[tuple[bytes, bool]] = []

    def attach(self, receiver: Any, account: object = None) -> None:
        self.receiver = receiver

    def write_message(self, data: bytes, *, is_text: bool) -> None:
        self.written.append((data, is_text))

    async def send(self, message: Any, *, text: bool | None = None) -> None:
        self.written.append((message, bool(text)))


class Receiver:
    """A session that answers each message while it receives it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.room_made = False

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        self.connection.write_message(bytes(data).upper(), is_text=is_text)

    def resume_output(self) -> None:
        self.room_made = True


def record(connection: Connection, notes: Notes, *, last_output: int | None = None) -> Connection:
    found: Connection = recorded(cast("Any", connection), cast("SessionRecording", notes), last_output=last_output)
    return found


async def test_without_a_recording_the_connection_stays_what_it_is() -> None:
    connection = Connection()
    assert recorded(cast("Any", connection), None) is connection


async def test_messages_are_recorded_in_their_order_and_passed_on() -> None:
    connection, notes = Connection(), Notes()
    wrapped = record(connection, notes)
    wrapped.attach(Receiver(wrapped))
    connection.receiver.receive_message(bytearray(b"one"), is_text=True)
    await wrapped.send(b"two", text=False)
    connection.receiver.receive_message(memoryview(b"three"), is_text=False)
    assert notes.lines == [
        ("opened", "/v1/streaming_input", "omni.v1+json", None),
        ("received", b"one", True),
        ("sent", b"ONE", True),
        ("sent", b"two", False),
        ("received", b"three", False),
        ("sent", b"THREE", False),
    ]
    assert connection.written == [(b"ONE", True), (b"two", False), (b"THREE", False)]


async def test_what_is_no_message_goes_through() -> None:
    connection = Connection()
    wrapped = record(connection, Notes())
    receiver = Receiver(wrapped)
    wrapped.attach(receiver)
    connection.receiver.resume_output()
    connection.paused = True
    assert (receiver.room_made, wrapped.paused) == (True, True)


async def test_the_token_is_not_recorded() -> None:
    notes = Notes()
    record(Connection("/v1/streaming_input?session_id=sess_1&resume_token=secret"), notes, last_output=3)
    record(Connection("/v1/streaming_input?session_id=sess_1&x=y"), notes)
    assert [line[1:] for line in notes.lines] == [
        ("/v1/streaming_input", "omni.v1+json", 3),
        ("/v1/streaming_input?session_id=sess_1", "omni.v1+json", None),
    ]


@pytest.mark.parametrize(
    ("received", "sent", "received_first", "expected"),
    [
        (Close(1000, ""), Close(1000, ""), True, ("client", 1000)),
        (Close(1000, ""), Close(1011, ""), False, ("server", 1011)),
        (Close(1001, ""), None, None, ("client", 1001)),
        (None, Close(1009, ""), None, ("server", 1009)),
        (None, None, None, ("lost", 1006)),
    ],
)
async def test_who_closed_it(
    received: Close | None, sent: Close | None, received_first: bool | None, expected: tuple[str, int]
) -> None:
    connection, notes = Connection(), Notes()
    record(connection, notes)
    protocol = connection.protocol
    protocol.close_rcvd, protocol.close_sent, protocol.close_rcvd_then_sent = received, sent, received_first
    connection.connection_lost_waiter.set_result(None)
    await asyncio.sleep(0)
    assert notes.lines[-1] == ("closed", *expected)
