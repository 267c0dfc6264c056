"""Refusal of a call: from an error to a status with metadata."""

from __future__ import annotations

from typing import Any, Final, NoReturn, TypeAlias

import grpc

from omni_ws.errors import EngineFailed, OmniError
from omni_ws.service.failure import identified

CallContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

#: Trailing metadata: the code in the specification's table of errors, and the time to wait before a retry.
CODE_METADATA: Final = "omni-error-code"
RETRY_METADATA: Final = "retry-after-ms"


async def refuse(context: CallContext, error: OmniError) -> NoReturn:
    """End the call with the status of ``error``, by raising gRPC's own exception."""
    identified(error, where="a token call")
    name = error.wire.grpc_status or "INTERNAL"
    if isinstance(error, EngineFailed) and error.fatal:
        name = "UNAVAILABLE"  # the engine restarts, and the session is not lost
    message = f"{error.param}: {error.message}" if error.param else error.message
    metadata = [(CODE_METADATA, error.code)]
    if error.retry_after_ms is not None:
        metadata.append((RETRY_METADATA, str(error.retry_after_ms)))
    await context.abort(grpc.StatusCode[name], message, tuple(metadata))
