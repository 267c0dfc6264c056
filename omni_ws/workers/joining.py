"""How a worker serves connections that the supervisor accepted."""

from __future__ import annotations

import os
import socket
import tempfile
from typing import Any, cast

from websockets.asyncio.server import Server, ServerConnection
from websockets.extensions.permessage_deflate import enable_server_permessage_deflate
from websockets.server import ServerProtocol

from omni_ws.app import App
from omni_ws.engine.base import EngineState
from omni_ws.service.sessions.shared_counts import WorkerState
from omni_ws.service.sessions.worker_group import METRICS
from omni_ws.transport.http.connections import Connections
from omni_ws.transport.http.front_door import FrontDoor
from omni_ws.workers.metrics_sum import as_families
from omni_ws.workers.worker import Worker

_STATES = {
    EngineState.STARTING: WorkerState.STARTING,
    EngineState.OK: WorkerState.OK,
    EngineState.UNHEALTHY: WorkerState.UNHEALTHY,
}
#: What the library gives to each connection unless it is told otherwise.
_LIBRARY_DEFAULTS = {"ping_timeout": 20, "max_queue": 16, "write_limit": 32768}


def unreachable_socket() -> socket.socket:
    """A socket on which a server can listen without ever getting a connection: its name is gone."""
    with tempfile.TemporaryDirectory() as folder:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(os.path.join(folder, "none"))
    return listening


def join(
    worker: Worker,
    app: App,
    server: Server,
    connections: Connections,
    door: type[ServerConnection],
    options: dict[str, Any],
) -> None:
    """Have ``server`` serve what the worker is given, by connections of ``door`` with these ``options``."""
    deflate = app.config.streaming_input.permessage_deflate

    def make() -> FrontDoor:
        protocol = ServerProtocol(extensions=enable_server_permessage_deflate(None) if deflate else None)
        return cast("FrontDoor", door(protocol, server, **_LIBRARY_DEFAULTS, **options))

    def note() -> tuple[WorkerState, int, int, int]:
        engine = app.sessions.engine
        draining = app.sessions.admission.draining
        state = WorkerState.DRAINING if draining else _STATES[engine.state]
        return state, len(connections), len(server.all_connections), engine.active_requests

    async def metrics(argument: Any) -> Any:
        return as_families(app.sessions.metrics.families())

    connections.changed = worker.changed
    worker.on(METRICS, metrics)
    worker.serve(make, note)
