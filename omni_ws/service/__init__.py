"""Sessions and their requests, above the engines and below the transports. Uses asyncio, but no sockets.

Each of these imports only from those above it:

- ``process``: cares for the server's process: its log, open files, event loop and memory.
- ``recording``: writes sessions to files, to replay them later.
- ``observing``: metrics, logs, traces and profiles of sessions and requests.
- ``listening``: turn detection in the audio of an open microphone.
- ``mcp``: calls tools of MCP servers for the model.
- ``store``: keeps sessions, so that another process can go on with them.
- ``conversation``: makes requests of the input of one session, and sends their answers.
- ``sessions``: opens sessions within the server's limits, and keeps sessions that outlive a connection.
- ``tokens``: sessions whose input and output are lists of tokens, served over gRPC.

The functions in this module are shared by all of them: they prepare errors for the client and the log, and make random
identifiers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from omni_ws.engine.base import Engine, EngineState
from omni_ws.errors import EngineFailed, OmniError

# Failures, as clients and the log see them, and identifiers that cannot be guessed.


logger = logging.getLogger(__name__)


def unexpected(exception: BaseException, *, where: str) -> EngineFailed:
    """Log ``exception`` under a new error id. Return the error that the client gets instead, with that id.

    ``where`` tells the log what failed.
    """
    error_id = new_id("err_")
    logger.error("%s failed (%s)", where, error_id, exc_info=exception)
    return EngineFailed("the server failed to answer this request", error_id=error_id)


def identified(error: OmniError, *, where: str) -> OmniError:
    """If ``error`` is an EngineFailed without an id, give it one and log it, with its cause, under that id.

    ``where`` tells the log what failed. Returns ``error``.
    """
    if isinstance(error, EngineFailed) and error.error_id is None:
        error_id = new_id("err_")
        cause = error if error.__cause__ is not None else None
        logger.warning("%s failed (%s): %s", where, error_id, error.logged or error.message, exc_info=cause)
        error.identify(error_id)
    return error


def being_cancelled() -> bool:
    """Whether the running task is being cancelled; True, too, if no task runs.

    If it is False, a CancelledError in this task comes from something that the task awaited, and is a failure like any
    other.
    """
    return (task := asyncio.current_task()) is None or task.cancelling() > 0


def of_request(error: OmniError, request_id: str, *, engine: Engine, ref: str | None = None) -> OmniError:
    """Note in ``error`` the id of its request and ``ref``, the client's name for it. Returns ``error``.

    An EngineFailed is also logged (see ``identified``), and ends the session unless ``engine`` is OK.
    """
    identified(error, where=f"request {request_id}")
    error.belong_to(request_id, ref)
    if isinstance(error, EngineFailed) and engine.state is not EngineState.OK:
        error.end_session()
    return error


def new_id(prefix: str) -> str:
    """Return ``prefix``, such as ``req_`` or ``sess_``, followed by 96 random bits in hexadecimal."""
    return prefix + secrets.token_hex(12)
