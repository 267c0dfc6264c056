"""Which handler answers which path: pure matching of method and decoded path segments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from omni_ws.errors import MethodNotAllowed, NotFound
from omni_ws.transport.http.exchange import HttpExchange

_SHOWN_CHARACTERS: Final = 128

Handler = Callable[[HttpExchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Match:
    """The handler of a request, its template (a label of bounded variety, for metrics) and the path's parameters."""

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
        """The parameters where ``segments`` fit this template, else None."""
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
    """A table of routes.

    Templates look like ``/v1/models/{id}``; a last part ``{name:path}`` takes all that is left, slashes included. A
    literal part wins over a parameter, whatever was added first.
    """

    def __init__(self) -> None:
        self._routes: dict[tuple[str, ...], _Route] = {}
        #: Most literal first, so that the first fit is the right one.
        self._ordered: list[_Route] = []

    def add(self, method: str, template: str, handler: Handler) -> None:
        """Raises ValueError where the route stands already."""
        parts = tuple(part for part in template.split("/") if part)
        route = self._routes.setdefault(parts, _Route(template, parts))
        if method in route.methods:
            raise ValueError(f"{method} {template} has a handler already")
        route.methods[method] = handler
        self._ordered = sorted(
            self._routes.values(), key=lambda one: (one.catches_rest, [part.startswith("{") for part in one.parts])
        )

    @property
    def templates(self) -> tuple[tuple[str, frozenset[str]], ...]:
        """Every template with its methods."""
        return tuple((route.template, frozenset(route.methods)) for route in self._ordered)

    def match(self, method: str, segments: tuple[str, ...]) -> Match:
        """Raises NotFound, or MethodNotAllowed with what the path allows."""
        route, parameters = self._find(segments)
        handler = route.methods.get(method)
        if handler is None and method == "HEAD":
            handler = route.methods.get("GET")
        if handler is None:
            raise MethodNotAllowed(f"{route.template} does not take {method}", allow=route.allow)
        return Match(handler, route.template, parameters)

    def allow(self, segments: tuple[str, ...]) -> tuple[str, ...]:
        """The methods of a path; of all paths for ``*``. Raises NotFound."""
        if segments == ("*",):
            return tuple(sorted({method for route in self._ordered for method in route.allow}))
        return self._find(segments)[0].allow

    async def dispatch(self, exchange: HttpExchange) -> None:
        """Run the handler of the exchange's request. OPTIONS is answered here, before any handler asks for a key."""
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
        raise NotFound(f"there is nothing at {shown_path(segments)}")


def shown_path(segments: tuple[str, ...]) -> str:
    """The path for a message, as a client wrote it but for its escapes, and cut where it is long."""
    path = "/" + "/".join(segments)
    return path if len(path) <= _SHOWN_CHARACTERS else path[:_SHOWN_CHARACTERS] + "…"
