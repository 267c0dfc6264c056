"""How a call is told that it is refused."""

from __future__ import annotations

from typing import Any, Final, NoReturn, TypeAlias

import grpc

from omni_ws.errors import EngineFailed, OmniError
from omni_ws.service.failure import identified

CallContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

#: Trailing metadata of a refusal: the code of the specification's error table, and when to come again.
CODE_METADATA: Final = "omni-error-code"
RETRY_METADATA: Final = "retry-after-ms"


async def refuse(context: CallContext, error: OmniError) -> NoReturn:
    """Ends the call with the status of ``error``, by an exception of gRPC's own."""
    identified(error, where="a token call")
    name = error.wire.grpc_status or "INTERNAL"
    if isinstance(error, EngineFailed) and error.fatal:
        name = "UNAVAILABLE"  # the engine is gone and will be back; the session is not lost
    message = f"{error.param}: {error.message}" if error.param else error.message
    metadata = [(CODE_METADATA, error.code)]
    if error.retry_after_ms is not None:
        metadata.append((RETRY_METADATA, str(error.retry_after_ms)))
    await context.abort(grpc.StatusCode[name], message, tuple(metadata))
