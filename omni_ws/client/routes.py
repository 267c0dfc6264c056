"""The addresses of a server, or of its replicas: which a client tries first, and which have failed."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from websockets.proxy import get_proxy
from websockets.uri import parse_uri

from omni_ws.errors import InvalidValue

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def websocket_url(url: str) -> str:
    """Complete a URL: ``http`` becomes ``ws``, and an empty path becomes ``/v1/streaming_input``.

    Raises InvalidValue if it is not a WebSocket URL.
    """
    refusal = InvalidValue(f"not a WebSocket URL: {url}", param="url")
    try:
        parts = urlsplit(url if "://" in url else f"ws://{url}")
        port = parts.port
        (parts.hostname or "").encode("idna")  # as a name is resolved
    except ValueError:
        raise refusal from None
    scheme = _SCHEMES.get(parts.scheme)
    if scheme is None or not parts.hostname or port == 0:
        raise refusal
    path = parts.path if parts.path not in ("", "/") else "/v1/streaming_input"
    return urlunsplit((scheme, parts.netloc, path, parts.query, ""))


class Route(NamedTuple):
    """A way to a server: its URL and, if its name has several addresses, the one to connect to."""

    url: str
    address: str | None = None


class Routes:
    """The routes to one server or to replicas that share a store, and those of them that failed.

    Names are resolved for each connection, so that a client finds an address that is new. A route that failed is tried
    after all others until it works again: a process that is stopped still accepts connections and never answers them.
    """

    def __init__(self, urls: str | Sequence[str]) -> None:
        self.urls = (urls,) if isinstance(urls, str) else tuple(urls)
        if not self.urls:
            raise InvalidValue("no URL of a server", param="url")
        #: The route of the connection of the moment, or of the last attempt.
        self.current: Route | None = None
        #: An ordered set: the last failure is at the end.
        self._failed: dict[Route, None] = {}

    async def in_order(self) -> list[Route]:
        """Resolve the names, and return all routes: the current one, others, and then those that failed.

        Raises InvalidValue for a URL that is none, and OSError if no name has an address.
        """
        urls = [websocket_url(url) for url in self.urls]
        found: list[Route] = []
        failure: OSError | None = None
        for routes in await asyncio.gather(*map(_routes_to, urls), return_exceptions=True):
            match routes:
                case list():
                    found += routes
                case OSError():
                    failure = routes
                case _:
                    raise routes
        if not found and failure is not None:
            raise failure
        places = {route: place for place, route in enumerate(self._failed, 1)}
        return sorted(found, key=lambda route: (places.get(route, 0), route != self.current))

    def tries(self, route: Route) -> None:
        """Make a route the current one."""
        self.current = route

    def works(self) -> None:
        """Record that there is a connection by the current route."""
        if self.current is not None:
            self._failed.pop(self.current, None)

    def fails(self) -> None:
        """Record that the current route led to no server, or to one that does not answer any more."""
        if self.current is not None:
            self._failed.pop(self.current, None)
            self._failed[self.current] = None


async def _routes_to(url: str) -> list[Route]:
    """Return a route for each address of the host, or one route without an address if there is no choice."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if _is_address(host) or get_proxy(parse_uri(url)) is not None:
        return [Route(url)]
    port = parts.port or (443 if parts.scheme == "wss" else 80)
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    return [Route(url, address) for address in addresses] if len(addresses) > 1 else [Route(url)]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
