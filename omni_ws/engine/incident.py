"""The border for exceptions inside engines: their text goes to the log, and an id to the client."""

from __future__ import annotations

import logging
import uuid

from omni_ws.errors import EngineFailed

logger = logging.getLogger(__name__)


def incident(failure: str, exception: BaseException, *, request_id: str | None = None) -> EngineFailed:
    """What a client sees of ``exception``: ``failure`` says in words of our own what did not work."""
    error_id = f"err_{uuid.uuid4().hex}"
    logger.error("%s (%s)", failure, error_id, exc_info=exception)
    return EngineFailed(failure, request_id=request_id, error_id=error_id)
