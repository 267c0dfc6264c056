"""Waiting for what no event tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], *, seconds: float = 20) -> None:
    """Lets the loop run until ``condition`` holds. Raises TimeoutError when it does not come true."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition belongs to code that has no event for it
            await asyncio.sleep(0)
