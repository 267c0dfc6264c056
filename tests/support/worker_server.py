"""A server of several workers, in processes of its own, with its log as it is written."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

from support.patience import PATIENCE_SEC
from support.raw_http import call
from support.until import PERIOD_SEC


class WorkerServer:
    """The command ``omni-ws serve`` with workers and the fake engine."""

    def __init__(self, log: IO[bytes], *flags: str) -> None:
        command = [sys.executable, "-m", "omni_ws", "serve", "--engine", "fake", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=log)
        self._log = Path(log.name)
        self.port = 0

    @property
    def said(self) -> str:
        """Its log so far."""
        return self._log.read_text(encoding="utf-8")

    def line(self, pattern: str) -> re.Match[str]:
        """The first match in the log, once it is there. Blocks."""
        end = time.monotonic() + PATIENCE_SEC
        while True:
            goes_on = self.process.poll() is None and time.monotonic() < end
            if (match := re.search(pattern, self.said)) is not None:
                return match
            assert goes_on, f"no line like {pattern!r} in:\n{self.said}"
            time.sleep(PERIOD_SEC)

    async def logged(self, pattern: str) -> re.Match[str]:
        return await asyncio.to_thread(self.line, pattern)

    @property
    def websocket_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/streaming_input"

    def pid_of(self, worker: str) -> int:
        return int(self.line(rf"started worker {worker} \(process (\d+)\)")[1])

    @property
    def workers(self) -> set[int]:
        """The numbers of the workers that were started and have not ended. With two, a successor's is higher by two."""
        said = self.said
        started = re.findall(r"started worker w(\d+) ", said)
        ended = re.findall(r"worker w(\d+) \(.* has ended", said)
        return {*map(int, started)} - {*map(int, ended)}

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    async def get(self, path: str) -> Any:
        return await call(self.port, "GET", path)

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE_SEC)


@contextmanager
def server_process(*flags: str) -> Iterator[WorkerServer]:
    """A server that listens. Whatever the test does, none of its processes is left."""
    with NamedTemporaryFile() as log:
        server = WorkerServer(log, *flags)
        try:
            server.port = int(server.line(r"listens on http://127\.0\.0\.1:(\d+)")[1])
            yield server
        finally:
            for _ in range(2):  # drain, and at once
                server.process.terminate()
            try:
                server.process.wait(PATIENCE_SEC)
            finally:
                server.process.kill()


@contextmanager
def worker_server(*flags: str) -> Iterator[WorkerServer]:
    """A server whose two workers are ready."""
    with server_process("--workers", "2", *flags) as server:
        server.line("all 2 workers are ready")
        yield server
