"""The processes of a fleet: a store, replicas of the server that share it, and a front."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

from benchmarks.server_process import free_port

#: In which a process has to do what it was started or told to do.
PATIENCE_SEC: Final = 120.0
#: Of a program that keeps sessions, with its package of Debian; the first that is installed is used.
STORES: Final = {"valkey-server": "valkey-server", "redis-server": "redis-server"}
LOOK_SEC: Final = 0.02


def missing() -> str | None:
    """What a fleet with a store of its own process needs and this machine lacks, by name; None if nothing."""
    if importlib.util.find_spec("redis") is None:
        return "the package redis (the extra redis) is not installed"
    if _store_program() is None:
        return "redis-server is not installed (Debian: redis-server)"
    return None


def _store_program() -> str | None:
    return next((path for path in map(shutil.which, STORES) if path is not None), None)


class Process:
    """A process that is killed, stopped and started again; what it says goes to ``log``."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self.is_stopped = False
        self._command = command
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; return once it serves."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(*self._command, stdout=log, stderr=log)
        await self.until_well()

    async def until_well(self) -> None:
        """Return once it serves. Raises RuntimeError if it ends instead."""
        end = now() + PATIENCE_SEC
        while not await asyncio.to_thread(self.serves):
            if not self.is_running or now() > end:
                raise RuntimeError(f"{self.name} does not serve: {self.last_lines()}")
            await asyncio.sleep(LOOK_SEC)

    def serves(self) -> bool:
        """Whether it does its work. Called in a thread."""
        raise NotImplementedError

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self.is_stopped = number is signal.SIGSTOP

    async def kill(self) -> None:
        """SIGKILL, also to one that is stopped."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self.is_stopped = False

    async def end(self) -> int:
        """SIGTERM; return the exit status."""
        self.signal(signal.SIGTERM)
        assert self._process is not None
        return await asyncio.wait_for(self._process.wait(), PATIENCE_SEC)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None and not self.is_stopped

    def lines_about(self, session_id: str) -> list[str]:
        """The lines of its log that name a session."""
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        return [line for line in text.splitlines() if session_id in line]

    def last_lines(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-2000:] if self._log.exists() else ""


class StoreProcess(Process):
    """A Valkey or Redis of its own, which keeps what it acknowledged in an append-only file."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        program = _store_program()
        assert program is not None
        folder.mkdir()
        options = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(folder), "appendonly": "yes", "save": ""}
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        super().__init__("the store", [program, *flags], folder / "log")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def serves(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))  # not while it reads its file
        return False


class Replica(Process):
    """``omni-ws serve`` over the fake engine, which echoes words at a pace."""

    def __init__(self, replica_id: str, folder: Path, *, store: str, word_ms: int) -> None:
        self.port = free_port()
        flags: dict[str, object] = {
            "engine": "fake",
            "fake.chunk-interval-ms": word_ms,
            "port": self.port,
            "replica-id": replica_id,
            "log-level": "info",
        }
        if store != "memory":
            # All processes of the fleet share the cores: a commit that waits for them is not the store's fault.
            flags |= {"sessions.store": store, "sessions.store-slow-sec": 5}
        command = [sys.executable, "-m", "omni_ws", "serve", *(f"--{name}={value}" for name, value in flags.items())]
        super().__init__(replica_id, command, folder / f"{replica_id}.log")

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/streaming_input"

    def health(self) -> dict[str, Any]:
        with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=20) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def serves(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.health()["status"] == "ok")
        return False


@contextlib.asynccontextmanager
async def fleet_of(
    count: int, folder: Path, *, store: str, word_ms: int
) -> AsyncIterator[tuple[list[Replica], StoreProcess | None]]:
    """So many replicas that share a store, all of which serve.

    ``store`` is ``redis`` for a process of its own, else a value of ``sessions.store``.
    """
    own = StoreProcess(folder / "store") if store == "redis" else None
    replicas = [
        Replica(name, folder, store=store if own is None else own.url, word_ms=word_ms) for name in "abcdefgh"[:count]
    ]
    try:
        if own is not None:
            await own.start()
        await asyncio.gather(*(one.start() for one in replicas))
        yield replicas, own
    finally:
        for one in replicas:
            await one.kill()
        if own is not None:
            await own.kill()


def now() -> float:
    return time.monotonic()
