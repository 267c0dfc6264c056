"""Work that an event may cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, Any], *, name: str) -> bool:
    """Runs ``work`` to its end, or cancels it when ``event`` is set first, and returns False."""
    working = asyncio.create_task(work, name=name)
    interrupted = asyncio.create_task(event.wait(), name=f"signal during {name}")
    try:
        await asyncio.wait({working, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        working.cancel()
        interrupted.cancel()
        await asyncio.gather(working, interrupted, return_exceptions=True)
