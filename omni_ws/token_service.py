"""The gRPC service of an engine with token sessions, on a port of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from omni_ws.app import App
from omni_ws.config.model import ServerConfig
from omni_ws.config.startup import has_grpc
from omni_ws.config.values import ConfigurationError
from omni_ws.service.tokens.sessions import token_sessions

if TYPE_CHECKING:
    from omni_ws.transport.grpc_salience.listener import GrpcListener

DEFAULT_GRPC_PORT: Final = 50051


@asynccontextmanager
async def serve_tokens(app: App) -> AsyncIterator[GrpcListener | None]:
    """Serves gRPC while the block runs. Calls are refused until ``begin`` is called.

    Yields None without the packages for gRPC, or for an engine without token sessions. Raises ConfigurationError if
    ``grpc.port`` is set nevertheless, and OSError if the port is taken.
    """
    config = app.config
    if not app.sessions.engine.capabilities.token_sessions or not has_grpc():
        if config.grpc.port is not None:
            raise ConfigurationError(
                [f"token sessions are not supported by the {config.engine_name} engine; remove grpc.port"]
            )
        yield None
        return
    from omni_ws.transport.grpc_salience import listener
    from omni_ws.transport.grpc_salience.servicer import Salience

    credentials = None
    if config.ssl_certfile is not None:
        credentials = listener.tls(config.ssl_certfile, config.ssl_keyfile)
    async with listener.listen(
        Salience(partial(token_sessions, app.sessions), app.authenticator, lambda: app.sessions.model),
        host=config.host,
        port=_grpc_port(config),
        settings=config.grpc,
        max_connections=config.limits.max_connections,
        budget=app.sessions.budget,
        metrics=app.sessions.metrics,
        credentials=credentials,
    ) as running:
        yield running


def _grpc_port(config: ServerConfig) -> int:
    """A server on any free port takes any free port for gRPC, too: the default one may be taken."""
    if config.grpc.port is not None:
        return config.grpc.port
    return DEFAULT_GRPC_PORT if config.port else 0
