"""How a client's connection ended: whether it meant to end its session, or will come back."""

from __future__ import annotations

from typing import Final

from websockets.asyncio.server import ServerConnection
from websockets.frames import CloseCode

#: Close codes of a client that is done: it will not come back (RFC 6455, 7.4.1).
FAREWELLS: Final = frozenset({CloseCode.NORMAL_CLOSURE, CloseCode.GOING_AWAY, CloseCode.NO_STATUS_RCVD})
#: Close codes that the WebSocket layer gives to clients that would do the same thing again.
VIOLATIONS: Final = frozenset({CloseCode.PROTOCOL_ERROR, CloseCode.INVALID_DATA, CloseCode.MESSAGE_TOO_BIG})


def ended_by_client(connection: ServerConnection) -> bool:
    """Whether the client meant it, or does not know the protocol; otherwise the network may have been to blame."""
    protocol = connection.protocol
    if protocol.close_rcvd is not None:
        return protocol.close_rcvd.code in FAREWELLS
    return protocol.close_sent is not None and protocol.close_sent.code in VIOLATIONS
