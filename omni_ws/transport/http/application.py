"""The base classes of the application that FrontDoor serves, and of its front ends; and the router."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from websockets.asyncio.server import ServerConnection

from omni_ws.config.keys import ApiKey
from omni_ws.errors import MethodNotAllowed, NotFound, OmniError, Unauthenticated, UpgradeRequired
from omni_ws.metrics import Metrics
from omni_ws.service.observing.profiling import Profiling
from omni_ws.service.recording import Recorder
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Sessions
from omni_ws.transport.http.access import Authenticator, ClientSecret, ClientSecrets, presented_key
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.http.request import HttpRequest

#: Creates the connection that takes over the transport: called with a ServerProtocol, the Server, and the options of
#: ``serve`` (ping_interval, ping_timeout, close_timeout, max_queue, write_limit) as keywords.
ConnectionFactory = Callable[..., ServerConnection]
#: Serves one connection that its factory created, from the end of the handshake to the close.
ServeConnection = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class UpgradeDecision:
    """An accepted WebSocket handshake."""

    connection: ConnectionFactory = ServerConnection
    #: Called with the connection once it is open. Other arguments are bound to it, such as those from the handshake.
    serve: ServeConnection = ServerConnection.close
    #: The selected subprotocol.
    subprotocol: str | None = None
    #: Limit of a message in bytes; None for the one given to ``serve``.
    max_size: int | None = None
    #: Template of the path, a label of the metrics and of the access log.
    route: str = ""


class Application(ABC):
    """Base class of the application that FrontDoor serves: answers HTTP requests and WebSocket handshakes.

    All methods run on the event loop. The attributes are shared by all front ends.
    """

    sessions: SessionFactory
    authenticator: Authenticator
    secrets: ClientSecrets
    #: None without ``record``.
    recorder: Recorder | None
    profiling: Profiling

    @abstractmethod
    async def handle(self, exchange: HttpExchange) -> None:
        """Answer one HTTP request.

        An OmniError raised before the head of the response is sent becomes a JSON response; any other exception
        becomes a 500 with an id. The task that runs this is cancelled when the peer disconnects.
        """

    @abstractmethod
    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Accept a well-formed WebSocket handshake, or refuse it by raising an OmniError."""

    @abstractmethod
    def allows_host(self, request: HttpRequest) -> bool:
        """Return whether a request with this ``Host`` may be served."""

    @abstractmethod
    def allows_origin(self, request: HttpRequest) -> bool:
        """Return whether pages of the request's ``Origin`` may use this server. The request must have that field."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one HTTP connection, in seconds and bytes."""

    #: From the opening of a connection to its first byte, and from the first byte of a request to the end of its head.
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
    #: After a response that was sent before its request was read: for how long, and how many bytes, input is read and
    #: discarded. A close with unread input resets the connection, and the peer would lose the response.
    linger_timeout_sec: float = 5.0
    linger_bytes: int = 16 * 1024 * 1024
    #: A half-closed client is probed after this long, then at intervals that double up to ``half_close_probe_max_sec``.
    half_close_probe_sec: float = 0.25
    half_close_probe_max_sec: float = 5.0


