"""FrontEnd: one way into the server, with its routes, its WebSocket endpoints and its life cycle."""

from __future__ import annotations

from omni_ws.errors import OmniError
from omni_ws.metrics import Metrics
from omni_ws.transport.http.router import Router


class FrontEnd:
    """Base class of everything that answers on the port.

    A front end overrides what applies to it; the defaults do nothing. The application calls ``register`` and
    ``connect_gauges`` once, before the port opens, ``open_ports`` once it is open, and the rest in this order as the
    server ends: ``drain``, ``end_all``, ``wait_ended``, ``wait_closed``. A server that is closed without draining
    starts at ``end_all``.

    All methods run on the event loop.
    """

    def register(self, router: Router) -> None:
        """Add the routes and the WebSocket endpoints."""

    def connect_gauges(self, metrics: Metrics) -> None:
        """Bind the gauges that only this front end can read."""

    async def open_ports(self) -> None:
        """Listen on ports of its own, if it has any. Raises OSError, with advice, if one is taken."""

    def drain(self, time_left: float) -> None:
        """Refuse new requests and let open ones finish; what is open after ``time_left`` seconds is ended."""

    def end_all(self, error: OmniError) -> None:
        """End every session now, for this reason."""

    async def wait_ended(self) -> None:
        """Waits until the engine has released what ``end_all`` ended.

        Runs beside the closing of the connections, and is cancelled when the close time-out passes.
        """

    async def wait_closed(self) -> None:
        """Waits until no session is left. Runs once all connections are closed, without a time-out."""
