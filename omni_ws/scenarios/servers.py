"""A server of our own in a child process, which is gone when the block ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import urlopen

import orjson

from omni_ws.caller.script import Target
from omni_ws.cli import INTERRUPTED

#: How long a server may take until it is ready: models are loaded meanwhile.
_START_SEC: Final = 300.0
_STOP_SEC: Final = 20.0
_LOOK_SEC: Final = 0.1
#: What is read at most of what a server says of its health.
_HEALTH_BYTES: Final = 1 << 20


class NoServer(Exception):
    """The server did not start."""


def flags(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the flags of ``omni-ws serve`` for settings as in its configuration file."""
    for name, value in settings.items():
        flag = f"{prefix}.{name}" if prefix else f"--{name}"
        if isinstance(value, Mapping):
            yield from flags(value, flag)
        elif isinstance(value, str):
            yield f"{flag}={value}"
        else:
            yield f"{flag}={orjson.dumps(value).decode()}"


@asynccontextmanager
async def own_server(settings: Mapping[str, Any], more: Sequence[str] = ()) -> AsyncIterator[str]:
    """Run ``omni-ws serve`` with these settings and flags during the block; yield its address. Raises NoServer."""
    port = _free_port()
    command = [sys.executable, "-m", "omni_ws", "serve", "--log-level=warning", *flags(settings), *more]
    # Ctrl-C at the terminal is for the command, which ends the server itself.
    process = await asyncio.create_subprocess_exec(
        *command, f"--port={port}", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, process_group=0
    )
    try:
        await _ready(process, port)
        yield f"127.0.0.1:{port}"
    finally:
        await asyncio.shield(_end(process))


async def until_started(target: Target) -> None:
    """Wait while a server says at ``/health`` that it starts, if it has such a route. Raises NoServer."""
    url = f"{'https' if target.secure else 'http'}://{target.authority}/health"
    await _until(lambda: _health(url) != "starting", f"the server at {target.authority} still starts")


async def _ready(process: asyncio.subprocess.Process, port: int) -> None:
    def is_ready() -> bool:
        if process.returncode is not None:
            raise NoServer(f"`omni-ws serve` ended with status {process.returncode}")
        return _health(f"http://127.0.0.1:{port}/health") in ("ok", "degraded")

    await _until(is_ready, "`omni-ws serve` is not ready")


async def _until(condition: Callable[[], bool], otherwise: str) -> None:
    """Look until ``condition`` holds. Raises NoServer with ``otherwise`` if that takes too long."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _START_SEC
    while not await asyncio.to_thread(condition):
        if loop.time() > end:
            raise NoServer(f"{otherwise} after {_START_SEC:g} s")
        await asyncio.sleep(_LOOK_SEC)


def _health(url: str) -> str | None:
    """Return the state that a server tells; None if it tells none."""
    try:
        with urlopen(url, timeout=5) as answer:
            body = answer.read(_HEALTH_BYTES)
    except HTTPError as error:
        body = error.read(_HEALTH_BYTES)
    except (OSError, HTTPException, ValueError):
        return None
    try:
        state = orjson.loads(body)["status"]
    except (ValueError, LookupError, TypeError):
        return None
    return state if isinstance(state, str) else None


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
    try:
        async with asyncio.timeout(_STOP_SEC):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_interruptible(work: Coroutine[Any, Any, int]) -> int:
    """Run a command to its end. SIGINT, SIGTERM and SIGHUP end it with the server that it started."""

    async def run() -> int:
        running = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread, or not POSIX
                loop.add_signal_handler(number, running.cancel)
        try:
            return await running
        except asyncio.CancelledError:
            return INTERRUPTED

    return asyncio.run(run())
