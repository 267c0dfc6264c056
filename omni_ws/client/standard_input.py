"""Reads standard input without blocking the event loop, be it a pipe, a file or a terminal."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Final

#: Pieces read ahead of the consumer.
_QUEUED: Final = 8


def read_standard_input() -> bytes:
    """Reads up to 64 KiB. Bypasses Python's buffer, whose lock a read that never returns would hold forever."""
    return os.read(0, 1 << 16)


async def read_ahead(read: Callable[[], bytes] = read_standard_input) -> AsyncGenerator[bytes, None]:
    """Yields what ``read`` returns until that is empty. Raises the OSError of ``read``.

    ``read`` runs in a daemon thread, so that a read that never returns does not keep the process from exiting.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_QUEUED)
    gone = threading.Event()

    def hand_over(item: bytes | OSError) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def pump() -> None:
        while room.acquire() and not gone.is_set():
            try:
                data = read()
            except OSError as error:
                hand_over(error)
                return
            hand_over(data)
            if not data:
                return

    threading.Thread(target=pump, name="standard input", daemon=True).start()
    try:
        while True:
            item = await queue.get()
            room.release()
            if isinstance(item, OSError):
                raise item
            if not item:
                return
            yield item
    finally:
        gone.set()
        room.release()
