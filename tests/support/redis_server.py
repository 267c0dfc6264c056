"""A server of Redis or Valkey of one's own, on a free port of this machine; skipped by name where none is installed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.fleet.processes import StoreProcess, missing


class RedisServer(StoreProcess):
    """The process, which can be killed, stopped and started anew. ``configuration`` is the file of a sentinel."""

    def __init__(self, folder: Path, *options: str, configuration: Path | None = None) -> None:
        if (reason := missing()) is not None:
            pytest.skip(reason)
        super().__init__(folder / "redis")
        program, *usual = self._command
        self._command = [program, *([] if configuration is None else [str(configuration)]), *usual, *options]

    async def ask(self, *words: str) -> bytes:
        """Send one command, and return the first line of the answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            parts = b"".join(b"$%d\r\n%s\r\n" % (len(word.encode()), word.encode()) for word in words)
            writer.write(b"*%d\r\n" % len(words) + parts)
            return (await reader.readline()).strip()
        finally:
            writer.close()
            await writer.wait_closed()


@asynccontextmanager
async def redis_server(folder: Path, *options: str, configuration: Path | None = None) -> AsyncIterator[RedisServer]:
    """Run a server during the block."""
    server = RedisServer(folder, *options, configuration=configuration)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()
