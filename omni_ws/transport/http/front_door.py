"""FrontDoor: HTTP/1.1 and WebSocket on one port.

A connection speaks HTTP until the client upgrades it; then a connection of the websockets library takes over the
transport. The front door is the connection factory of the library's own server, which keeps its TLS, its Unix sockets,
its extensions and its close codes:

    connections = Connections()
    door = front_door(application, connections=connections, limits=limits)
    async with serve(websocket_handler, host, port, create_connection=door, compression=None):
        ...

With TLS the library's server listens without it, and ``TlsDoor`` shakes hands: a connection counts from the moment at
which it is accepted, and the library knows it only once it is secure.

The library takes over a transport in use if it is given the request head again. That is not documented: the version of
the library is pinned, and tests/transport/http/test_front_door_contract.py checks what the front door relies on.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import os
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import h11
from websockets.asyncio.server import Server, ServerConnection
from websockets.exceptions import InvalidHeader
from websockets.headers import parse_connection, parse_extension, parse_subprotocol
from websockets.http11 import MAX_LINE_LENGTH
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from omni_ws.core.addresses import Addresses
from omni_ws.errors import HeaderTooLarge, InvalidFrame, OmniError, UpgradeRequired
from omni_ws.service.sessions.shared_counts import WorkerGroup
from omni_ws.transport.http.application import Application, HttpLimits, UpgradeDecision
from omni_ws.transport.http.connection import HttpConnection, Phase
from omni_ws.transport.http.exchange import AccessRecord, LogAccess, discard_record
from omni_ws.transport.http.hang_up import Connections, OpenConnection
from omni_ws.transport.http.request import HttpRequest

#: Size of a decoded Sec-WebSocket-Key (RFC 6455, section 4.1).
_KEY_BYTES: Final = 16
#: Header fields that the library parses, and its parsers.
_LISTS: Final[tuple[tuple[str, Callable[[str], object]], ...]] = (
    ("Connection", parse_connection),
    ("Sec-WebSocket-Protocol", parse_subprotocol),
    ("Sec-WebSocket-Extensions", parse_extension),
)
_FIELD_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")


class FrontDoor(HttpConnection):
    """An HTTP connection that can be upgraded to WebSocket.

    ``serve`` creates it in place of a connection of its own. ``protocol`` provides the limits and extensions for the
    protocol of an upgraded connection, whose factory gets ``options``.
    """

    def __init__(
        self,
        protocol: ServerProtocol,
        server: Server,
        *,
        application: Application,
        connections: Connections,
        limits: HttpLimits | None = None,
        log_access: LogAccess = discard_record,
        addresses: Addresses | None = None,
        elsewhere: WorkerGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            application=application,
            connections=connections,
            limits=limits or HttpLimits(),
            log_access=log_access,
            addresses=addresses or Addresses(),
        )
        self._given_protocol = protocol
        self._server = server
        self._options = options
        self._elsewhere = elsewhere
        #: What has counted for the connection before it was made.
        self._accepted_as: OpenConnection | None = None
        #: What another process read of the connection, and whether that process passed it on to this one.
        self._received_elsewhere = b""
        self._passed_on = False
        #: Which process gets the connection, and what was read of it, once it is to be given away.
        self._destination: tuple[int, bytes] | None = None

    @property
    def upgraded_connections(self) -> int:
        elsewhere = 0 if self._elsewhere is None else self._elsewhere.connections_elsewhere
        return len(self._server.all_connections) + elsewhere

    def accept_as(self, connection: OpenConnection) -> None:
        """``connection`` counts for this one until it is made."""
        self._accepted_as = connection

    def received_elsewhere(self, data: bytes, *, passed_on: bool) -> None:
        """What another process has read of the connection that is about to be made.

        The first request of one that was ``passed_on`` is served here in any case.
        """
        self._received_elsewhere = data
        self._passed_on = passed_on

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._accepted_as is not None:
            self._connections.discard(self._accepted_as)
        super().connection_made(transport)
        if self._received_elsewhere:
            self._transport.pause_reading()  # what was read before comes first
            self._loop.call_soon(self._receive_first)

    def _receive_first(self) -> None:
        data, self._received_elsewhere = self._received_elsewhere, b""
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self.data_received(data)

    def _receive_head(self, event: h11.Request) -> None:
        serial = None
        if self._elsewhere is not None and not self._passed_on:
            serial = self._elsewhere.destination(event.target)
        self._passed_on = False
        if serial is None:
            super()._receive_head(event)
            return
        received = b"%b %b HTTP/%b\r\n" % (event.method, event.target, event.http_version)
        received += _fields(event) + b"\r\n" + self._http.trailing_data[0]
        self._enter(Phase.HANDED_OVER)
        self._detach()
        self._transport.pause_reading()
        self._destination = (serial, received)
        if self._transport.get_write_buffer_size():  # the response before has not left yet
            self._output.pause()  # which drops the connection where that takes too long
            self._transport.set_write_buffer_limits(0)  # writing resumes once all has left
        else:
            self._pass_on()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._destination is not None:
            self._loop.call_soon(self._pass_on)  # a transport may not be aborted from in here

    def _pass_on(self) -> None:
        """Give the connection away. It stays in the registry until then; the system keeps it open meanwhile."""
        if self._elsewhere is None or self._destination is None or self._transport.is_closing():
            return
        try:
            descriptor = os.dup(self._transport.get_extra_info("socket").fileno())
        except OSError:  # this process may open no more files; the client may try again
            self._transport.abort()
            return
        self._connections.discard(self)  # it counts among those elsewhere now
        self._elsewhere.pass_on(self._destination[0], descriptor, self._destination[1])
        self._transport.abort()  # which closes this process's descriptor alone

    def upgrade(self, event: h11.Request, request: HttpRequest) -> None:
        """Hand the transport over to a WebSocket connection, with the head and the bytes that followed it."""
        check_handshake(event, request)
        decision = self._application.upgrade(request)
        if self._half_closed:
            raise InvalidFrame("a WebSocket requires both directions of the connection; the client has closed one")
        connection = decision.connection(self._protocol_for(decision), self._server, **self._options)
        self._log_access(AccessRecord(request.method, decision.route, 101, client=request.client))
        head = b"GET %b HTTP/1.1\r\n" % event.target + _handshake_fields(event)
        trailing = self._http.trailing_data[0]
        self.release()
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        connection.data_received(head + b"\r\n" + trailing)

    def _protocol_for(self, decision: UpgradeDecision) -> ServerProtocol:
        """Create the protocol of an upgraded connection; that of ``serve`` selects one subprotocol for all paths."""

        # Not of the decision: the protocol lives as long as the connection.
        subprotocol = None if decision.subprotocol is None else Subprotocol(decision.subprotocol)

        def select(protocol: ServerProtocol, offered: Sequence[Subprotocol]) -> Subprotocol | None:
            return subprotocol

        given = self._given_protocol
        sizes = (given.max_message_size, given.max_fragment_size)
        return ServerProtocol(
            origins=given.origins,
            extensions=given.available_extensions,
            select_subprotocol=select,
            max_size=sizes if decision.max_size is None else decision.max_size,
            logger=given.logger,
        )


class TlsDoor(asyncio.Protocol):
    """A connection that was accepted, which shakes hands and then is that of ``door``; an OpenConnection until then."""

    busy = False

    def __init__(self, door: FrontDoor, connections: Connections, context: ssl.SSLContext, limits: HttpLimits) -> None:
        self._door = door
        self._connections = connections
        self._context = context
        self._timeout_sec = limits.header_timeout_sec
        self._shaking: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        full = self._connections.is_full(upgraded=self._door.upgraded_connections)
        try:
            if full and not self._connections.turn_away(self):
                return
            # The transport of the handshake is another one: no byte may go to this one.
            accepted = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            self._shaking = asyncio.get_running_loop().create_task(self._shake_hands(accepted), name="TLS handshake")
        except OSError:  # this process may open no more files; the client may try again
            return
        finally:
            transport.abort()  # which closes its own descriptor alone
            if self._shaking is None:
                self._connections.discard(self)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        self._door.accept_as(self)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._door, accepted, ssl=self._context, ssl_handshake_timeout=self._timeout_sec
            )
        except OSError:  # of the peer, or of its time
            accepted.close()
        finally:
            self._connections.discard(self)

    # OpenConnection

    def close_if_idle(self) -> None:
        self.abort()

    def interrupt(self, error: OmniError) -> None:
        pass

    def abort(self) -> None:
        if self._shaking is not None:
            self._shaking.cancel()


def front_door(
    application: Application,
    *,
    connections: Connections,
    limits: HttpLimits | None = None,
    log_access: LogAccess = discard_record,
    addresses: Addresses | None = None,
    elsewhere: WorkerGroup | None = None,
    tls: ssl.SSLContext | None = None,
) -> type[ServerConnection]:
    """Return the ``create_connection`` argument of ``serve``, which is to have no ``ssl``.

    ``log_access`` is called with the record of every request; ``addresses`` knows the trusted proxies; ``elsewhere``
    the other processes that serve the same port.
    """
    door: Callable[..., FrontDoor] = functools.partial(
        FrontDoor,
        application=application,
        connections=connections,
        limits=limits,
        log_access=log_access,
        addresses=addresses,
        elsewhere=elsewhere,
    )

    def secure(protocol: ServerProtocol, server: Server, **options: Any) -> TlsDoor:
        assert tls is not None
        return TlsDoor(door(protocol, server, **options), connections, tls, limits or HttpLimits())

    # websockets documents a wrapper or a subclass of ServerConnection, and annotates the latter only.
    return cast("type[ServerConnection]", door if tls is None else secure)


def _fields(event: h11.Request) -> bytes:
    return b"".join(b"%b: %b\r\n" % field for field in event.headers.raw_items())


def _handshake_fields(event: h11.Request) -> bytes:
    """The header fields for the library, which takes no other protocol beside WebSocket in ``Upgrade``."""
    fields = (field for field in event.headers.raw_items() if field[0].lower() != b"upgrade")
    return b"".join(b"%b: %b\r\n" % field for field in fields) + b"Upgrade: websocket\r\n"


def check_handshake(event: h11.Request, request: HttpRequest) -> None:
    """Refuse handshakes that the library would refuse with a text response of its own (RFC 6455, section 4.2.1).

    Raises InvalidFrame, UpgradeRequired or HeaderTooLarge, which become JSON responses.
    """
    if request.headers.get_all("sec-websocket-version") != ("13",):
        raise UpgradeRequired("unsupported WebSocket version; this server supports version 13")
    keys = request.headers.get_all("sec-websocket-key")
    if len(keys) != 1 or not _is_key(keys[0]):
        raise InvalidFrame("Sec-WebSocket-Key must be one base64 value of 16 bytes")
    fields = event.headers.raw_items()
    longest = max(
        len(b"GET  HTTP/1.1\r\n") + len(event.target), *(len(name) + len(value) + 4 for name, value in fields)
    )
    if longest > MAX_LINE_LENGTH:
        raise HeaderTooLarge(f"at most {MAX_LINE_LENGTH} bytes per header field of a WebSocket handshake")
    if not all(_FIELD_VALUE.fullmatch(value) for _, value in fields):
        raise InvalidFrame("a header field value contains control characters")
    for name, parse in _LISTS:
        for value in request.headers.get_all(name):
            try:
                parse(value)
            except InvalidHeader:
                raise InvalidFrame(f"{name} is not a valid list (RFC 6455)") from None


def _is_key(value: str) -> bool:
    try:
        return len(base64.b64decode(value.encode("ascii"), validate=True)) == _KEY_BYTES
    except (binascii.Error, UnicodeEncodeError):
        return False
