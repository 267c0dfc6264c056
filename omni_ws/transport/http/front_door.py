"""One port, two protocols: HTTP/1.1 until a client upgrades, then websockets takes the transport over.

Use it as the connection factory of websockets' own server, so that extensions, keep-alive, close codes, TLS and Unix
sockets stay the library's:

    connections = Connections()
    door = front_door(application, connections=connections, limits=limits)
    async with serve(websocket_handler, host, port, create_connection=door, compression=None):
        ...

The library takes a transport over in the middle of its life when it is given the request head once more. That works,
and is not promised: the library's version is pinned, and tests/transport/http/test_front_door_contract.py keeps watch.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
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
from omni_ws.errors import HeaderTooLarge, InvalidFrame, UpgradeRequired
from omni_ws.transport.http.access_log import AccessRecord, LogAccess, discard_record
from omni_ws.transport.http.application import Application, HttpLimits, UpgradeDecision
from omni_ws.transport.http.connection import HttpConnection
from omni_ws.transport.http.connections import Connections
from omni_ws.transport.http.request import HttpRequest

_KEY_BYTES: Final = 16
#: What the library reads once more.
_LISTS: Final[tuple[tuple[str, Callable[[str], object]], ...]] = (
    ("Connection", parse_connection),
    ("Sec-WebSocket-Protocol", parse_subprotocol),
    ("Sec-WebSocket-Extensions", parse_extension),
)
_FIELD_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")


class FrontDoor(HttpConnection):
    """One connection. ``serve`` calls this with the protocol object and the options meant for a connection of its own:
    the latter go to the connection that the application chooses, the former's limits to that connection's protocol."""

    def __init__(
        self,
        protocol: ServerProtocol,
        server: Server,
        *,
        application: Application,
        connections: Connections,
        limits: HttpLimits | None = None,
        account: LogAccess = discard_record,
        addresses: Addresses | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            application=application,
            connections=connections,
            limits=limits or HttpLimits(),
            account=account,
            addresses=addresses or Addresses(),
        )
        self._given_protocol = protocol
        self._server = server
        self._options = options

    @property
    def upgraded_connections(self) -> int:
        return len(self._server.all_connections)

    def upgrade(self, event: h11.Request, request: HttpRequest) -> None:
        check_handshake(event, request)
        decision = self._application.upgrade(request)
        if self._peer_finished:
            raise InvalidFrame("a WebSocket needs both directions of the connection, and one is closed")
        connection = decision.connection(self._protocol_for(decision), self._server, **self._options)
        self.account(AccessRecord(request.method, decision.route, 101, client=request.client))
        head = b"GET %b HTTP/1.1\r\n" % event.target
        head += b"".join(b"%b: %b\r\n" % field for field in event.headers.raw_items())
        trailing = self._http.trailing_data[0]
        self.release()
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        connection.data_received(head + b"\r\n" + trailing)

    def _protocol_for(self, decision: UpgradeDecision) -> ServerProtocol:
        """A protocol object of the path's own: ``serve`` has one choice of subprotocol for all paths."""

        def select(protocol: ServerProtocol, offered: Sequence[Subprotocol]) -> Subprotocol | None:
            return None if decision.subprotocol is None else Subprotocol(decision.subprotocol)

        given = self._given_protocol
        sizes = (given.max_message_size, given.max_fragment_size)
        return ServerProtocol(
            origins=given.origins,
            extensions=given.available_extensions,
            select_subprotocol=select,
            max_size=sizes if decision.max_size is None else decision.max_size,
            logger=given.logger,
        )


def front_door(
    application: Application,
    *,
    connections: Connections,
    limits: HttpLimits | None = None,
    account: LogAccess = discard_record,
    addresses: Addresses | None = None,
) -> type[ServerConnection]:
    """What to give to ``serve`` as ``create_connection``."""
    door: Callable[..., FrontDoor] = functools.partial(
        FrontDoor,
        application=application,
        connections=connections,
        limits=limits,
        account=account,
        addresses=addresses,
    )
    # websockets documents "a wrapper or a subclass" and annotates only the latter.
    return cast("type[ServerConnection]", door)


def check_handshake(event: h11.Request, request: HttpRequest) -> None:
    """Refuse, with a JSON answer of ours, what the library would refuse with a text of its own (RFC 6455, 4.2.1).

    Raises InvalidFrame, UpgradeRequired or HeaderTooLarge.
    """
    if request.headers.get_all("sec-websocket-version") != ("13",):
        raise UpgradeRequired("this server speaks version 13 of the WebSocket protocol")
    keys = request.headers.get_all("sec-websocket-key")
    if len(keys) != 1 or not _is_key(keys[0]):
        raise InvalidFrame("Sec-WebSocket-Key must be one base64 value of 16 bytes")
    fields = event.headers.raw_items()
    longest = max(
        len(b"GET  HTTP/1.1\r\n") + len(event.target), *(len(name) + len(value) + 4 for name, value in fields)
    )
    if longest > MAX_LINE_LENGTH:
        raise HeaderTooLarge(f"a header field of a WebSocket handshake has at most {MAX_LINE_LENGTH} bytes")
    if not all(_FIELD_VALUE.fullmatch(value) for _, value in fields):
        raise InvalidFrame("a header field has control characters in its value")
    for name, parse in _LISTS:
        for value in request.headers.get_all(name):
            try:
                parse(value)
            except InvalidHeader:
                raise InvalidFrame(f"{name} is not a list as RFC 6455 has it") from None


def _is_key(value: str) -> bool:
    try:
        return len(base64.b64decode(value.encode("ascii"), validate=True)) == _KEY_BYTES
    except (binascii.Error, UnicodeEncodeError):
        return False
