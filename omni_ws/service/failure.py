"""The border for exceptions from outside the tree."""

from __future__ import annotations

import logging

from omni_ws.errors import EngineFailed
from omni_ws.service.identifiers import new_id

logger = logging.getLogger(__name__)


def unexpected(error: BaseException) -> EngineFailed:
    """What a client hears of an exception that nobody foresaw: an id to look for in the log, and not its text."""
    failure_id = new_id("fail_")
    logger.error("unexpected failure %s", failure_id, exc_info=error)
    return EngineFailed(f"internal error {failure_id}")
