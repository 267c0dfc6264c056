"""A gRPC client that decides for itself which bytes of a message it sends, and sees what it is allowed to send."""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from support.patience import PATIENCE_SEC
from support.raw_http import raw_client

from omni_ws.caller.script import beside

DATA, HEADERS, RESET, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
ACK = END_STREAM = 1
END_HEADERS = 4
TABLE_SIZE, INITIAL_WINDOW = 1, 4
FRAME_BYTES = 16_384


class RawHttp2:
    """Calls are numbered as HTTP/2 numbers them: 1, 3, 5 …; ``begin`` in this order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, window: int) -> None:
        self._reader, self._writer = reader, writer
        self._stream_window = 65_535
        self._connection_window = 65_535
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._granted: defaultdict[int, int] = defaultdict(int)
        self._changed = asyncio.Event()
        self.greeted = False
        self.pongs = 0
        self.closed = False
        self.headers: defaultdict[int, bytes] = defaultdict(bytes)
        self.over: set[int] = set()
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        # Without a table, header fields come as they are.
        self._frame(SETTINGS, 0, 0, struct.pack(">HIHI", TABLE_SIZE, 0, INITIAL_WINDOW, window))

    def begin(self, stream: int, path: str, *, message_bytes: int | None, end: bool = False) -> None:
        """A call whose message is announced as so long; None: not even that is said. ``end``: nothing more comes."""
        fields = {
            ":method": "POST", ":scheme": "http", ":path": path, ":authority": "here",
            "content-type": "application/grpc", "te": "trailers",
        }  # fmt: skip
        block = b"".join(
            b"\0" + b"".join(bytes([len(one)]) + one.encode() for one in field) for field in fields.items()
        )
        self._frame(HEADERS, END_HEADERS, stream, block)
        if message_bytes is not None:
            self._data(stream, struct.pack(">BI", 0, message_bytes))
        if end:
            self._frame(DATA, END_STREAM, stream, b"")

    def room(self, stream: int) -> int:
        return min(self._connection_window, self._stream_window + self._granted[stream] - self._sent[stream])

    def sent(self, stream: int) -> int:
        """Bytes of its message, the five that announce it included."""
        return self._sent[stream]

    async def send(self, stream: int, size: int) -> None:
        """So many bytes more of its message, as the server lets them in."""
        while size:
            await self.until(lambda: self.room(stream) > 0)
            part = min(size, self.room(stream), FRAME_BYTES)
            self._data(stream, b"\0" * part)
            size -= part

    async def status(self, stream: int) -> int:
        """Of the call, once it is over."""
        await self.until(lambda: stream in self.over)
        found = re.search(rb"grpc-status.(\d+)", self.headers[stream], re.DOTALL)
        assert found is not None, self.headers[stream]
        return int(found[1])

    async def ping(self) -> None:
        """Everything that was sent has been looked at when this returns."""
        wanted = self.pongs + 1
        self._frame(PING, 0, 0, bytes(8))
        await self.until(lambda: self.pongs >= wanted)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_SEC):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def _data(self, stream: int, payload: bytes) -> None:
        self._frame(DATA, 0, stream, payload)
        self._sent[stream] += len(payload)
        self._connection_window -= len(payload)

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._writer.write(struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload)

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self._reader.readexactly(9)
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                self._received(kind, flags, stream, await self._reader.readexactly(int.from_bytes(head[:3], "big")))
                self._changed.set()
        self.closed = True
        self._changed.set()

    def _received(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self._stream_window = dict(struct.iter_unpack(">HI", payload)).get(INITIAL_WINDOW, self._stream_window)
            self._frame(SETTINGS, ACK, 0, b"")
            self.greeted = True
        elif kind == PING:
            self.pongs += bool(flags & ACK)
            if not flags & ACK:
                self._frame(PING, ACK, 0, payload)
        elif kind == WINDOW_UPDATE and stream:
            self._granted[stream] += int.from_bytes(payload, "big")
        elif kind == WINDOW_UPDATE:
            self._connection_window += int.from_bytes(payload, "big")
        elif kind == HEADERS:
            self.headers[stream] += payload
        if kind == RESET or (kind in (HEADERS, DATA) and flags & END_STREAM):
            self.over.add(stream)


@asynccontextmanager
async def raw_http2(port: int, *, window: int = 65_535) -> AsyncIterator[RawHttp2]:
    """``window`` is what the server may send on each call."""
    async with raw_client(port) as connection:
        client = RawHttp2(connection.reader, connection.writer, window=window)
        async with beside(client._read()):
            yield client
