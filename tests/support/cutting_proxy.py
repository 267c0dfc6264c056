"""A TCP proxy that cuts connections after a given number of bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum


class Direction(Enum):
    TO_SERVER = "to server"
    TO_CLIENT = "to client"


@dataclass(frozen=True)
class Cut:
    """Bytes beyond ``after`` in ``direction`` never arrive. ``reset``: both sides see an RST, otherwise a FIN."""

    direction: Direction
    after: int
    reset: bool


class CuttingProxy:
    """Each connection takes the next cut of ``cuts``, and is whole once there are none left."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.cuts: deque[Cut] = deque()
        #: What the last connection carried.
        self.carried: dict[Direction, int] = {}
        self.connections = 0
        self.made = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        cut = self.cuts.popleft() if self.cuts else None
        self.carried = carried = dict.fromkeys(Direction, 0)
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
        pumps = [
            asyncio.create_task(_pump(reader, server_writer, carried, Direction.TO_SERVER, cut)),
            asyncio.create_task(_pump(server_reader, writer, carried, Direction.TO_CLIENT, cut)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            is_cut = any(pump.done() and pump.result() for pump in pumps)
            self.made += is_cut
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for one in (writer, server_writer):
                if cut is not None and cut.reset and is_cut:
                    one.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                    one.transport.abort()
                else:
                    one.close()
            for one in (writer, server_writer):
                with contextlib.suppress(ConnectionError):
                    await one.wait_closed()


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    carried: dict[Direction, int],
    direction: Direction,
    cut: Cut | None,
) -> bool:
    """Whether it ended because of the cut."""
    limit = cut.after if cut is not None and cut.direction is direction else None
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            if limit is not None and carried[direction] + len(data) > limit:
                data = data[: limit - carried[direction]]
                carried[direction] += len(data)
                writer.write(data)
                await writer.drain()
                return True
            carried[direction] += len(data)
            writer.write(data)
            await writer.drain()
    return False


@contextlib.asynccontextmanager
async def cutting_proxy(port: int) -> AsyncIterator[CuttingProxy]:
    proxy = CuttingProxy(port)
    handlers: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(proxy.serve(reader, writer))
        handlers.add(task)
        task.add_done_callback(handlers.discard)

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listener.close()
        for task in tuple(handlers):
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
