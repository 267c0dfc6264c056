"""App: the front ends of a server, on one port and with one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from websockets.asyncio.server import ServerConnection

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig
from omni_ws.config.plugins import FRONTS, OWN, made
from omni_ws.config.values import ConfigurationError
from omni_ws.core.addresses import Hosts
from omni_ws.engine.base import Engine
from omni_ws.engine_choice import live_backend
from omni_ws.errors import OmniError, Unauthenticated
from omni_ws.service.listening.workers import TurnModel
from omni_ws.service.observing.profiling import Profiling
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.shared_counts import WorkerGroup
from omni_ws.service.sessions.summaries import Summaries
from omni_ws.transport.http import access
from omni_ws.transport.http.access import Authenticator, ClientSecrets
from omni_ws.transport.http.application import Application, FrontEnd, Router, ServeConnection, UpgradeDecision
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.mode_b.keeper import ModeBKeeper
from omni_ws.transport.mode_b.routes import SESSIONS_PATH, ModeBReaders, ModeBRoutes
from omni_ws.transport.mode_b.session import ModeBRegistry
from omni_ws.transport.recording.recordings import HttpRecordings


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
        """Run the endpoint that accepted the handshake: the handler of the websockets library."""
        await self._serving.pop(connection)(connection)

    def allows_origin(self, request: HttpRequest) -> bool:
        return access.is_allowed_origin(request, self.config.allow_origin)

    def allows_host(self, request: HttpRequest) -> bool:
        """Return whether the ``Host`` of a request is allowed: any host if there are API keys.

        With keys, DNS rebinding gains an attacker nothing. A request of HTTP/1.0, which no browser sends, may have no
        ``Host``.
        """
        host = request.headers.get("host")
        return self.authenticator.has_keys or host is None or self._hosts.answers_to(host)

    # life cycle

    @asynccontextmanager
    async def storing(self) -> AsyncIterator[None]:
        """Keep sessions in the configured store during the block. Raises ConfigurationError if it cannot be used."""
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
        """Wait until no session is left, then release shared resources. All connections must be closed."""
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


# The front ends of Mode B, which share its sessions: their entry points.


def mode_b(app: App) -> FrontEnd:
    return ModeBRoutes(app, app.mode_b)


def mode_b_readers(app: App) -> FrontEnd:
    return ModeBReaders(app, app.mode_b, app.recordings)
