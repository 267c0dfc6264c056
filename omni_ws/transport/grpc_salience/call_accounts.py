"""CallAccounts: counts and logs each call of the token service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Final, cast

import grpc

from omni_ws.metrics import Metrics
from omni_ws.service.observing.accounts import write_line

logger = logging.getLogger("omni_ws.grpc")

#: Statuses that are faults of the server, and logged as errors.
_SERVER_FAULTS: Final = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})


class CallAccounts(grpc.aio.ServerInterceptor):
    """Counts calls of the methods of ``service``. Clients can make up other names, so those are not counted.

    Install it before ``MessageIntake``, so that it also counts the calls refused there.
    """

    def __init__(self, metrics: Metrics, *, service: str) -> None:
        self._metrics = metrics
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        path = handler_call_details.method
        if handler is None or not path.startswith(self._prefix):
            return cast("grpc.RpcMethodHandler[Any, Any] | None", handler)
        method = path.removeprefix(self._prefix)
        if handler.response_streaming:

            async def stream(requests: Any, context: Any) -> AsyncIterator[Any]:
                with self._counted(method, context):
                    async with aclosing(handler.stream_stream(requests, context)) as events:
                        async for event in events:
                            yield event

            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)

        async def answer(requests: Any, context: Any) -> Any:
            with self._counted(method, context):
                return await handler.stream_unary(requests, context)

        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    @contextmanager
    def _counted(self, method: str, context: Any) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        outcome = "UNKNOWN"
        try:
            yield
            outcome = "OK"
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "CANCELLED"
            raise
        finally:
            code = context.code()  # 0 where the servicer has set none
            status = code.name if isinstance(code, grpc.StatusCode) else outcome
            seconds = loop.time() - begun
            self._metrics.grpc_calls.labels(method, status).inc()
            self._metrics.grpc_call_seconds.labels(method).observe(seconds)
            level = logging.ERROR if status in _SERVER_FAULTS else logging.INFO
            write_line(logger, level, "grpc call", method=method, status=status, seconds=round(seconds, 4))
