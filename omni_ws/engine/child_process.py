"""What a process needs that this server starts, and how it ends: it reads what it is to do from its standard input."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Final

import omni_ws

log = logging.getLogger(__name__)

#: How long a process may take to end by itself.
STOP_SEC: Final = 2.0


def child_environment() -> dict[str, str]:
    """Return the environment for a process that has to find this very package, however the server found it."""
    package_folder = str(Path(omni_ws.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (package_folder, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


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
