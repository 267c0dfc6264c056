"""How a process ends that this server started, and that reads what it is to do from its standard input."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

log = logging.getLogger(__name__)

#: How long a process may take to end by itself.
STOP_SEC: Final = 2.0


async def end_process(process: asyncio.subprocess.Process, *, name: str) -> int | None:
    """Close the input of ``process``, which ends it, and kill it where that does not help; also when cancelled.

    Returns its exit status.
    """
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(STOP_SEC):
            await process.wait()
    except TimeoutError:
        log.warning("the %s does not end by itself and is killed", name)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode
