"""An HTTP client that sends exactly the bytes it is told, and reads exactly what an answer, or a stream, is made of."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import orjson


@dataclass(frozen=True)
class RawResponse:
    """``headers`` are lower-case names with the last value of each; ``body`` has its chunks joined."""

    status: int
    headers: dict[str, str]
    body: bytes
    version: str = "HTTP/1.1"
    interim: list[int] = field(default_factory=list)

    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of a JSON answer."""
        error: dict[str, Any] = self.json()["error"]
        return error


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *parts: bytes | str) -> None:
        for part in parts:
            self.writer.write(part.encode("latin-1") if isinstance(part, str) else part)
        await self.writer.drain()

    def finish_sending(self) -> None:
        self.writer.write_eof()

    async def head(self) -> tuple[str, int, dict[str, str]]:
        """Status line and headers of the next answer, interim ones included."""
        raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = raw.rstrip("\r\n").split("\r\n")
        version, status, *_ = status_line.split(" ", 2)
        pairs = (line.split(":", 1) for line in lines)
        return version, int(status), {name.strip().lower(): value.strip() for name, value in pairs}

    async def response(self, *, to_head: bool = False) -> RawResponse:
        """The next answer, whole; ``to_head`` says that it answers a HEAD request."""
        interim: list[int] = []
        version, status, headers = await self.head()
        while status < 200 and status != 101:
            interim.append(status)
            version, status, headers = await self.head()
        body = b""
        if to_head or status in (101, 204, 304):
            pass
        elif headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in self.chunks()])
        elif "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            body = await self.reader.read()
        return RawResponse(status, headers, body, version, interim)

    async def chunk(self) -> bytes:
        """One chunk of a chunked answer, b"" at its end."""
        size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
        data = await self.reader.readexactly(size)
        assert await self.reader.readexactly(2) == b"\r\n"
        return data

    async def chunks(self) -> AsyncIterator[bytes]:
        while chunk := await self.chunk():
            yield chunk

    async def rest(self) -> bytes:
        """Everything until the server closes; what came before a reset counts too."""
        received = bytearray()
        with contextlib.suppress(ConnectionError):
            while data := await self.reader.read(65536):
                received += data
        return bytes(received)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await self.writer.wait_closed()

    def reset(self) -> None:
        """End the connection by a reset, as a killed process with unread data does."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def raw_client(
    port: int, *, tls: ssl.SSLContext | None = None, read_ahead: int = 2**20
) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, limit=read_ahead)
    client = RawClient(reader, writer)
    try:
        yield client
    finally:
        await client.close()


def request(method: str, target: str, *headers: str, body: bytes = b"") -> bytes:
    """The bytes of a request with a Host, and a Content-Length where there is a body and no other framing."""
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *headers]
    framed = any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers)
    if body and not framed:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def websocket_upgrade(target: str, *headers: str) -> bytes:
    """The bytes of a WebSocket handshake."""
    return request(
        "GET",
        target,
        "Upgrade: websocket",
        "Connection: keep-alive, Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        *headers,
    )


def chunked(*parts: bytes, end: bool = True) -> bytes:
    """``parts`` as HTTP chunks."""
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return framed + (b"0\r\n\r\n" if end else b"")


async def call(port: int, method: str, target: str, body: Any = None, *headers: str) -> RawResponse:
    """One request of its own connection; ``body`` is bytes, or what becomes JSON."""
    if body is not None and not any(header.lower().startswith("content-type") for header in headers):
        headers = ("Content-Type: application/json", *headers)
    data = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
    async with raw_client(port) as client:
        await client.send(request(method, target, "Connection: close", *headers, body=data))
        return await client.response()


async def post(port: int, target: str, body: Any, *headers: str) -> RawResponse:
    return await call(port, "POST", target, body, *headers)


@dataclass(frozen=True)
class Event:
    """``name`` is that of an ``event:`` line; ``data`` that of the one ``data:`` line. A comment has neither.

    ``id`` is that of an ``id:`` line, which comes first: a stream of such events can be resumed. Others have 0.
    """

    data: str
    name: str | None = None
    comment: bool = False
    id: int = 0

    def json(self) -> Any:
        return orjson.loads(self.data)


DONE = Event("[DONE]")


def parse_event(block: str) -> Event:
    if block.startswith(":"):
        assert "\n" not in block
        return Event("", comment=True)
    lines = block.split("\n")
    number = int(lines.pop(0).removeprefix("id: ")) if lines[0].startswith("id: ") else 0
    name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else None
    assert len(lines) == 1, block
    assert lines[0].startswith("data: "), block
    return Event(lines[0].removeprefix("data: "), name, id=number)


def parse_events(body: bytes) -> list[Event]:
    """All events of an answer that is complete."""
    text = body.decode()
    assert text.endswith("\n\n"), text[-80:]
    assert "\r" not in text
    return [parse_event(block) for block in text[:-2].split("\n\n")]


def events_of(answer: RawResponse) -> list[Event]:
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return parse_events(answer.body)


async def arriving_events(client: RawClient) -> AsyncIterator[Event]:
    """The events of a chunked answer as they come; ends with the answer."""
    pending = ""
    async for chunk in client.chunks():
        pending += chunk.decode()
        *whole, pending = pending.split("\n\n")
        for block in whole:
            yield parse_event(block)
    assert pending == "", "the answer ends inside an event"


def content(events: list[Event]) -> str:
    """The text of a chat stream."""
    texts = []
    for event in events:
        if event.name is None and not event.comment and event != DONE:
            texts += [choice["delta"].get("content") or "" for choice in event.json()["choices"]]
    return "".join(texts)
