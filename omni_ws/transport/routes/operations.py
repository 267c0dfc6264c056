"""Routes for operators and SDKs: ``/health``, ``/metrics``, ``/v1/models`` and ``/openapi.json``."""

from __future__ import annotations

import time
from functools import cache
from importlib import resources
from typing import Any, Final

from omni_ws import __version__
from omni_ws.engine.base import EngineState
from omni_ws.engine.composed.parts import parts_of
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import ModelNotFound
from omni_ws.metrics import rendered
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.shared_counts import WorkerGroup
from omni_ws.transport.http.access import Authenticator
from omni_ws.transport.http.application import FrontEnd, Router
from omni_ws.transport.http.exchange import HttpExchange

#: What ``/health`` says with 200.
_SERVING: Final = ("ok", "degraded")


class OperationsRoutes(FrontEnd):
    """The handlers. ``/health`` and ``/openapi.json`` need no key; the others do where keys are configured."""

    def __init__(self, sessions: SessionFactory, authenticator: Authenticator) -> None:
        self._sessions = sessions
        self._authenticator = authenticator
        self._started = int(time.time())

    def register(self, router: Router) -> None:
        router.add("GET", "/health", self.health)
        router.add("GET", "/metrics", self.metrics)
        router.add("GET", "/openapi.json", self.openapi)
        router.add("GET", "/v1/models", self.models)
        router.add("GET", "/v1/models/{id:path}", self.model)

    async def health(self, exchange: HttpExchange) -> None:
        """Respond with 200 where the server takes new sessions, else with 503; the body tells the state."""
        status = self._status()
        engine, group = self._sessions.engine, self._sessions.group
        parts = parts_of(engine).items()  # their hosts are for those alone who may talk
        await exchange.respond_json(
            200 if status in _SERVING else 503,
            {
                "status": status,
                "engine": engine.name,
                "parts": {role: part and {"name": part.name, "model": part.model} for role, part in parts},
                "model": self._sessions.model.names[0],
                "sessions": self._sessions.admission.all_sessions,
                "stages": list(engine.capabilities.stages) or [engine.name],
                "request_states": {"running": engine.active_requests if group is None else group.engine_requests},
                "version": __version__,
                **({} if group is None else {"workers": _workers(group)}),
            },
            () if status in _SERVING else [("Retry-After", "1")],
        )

    async def metrics(self, exchange: HttpExchange) -> None:
        """Respond with the metrics, in the exposition format that ``Accept`` prefers."""
        self._authenticator.authenticate(exchange.request)
        accept = ",".join(exchange.request.headers.get_all("accept"))
        group, own = self._sessions.group, self._sessions.metrics
        families = own.families() if group is None else await group.all_metrics(own.families())
        text, media_type = await run_work(Work.FILES, rendered(families, accept))
        await exchange.respond(200, [("Content-Type", media_type), ("Cache-Control", "no-store")], text)

    async def models(self, exchange: HttpExchange) -> None:
        """List the names of the one model that is served."""
        self._authenticator.authenticate(exchange.request)
        data = [self._model(name) for name in self._sessions.model.names]
        await exchange.respond_json(200, {"object": "list", "data": data})

    async def model(self, exchange: HttpExchange) -> None:
        """Describe the model by one of its names. Raises ModelNotFound."""
        self._authenticator.authenticate(exchange.request)
        name = exchange.path_parameters["id"]
        try:
            self._sessions.model.check(name)
        except ModelNotFound as error:
            error.param = "id"
            raise
        await exchange.respond_json(200, self._model(name))

    async def openapi(self, exchange: HttpExchange) -> None:
        """Respond with the OpenAPI document."""
        await exchange.respond(200, [("Content-Type", "application/json")], _web("openapi.json"))

    def _status(self) -> str:
        """The state of the server: draining, or that of its engine."""
        if self._sessions.admission.draining:
            return "draining"
        group = self._sessions.group
        if group is not None and group.ready:  # one that is not restarts, and gets no new sessions
            if not group.counts.started:
                return "starting"
            return "degraded" if group.hung else "ok"
        return {
            EngineState.STARTING: "starting",
            EngineState.OK: "ok",
            EngineState.UNHEALTHY: "unhealthy",
        }[self._sessions.engine.state]

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "omni_ws",
            "transcripts": self._sessions.engine.capabilities.transcripts,
        }


def _workers(group: WorkerGroup) -> dict[str, Any]:
    hung = group.hung
    return {"ready": group.ready, "wanted": group.wanted, **({"hung": hung} if hung else {})}


@cache
def _web(name: str) -> bytes:
    """A file of the package. Cached, because reading blocks the event loop."""
    return resources.files("omni_ws").joinpath("web", name).read_bytes()