class FrontEnd:
    """Base class of front ends. A front end is one API of the server, such as Mode B or the Realtime API.

    A front end overrides the methods that it needs; the defaults do nothing. The application calls ``register`` and
    ``connect_gauges`` once, before the port opens, and ``open_ports`` once the port is open. When the server ends, it
    calls ``drain``, ``end_all``, ``wait_ended`` and ``wait_closed``, in this order; a server that is closed without
    draining starts at ``end_all``.

    All methods run on the event loop.
    """

    def __init__(self, app: Application) -> None:
        self._sessions = app.sessions
        self._config = app.sessions.config
        self._authenticator = app.authenticator
        self._secrets = app.secrets
        self._recorder = app.recorder

    def _identified(self, request: HttpRequest, kind: str) -> tuple[ApiKey | None, ClientSecret | None]:
        """Return the key of a request, given directly or by a client secret, and the client secret, if there is one.

        Raises Unauthenticated, also for the secret of another ``kind`` of session.
        """
        secret = self._secrets.find(presented_key(request), asyncio.get_running_loop().time())
        if secret is None:
            return self._authenticator.authenticate(request), None
        if secret.kind != kind:
            raise Unauthenticated("this client secret is for another kind of session")
        return secret.key, secret

    def register(self, router: Router) -> None:
        """Add the routes and the WebSocket endpoints."""

    def connect_gauges(self, metrics: Metrics) -> None:
        """Bind the gauges whose values only this front end knows."""

    def serves(self, session_id: str) -> bool:
        """Return whether this front end has an open session or call. The id of a call comes without its ``rtc_``."""
        return False

    async def open_ports(self) -> None:
        """Listen on this front end's own ports, if it has any. Raises OSError, with advice, if a port is in use."""

    def drain(self, time_left: float) -> None:
        """Refuse new requests and let open ones finish; end those that are still open after ``time_left`` seconds."""

    def end_all(self, error: OmniError) -> None:
        """End every session now. Clients receive ``error``."""

    async def wait_ended(self) -> None:
        """Wait until the engine has released the sessions that ``end_all`` ended.

        Runs while the connections close, and is cancelled when the close time-out passes.
        """

    async def wait_closed(self) -> None:
        """Wait until no session is left. Called once all connections are closed, without a time-out."""


class SessionFrontEnd(FrontEnd):
    """Base class of front ends that have a ``Sessions``, and drain and end it with the server."""

    def __init__(self, app: Application, sessions: Sessions) -> None:
        super().__init__(app)
        self._live = sessions

    def serves(self, session_id: str) -> bool:
        return self._live.has_open(session_id)

    def drain(self, time_left: float) -> None:
        self._live.drain(time_left)

    def end_all(self, error: OmniError) -> None:
        self._live.end_all(error)

    async def wait_closed(self) -> None:
        await self._live.wait_closed()


Handler = Callable[[HttpExchange], Awaitable[None]]
#: Accepts a WebSocket handshake, or refuses it by raising an OmniError.
Upgrade = Callable[[HttpRequest], UpgradeDecision]

#: Characters of a path that an error repeats.
_SHOWN_CHARACTERS: Final = 128


@dataclass(frozen=True, slots=True)
class _Route:
    template: str
    parts: tuple[str, ...]
    methods: dict[str, Handler] = field(default_factory=dict)

    @property
    def catches_rest(self) -> bool:
        return bool(self.parts) and self.parts[-1].endswith(":path}")

    def parameters(self, segments: tuple[str, ...]) -> dict[str, str] | None:
        """Return the parameters in the path ``segments``; None if they do not match this route."""
        if self.catches_rest:
            head = len(self.parts) - 1
            if len(segments) <= head:
                return None
            segments = (*segments[:head], "/".join(segments[head:]))
        if len(segments) != len(self.parts):
            return None
        found: dict[str, str] = {}
        for part, segment in zip(self.parts, segments, strict=True):
            if part.startswith("{"):
                found[part.strip("{}").removesuffix(":path")] = segment
            elif part != segment:
                return None
        return found

    @property
    def allow(self) -> tuple[str, ...]:
        implied = {"OPTIONS"} | ({"HEAD"} if "GET" in self.methods else set())
        return tuple(sorted(implied | set(self.methods)))


