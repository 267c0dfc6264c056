"""A relay between a client and a server whose connections can be cut, and held up, like a real network's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class TcpRelay:
    """Everything goes through until it is cut or held."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        #: Where new connections are refused at once.
        self.refusing = False
        self.accepted = 0
        #: What clients sent, by connection.
        self.sent: list[bytearray] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()

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
        if self.refusing:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        sent = bytearray()
        self.sent.append(sent)
        self._pairs.add(pair)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, far_writer, sent))
                tasks.create_task(self._pump(far_reader, writer))
        finally:
            self._pairs.discard(pair)
            for one in pair:
                one.transport.abort()

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, kept: bytearray | None = None
    ) -> None:
        try:
            while data := await source.read(4096):
                if kept is not None:
                    kept += data
                await self._flowing.wait()
                target.write(data)
                await target.drain()
            if target.can_write_eof():
                target.write_eof()
        except OSError:
            target.transport.abort()  # a reset goes through, as on a network


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
