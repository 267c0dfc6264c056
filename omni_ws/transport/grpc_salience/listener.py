"""The gRPC port, which serves salience.v1 and the standard services for health checks and reflection."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from omni_ws.config.model import GrpcConfig
from omni_ws.core.quota import ByteBudget
from omni_ws.generated import salience_pb2, salience_pb2_grpc
from omni_ws.metrics import Metrics
from omni_ws.transport.grpc_salience.call_accounts import CallAccounts
from omni_ws.transport.grpc_salience.health import SERVICE_NAME as HEALTH_SERVICE
from omni_ws.transport.grpc_salience.health import Health
from omni_ws.transport.grpc_salience.message_intake import MessageIntake
from omni_ws.transport.grpc_salience.servicer import Salience

SERVICE: Final = salience_pb2.DESCRIPTOR.services_by_name["Salience"].full_name
#: Grace period of running calls when the server closes.
CLOSE_TIMEOUT_SEC: Final = 1.0


class GrpcListener:
    """A port that is being served."""

    def __init__(self, server: grpc.aio.Server, port: int, servicer: Salience, health: Health) -> None:
        #: The port bound, also where port 0 was asked for.
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
        """Stop within ``close_timeout`` seconds, also while a drain stops more slowly."""
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
    """Serve while the block runs. Calls are refused until ``begin``.

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
    """Raise OSError, with the reason, if ``port`` cannot be bound. gRPC gives none, and logs a line of its own."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        if os.name == "posix":  # as servers set it; elsewhere it would share the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def tls(certificate: Path, key: Path | None) -> grpc.ServerCredentials:
    """Load credentials from PEM files. Without ``key``, the certificate's file holds the private key too."""
    chain = certificate.read_bytes()
    return grpc.ssl_server_credentials([(chain if key is None else key.read_bytes(), chain)])
