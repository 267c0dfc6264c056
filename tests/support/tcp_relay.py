"""A relay between a client and a server whose connections can be cut, and held up, like a real network's."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum

from support.raw_http import RawClient


class Direction(Enum):
    TO_SERVER = "to server"
    TO_CLIENT = "to client"


@dataclass(frozen=True)
class Cut:
    """Bytes beyond ``after`` in ``direction`` never arrive. ``reset``: both sides see an RST, otherwise a FIN."""

    direction: Direction
    after: int
    reset: bool


_Pair = tuple[asyncio.StreamWriter, asyncio.StreamWriter]


class TcpRelay:
    """Everything goes through until it is cut or held. Each connection takes the next of ``cuts``, if there is one."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        #: Where new connections are refused at once.
        self.refusing = False
        self.accepted = 0
        #: What clients sent, by connection.
        self.sent: list[bytearray] = []
        self.cuts: deque[Cut] = deque()
        #: How many of them were made.
        self.made = 0
        #: How many bytes the last connection carried.
        self.carried: dict[Direction, int] = {}
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._pairs: set[_Pair] = set()

    def cut(self) -> None:
        """Break every connection, both ways, as a network does: by a reset, without a goodbye."""
        for pair in self._pairs:
            for writer in pair:
                writer.transport.abort()

    def hold(self) -> None:
        """Let nothing more through, in either direction, while all stays connected."""
        self._flowing.clear()

    def let_go(self) -> None:
        self._flowing.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            if self.refusing:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        cut = self.cuts.popleft() if self.cuts else None
        self.sent.append(sent := bytearray())
        self.carried = carried = dict.fromkeys(Direction, 0)
        self._pairs.add(pair)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, pair, Direction.TO_SERVER, carried, cut, sent))
                tasks.create_task(self._pump(far_reader, pair, Direction.TO_CLIENT, carried, cut))
            for one in pair:
                await RawClient(reader, one).close()
        finally:
            self._pairs.discard(pair)
            for one in pair:
                one.transport.abort()

    async def _pump(
        self,
        source: asyncio.StreamReader,
        pair: _Pair,
        direction: Direction,
        carried: dict[Direction, int],
        cut: Cut | None,
        kept: bytearray | None = None,
    ) -> None:
        target = pair[direction is Direction.TO_SERVER]
        limit = cut.after if cut is not None and cut.direction is direction else None
        try:
            while data := await source.read(4096):
                if kept is not None:
                    kept += data
                await self._flowing.wait()
                passed = data if limit is None else data[: limit - carried[direction]]
                carried[direction] += len(passed)
                target.write(passed)
                await target.drain()
                if cut is not None and len(passed) < len(data):
                    self.made += 1
                    for one in pair:
                        RawClient(source, one).reset() if cut.reset else one.close()
                    return
            if target.can_write_eof():
                target.write_eof()
        except OSError:
            target.transport.abort()  # a reset goes through, as on a network
        except RuntimeError:
            # uvloop says so where it has closed the transport after a reset.
            if not target.transport.is_closing():
                raise


@contextlib.asynccontextmanager
async def tcp_relay(target_port: int) -> AsyncIterator[TcpRelay]:
    relay = TcpRelay(target_port)
    running: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(relay.serve(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    # A small window: what is held up must be felt by who sends.
    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=8192)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()
