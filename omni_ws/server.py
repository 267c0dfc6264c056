"""The life cycle of a server: engine, ports, signals, drain; and App, its front ends on one port."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from websockets.asyncio.server import Server, ServerConnection
from websockets.asyncio.server import serve as serve_websockets

from omni_ws import __version__
from omni_ws.config import check_available, check_exposure, configured_keys
from omni_ws.config.keys import ApiKey
from omni_ws.config.loading import (
    has_grpc,
    page_address,
)
from omni_ws.config.model import ServerConfig
from omni_ws.config.parts import (
    FRONTS,
    OWN,
    made,
)
from omni_ws.config.values import ConfigurationError
from omni_ws.engine.base import Engine
from omni_ws.engine.child_main import return_freed_memory, share_heaps
from omni_ws.engine_choice import (
    advice,
    create_engine,
    live_backend,
    part_lines,
    turn_lines,
)
from omni_ws.engine_choice import turn_model as load_turn_model
from omni_ws.errors import OmniError, ShuttingDown, Unauthenticated
from omni_ws.service.listening import TurnModel
from omni_ws.service.observing.profiling import Profiling
from omni_ws.service.process import allow_connections, configure_logging, returning_memory, unless, watching_loop
from omni_ws.service.sessions.admission import Hosts
from omni_ws.service.sessions.factory import SessionFactory, Summaries
from omni_ws.service.sessions.shared_counts import WorkerGroup
from omni_ws.service.tokens import token_sessions
from omni_ws.transport.http import access
from omni_ws.transport.http.access import Authenticator, ClientSecrets
from omni_ws.transport.http.application import (
    Application,
    FrontEnd,
    HttpLimits,
    Router,
    ServeConnection,
    UpgradeDecision,
)
from omni_ws.transport.http.connections import (
    Connections,
    notice_dead_networks,
)
from omni_ws.transport.http.exchange import AccessLog, HttpExchange
from omni_ws.transport.http.front_door import front_door
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.mode_b.keeper import ModeBKeeper
from omni_ws.transport.mode_b.routes import SESSIONS_PATH, ModeBReaders, ModeBRoutes
from omni_ws.transport.mode_b.session import ModeBRegistry
from omni_ws.transport.recording import HttpRecordings
from omni_ws.transport.routes.openai import ChatRoutes, SpokenAnswers
from omni_ws.workers.worker import Worker, join, unreachable_socket

if TYPE_CHECKING:
    from omni_ws.transport.grpc_salience import GrpcListener


logger = logging.getLogger(__name__)


class App(Application):
    """The application to which the front door passes requests. It knows front ends only by the interface ``FrontEnd``.

    The caller starts and stops the engine; routes also answer while the engine starts.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        keys: tuple[ApiKey, ...] = (),
        *,
        turn_model: TurnModel | None = None,
        group: WorkerGroup | None = None,
    ) -> None:
        self.config = config
        self.sessions = SessionFactory(
            engine, config, keys=keys, turn_model=turn_model, group=group, chat_engine=live_backend(config)
        )
        self.authenticator = Authenticator(keys)
        self._hosts = Hosts((*config.allow_host, config.host))
        self.secrets = ClientSecrets()
        self.summaries = Summaries(self.sessions.chats, self.sessions.metrics)
        self.sessions.sum_up_by(self.summaries)
        self.recordings = HttpRecordings.configured(config, self.sessions, sessions_path=SESSIONS_PATH)
        self.recorder = self.recordings.recorder if self.recordings else None
        self.registry = ModeBRegistry(self.sessions)
        self.mode_b = ModeBKeeper(self.registry, self.sessions.store)
        self.spoken = SpokenAnswers(group, lambda: asyncio.get_running_loop().time())
        self.profiling = Profiling(engine, self.sessions.observers, config.profiler.root)
        self._router = Router()
        #: The coroutine function of the endpoint that serves each open WebSocket.
        self._serving: WeakKeyDictionary[ServerConnection, ServeConnection] = WeakKeyDictionary()
        self.sessions.connect_gauges()
        self.front_ends = tuple(self._front_ends())
        for front_end in self.front_ends:
            try:
                front_end.register(self._router)
            except ValueError as error:
                raise ConfigurationError([f"front end {type(front_end).__name__}: {error}"]) from error
            front_end.connect_gauges(self.sessions.metrics)

    def _front_ends(self) -> Iterator[FrontEnd]:
        """The front ends, in the order in which they drain and end: this package's, then the configured plug-ins."""
        for name in dict.fromkeys((*OWN[FRONTS], *self.config.fronts)):
            yield made(FRONTS, name, of=self, kind=FrontEnd)

    # Called by the front door

    async def handle(self, exchange: HttpExchange) -> None:
        if self.recordings is not None:
            with suppress(Unauthenticated):  # refused requests are not recorded
                self.recordings.begin(exchange, self.authenticator.authenticate(exchange.request))
        await self._router.dispatch(exchange)

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        decision = self._router.upgrade(request)

        def connect(*arguments: Any, **options: Any) -> ServerConnection:
            connection = decision.connection(*arguments, **options)
            self._serving[connection] = decision.serve
            return connection

        return replace(decision, connection=connect)

    async def serve_websocket(self, connection: ServerConnection) -> None:
        """Run the endpoint that accepted the handshake. The websockets library calls this as its handler."""
        await self._serving.pop(connection)(connection)

    def allows_origin(self, request: HttpRequest) -> bool:
        return access.is_allowed_origin(request, self.config.allow_origin)

    def allows_host(self, request: HttpRequest) -> bool:
        """Return whether the ``Host`` of a request is allowed. With API keys, any is: DNS rebinding gains nothing then.

        A request without ``Host`` is allowed: it is HTTP/1.0, which no browser sends.
        """
        host = request.headers.get("host")
        return self.authenticator.has_keys or host is None or self._hosts.answers_to(host)

    def serves(self, session_id: str) -> bool:
        """Return whether this process has an open session or call; without a store, True: no other process can.

        ``session_id`` is an id without the ``replica_id`` before it.
        """
        own = session_id.replace("live_", "sess_", 1)  # as the Live API names it
        if self.config.replica_id:
            own = f"{self.config.replica_id}_{own}"
        return self.sessions.store is None or any(front_end.serves(own) for front_end in self.front_ends)

    # life cycle

    @asynccontextmanager
    async def storing(self) -> AsyncIterator[None]:
        """Run the configured store of sessions during the ``with`` block.

        Raises ConfigurationError if the store is unusable.
        """
        store = self.sessions.store
        if store is None:
            yield
            return
        await store.start()
        try:
            yield
        finally:
            await store.stop()

    async def open_ports(self) -> None:
        """Open the ports of front ends that have ports of their own. Raises OSError if one is taken."""
        for front_end in self.front_ends:
            await front_end.open_ports()

    def drain(self, time_left: float) -> None:
        """Refuse new sessions, and let open requests finish within ``time_left`` seconds."""
        self.sessions.admission.drain()
        for front_end in self.front_ends:
            front_end.drain(time_left)

    def end_all(self, error: OmniError) -> None:
        """End every session now, with this error as the reason."""
        self.sessions.admission.drain()
        for front_end in self.front_ends:
            front_end.end_all(error)

    async def wait_ended(self) -> None:
        """Wait until the engine has released the sessions that ``end_all`` ended."""
        for front_end in self.front_ends:
            await front_end.wait_ended()

    async def close(self) -> None:
        """Wait until no session is left, then release shared resources. All connections must be closed before."""
        for front_end in self.front_ends:
            await front_end.wait_closed()
        await self.summaries.close()
        await self.sessions.chats.close()
        if self.recordings is not None:
            await self.recordings.close()
        if self.sessions.daily_use_file is not None:
            await self.sessions.daily_use_file.close()
        self.sessions.speech_workers.close()
        await self.profiling.close()


