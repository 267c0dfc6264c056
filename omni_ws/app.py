"""App: what answers at which path, over an engine that runs already."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from websockets.asyncio.server import ServerConnection

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig
from omni_ws.core.hosts import Hosts
from omni_ws.engine.base import Engine
from omni_ws.errors import NotFound, Unauthenticated, UpgradeRequired
from omni_ws.service.observing.profiling import Profiling
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.gauges import connect_gauges
from omni_ws.service.sessions.registry import SessionRegistry
from omni_ws.transport.http import cors
from omni_ws.transport.http.application import UpgradeDecision
from omni_ws.transport.http.authentication import Authenticator
from omni_ws.transport.http.exchange import HttpExchange, HttpRequest
from omni_ws.transport.http.router import Router, shown_path
from omni_ws.transport.native.attached import AttachedConnection, Attachments
from omni_ws.transport.native.endpoint import NATIVE_PATH, StreamingInput
from omni_ws.transport.recording.recordings import Recordings
from omni_ws.transport.routes.chat import ChatRoutes
from omni_ws.transport.routes.completions import CompletionRoutes
from omni_ws.transport.routes.demo import DemoRoutes
from omni_ws.transport.routes.mode_b import ModeBRoutes
from omni_ws.transport.routes.ops import OperationsRoutes
from omni_ws.transport.routes.profiling import ProfilingRoutes
from omni_ws.transport.routes.speech import SpeechRoutes
from omni_ws.transport.routes.transcriptions import TranscriptionRoutes

SESSIONS_PATH: Final = f"{NATIVE_PATH}/sessions"


class App:
    """Everything that is said on the port, over an engine that runs already."""

    def __init__(self, engine: Engine, config: ServerConfig, keys: tuple[ApiKey, ...] = ()) -> None:
        self.config = config
        self.sessions = SessionFactory(engine, config, keys=keys)
        self.authenticator = Authenticator(keys)
        self._hosts = Hosts((*config.allow_host, config.host))
        self.sessions.admission.known_keys = len(keys) or None
        self.recordings = Recordings.configured(config, self.sessions, sessions_path=SESSIONS_PATH)
        recorder, by_http = (self.recordings.recorder, self.recordings.http) if self.recordings else (None, None)
        self.native = StreamingInput(self.sessions, self.authenticator, recorder)
        self.registry = SessionRegistry(self.sessions)
        self.profiling = Profiling(engine, self.sessions.observers, config.profiler.root)
        self._attachments = Attachments(config, self.authenticator, self.registry, by_http)
        self._router = self._routes()
        connect_gauges(self.sessions, sessions_away=lambda: self.native.sessions_away)

    def _routes(self) -> Router:
        router = Router()
        chat = ChatRoutes(self.sessions, self.authenticator)
        speech = SpeechRoutes(self.sessions, self.authenticator)
        operations = OperationsRoutes(self.sessions, self.authenticator)
        demo = DemoRoutes()
        router.add("GET", "/", demo.page)
        router.add("GET", "/browser/{name}", demo.file)
        router.add("GET", "/health", operations.health)
        router.add("GET", "/metrics", operations.metrics)
        router.add("GET", "/openapi.json", operations.openapi)
        router.add("GET", "/v1/models", operations.models)
        router.add("GET", "/v1/models/{id:path}", operations.model)
        router.add("POST", "/v1/chat/completions", chat.chat_completions)
        router.add("POST", "/v1/audio/speech", speech.audio_speech)
        completions = CompletionRoutes(self.sessions, self.authenticator)
        router.add("POST", "/v1/completions", completions.completions)
        transcriptions = TranscriptionRoutes(self.sessions, self.authenticator)
        router.add("POST", "/v1/audio/transcriptions", transcriptions.transcriptions)
        router.add("GET", NATIVE_PATH, self._needs_upgrade)
        profiling = ProfilingRoutes(self.profiling, self.authenticator)
        router.add("POST", "/start_profile", profiling.start_profile)
        router.add("POST", "/start_request_profile", profiling.start_request_profile)
        router.add("POST", "/stop_profile", profiling.stop)
        router.add("POST", "/stop_request_profile", profiling.stop)
        self._add_mode_b(router)
        return router

    def _add_mode_b(self, router: Router) -> None:
        mode_b = ModeBRoutes(self.sessions, self.authenticator, self.registry)
        one = f"{SESSIONS_PATH}/{{id}}"
        router.add("POST", SESSIONS_PATH, mode_b.create)
        router.add("GET", one, mode_b.status)
        router.add("PATCH", one, mode_b.append)
        router.add("DELETE", one, mode_b.delete)
        router.add("POST", f"{one}/chunks", mode_b.append)
        router.add("POST", f"{one}/append", mode_b.append)
        router.add("POST", f"{one}/finish", mode_b.finish)
        router.add("GET", f"{one}/result", mode_b.result)

    @property
    def routes(self) -> tuple[tuple[str, frozenset[str]], ...]:
        """The template of every path that is answered, with its methods."""
        return self._router.templates

    async def handle(self, exchange: HttpExchange) -> None:
        if self.recordings is not None:
            with suppress(Unauthenticated):  # who is sent away is not recorded
                self.recordings.http.begin(exchange, self.authenticator.authenticate(exchange.request))
        await self._router.dispatch(exchange)

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        if request.path != NATIVE_PATH:
            # Raises NotFound for a path that is nothing, and says so for one that is something else.
            self._router.match("GET", request.segments)
            raise NotFound(f"there is no WebSocket at {shown_path(request.segments)}")
        if self._attachments.is_meant(request):
            return self._attachments.upgrade(request)
        return self.native.upgrade(request)

    async def serve_websocket(self, connection: ServerConnection) -> None:
        """A connection whose upgrade was accepted."""
        if isinstance(connection, AttachedConnection):
            await self._attachments.serve(connection)
        else:
            await self.native.serve(connection)

    def allows_origin(self, request: HttpRequest) -> bool:
        """Pages of the server's own host, and of the origins that the operator allows."""
        origin = request.headers.get("origin")
        if origin is None or "*" in self.config.allow_origin or origin in self.config.allow_origin:
            return True
        return cors.is_own_origin(request)

    def allows_host(self, request: HttpRequest) -> bool:
        """With keys any: who has none gets nothing. HTTP/1.0, which no browser speaks, may have none."""
        host = request.headers.get("host")
        return self.authenticator.has_keys or host is None or self._hosts.answers_to(host)

    async def _needs_upgrade(self, exchange: HttpExchange) -> None:
        if not self.config.streaming_input.enabled:
            raise NotFound("streaming input is turned off on this server")
        raise UpgradeRequired("this is a WebSocket")
