"""The server: routes over a live engine, and the whole life cycle around them."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from websockets.asyncio.server import Server, ServerConnection
from websockets.asyncio.server import serve as serve_websockets

from omni_ws import __version__
from omni_ws.config import check_available, check_exposure, configured_keys
from omni_ws.config.error import ConfigurationError
from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig
from omni_ws.config.startup import GRPC_PACKAGES
from omni_ws.engine.base import Engine
from omni_ws.engine_choice import create_engine
from omni_ws.errors import NotFound, ShuttingDown, Unauthenticated, UpgradeRequired
from omni_ws.logs import configure_logging
from omni_ws.service.gauges import connect_gauges
from omni_ws.service.loop_watch import watching_loop
from omni_ws.service.observer import Observer
from omni_ws.service.profiling import Profiling
from omni_ws.service.registry import SessionRegistry
from omni_ws.service.session_factory import SessionFactory
from omni_ws.transport.access_log import AccessLog
from omni_ws.transport.application import HttpLimits, UpgradeDecision
from omni_ws.transport.attached_output import AttachedConnection, Attachments
from omni_ws.transport.authentication import Authenticator
from omni_ws.transport.completions import CompletionRoutes
from omni_ws.transport.connections import Connections
from omni_ws.transport.demo import DemoRoutes
from omni_ws.transport.front_door import front_door
from omni_ws.transport.hang_up import notice_dead_networks
from omni_ws.transport.http1 import HttpExchange, HttpRequest
from omni_ws.transport.mode_b import ModeBRoutes
from omni_ws.transport.openai import OpenAIRoutes
from omni_ws.transport.ops import OperationsRoutes
from omni_ws.transport.profiling_routes import ProfilingRoutes
from omni_ws.transport.recordings import Recordings
from omni_ws.transport.router import Router
from omni_ws.transport.streaming_input import NATIVE_PATH, StreamingInput
from omni_ws.transport.transcriptions import TranscriptionRoutes

if TYPE_CHECKING:
    from omni_ws.transport.grpc_salience.listener import GrpcListener

logger = logging.getLogger(__name__)

SESSIONS_PATH: Final = f"{NATIVE_PATH}/sessions"
#: How long connections may take to close once everything that they waited for is done.
CLOSE_TIMEOUT_SEC: Final = 5.0
DEFAULT_GRPC_PORT: Final = 50051


class App:
    """Everything that is said on the port, over an engine that runs already."""

    def __init__(self, engine: Engine, config: ServerConfig, keys: tuple[ApiKey, ...] = ()) -> None:
        self.config = config
        self.sessions = SessionFactory(engine, config)
        self.authenticator = Authenticator(keys)
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
        openai = OpenAIRoutes(self.sessions, self.authenticator)
        operations = OperationsRoutes(self.sessions, self.authenticator)
        demo = DemoRoutes()
        router.add("GET", "/", demo.page)
        router.add("GET", "/browser/{name}", demo.file)
        router.add("GET", "/health", operations.health)
        router.add("GET", "/metrics", operations.metrics)
        router.add("GET", "/openapi.json", operations.openapi)
        router.add("GET", "/v1/models", operations.models)
        router.add("GET", "/v1/models/{id:path}", operations.model)
        router.add("POST", "/v1/chat/completions", openai.chat_completions)
        router.add("POST", "/v1/audio/speech", openai.audio_speech)
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
            raise NotFound("there is no WebSocket at this path")
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
        return origin != "null" and urlsplit(origin).netloc.lower() == (request.headers.get("host") or "").lower()

    async def _needs_upgrade(self, exchange: HttpExchange) -> None:
        if not self.config.streaming_input.enabled:
            raise NotFound("streaming input is turned off on this server")
        raise UpgradeRequired("this is a WebSocket")


def create_app(engine: Engine, config: ServerConfig, keys: tuple[ApiKey, ...] = ()) -> App:
    """Routes over a live engine, to be served with ``listen``."""
    return App(engine, config, keys)


class RunningServer:
    """A server that listens. ``port`` is the real one where any free one was asked for."""

    def __init__(self, app: App, server: Server, connections: Connections) -> None:
        self.app = app
        self._server = server
        self._connections = connections

    @property
    def port(self) -> int:
        port: int = next(iter(self._server.sockets)).getsockname()[1]
        return port

    async def drain(self, timeout: float) -> None:
        """Take no new session and let what runs finish within ``timeout`` seconds.

        The port stays open meanwhile, so that whoever asks hears that the server is draining.
        """
        admission = self.app.sessions.admission
        admission.draining = True
        self.app.native.drain(timeout)
        self.app.registry.drain(ShuttingDown("the server is shutting down"))
        self._connections.close_idle()
        try:
            async with asyncio.timeout(timeout):
                await admission.wait_empty()
                self._server.close(close_connections=False)
                self._connections.close_idle()
                await asyncio.gather(self._connections.wait_idle(None), self._server.wait_closed())
        except TimeoutError:
            logger.warning("some answers did not finish within %g seconds", timeout)

    async def close(self) -> None:
        """End what is left, whatever it is doing."""
        self.app.sessions.admission.draining = True
        self._server.close(close_connections=False)
        self.app.native.end_all(ShuttingDown("the server is shutting down"))
        self.app.registry.end_all(ShuttingDown("the server is shutting down"))
        self._connections.close_idle()
        self._connections.abort_all()
        await self._connections.wait_idle(CLOSE_TIMEOUT_SEC)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_SEC):
                await self.app.registry.wait_over()
                await self._server.wait_closed()
        except TimeoutError:
            for connection in self._server.all_connections:
                connection.transport.abort()
            await self._server.wait_closed()
        await self.app.native.wait_closed()
        if self.app.recordings is not None:
            await self.app.recordings.close()
        self.app.sessions.speech_workers.close()
        await self.app.profiling.stop()


@asynccontextmanager
async def listen(app: App) -> AsyncIterator[RunningServer]:
    """Serve ``app`` on its configured address for as long as the block lasts. Raises OSError for a taken port."""
    config = app.config
    streaming = config.streaming_input
    http = config.http
    metrics = app.sessions.metrics
    connections = Connections(max_open=config.limits.max_connections)
    limits = HttpLimits(
        header_timeout_sec=http.header_timeout_sec,
        body_timeout_sec=http.body_timeout_sec,
        keepalive_timeout_sec=http.keepalive_timeout_sec,
        max_header_bytes=http.max_header_bytes,
        write_timeout_sec=streaming.write_timeout_sec,
    )
    server = await serve_websockets(
        app.serve_websocket,
        config.host,
        config.port,
        create_connection=front_door(app, connections=connections, limits=limits, account=AccessLog(metrics)),
        compression="deflate" if streaming.permessage_deflate else None,
        # The session has a keep-alive of its own: the library's cannot know when it is us who do not read.
        ping_interval=None,
        open_timeout=http.header_timeout_sec,
        close_timeout=CLOSE_TIMEOUT_SEC,
        server_header="omni_ws",
        ssl=_tls(config),
    )
    for listening in server.sockets:
        notice_dead_networks(listening)
    metrics.http_connections.set_function(lambda: len(connections))
    metrics.websocket_connections.set_function(lambda: len(server.all_connections))
    running = RunningServer(app, server, connections)
    try:
        yield running
    finally:
        await running.close()


def _tls(config: ServerConfig) -> ssl.SSLContext | None:
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    return context


async def serve(config: ServerConfig) -> int:
    """The whole life of a server: engine, port, signals, drain. Returns the exit status.

    Raises ConfigurationError for what cannot be served so, OSError for a taken port, EngineFailed when the engine does
    not start.
    """
    configure_logging(config.log_format, config.log_level)
    keys = configured_keys(config)
    check_exposure(config)
    check_available(config)
    engine = create_engine(config)
    stop, at_once = asyncio.Event(), asyncio.Event()
    try:
        with ExitStack() as watch, _signals(lambda: (at_once if stop.is_set() else stop).set()):
            # The port answers while the engine starts: /health says so, with 503.
            async with tracing(config) as spans, listen(create_app(engine, config, keys)) as server:
                if spans is not None:
                    server.app.sessions.observers.add(spans, every_output=False)
                watch.enter_context(watching_loop(server.app.sessions.metrics.loop_lag_seconds.observe))
                if not await _unless(stop, engine.start(), name="engine start"):
                    return 0
                async with serve_tokens(server.app) as token_service:
                    _announce(server, engine, token_service)
                    await stop.wait()
                    logger.info("shutting down")
                    ends = [server.drain(config.drain_timeout_sec)]
                    if token_service is not None:
                        ends.append(token_service.drain(config.drain_timeout_sec))
                    await _unless(at_once, _all(ends), name="drain")
    finally:
        await engine.stop()
    return 0


@asynccontextmanager
async def tracing(config: ServerConfig) -> AsyncIterator[Observer | None]:
    """What makes spans, where that is asked for; they are sent until the block is left."""
    if not config.tracing:
        yield None
        return
    from omni_ws.service.tracing import RequestSpans, network_processor, tracer_provider

    provider = tracer_provider(network_processor())
    try:
        yield RequestSpans(provider.get_tracer("omni_ws", __version__))
    finally:
        await asyncio.to_thread(provider.shutdown)


@asynccontextmanager
async def serve_tokens(app: App) -> AsyncIterator[GrpcListener | None]:
    """The gRPC service of an engine that has started, on its port, for as long as the block lasts.

    There is none where the engine has no token sessions, or the packages for it are not installed; it is an error then
    (ConfigurationError) to have named a port. Raises OSError for a taken port.
    """
    config = app.config
    sessions = app.sessions.token_sessions()
    if sessions is None or any(find_spec(name) is None for name in GRPC_PACKAGES):
        if config.grpc.port is not None:
            raise ConfigurationError([f"the {config.engine} engine has no token sessions; leave grpc.port out"])
        yield None
        return
    from omni_ws.transport.grpc_salience import listener
    from omni_ws.transport.grpc_salience.servicer import Salience

    credentials = None
    if config.ssl_certfile is not None:
        credentials = listener.tls(config.ssl_certfile, config.ssl_keyfile)
    try:
        async with listener.listen(
            Salience(sessions, app.authenticator, lambda: app.sessions.model),
            host=config.host,
            port=_grpc_port(config),
            max_message_bytes=config.grpc.max_message_bytes,
            metrics=app.sessions.metrics,
            credentials=credentials,
        ) as running:
            yield running
    finally:
        sessions.close_all()


def _grpc_port(config: ServerConfig) -> int:
    """Who wants any free port for the server, and names none for gRPC, wants none that may be taken."""
    if config.grpc.port is not None:
        return config.grpc.port
    return DEFAULT_GRPC_PORT if config.port else 0


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None], *, name: str) -> bool:
    """Do ``work`` to its end; where ``event`` comes first it is cancelled, and the answer is False."""
    working = asyncio.create_task(work, name=name)
    interrupted = asyncio.create_task(event.wait(), name=f"signal during {name}")
    try:
        await asyncio.wait({working, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        working.cancel()
        interrupted.cancel()
        await asyncio.gather(working, interrupted, return_exceptions=True)


@contextmanager
def _signals(callback: Callable[[], None]) -> Iterator[None]:
    """While the block lasts SIGTERM and SIGINT call ``callback`` and nothing else."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, callback)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _announce(server: RunningServer, engine: Engine, token_service: GrpcListener | None) -> None:
    config = server.app.config
    scheme = "https" if config.ssl_certfile is not None else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    logger.info("omni_ws %s listens on %s://%s:%d (engine %s)", __version__, scheme, host, server.port, engine.name)
    if token_service is not None:
        logger.info("salience.v1 (gRPC) listens on %s:%d", host, token_service.port)
    for line in engine.describe():
        logger.info("%s", line)