# The front ends of chat and of Mode B, which share spoken answers and sessions: their entry points.


def chat(app: App) -> FrontEnd:
    return ChatRoutes(app, app.spoken)


def mode_b(app: App) -> FrontEnd:
    return ModeBRoutes(app, app.mode_b, app.spoken)


def mode_b_readers(app: App) -> FrontEnd:
    return ModeBReaders(app, app.mode_b, app.recordings)


# The life cycle of a server: engine, ports, signals, drain.


#: The memory allocator's heaps, for all threads. With fewer, the event loop sometimes waits 10 ms for other threads.
HEAPS: Final = 4
#: The time for connections to close after their sessions have ended.
CLOSE_TIMEOUT_SEC: Final = 5.0
#: The time for interrupted HTTP responses to report the interruption.
LAST_WORDS_SEC: Final = 1.0
#: The time for both of these after a second signal.
AT_ONCE_SEC: Final = 0.1
#: The time after which a start in progress logs the address of the page.
TELL_ADDRESS_SEC: Final = 2.0
#: The time after a second signal within which the process exits in any case. The promise is 1 s, also on a busy
#: machine.
LAST_RESORT_SEC: Final = 0.5


def create_app(
    engine: Engine,
    config: ServerConfig | None = None,
    keys: tuple[ApiKey, ...] = (),
    *,
    model_name: str | None = None,
    turn_model: TurnModel | None = None,
    group: WorkerGroup | None = None,
) -> App:
    """Create the App for an engine, for use with ``listen``. ``semantic_vad`` needs a ``turn_model``.

    The caller starts the engine, before or while the app is served, and stops it afterwards.

    ``model_name`` is the first name under which the model is served and announced; the configured names follow.
    ``group`` is the group of workers of which this process is one. Raises ConfigurationError if a front end cannot be
    made or registered.
    """
    config = config or ServerConfig()
    if model_name is not None:
        names = (model_name, *(name for name in config.served_model_name if name != model_name))
        config = ServerConfig.model_validate({**dict(config), "served_model_name": names})
    return App(engine, config, keys, turn_model=turn_model, group=group)


