"""Application: the interface between the front door and what it serves, and the limits of a connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from websockets.asyncio.server import ServerConnection

from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.http.request import HttpRequest

#: Creates the connection that takes over the transport: called with a ServerProtocol, the Server, and the options of
#: ``serve`` (ping_interval, ping_timeout, close_timeout, max_queue, write_limit) as keywords.
ConnectionFactory = Callable[..., ServerConnection]
#: Serves one connection that its factory created, from the end of the handshake to the close.
ServeConnection = Callable[[Any], Awaitable[None]]


async def close_at_once(connection: ServerConnection) -> None:
    """Closes a connection that no endpoint serves."""
    await connection.close()


@dataclass(frozen=True, slots=True)
class UpgradeDecision:
    """An accepted WebSocket handshake."""

    connection: ConnectionFactory = ServerConnection
    #: Called with the connection once it is open; what it needs to know of the handshake is bound to it.
    serve: ServeConnection = close_at_once
    #: The selected subprotocol.
    subprotocol: str | None = None
    #: Limit of a message in bytes; None for the one given to ``serve``.
    max_size: int | None = None
    #: Template of the path, a label of the metrics and of the access log.
    route: str = ""


class Application(Protocol):
    """What the front door serves. All methods run on the event loop."""

    async def handle(self, exchange: HttpExchange) -> None:
        """Answers one HTTP request.

        An OmniError raised before the head of the response is sent becomes a JSON response; any other exception
        becomes a 500 with an id. The task that runs this is cancelled when the peer disconnects.
        """

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Accepts a well-formed WebSocket handshake, or refuses it by raising an OmniError."""
        ...

    def allows_host(self, request: HttpRequest) -> bool:
        """Whether the request's ``Host`` names this server."""
        ...

    def allows_origin(self, request: HttpRequest) -> bool:
        """Whether pages of the request's ``Origin`` may use this server. Called only for requests that have one."""
        ...


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one HTTP connection; seconds and bytes."""

    #: From the first byte of a request (of the first one: from the opening of the connection) to the end of its head.
    header_timeout_sec: float = 10.0
    #: Between two reads of a request body, while the peer owes bytes.
    body_timeout_sec: float | None = 30.0
    #: Least average rate of a body in bytes a second, once ``body_timeout_sec`` has passed; live input is exempt.
    min_body_rate: float | None = 500.0
    #: From a response to the first byte of the next request.
    keepalive_timeout_sec: float = 75.0
    #: How long the output may stay above its high-water mark, and how long a closing connection may take to flush.
    write_timeout_sec: float = 30.0
    max_header_bytes: int = 32 * 1024
    #: Unread body bytes at which reading pauses; also bounds the bytes held of pipelined requests.
    body_high_water_bytes: int = 64 * 1024
    #: After a response sent before its request was read: how long, and how many bytes, are read and discarded. A close
    #: with unread input resets the connection, and the peer, still sending, would lose the response.
    linger_timeout_sec: float = 5.0
    linger_bytes: int = 16 * 1024 * 1024
    #: A half-closed client is probed after this long, then at intervals that double up to ``half_close_probe_max_sec``.
    half_close_probe_sec: float = 0.25
    half_close_probe_max_sec: float = 5.0
