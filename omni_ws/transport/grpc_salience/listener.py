"""The gRPC port: serves salience.v1 and the standard services for health checks and reflection."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from omni_ws.config.model import GrpcConfig
from omni_ws.core.quota import ByteBudget
from omni_ws.generated import salience_pb2, salience_pb2_grpc
from omni_ws.metrics import Metrics
from omni_ws.service.observing.accounts import write_line
from omni_ws.transport.grpc_salience.servicer import Handler, MessageIntake, Salience

HEALTH_SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
SERVICE: Final = salience_pb2.DESCRIPTOR.services_by_name["Salience"].full_name
#: Grace period of running calls when the server closes.
CLOSE_TIMEOUT_SEC: Final = 1.0


class GrpcListener:
    """A gRPC server that listens on a port, with its drain and its end."""

    def __init__(self, server: grpc.aio.Server, port: int, servicer: Salience, health: Health) -> None:
        #: The port that was bound, even if port 0 was asked for.
        self.port = port
        self._servicer = servicer
        self._server = server
        self._health = health
        #: Grace period of running calls when the server closes, in seconds.
        self.close_timeout = CLOSE_TIMEOUT_SEC
        #: The stop that a drain began.
        self._stopping: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Accept calls, once the engine has started."""
        self._servicer.begin()
        self._health.set_serving(True)

    async def drain(self, timeout: float) -> None:
        """Refuse new calls, let running calls finish within ``timeout`` seconds, then stop and close all sessions."""
        self._health.set_serving(False)
        self._servicer.refuse_calls()
        grace: float | None = self.close_timeout
        try:
            async with asyncio.timeout(timeout):
                await self._servicer.wait_idle()
        except TimeoutError:
            grace = None
        # Not before: a call that arrives while gRPC stops fails with CANCELLED instead of UNAVAILABLE. The grace period
        # is short, because calls that watch health never end by themselves.
        self._stopping = asyncio.ensure_future(self._server.stop(grace))
        # A second signal may cancel the drain. Were gRPC's stop cancelled, each later one would be, too.
        await asyncio.shield(self._stopping)
        self._servicer.close_sessions()

    async def close(self) -> None:
        """Stop within ``close_timeout`` seconds, even if a drain is under way."""
        await self._server.stop(self.close_timeout)
        if self._stopping is not None:
            await self._stopping
        self._servicer.close_sessions()


@asynccontextmanager
async def listen(
    servicer: Salience,
    *,
    host: str,
    port: int,
    settings: GrpcConfig,
    max_connections: int,
    budget: ByteBudget,
    metrics: Metrics,
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[GrpcListener]:
    """Serve gRPC while the block runs. Calls are refused until ``GrpcListener.begin``.

    Raises OSError, with advice, if the port cannot be bound.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    advice = "stop the process that uses the port, or choose another with --grpc-port (0: any)"
    try:
        _try_port(host, port)
    except OSError as error:
        raise OSError(f"gRPC cannot listen on {address}, {error.strerror}: {advice}") from error
    intake = MessageIntake(
        service=SERVICE,
        check_key=servicer.key,
        budget=budget,
        max_message_bytes=settings.max_message_bytes,
        timeout_sec=settings.message_timeout_sec,
        max_calls=max_connections,
    )
    server = grpc.aio.server(
        interceptors=[CallAccounts(metrics, service=SERVICE), intake],
        options=[
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.max_concurrent_streams", max_connections),
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            # With it gRPC would buffer megabytes of messages that nothing reads.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.max_send_message_length", -1),
            # A port in use is an error; by default it would be shared.
            ("grpc.so_reuseport", 0),
        ],
    )
    salience_pb2_grpc.add_SalienceServicer_to_server(servicer, server)
    health = Health((SERVICE,))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME), server)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"gRPC cannot listen on {address}: {advice}") from error
    await server.start()
    running = GrpcListener(server, bound, servicer, health)
    try:
        yield running
    finally:
        await running.close()


def _try_port(host: str, port: int) -> None:
    """Raise OSError, with the reason, if ``port`` cannot be bound: gRPC gives no reason, and logs a line of its own."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        if os.name == "posix":  # as servers set it; elsewhere it would share the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def tls(certificate: Path, key: Path | None) -> grpc.ServerCredentials:
    """Load TLS credentials from PEM files. Without ``key``, the certificate's file holds the private key too."""
    chain = certificate.read_bytes()
    return grpc.ssl_server_credentials([(chain if key is None else key.read_bytes(), chain)])


# Accounts.

logger = logging.getLogger("omni_ws.grpc")

#: Statuses that are faults of the server, and logged as errors.
_SERVER_FAULTS: Final = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})


class CallAccounts(grpc.aio.ServerInterceptor):
    """An interceptor that counts and logs the calls of ``service``, but not other names, which clients can make up.

    Install it before ``MessageIntake``, so that it also counts the calls refused there.
    """

    def __init__(self, metrics: Metrics, *, service: str) -> None:
        self._metrics = metrics
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler: Any = await continuation(handler_call_details)
        path = handler_call_details.method
        if handler is None or not path.startswith(self._prefix):
            return cast("Handler | None", handler)
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
            code = context.code()  # 0 if the servicer has set none
            status = code.name if isinstance(code, grpc.StatusCode) else outcome
            seconds = loop.time() - begun
            self._metrics.grpc_calls.labels(method, status).inc()
            self._metrics.grpc_call_seconds.labels(method).observe(seconds)
            level = logging.ERROR if status in _SERVER_FAULTS else logging.INFO
            write_line(logger, level, "grpc call", method=method, status=status, seconds=round(seconds, 4))


# Health.

_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # without types
    """The standard service grpc.health.v1, with one status for ``services`` and the whole server.

    The status is NOT_SERVING at first. The servicer of ``grpc_health`` itself is not used: there, a change of the
    status waits until every watching client has read it.
    """

    def __init__(self, services: Collection[str]) -> None:
        self._services = {"", *services}
        self._status = _Status.NOT_SERVING
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Change the status, and wake all watchers."""
        self._status = _Status.SERVING if serving else _Status.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:  # named by the protocol
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _Status(status=self._status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        sent = None
        while True:
            changed = self._changed
            status = self._status if request.service in self._services else _Status.SERVICE_UNKNOWN
            if status != sent:
                sent = status
                yield _Status(status=status)
            else:
                await changed.wait()