def launch_server(config: ServerConfig | None = None, *, listening: Callable[[int], object] | None = None) -> int:
    """Run a server until SIGTERM, SIGINT or SIGHUP, and return the exit status. Blocks. Raises as ``serve`` does.

    With several workers, SIGHUP does not end the server, but replaces its workers; and if one fails to start, its exit
    status is returned. ``listening`` is called with the port once the server can answer.
    """
    config = config or ServerConfig()
    if config.workers > 1:
        from omni_ws.workers.supervisor import launch_workers

        return launch_workers(config, listening=listening)
    return _run(config, lambda: serve(config, listening=listening))


def run_worker(config: ServerConfig, keys: tuple[ApiKey, ...], join: Callable[[], Worker]) -> int:
    """Run one worker, like ``launch_server``. ``join`` is called on the event loop, and returns the Worker."""

    async def work() -> int:
        return await serve(config, keys=keys, worker=join())

    return _run(config, work)


def _run(config: ServerConfig, work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    if not config.on_vllm:  # vLLM computes with as many threads as there are cores
        share_heaps(HEAPS)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(work())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class RunningServer:
    """A server that is listening for connections."""

    def __init__(self, app: App, server: Server, connections: Connections, *, port: int | None = None) -> None:
        """Set up the server; ``port`` is given if another process, the supervisor, listens on that port."""
        self.app = app
        self._port = port
        self._server = server
        self._connections = connections
        self._close_timeout = CLOSE_TIMEOUT_SEC
        self._last_words_timeout = LAST_WORDS_SEC

    def hurry(self) -> None:
        """Shorten the time-outs of ``close``, after a second signal."""
        self._close_timeout = self._last_words_timeout = AT_ONCE_SEC

    @property
    def port(self) -> int:
        """The port on which the server listens; with the setting ``port = 0``, the port that the system chose."""
        port: int = next(iter(self._server.sockets)).getsockname()[1] if self._port is None else self._port
        return port

    async def drain(self, timeout: float) -> None:
        """Refuse new sessions, and let open requests finish within ``timeout`` seconds.

        The port stays open meanwhile, so that clients and health checks learn that the server is draining.
        """
        self.app.drain(timeout)
        self._connections.close_idle()
        try:
            async with asyncio.timeout(timeout):
                await self.app.sessions.admission.wait_empty()
                self._server.close(close_connections=False)
                self._connections.close_idle()
                await asyncio.gather(self._connections.wait_idle(None), self._server.wait_closed())
        except TimeoutError:
            logger.warning("not all answers finished within %g seconds; cancelling the rest", timeout)

    async def close(self) -> None:
        """End every session, request and connection, then close the app."""
        self._server.close(close_connections=False)
        going = ShuttingDown("the server is shutting down")
        self.app.end_all(going)
        self._connections.interrupt_all(going)
        self._connections.close_idle()
        await self._connections.wait_idle(self._last_words_timeout)
        self._connections.abort_all()
        await self._connections.wait_idle(self._close_timeout)
        try:
            async with asyncio.timeout(self._close_timeout):
                await self.app.wait_ended()
                await self._server.wait_closed()
        except TimeoutError:
            for connection in self._server.all_connections:
                connection.transport.abort()
            await self._server.wait_closed()
        await self.app.close()


@asynccontextmanager
async def listen(app: App, worker: Worker | None = None) -> AsyncIterator[RunningServer]:
    """Serve ``app`` on its configured address during the ``with`` block. Raises OSError if the port is taken.

    The end of the block ends all sessions, and closes the app. A ``worker`` gets its connections from the supervisor.
    Raises ConfigurationError if the store of sessions or the TLS certificate is unusable.
    """
    async with app.storing(), _listening(app, worker) as running:
        yield running


@asynccontextmanager
async def _listening(app: App, worker: Worker | None) -> AsyncIterator[RunningServer]:
    config = app.config
    streaming = config.streaming_input
    http = config.http
    metrics = app.sessions.metrics
    connections = Connections(max_open=config.limits.max_connections)
    limits = HttpLimits(
        header_timeout_sec=http.header_timeout_sec,
        body_timeout_sec=http.body_timeout_sec,
        min_body_rate=http.min_body_bytes_per_sec or None,
        keepalive_timeout_sec=http.keepalive_timeout_sec,
        max_header_bytes=http.max_header_bytes,
        write_timeout_sec=streaming.write_timeout_sec,
    )
    door = front_door(
        app,
        connections=connections,
        limits=limits,
        log_access=AccessLog(metrics),
        addresses=app.sessions.addresses,
        elsewhere=worker,
        tls=_tls(config),
    )
    # Sessions have a keep-alive of their own: the library's cannot tell a silent peer from one that is not read.
    options: dict[str, Any] = {"ping_interval": None, "close_timeout": CLOSE_TIMEOUT_SEC}
    address: dict[str, Any]
    if worker is None:
        backlog = config.limits.max_connections
        address = {"host": config.host, "port": config.port, "backlog": backlog}
    else:
        address = {"unix": True, "sock": unreachable_socket()}
    server = await serve_websockets(
        app.serve_websocket,
        **address,
        **options,
        create_connection=door,
        compression="deflate" if streaming.permessage_deflate else None,
        open_timeout=http.header_timeout_sec,
        server_header="omni_ws",
    )
    metrics.http_connections.set_function(lambda: len(connections))
    metrics.websocket_connections.set_function(lambda: len(server.all_connections))
    running = RunningServer(app, server, connections, port=None if worker is None else worker.port)
    if worker is None:
        for listening in server.sockets:
            notice_dead_networks(listening)
    else:
        join(worker, app, server, connections, door, options)
    try:
        await app.open_ports()
        yield running
    finally:
        await running.close()


def _tls(config: ServerConfig) -> ssl.SSLContext | None:
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name, file in (("ssl_certfile", config.ssl_certfile), ("ssl_keyfile", config.ssl_keyfile)):
        try:
            if file is not None:
                file.read_bytes()
        except OSError as error:
            raise ConfigurationError([f"{name}: cannot read {file}: {error.strerror}"]) from None
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except ssl.SSLError as error:
        reason = error.reason or "no PEM"
        raise ConfigurationError(
            [f"ssl_certfile and ssl_keyfile must contain a PEM certificate and its private key: {reason}"]
        ) from None
    return context


async def serve(
    config: ServerConfig,
    *,
    listening: Callable[[int], object] | None = None,
    last_resort: Callable[[int], object] = os._exit,
    keys: tuple[ApiKey, ...] | None = None,
    worker: Worker | None = None,
) -> int:
    """Run a server until it ends, and return the exit status.

    ``listening`` is called with the port once the server can answer. If the server does not end soon after a second
    signal, ``last_resort`` is called with the exit status, from a thread, since the event loop may be blocked. A
    ``worker`` gets its keys from the supervisor. Raises ConfigurationError for a configuration that cannot be served,
    OSError if a port is taken, and EngineFailed if the engine does not start.
    """
    configure_logging(config.log_format, config.log_level, None if worker is None else worker.name)
    keys = configured_keys(config) if keys is None else keys
    check_exposure(config)
    check_available(config)
    allow_connections(config.limits.max_connections)
    engine = create_engine(config)
    stop, at_once = asyncio.Event(), asyncio.Event()
    with _stopping(stop, at_once, last_resort):
        try:
            turn_model = await asyncio.to_thread(load_turn_model, config)
            app = create_app(engine, config, keys, turn_model=turn_model, group=worker)
            await _serve_until(stop, at_once, engine, app, listening, worker)
            if worker is not None:
                worker.close(app.sessions.metrics.families())
        finally:
            await engine.stop()
    return 0


async def _serve_until(
    stop: asyncio.Event,
    at_once: asyncio.Event,
    engine: Engine,
    app: App,
    listening: Callable[[int], object] | None = None,
    worker: Worker | None = None,
) -> None:
    """Serve until ``stop`` is set, then drain. When ``at_once`` is set, the start or the drain is cut short."""
    # The ports open before the engine starts: health checks are answered, and a taken port fails before models load.
    exporting = exporting_to_otlp(app)
    async with exporting, listen(app, worker) as server, serve_tokens(app) as token_service:
        watching = watching_loop(app.sessions.metrics.loop_lag_seconds.observe)
        with watching, returning_memory(lambda: app.sessions.budget.held):
            waits = asyncio.get_running_loop().call_later(TELL_ADDRESS_SEC, _announce_start, server, worker)
            try:
                if not await unless(stop, engine.start(), name="engine start"):
                    return
            finally:
                waits.cancel()
            # Loading a model takes more memory than the model.
            await asyncio.to_thread(return_freed_memory)
            app.sessions.advise = lambda: advice(engine, app.config)
            if token_service is not None:
                token_service.begin()
            if worker is not None:
                worker.begin()
            if worker is None or worker.serial == 1:  # the other workers would log the same
                _announce(server, engine, token_service)
            if listening is not None:
                listening(server.port)
            await stop.wait()
            logger.info("shutting down")
            if worker is not None:
                worker.changed()
            drains = [one.drain(app.config.drain_timeout_sec) for one in (server, token_service) if one is not None]
            if not await unless(at_once, _all(drains), name="drain"):
                server.hurry()
                if token_service is not None:
                    token_service.hurry(AT_ONCE_SEC)


@asynccontextmanager
async def exporting_to_otlp(app: App) -> AsyncIterator[None]:
    """Export during the ``with`` block: spans if ``tracing`` is set, and metrics if ``otlp_metrics`` is set."""
    config, sessions = app.config, app.sessions

    def model() -> str:
        return sessions.model.names[0]

    async with AsyncExitStack() as running:
        if config.tracing:
            from omni_ws.service.observing.telemetry import RequestSpans, network_processor, tracer_provider

            processor = network_processor()
            provider = tracer_provider(processor)
            running.push_async_callback(asyncio.to_thread, provider.shutdown)
            spans = RequestSpans(provider.get_tracer("omni_ws", __version__), processor, model=model)
            sessions.observers.add(spans, every_output=False)
        if config.otlp_metrics:
            from omni_ws.service.observing.telemetry import MetricsExport

            export = MetricsExport(sessions.metrics.families, model=model)
            await running.enter_async_context(_during(export.run(), name="metrics export"))
        yield


@asynccontextmanager
async def _during(work: Coroutine[Any, Any, None], *, name: str) -> AsyncIterator[None]:
    """Run ``work`` as a task during the ``with`` block; then cancel the task and wait until it has ended."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)


@contextmanager
def _stopping(stop: asyncio.Event, at_once: asyncio.Event, last_resort: Callable[[int], object]) -> Iterator[None]:
    """Handle signals during the ``with`` block: the first SIGTERM or SIGINT sets ``stop``, the second ``at_once``.

    The second signal also calls ``last_resort``, after LAST_RESORT_SEC. SIGHUP sets ``stop``, too, but is not counted:
    a terminal that closes may send it more than once.
    """
    signalled = False

    def end() -> None:
        nonlocal signalled
        if signalled and not at_once.is_set():
            last = threading.Timer(LAST_RESORT_SEC, last_resort, [0])
            last.daemon = True  # it does not keep an ended process alive
            last.start()
            at_once.set()
        signalled = True
        stop.set()

    actions = {signal.SIGTERM: end, signal.SIGINT: end}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # SIGHUP is ignored under nohup, and in a worker
        actions[signal.SIGHUP] = stop.set
    loop = asyncio.get_running_loop()
    for number, action in actions.items():
        loop.add_signal_handler(number, action)
    try:
        yield
    finally:
        for number in actions:
            loop.remove_signal_handler(number)


# The gRPC service for an engine with token sessions, on a port of its own

DEFAULT_GRPC_PORT: Final = 50051


@asynccontextmanager
async def serve_tokens(app: App) -> AsyncIterator[GrpcListener | None]:
    """Serve gRPC during the ``with`` block. Calls are refused until the listener's ``begin`` is called.

    Without the packages for gRPC, or for an engine without token sessions, yields None, or raises ConfigurationError if
    ``grpc.port`` is set. Raises OSError if the port is taken.
    """
    config = app.config
    if not app.sessions.engine.capabilities.token_sessions or not has_grpc():
        if config.grpc.port is not None:
            raise ConfigurationError(
                [f"token sessions are not supported by the {config.engine_name} engine; remove grpc.port"]
            )
        yield None
        return
    from omni_ws.transport.grpc_salience import (
        Salience,
        listen,
        tls,
    )

    credentials = None
    if config.ssl_certfile is not None:
        credentials = tls(config.ssl_certfile, config.ssl_keyfile)
    async with listen(
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
    """Return the port for gRPC: as set, or the default. 0, for any free port, if the server's own port is 0."""
    if config.grpc.port is not None:
        return config.grpc.port
    return DEFAULT_GRPC_PORT if config.port else 0


# The log's lines at the start


def _announce(server: RunningServer, engine: Engine, token_service: GrpcListener | None) -> None:
    config = server.app.config
    scheme = "https" if config.ssl_certfile is not None else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    logger.info("omni_ws %s listens on %s://%s:%d (engine %s)", __version__, scheme, host, server.port, engine.name)
    if token_service is not None:
        logger.info("salience.v1 (gRPC) listens on %s:%d", host, token_service.port)
    turns = turn_lines(engine, server.app.sessions.speech_workers.turn_detection_types)
    for line in (*part_lines(engine, config), *turns, *engine.describe()):
        logger.info("%s", line)
    # Last, because the end of the log is seen first.
    logger.info("to try it, open %s in a browser", page_address(config, server.port))


def _announce_start(server: RunningServer, worker: Worker | None) -> None:
    """Log the address of the server's web page, while the engine is still starting.

    Programs that wait for the server look for the last line of ``_announce``; this line must differ from that one.
    """
    if worker is None or worker.serial == 1:
        logger.info("still starting; open %s to see how it goes", page_address(server.app.config, server.port))
