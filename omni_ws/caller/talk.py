"""Speaking into a session of the client library, while something else listens to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def beside(activity: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Runs something beside the block, and no longer than that; raises what went wrong in it."""
    task = asyncio.create_task(activity)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
