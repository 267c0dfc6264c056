"""What stands behind the front door: the interface that a server's application fulfils, and the limits of the door."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from websockets.asyncio.server import ServerConnection

from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.http.request import HttpRequest

#: Makes the connection that takes the transport over: called with a ServerProtocol, the Server, and the options that
#: ``serve`` was given (ping_interval, ping_timeout, close_timeout, max_queue, write_limit) as keywords.
ConnectionFactory = Callable[..., ServerConnection]


@dataclass(frozen=True, slots=True)
class UpgradeDecision:
    """How an upgrade is accepted.

    ``subprotocol`` is the chosen one, or None for none; ``max_size`` is the WebSocket message limit in bytes of this
    path, None for the one given to ``serve``; ``route`` is the template of the path, for accounts.
    """

    connection: ConnectionFactory = ServerConnection
    subprotocol: str | None = None
    max_size: int | None = None
    route: str = ""


class Application(Protocol):
    """Decides what is said on the port. All methods run on the event loop."""

    async def handle(self, exchange: HttpExchange) -> None:
        """Answer one HTTP request.

        An OmniError raised before the answer began becomes its JSON answer; any other exception becomes a 500 with an
        id. When the peer goes, the task that runs this is cancelled.
        """

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Accept a well-formed WebSocket upgrade, or refuse it by raising an OmniError."""
        ...

    def allows_host(self, request: HttpRequest) -> bool:
        """Whether this server answers to the request's ``Host``."""
        ...

    def allows_origin(self, request: HttpRequest) -> bool:
        """Whether a page of the request's ``Origin`` may talk to this server. Asked only where there is an Origin."""
        ...


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of one HTTP connection; seconds and bytes."""

    #: From the first byte of a request (or from the connection's start) to the end of its head.
    header_timeout_sec: float = 10.0
    #: Between two reads of a request body, while the peer owes bytes.
    body_timeout_sec: float | None = 30.0
    #: Bytes a second that a body has to come with on the whole, in addition to that time once; not where it is live.
    min_body_rate: float | None = 500.0
    #: From an answer to the first byte of the next request.
    keepalive_timeout_sec: float = 75.0
    #: How long the output may stay over its high-water mark, or a closing connection undelivered.
    write_timeout_sec: float = 30.0
    max_header_bytes: int = 32 * 1024
    #: Unread body bytes at which the socket is no longer read; also bounds what is held of pipelined requests.
    body_high_water_bytes: int = 64 * 1024
    #: After an answer that came before its request was read: how long and how much is read and thrown away, so that
    #: the peer, still sending, gets to read the answer before the connection ends.
    linger_timeout_sec: float = 5.0
    linger_bytes: int = 16 * 1024 * 1024
    #: A client that closed its sending side is asked whether it still listens after this long, and again after twice as
    #: long each time, up to the second.
    half_close_probe_sec: float = 0.25
    half_close_probe_max_sec: float = 5.0
