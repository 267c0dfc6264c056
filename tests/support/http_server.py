"""The front door on a real socket, before handlers that a test gives, and a web server with media behind it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.patience import PATIENCE_SEC
from support.virtual_clock import VirtualClockLoop
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from omni_ws.audio.container import wav_header
from omni_ws.errors import NotFound
from omni_ws.tools.lan_certificate import kept_certificate
from omni_ws.transport.http.application import Application, Handler, HttpLimits, Router, UpgradeDecision
from omni_ws.transport.http.connections import Connections
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.http.front_door import front_door
from omni_ws.transport.http.request import HttpRequest

UpgradeHandler = Callable[[HttpRequest], UpgradeDecision]


@dataclass
class RoutedApplication(Application):
    """``handlers`` maps "METHOD /template" to what answers; ``upgrades`` maps a path to what accepts an upgrade."""

    handlers: Mapping[str, Handler] = field(default_factory=dict)
    upgrades: Mapping[str, UpgradeHandler] = field(default_factory=dict)
    origins: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.router = Router()
        for route, handler in self.handlers.items():
            method, _, template = route.partition(" ")
            self.router.add(method, template, handler)

    async def handle(self, exchange: HttpExchange) -> None:
        await self.router.dispatch(exchange)

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        if request.path not in self.upgrades:
            raise NotFound("not found")
        return self.upgrades[request.path](request)

    def allows_host(self, request: HttpRequest) -> bool:
        return True

    def allows_origin(self, request: HttpRequest) -> bool:
        return request.headers.get("origin") in self.origins


async def echo(connection: ServerConnection) -> None:
    """A WebSocket handler that sends back what it gets."""
    with contextlib.suppress(ConnectionClosed):
        async for message in connection:
            await connection.send(message)


@dataclass(frozen=True)
class Serving:
    port: int
    connections: Connections
    server: Server


@contextlib.asynccontextmanager
async def serving(
    application: RoutedApplication,
    *,
    limits: HttpLimits | None = None,
    on_websocket: Callable[[ServerConnection], Awaitable[None]] = echo,
    port: int = 0,
    max_connections: int | None = None,
    elsewhere: Any = None,
    ssl: ssl.SSLContext | None = None,
    **options: Any,
) -> AsyncIterator[Serving]:
    """A server for the time of the context; what is left of its connections is dropped at the end."""
    if limits is None and not isinstance(asyncio.get_running_loop(), VirtualClockLoop):
        # On a busy machine the usual ones would end what a test has not got to yet.
        limits = HttpLimits(
            header_timeout_sec=PATIENCE_SEC,
            body_timeout_sec=PATIENCE_SEC,
            keepalive_timeout_sec=PATIENCE_SEC,
            write_timeout_sec=PATIENCE_SEC,
        )
    connections = Connections(max_open=max_connections)
    door = front_door(application, connections=connections, limits=limits, elsewhere=elsewhere, tls=ssl)
    server = await serve(on_websocket, "127.0.0.1", port, create_connection=door, compression=None, **options)
    try:
        yield Serving(server.sockets[0].getsockname()[1], connections, server)
    finally:
        server.close()
        connections.abort_all()
        assert await connections.wait_idle(PATIENCE_SEC), "a handler did not end"
        await server.wait_closed()


def tls_contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's and a client's context around a certificate made for this run: ``certificate.pem``, with its key."""
    certificate = folder / "certificate.pem"
    kept_certificate(certificate, ["localhost", "127.0.0.1"])
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate)
    return server, ssl.create_default_context(cafile=str(certificate))


GIF = b"GIF89a" + bytes(20)
WAV = wav_header(sample_rate=16_000, channels=1, data_bytes=320) + bytes(320)


class MediaHost:
    """A web server with images, on 127.0.0.1."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[dict[str, str]] = []
        #: Set to end requests for /silent, which do not respond.
        self.released = asyncio.Event()
        self.left = asyncio.Event()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def answer(self, exchange: HttpExchange) -> None:
        self.requests.append({name: exchange.request.headers.get(name) or "" for name in exchange.request.headers})
        path = exchange.request.path
        if path.startswith("/to/"):
            await exchange.respond(302, [("Location", path.removeprefix("/to"))])
        elif path == "/away":
            await exchange.respond(302, [("Location", exchange.request.query.get("url") or "")])
        elif path == "/endless":
            await exchange.start(200, [("Content-Type", "image/gif")])
            while True:
                await exchange.write(bytes(4096))
        elif path == "/silent":
            try:
                await self.released.wait()
                await exchange.respond(204)
            finally:
                self.left.set()
        elif path == "/zipped":
            await exchange.respond(200, [("Content-Encoding", "gzip")], GIF)
        elif path == "/missing":
            await exchange.respond(404, [], b"the inner text of a host")
        else:
            kind, data = {
                "/a.gif": ("image/gif", GIF),
                "/untyped.gif": ("application/octet-stream", GIF),
                "/a.wav": ("application/octet-stream", WAV),
                "/typed": ("audio/wav", WAV),
                "/a.mp4": ("video/mp4", b"mp4"),
                "/a.txt": ("text/plain", b"text"),
                "/lies": ("audio/wav", GIF),
            }[path]
            await exchange.respond(200, [("Content-Type", kind)], data)


@contextlib.asynccontextmanager
async def media_host(**options: Any) -> AsyncIterator[MediaHost]:
    host = MediaHost()
    async with serving(RoutedApplication({"GET /{path:path}": host.answer}), **options) as served:
        host.port = served.port
        yield host


def listed(host: MediaHost, *more: str) -> tuple[str, ...]:
    return (f"http://127.0.0.1:{host.port}", *more)
