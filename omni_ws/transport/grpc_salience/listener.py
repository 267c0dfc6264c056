"""The gRPC port: salience.v1, and the standard services for health and reflection."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from omni_ws.generated import salience_pb2, salience_pb2_grpc
from omni_ws.metrics import Metrics
from omni_ws.transport.grpc_salience.call_accounts import CallAccounts
from omni_ws.transport.grpc_salience.servicer import Salience

SERVICE: Final = salience_pb2.DESCRIPTOR.services_by_name["Salience"].full_name
#: How long calls may take to end once the server has to close.
CLOSE_TIMEOUT_SEC: Final = 1.0


class GrpcListener:
    """A port that is served. ``port`` is the real one where any free one was asked for."""

    def __init__(self, server: grpc.aio.Server, port: int, servicer: Salience, health_servicer: Any) -> None:
        self.port = port
        self._servicer = servicer
        self._server = server
        self._health = health_servicer

    async def begin(self) -> None:
        """The engine has started: take calls."""
        self._servicer.begin()
        for service in (SERVICE, ""):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, timeout: float) -> None:
        """Refuse new calls and let what runs finish within ``timeout`` seconds. Sessions end with the last call."""
        await self._health.enter_graceful_shutdown()
        self._servicer.refuse_calls()
        grace: float | None = CLOSE_TIMEOUT_SEC
        try:
            async with asyncio.timeout(timeout):
                await self._servicer.wait_idle()
        except TimeoutError:
            grace = None
        # Only now: a call that comes while gRPC itself stops is told that it was cancelled. With a little time for last
        # words, and no more: whoever watches health would never end.
        await self._server.stop(grace)
        self._servicer.close_sessions()


@asynccontextmanager
async def listen(
    servicer: Salience,
    *,
    host: str,
    port: int,
    max_message_bytes: int,
    metrics: Metrics,
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[GrpcListener]:
    """Serve for as long as the block lasts; calls are refused until ``begin``.

    Raises OSError for a port that cannot be had.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    advice = "end the user of that port, or choose another with --grpc-port (0: any)"
    try:
        _try_port(host, port)
    except OSError as error:
        raise OSError(f"gRPC cannot listen on {address}, {error.strerror}: {advice}") from error
    server = grpc.aio.server(
        interceptors=[CallAccounts(metrics, service=SERVICE)],
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),
            # A taken port is an error, and not shared.
            ("grpc.so_reuseport", 0),
        ],
    )
    salience_pb2_grpc.add_SalienceServicer_to_server(servicer, server)
    health_servicer: Any = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"gRPC cannot listen on {address}: {advice}") from error
    for service in (SERVICE, ""):
        await health_servicer.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    try:
        yield GrpcListener(server, bound, servicer, health_servicer)
    finally:
        await server.stop(CLOSE_TIMEOUT_SEC)
        servicer.close_sessions()


def _try_port(host: str, port: int) -> None:
    """Raises OSError where ``port`` cannot be bound. gRPC says only that, and writes a line of its own about it."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        if os.name == "posix":  # as a server would have it; elsewhere it means that the port may be shared
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def tls(certificate: Path, key: Path | None) -> grpc.ServerCredentials:
    """From PEM files; the certificate's may hold the key too."""
    chain = certificate.read_bytes()
    return grpc.ssl_server_credentials([(chain if key is None else key.read_bytes(), chain)])
