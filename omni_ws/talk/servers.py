"""The server that a command talks to: a given one, the one on the default port, or one of its own."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final

from omni_ws.caller.script import Target
from omni_ws.client import DEFAULT_URL, ConnectionFailed, connect
from omni_ws.config import ServerConfig, load
from omni_ws.scenarios.servers import own_server, until_started
from omni_ws.tools.weights import fetch_for_start

#: How long the default port may take to answer: it is on this machine.
_LOOK_SEC: Final = 5.0


@asynccontextmanager
async def found_server(*, api_key: str | None, environ: Mapping[str, str]) -> AsyncIterator[str]:
    """Yield the URL of the server on the default port or, if there is none, of one that runs during the block.

    Raises NoServer if its own does not start, and the error of a server that refuses the session.
    """
    if await _answers(api_key):
        yield DEFAULT_URL
        return
    print("no server on the default port: one starts, and ends with this command", file=sys.stderr, flush=True)
    await _fetch(load((), environ).config)
    async with own_server({}) as authority:
        yield f"ws://{authority}/v1/streaming_input"


async def _fetch(config: ServerConfig) -> None:
    """Fetch weights in a daemon thread, whose end an interrupted command does not wait for."""
    loop, fetched = asyncio.get_running_loop(), asyncio.Event()

    def fetch() -> None:
        try:
            fetch_for_start(config)
        finally:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(fetched.set)

    threading.Thread(target=fetch, name="weights", daemon=True).start()
    await fetched.wait()


async def _answers(api_key: str | None) -> bool:
    """Return whether a server of this protocol is on the default port; wait for one that starts."""
    await until_started(Target.parse(DEFAULT_URL))
    try:
        async with connect(DEFAULT_URL, api_key=api_key, open_timeout=_LOOK_SEC):
            return True
    except ConnectionFailed:
        return False
