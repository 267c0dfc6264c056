"""A web server with media, which a server under test may be allowed to fetch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.http_server import RoutedApplication, serving

from omni_ws.audio.container import wav_header
from omni_ws.transport.http.exchange import HttpExchange

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


@asynccontextmanager
async def media_host(**options: Any) -> AsyncIterator[MediaHost]:
    host = MediaHost()
    async with serving(RoutedApplication({"GET /{path:path}": host.answer}), **options) as served:
        host.port = served.port
        yield host


def listed(host: MediaHost, *more: str) -> tuple[str, ...]:
    return (f"http://127.0.0.1:{host.port}", *more)