class Router:
    """The table of routes: finds the handler of a request by its method and path, and of a WebSocket by its path.

    Templates look like ``/v1/models/{id}``; a final part ``{name:path}`` matches the rest of the path, slashes
    included. A literal part takes precedence over a parameter, whichever of the two was added first.
    """

    def __init__(self) -> None:
        self._routes: dict[tuple[str, ...], _Route] = {}
        #: Most literal first: the first match is the right one.
        self._ordered: list[_Route] = []
        self._websockets: dict[str, list[tuple[Callable[[HttpRequest], bool], Upgrade]]] = {}

    def add(self, method: str, template: str, handler: Handler) -> None:
        """Add a handler. Raises ValueError if the method and path have a handler already."""
        parts = tuple(part for part in template.split("/") if part)
        route = self._routes.setdefault(parts, _Route(template, parts))
        if method in route.methods:
            raise ValueError(f"{method} {template} already has a handler")
        route.methods[method] = handler
        self._ordered = sorted(
            self._routes.values(), key=lambda one: (one.catches_rest, [part.startswith("{") for part in one.parts])
        )

    def add_websocket(
        self, path: str, upgrade: Upgrade, *, takes: Callable[[HttpRequest], bool] = lambda request: True
    ) -> None:
        """Let ``upgrade`` answer the handshakes at ``path`` for which ``takes`` returns True.

        ``path`` may be the template of a route. Endpoints at the same path are asked in the order in which they were
        added.

        A GET without an upgrade needs a route of its own; see ``needs_upgrade``.
        """
        self._websockets.setdefault(path, []).append((takes, upgrade))

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Return the decision on a handshake, or raise the error that refuses it.

        Raises NotFound if no endpoint takes it, or MethodNotAllowed if the path has only a route without GET.
        """
        found = self._websockets.get(request.path)
        if found is None:
            found = self._websockets.get(self._find(request.segments)[0].template, [])
        for takes, upgrade in found:
            if takes(request):
                return upgrade(request)
        self.match("GET", request.segments)  # raises its own NotFound if there is no route either
        raise NotFound(f"no WebSocket at {shown_path(request.segments)}")

    def match(self, method: str, segments: tuple[str, ...]) -> tuple[Handler, str, Mapping[str, str]]:
        """Return a request's handler, the template of its route (a label of the metrics) and the path's parameters.

        A HEAD without a handler of its own gets that of GET. Raises NotFound, or MethodNotAllowed with the methods of
        the path.
        """
        route, parameters = self._find(segments)
        handler = route.methods.get(method)
        if handler is None and method == "HEAD":
            handler = route.methods.get("GET")
        if handler is None:
            raise MethodNotAllowed(f"{method} is not allowed for {route.template}", allow=route.allow)
        return handler, route.template, parameters

    def allow(self, segments: tuple[str, ...]) -> tuple[str, ...]:
        """Return the allowed methods of a path; for ``*``, those of all paths together. Raises NotFound."""
        if segments == ("*",):
            return tuple(sorted({method for route in self._ordered for method in route.allow}))
        return self._find(segments)[0].allow

    async def dispatch(self, exchange: HttpExchange) -> None:
        """Run the handler of the exchange's request. OPTIONS is answered here, without authentication.

        Raises what ``match`` and the handler raise.
        """
        request = exchange.request
        if request.method == "OPTIONS":
            await exchange.respond_options(self.allow(request.segments))
            return
        handler, template, parameters = self.match(request.method, request.segments)
        exchange.found(template, parameters)
        await handler(exchange)

    def _find(self, segments: tuple[str, ...]) -> tuple[_Route, dict[str, str]]:
        same = self._routes.get(segments)  # the usual case: a path without parameters
        for route in self._ordered if same is None else (same,):
            parameters = route.parameters(segments)
            if parameters is not None:
                return route, parameters
        raise NotFound(f"{shown_path(segments)} not found")


async def needs_upgrade(exchange: HttpExchange) -> None:
    """Raise UpgradeRequired. This is the handler of a plain GET at the path of a WebSocket."""
    raise UpgradeRequired("this path requires a WebSocket handshake")


def shown_path(segments: tuple[str, ...]) -> str:
    """Return the decoded path, truncated, for an error message."""
    path = "/" + "/".join(segments)
    return path if len(path) <= _SHOWN_CHARACTERS else path[:_SHOWN_CHARACTERS] + "…"
