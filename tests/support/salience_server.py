"""The gRPC service on a free port, a stub that talks to it, and a client that decides which bytes it sends."""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from support.patience import PATIENCE_SEC
from support.raw_http import raw_client

from omni_ws.caller.script import beside
from omni_ws.config.keys import ApiKey
from omni_ws.config.model import GrpcConfig, ServerConfig
from omni_ws.generated import salience_pb2 as messages
from omni_ws.generated.salience_pb2_grpc import SalienceStub
from omni_ws.server import App, create_app, serve_tokens


@dataclass
class SalienceServer:
    app: App
    port: int
    channel: grpc.aio.Channel
    stub: Any
    metadata: tuple[tuple[str, str], ...] = ()
    #: None where the test serves by other means.
    listener: Any = None

    @property
    def held_bytes(self) -> int:
        return self.app.sessions.budget.used

    @property
    def sessions(self) -> int:
        return self.app.sessions.admission.sessions

    async def idle(self) -> None:
        """Until no call is at work: one that was cancelled ends later than its client believes."""
        await self.listener._servicer.wait_idle()

    def call(self, method: str, **fields: Any) -> Any:
        request = getattr(messages, f"{method}Request")(**fields)
        return getattr(self.stub, method)(request, metadata=self.metadata)

    async def open(self) -> str:
        session_id: str = (await self.call("OpenSession", model="local-model")).session_id
        return session_id

    def generate(self, session_id: str, tokens: Sequence[int] = (), offset: int = 0, **fields: Any) -> Any:
        return self.call("Generate", session_id=session_id, append_tokens=tokens, offset=offset, **fields)

    async def events(
        self, session_id: str, tokens: Sequence[int] = (), offset: int = 0, **fields: Any
    ) -> tuple[list[messages.Token], messages.GenerateDone]:
        events = [event async for event in self.generate(session_id, tokens, offset, **fields)]
        assert [event.WhichOneof("event") for event in events] == ["token"] * (len(events) - 1) + ["done"]
        return [event.token for event in events[:-1]], events[-1].done

    async def dump(self, session_id: str) -> list[int]:
        return list((await self.call("DumpSession", session_id=session_id)).tokens)

    async def fork(self, session_id: str, at: int) -> str:
        fork: str = (await self.call("ForkSession", session_id=session_id, at_position=at)).session_id
        return fork

    async def close(self, session_id: str) -> None:
        await self.call("CloseSession", session_id=session_id)


@contextlib.asynccontextmanager
async def salience_server(
    engine: Any,
    *,
    keys: tuple[ApiKey, ...] = (),
    config: ServerConfig | None = None,
    stops_engine: bool = True,
    **settings: Any,
) -> AsyncIterator[SalienceServer]:
    """``settings`` are those of the gRPC section. An engine that others use too goes on (not ``stops_engine``)."""
    config = config or ServerConfig(grpc=GrpcConfig(port=0, **settings))
    await engine.start()
    app = create_app(engine, config, keys)
    try:
        async with serve_tokens(app) as listener:
            assert listener is not None
            listener.begin()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{listener.port}") as channel:
                yield SalienceServer(app, listener.port, channel, SalienceStub(channel), listener=listener)
        assert app.sessions.admission.sessions == 0
        assert app.sessions.budget.used == 0
        assert engine.active_requests == 0
    finally:
        if stops_engine:
            await engine.stop()


@contextlib.asynccontextmanager
async def refused(status: grpc.StatusCode, match: str = "") -> AsyncIterator[None]:
    """The block is answered with this status, whose text contains ``match``."""
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        yield
    assert (refusal.value.code(), match in (refusal.value.details() or "")) == (status, True), refusal.value


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


@contextlib.asynccontextmanager
async def raw_http2(port: int, *, window: int = 65_535) -> AsyncIterator[RawHttp2]:
    """``window`` is what the server may send on each call."""
    async with raw_client(port) as connection:
        client = RawHttp2(connection.reader, connection.writer, window=window)
        async with beside(client._read()):
            yield client
