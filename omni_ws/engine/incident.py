"""Translates exceptions inside engines: details go to the log, an ID to the client."""

from __future__ import annotations

import logging
import uuid

from omni_ws.errors import EngineFailed

logger = logging.getLogger(__name__)


def incident(failure: str, exception: BaseException, *, request_id: str | None = None) -> EngineFailed:
    """Log ``exception`` under a new ID, and return the error that the client gets.

    That has the ID, and ``failure`` as its message; the text of ``exception`` might reveal internals.
    """
    error_id = f"err_{uuid.uuid4().hex}"
    logger.error("%s (%s)", failure, error_id, exc_info=exception)
    return EngineFailed(failure, request_id=request_id, error_id=error_id)
