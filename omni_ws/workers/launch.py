"""The start of a server of several workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omni_ws.config import check_available, check_exposure, configured_keys
from omni_ws.config.model import ServerConfig
from omni_ws.logs import configure_logging
from omni_ws.workers.supervisor import supervise


def launch_workers(config: ServerConfig, *, listening: Callable[[int], object] | None = None) -> int:
    """Runs a server of ``config.workers`` processes; otherwise as ``launch_server``."""
    configure_logging(config.log_format, config.log_level)
    keys = configured_keys(config)
    check_exposure(config)
    check_available(config)
    return asyncio.run(supervise(config, keys, listening))
