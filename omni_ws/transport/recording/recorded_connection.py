"""A WebSocket connection whose messages are recorded.

``recorded`` wraps a connection for the session behind it. Messages are recorded as they arrive, before the session
receives them, and as they are sent. Where nothing is recorded, nothing is wrapped, and nothing costs anything.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import parse_qsl, urlencode

from websockets.frames import CloseCode
from websockets.http11 import Request
from websockets.protocol import Protocol as WebSocketProtocol

from omni_ws.core.quota import ByteBudget
from omni_ws.service.recording.recorder import ConnectionRecording, SessionRecording


class MessageReceiver(Protocol):
    """What a connection calls with its messages."""

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None: ...


class MessageConnection(Protocol):
    """A connection that can be recorded, once its handshake is done."""

    request: Request | None
    #: Done when the connection is lost.
    connection_lost_waiter: asyncio.Future[None]

    @property
    def protocol(self) -> WebSocketProtocol: ...

    @property
    def subprotocol(self) -> str | None: ...

    def attach(self, receiver: Any, account: ByteBudget | None = None) -> None: ...

    def write_message(self, data: bytes, *, is_text: bool) -> None: ...

    async def send(self, message: Any, *, text: bool | None = None) -> None: ...


_Connection = TypeVar("_Connection", bound=MessageConnection)


def recorded(
    connection: _Connection, recording: SessionRecording | None, *, last_output: int | None = None
) -> _Connection:
    """The connection as its session is to use it; itself where ``recording`` is None.

    ``last_output`` is the one with which a client resumes its session.
    """
    if recording is None:
        return connection
    assert connection.request is not None
    written = recording.connection()
    written.opened(_target(connection.request.path), subprotocol=connection.subprotocol, last_output=last_output)
    return cast("_Connection", _RecordedConnection(connection, written))


class _RecordedConnection:
    """Stands in for a connection: whatever is not a message goes through to it."""

    def __init__(self, connection: MessageConnection, recording: ConnectionRecording) -> None:
        self._connection = connection
        self._recording = recording
        connection.connection_lost_waiter.add_done_callback(self._lost)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def attach(self, receiver: MessageReceiver, account: ByteBudget | None = None) -> None:
        self._connection.attach(_RecordedReceiver(receiver, self._recording), account)

    def write_message(self, data: bytes, *, is_text: bool) -> None:
        self._recording.sent(data, is_text=is_text)
        self._connection.write_message(data, is_text=is_text)

    async def send(self, message: bytes, *, text: bool) -> None:
        self._recording.sent(message, is_text=text)
        await self._connection.send(message, text=text)

    def _lost(self, _: object) -> None:
        protocol = self._connection.protocol
        received, sent = protocol.close_rcvd, protocol.close_sent
        if received is not None and (sent is None or protocol.close_rcvd_then_sent):
            self._recording.closed("client", received.code)
        elif sent is not None:
            self._recording.closed("server", sent.code)
        else:
            self._recording.closed("lost", CloseCode.ABNORMAL_CLOSURE)


class _RecordedReceiver:
    """Stands in for a receiver: whatever is not a message goes through to it."""

    def __init__(self, receiver: MessageReceiver, recording: ConnectionRecording) -> None:
        self._receiver = receiver
        self._receive_message = receiver.receive_message
        self._recording = recording

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        self._recording.received(bytes(data), is_text=is_text)
        self._receive_message(data, is_text=is_text)


def _target(target: str) -> str:
    """The target of a handshake, without the token and the other fields by which a client resumes its session."""
    path, _, query = target.partition("?")
    fields = [(name, value) for name, value in parse_qsl(query) if name == "session_id"]
    return f"{path}?{urlencode(fields)}" if fields and "resume_token" not in query else path
