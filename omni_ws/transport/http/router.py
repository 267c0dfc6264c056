"""Router: finds what answers a request, by its method and its decoded path segments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from omni_ws.errors import MethodNotAllowed, NotFound, UpgradeRequired
from omni_ws.transport.http.application import UpgradeDecision
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.http.request import HttpRequest

_SHOWN_CHARACTERS: Final = 128

Handler = Callable[[HttpExchange], Awaitable[None]]
#: Accepts a WebSocket handshake, or refuses it by raising an OmniError.
Upgrade = Callable[[HttpRequest], UpgradeDecision]


@dataclass(frozen=True, slots=True)
class Match:
    """The handler of a request, the template of its route (bounded in number, hence a metrics label) and the path's
    parameters."""

    handler: Handler
    template: str
    parameters: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Route:
    template: str
    parts: tuple[str, ...]
    methods: dict[str, Handler] = field(default_factory=dict)

    @property
    def catches_rest(self) -> bool:
        return bool(self.parts) and self.parts[-1].endswith(":path}")

    def parameters(self, segments: tuple[str, ...]) -> dict[str, str] | None:
        """The path's parameters, or None for segments that do not match."""
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
    """A table of routes, and of WebSocket endpoints by their paths.

    Templates look like ``/v1/models/{id}``; a final part ``{name:path}`` matches the rest of the path, slashes
    included. A literal part takes precedence over a parameter, in whatever order the two were added.
    """

    def __init__(self) -> None:
        self._routes: dict[tuple[str, ...], _Route] = {}
        #: Most literal first: the first match is the right one.
        self._ordered: list[_Route] = []
        self._websockets: dict[str, list[tuple[Callable[[HttpRequest], bool], Upgrade]]] = {}

    def add(self, method: str, template: str, handler: Handler) -> None:
        """Raises ValueError for a route that has a handler already."""
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
        """``upgrade`` answers the handshakes at ``path`` that ``takes`` accepts; endpoints are asked in the order in
        which they were added.

        A GET without an upgrade needs a route of its own; see ``needs_upgrade``.
        """
        self._websockets.setdefault(path, []).append((takes, upgrade))

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """The answer to a WebSocket handshake. Raises what refuses it: NotFound where no endpoint takes it."""
        for takes, upgrade in self._websockets.get(request.path, ()):
            if takes(request):
                return upgrade(request)
        self.match("GET", request.segments)  # raises its own NotFound where there is no route either
        raise NotFound(f"no WebSocket at {shown_path(request.segments)}")

    def match(self, method: str, segments: tuple[str, ...]) -> Match:
        """Raises NotFound, or MethodNotAllowed with the methods of the path."""
        route, parameters = self._find(segments)
        handler = route.methods.get(method)
        if handler is None and method == "HEAD":
            handler = route.methods.get("GET")
        if handler is None:
            raise MethodNotAllowed(f"{method} is not allowed for {route.template}", allow=route.allow)
        return Match(handler, route.template, parameters)

    def allow(self, segments: tuple[str, ...]) -> tuple[str, ...]:
        """The methods of a path, or of all paths together for ``*``. Raises NotFound."""
        if segments == ("*",):
            return tuple(sorted({method for route in self._ordered for method in route.allow}))
        return self._find(segments)[0].allow

    async def dispatch(self, exchange: HttpExchange) -> None:
        """Runs the handler of the exchange's request. OPTIONS is answered here, without authentication."""
        request = exchange.request
        if request.method == "OPTIONS":
            await exchange.respond_options(self.allow(request.segments))
            return
        match = self.match(request.method, request.segments)
        exchange.route = match.template
        exchange.path_parameters = match.parameters
        await match.handler(exchange)

    def _find(self, segments: tuple[str, ...]) -> tuple[_Route, dict[str, str]]:
        for route in self._ordered:
            parameters = route.parameters(segments)
            if parameters is not None:
                return route, parameters
        raise NotFound(f"{shown_path(segments)} not found")


async def needs_upgrade(exchange: HttpExchange) -> None:
    """The handler of a GET at the path of a WebSocket. Raises UpgradeRequired."""
    raise UpgradeRequired("this path requires a WebSocket handshake")


def shown_path(segments: tuple[str, ...]) -> str:
    """The decoded path, truncated, for an error message."""
    path = "/" + "/".join(segments)
    return path if len(path) <= _SHOWN_CHARACTERS else path[:_SHOWN_CHARACTERS] + "…"
