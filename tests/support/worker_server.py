"""A server of several workers, in processes of its own, with its log as it is written."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.patience import PATIENCE_SEC
from support.raw_http import call


class WorkerServer:
    """The command ``omni-ws serve`` with workers and the fake engine."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "omni_ws", "serve", "--engine", "fake", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = 0

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._more:
                self.lines.append(line)
                self._more.notify_all()
        with self._more:
            self.lines.append("the end")
            self._more.notify_all()

    def line(self, pattern: str) -> re.Match[str]:
        """The first line of the log that matches, once it is there. Blocks."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.lines if (match := re.search(pattern, line))), None)

        with self._more:
            self._more.wait_for(lambda: found() or self.lines[-1:] == ["the end"], PATIENCE_SEC)
            match = found()
        assert match is not None, f"no line like {pattern!r} in:\n{''.join(self.lines)}"
        return match

    async def logged(self, pattern: str) -> re.Match[str]:
        return await asyncio.to_thread(self.line, pattern)

    def close(self) -> None:
        self._reader.join(PATIENCE_SEC)
        if self.process.stderr is not None:
            self.process.stderr.close()

    @property
    def websocket_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/streaming_input"

    def pid_of(self, worker: str) -> int:
        return int(self.line(rf"started worker {worker} \(process (\d+)\)")[1])

    @property
    def workers(self) -> set[int]:
        """The numbers of the workers that were started and have not ended. With two, a successor's is higher by two."""
        said = "".join(self.lines)
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
    server = WorkerServer(*flags)
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
            server.close()


@contextmanager
def worker_server(*flags: str) -> Iterator[WorkerServer]:
    """A server whose two workers are ready."""
    with server_process("--workers", "2", *flags) as server:
        server.line("all 2 workers are ready")
        yield server
