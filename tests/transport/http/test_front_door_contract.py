"""Undocumented behaviour of websockets and h11 that the front door relies on.

A failure means that a version was raised which needs to be examined first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from typing import Any, cast

import h11
import pytest
from support.raw_http import websocket_upgrade
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.server import ServerProtocol

from omni_ws.transport.http.connections import (
    limit_chunk_sizes,
    strict_http,
)

pytestmark = pytest.mark.usefixtures("no_task_left")


class RecordingTransport(asyncio.Transport):
    """Records what is written; otherwise like a plain TCP transport."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.protocol: asyncio.BaseProtocol | None = None

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return False

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


def test_version_is_one_that_was_examined() -> None:
    major, minor, *_ = (int(part) for part in version("websockets").split("."))
    assert (major, minor) >= (17, 4)
    assert major == 17


async def test_serve_calls_its_factory_with_protocol_server_and_options() -> None:
    calls: list[tuple[object, object, dict[str, object]]] = []

    class Never(asyncio.Protocol):
        def __init__(self, protocol: ServerProtocol, server: Server, **options: object) -> None:
            calls.append((protocol, server, options))

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            cast("asyncio.Transport", transport).abort()

    async def unused(connection: ServerConnection) -> None:
        raise AssertionError("the factory's protocol never asks for the handler")

    factory: Any = Never
    async with serve(unused, "127.0.0.1", 0, create_connection=factory, max_size=(5, 3)) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.close()
    ((protocol, given_server, options),) = calls
    assert isinstance(protocol, ServerProtocol)
    assert given_server is server
    assert set(options) == {"ping_interval", "ping_timeout", "close_timeout", "max_queue", "write_limit"}
    assert (protocol.max_message_size, protocol.max_fragment_size) == (5, 3)
    assert protocol.origins is None
    assert protocol.available_extensions is not None


class OneConnectionServer:
    """The part of a server that ServerConnection uses."""

    def __init__(self, handler: Callable[[ServerConnection], Coroutine[Any, Any, None]]) -> None:
        self.handler = handler
        self.handler_tasks: set[asyncio.Task[None]] = set()

    def is_serving(self) -> bool:
        return True


async def test_connection_takes_a_transport_over_and_reads_a_replayed_head() -> None:
    opened = asyncio.Event()
    frames: list[object] = []

    async def handler(connection: ServerConnection) -> None:
        await connection.handshake()
        opened.set()
        frames.append(await connection.recv())

    server: Any = OneConnectionServer(handler)
    transport = RecordingTransport()
    protocol = ServerProtocol(select_subprotocol=lambda _, offered: offered[-1])
    connection = ServerConnection(protocol, server, ping_interval=None)
    transport.set_protocol(connection)
    connection.connection_made(transport)
    head = websocket_upgrade("/x", "Sec-WebSocket-Protocol: first, second")
    connection.data_received(head + b"\x81\x82\x00\x00\x00\x00hi")
    await asyncio.wait(server.handler_tasks)
    assert opened.is_set()
    assert frames == ["hi"]
    assert transport.written.startswith(b"HTTP/1.1 101 ")
    assert b"Sec-WebSocket-Protocol: second\r\n" in transport.written
    connection.connection_lost(None)


def test_h11_hands_out_what_follows_an_upgrade() -> None:
    http = h11.Connection(h11.SERVER)
    http.receive_data(websocket_upgrade("/x") + b"frames")
    assert isinstance(http.next_event(), h11.Request)
    assert http.trailing_data == (b"frames", False)


def test_h11_does_not_refuse_two_framings_itself() -> None:
    """The reason why this project refuses them; the check can go once h11 does."""
    http = h11.Connection(h11.SERVER)
    http.receive_data(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n")
    assert isinstance(http.next_event(), h11.Request)


def test_h11_takes_sizes_of_chunks_with_more_digits_than_others() -> None:
    """The reason why this project replaces h11's reader of chunks."""
    for bounded in (False, True):
        http = h11.Connection(h11.SERVER)
        http.receive_data(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert isinstance(http.next_event(), h11.Request)
        if bounded:
            limit_chunk_sizes(http)
        http.receive_data(b"1\r\na\r\n00000000000000001\r\nb\r\n")
        assert isinstance(http.next_event(), h11.Data)
        with pytest.raises(h11.RemoteProtocolError) if bounded else contextlib.nullcontext():
            assert isinstance(http.next_event(), h11.Data)


@pytest.mark.parametrize("line", [b"X: a\n", b"X:\r\n a\r\n"], ids=["without CR", "folded"])
@pytest.mark.parametrize("strict", [False, True])
def test_h11_takes_lines_that_others_read_otherwise(line: bytes, strict: bool) -> None:
    """The reason why this project replaces h11's buffer."""
    http = strict_http(1000) if strict else h11.Connection(h11.SERVER)
    http.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n")
    with pytest.raises(h11.RemoteProtocolError) if strict else contextlib.nullcontext():
        assert isinstance(http.next_event(), h11.Request)


def test_h11_bounds_only_incomplete_heads() -> None:
    """The reason why this project limits complete heads."""
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=100)
    http.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 1000 + b"\r\n\r\n")
    assert isinstance(http.next_event(), h11.Request)
