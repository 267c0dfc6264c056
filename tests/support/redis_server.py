"""A server of Redis or Valkey of one's own, on a free port of this machine; skipped by name where none is installed."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.patience import PATIENCE_SEC

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer:
    """The process, which can be killed, stopped and started anew; its data are in ``folder`` (append-only file)."""

    def __init__(self, folder: Path, *options: str, configuration: Path | None = None) -> None:
        """``configuration`` is the file of a sentinel, which begins with that."""
        if PROGRAM is None:
            pytest.skip("redis-server is not installed (on Debian: redis-server)")
        self._folder = folder
        self._options = options
        self._configuration = configuration
        self.port = _free_port()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        """Start it, and wait until it answers."""
        assert PROGRAM is not None
        port = ("--port", str(self.port), "--bind", "127.0.0.1")
        if self._configuration is None:
            durable = ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec")
            arguments = (*port, *durable, "--dir", str(self._folder), *self._options)
        else:
            arguments = (str(self._configuration), "--sentinel", *port, *self._options)
        self._process = await asyncio.create_subprocess_exec(PROGRAM, *arguments, stdout=asyncio.subprocess.PIPE)
        assert self._process.stdout is not None
        ready = b"Ready to accept connections" if self._configuration is None else b"Sentinel ID is"
        async with asyncio.timeout(PATIENCE_SEC):
            while ready not in (line := await self._process.stdout.readline()):
                assert line, "redis-server ended"

    async def kill(self) -> None:
        """Kill it, if it runs, and wait until it is gone."""
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.communicate()
            self._process = None

    def send(self, which: signal.Signals) -> None:
        """Send it a signal: SIGSTOP stops it, SIGCONT lets it go on."""
        assert self._process is not None
        self._process.send_signal(which)

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


def _free_port() -> int:
    """A free port of at most 55,535: a node of a cluster listens on the one 10,000 above it, too."""
    with contextlib.ExitStack() as taken:
        while True:
            one = taken.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if port <= 55_535:
                return port


@asynccontextmanager
async def redis_server(folder: Path, *options: str) -> AsyncIterator[RedisServer]:
    """Run a server during the block."""
    server = RedisServer(folder, *options)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()
