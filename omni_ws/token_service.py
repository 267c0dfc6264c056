"""The gRPC service beside the server's port, where the engine holds token sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from omni_ws.app import App
from omni_ws.config.error import ConfigurationError
from omni_ws.config.model import ServerConfig
from omni_ws.config.startup import GRPC_PACKAGES
from omni_ws.service.tokens.sessions import token_sessions

if TYPE_CHECKING:
    from omni_ws.transport.grpc_salience.listener import GrpcListener

DEFAULT_GRPC_PORT: Final = 50051


@asynccontextmanager
async def serve_tokens(app: App) -> AsyncIterator[GrpcListener | None]:
    """The gRPC service on its port, for as long as the block lasts. It refuses calls until ``begin`` says otherwise.

    There is none where the engine has no token sessions, or the packages for it are not installed; it is an error then
    (ConfigurationError) to have named a port. Raises OSError for a taken port.
    """
    config = app.config
    if not app.sessions.engine.capabilities.token_sessions or any(find_spec(name) is None for name in GRPC_PACKAGES):
        if config.grpc.port is not None:
            raise ConfigurationError([f"the {config.engine} engine has no token sessions; leave grpc.port out"])
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
    """Who wants any free port for the server, and names none for gRPC, wants none that may be taken."""
    if config.grpc.port is not None:
        return config.grpc.port
    return DEFAULT_GRPC_PORT if config.port else 0
