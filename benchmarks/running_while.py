"""Tasks that run while a block lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def running_while(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run each as a task until the block ends, which cancels and awaits all. What fails among them fails alone."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
