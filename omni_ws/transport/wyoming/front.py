"""The front end of Wyoming: listens for clients, connects to satellites, and opens sessions for their requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, Literal, TypeVar

from websockets.frames import CloseCode

from omni_ws.config.values import ConfigurationError
from omni_ws.errors import OmniError, SessionTimeout, ShuttingDown
from omni_ws.service import unexpected
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Sessions
from omni_ws.transport.http.application import Application, SessionFrontEnd
from omni_ws.transport.native.connection import Pause
from omni_ws.transport.native.keep_alive import KeepAlive, KeepAliveSettings, PeerRounds
from omni_ws.transport.native.tcp_link import TcpPort
from omni_ws.transport.recording import begin_recording
from omni_ws.transport.wyoming.connection import UNSERVED, Talks, WyomingConnection, WyomingLink, answer_without_session
from omni_ws.wire.wyoming import decode_event, encode_event, error_event

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Label of the sessions in metrics, logs and recordings.
WYOMING_ORIGIN: Final[Literal["wyoming"]] = "wyoming"
#: Seconds that an attempt to reach a satellite may take, and seconds from one attempt to the next.
CONNECT_TIMEOUT_SEC: Final = 10.0
RECONNECT_SEC: Final = 10.0


class WyomingServices(SessionFrontEnd):
    """The front end of Wyoming. Its peers present no keys: the limits of the key ``wyoming.key`` apply to them."""

    def __init__(self, app: Application) -> None:
        """Raises ConfigurationError if no key has the configured name."""
        super().__init__(app, Sessions(app.sessions, origin=WYOMING_ORIGIN, grace=0))
        self._settings = self._config.wyoming
        name = self._settings.key
        self._key = None if name is None else self._authenticator.named(name)
        if name is not None and self._key is None:
            raise ConfigurationError([f"wyoming.key: no API key is named {name}"])
        self._talks = Talks(max_tokens=self._config.limits.max_history_tokens)
        self._port = TcpPort("Wyoming", flag="--wyoming-port")
        #: The tasks of connections and satellites.
        self._tasks: set[asyncio.Task[None]] = set()
        self._lobbies: set[Lobby] = set()
        #: The tasks of satellites that are not connected.
        self._seeking: set[asyncio.Task[Any]] = set()
        self._draining = False

    @property
    def port(self) -> int | None:
        """The port on which the server listens for Wyoming; None if it does not listen."""
        return self._port.number

    async def open_ports(self) -> None:
        if self._settings.port is not None:
            await self._port.open(partial(self._link, self._accept), self._settings.host, self._settings.port)
        for address in self._settings.satellites:
            self._start(self._keep(address), name=f"satellite {address}")

    def _start(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # connections

    def _link(self, accepted: Callable[[WyomingLink], None]) -> WyomingLink:
        timeout = self._config.streaming_input.write_timeout_sec
        return WyomingLink(accepted, budget=self._sessions.budget, write_timeout=timeout)

    def _accept(self, link: WyomingLink) -> None:
        if len(self._tasks) >= self._config.limits.max_connections:
            link.abort()
            return
        self._start(self._serve(link, self._lobby(link)), name="connection over Wyoming")

    def _lobby(self, link: WyomingLink) -> Lobby:
        lobby = Lobby(link, self._sessions)
        self._lobbies.add(lobby)
        return lobby

    async def _serve(self, link: WyomingLink, lobby: Lobby, *, satellite: bool = False) -> None:
        """Serve a connection to its close. The connection to a ``satellite`` may be without a session for hours."""
        timeout = None if satellite else self._config.streaming_input.session_timeout_sec
        link.limit_input(self._sessions.admission.input_pace(self._key))
        try:
            while (first := await lobby.first_request(timeout)) is not None:
                session = await self._live.admit(self._key, client=link.client)
                self._lobbies.discard(lobby)
                begin_recording(self._recorder, session, WYOMING_ORIGIN, self._key)
                connection = WyomingConnection(link, session, self._sessions, self._talks, lasting=satellite)
                session.attach(connection)
                if not await connection.serve(first):
                    return
                lobby = self._lobby(link)
        except OmniError as error:
            logger.info("refused a connection over Wyoming from %s: %s", link.client, error.message)
            link.write_message(error_event(error), is_text=False)
            await link.close_in_time(CloseCode.NORMAL_CLOSURE, "")
        finally:
            self._lobbies.discard(lobby)

    # satellites

    async def _keep(self, address: str) -> None:
        """Stay connected to a satellite until the server drains."""
        host, _, port = address.rpartition(":")
        was_reached = True
        while not self._draining:
            try:
                link, lobby = await self._connect(host.strip("[]"), int(port))
            except (OSError, TimeoutError, UnicodeError) as error:  # the last for a host that cannot be a name
                if was_reached:  # once, not with each attempt
                    logger.warning("the satellite %s cannot be reached: %s", address, error or "no answer")
                was_reached = False
            else:
                was_reached = True
                logger.info("connected to the satellite %s", address)
                await self._visit(link, lobby)
                logger.info("the satellite %s has disconnected", address)
            await self._seek(asyncio.sleep(RECONNECT_SEC))

    async def _connect(self, host: str, port: int) -> tuple[WyomingLink, Lobby]:
        loop = asyncio.get_running_loop()
        lobbies: list[Lobby] = []
        made = partial(self._link, lambda link: lobbies.append(self._lobby(link)))
        async with asyncio.timeout(CONNECT_TIMEOUT_SEC):
            _, link = await self._seek(loop.create_connection(made, host, port))
        return link, lobbies[0]

    async def _seek(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Await ``waiting``. A drain cancels the current task meanwhile, instead of waiting for it."""
        task = asyncio.current_task()
        assert task is not None
        if self._draining:
            waiting.close()
            raise asyncio.CancelledError
        self._seeking.add(task)
        try:
            return await waiting
        finally:
            self._seeking.discard(task)

    async def _visit(self, link: WyomingLink, lobby: Lobby) -> None:
        """Serve a satellite until its connection is lost."""
        link.write_message(encode_event("run-satellite"), is_text=False)
        pinging = _ping(link, PeerRounds.configured(self._config.streaming_input).settings)
        pings = asyncio.create_task(pinging, name="pings of a satellite")
        try:
            await self._serve(link, lobby, satellite=True)
        finally:
            pings.cancel()
            await asyncio.wait([pings])
            link.abort()

    # the end

    def drain(self, time_left: float) -> None:
        self._refuse(ShuttingDown("the server is shutting down"))
        super().drain(time_left)

    def end_all(self, error: OmniError) -> None:
        self._port.close()
        self._refuse(error)
        super().end_all(error)

    def _refuse(self, error: OmniError) -> None:
        self._draining = True
        for task in tuple(self._seeking):
            task.cancel()
        for lobby in self._lobbies:
            lobby.refuse(error)

    async def wait_closed(self) -> None:
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
        await super().wait_closed()
        await self._port.wait_closed()


async def _ping(link: WyomingLink, settings: KeepAliveSettings) -> None:
    """Ping a silent satellite, and abort the connection if the satellite does not answer.

    While unsent output pauses reading from the satellite (see WyomingLink), its silence means nothing.
    """
    loop = link.loop
    alive = KeepAlive(settings, now=loop.time())
    while (due := alive.get_timer(listening=link.is_reading)) is not None:
        await asyncio.sleep(max(0.0, due - loop.time()))
        now = max(loop.time(), due)  # a timer may fire a little early
        alive.heard(link.heard_at)
        if not alive.check(now, link.write_ping, listening=link.is_reading):
            logger.info("the satellite at %s does not answer", link.client)
            link.abort()
            return


# Lobby: what receives the events of a connection that has no session.


#: Events that need a session, even if only to be refused. Others are ignored.
_OF_SESSIONS: Final = frozenset({"transcribe", "audio-start", "transcript", "run-pipeline", *UNSERVED}) | {
    f"synthesize{step}" for step in ("", "-start", "-chunk", "-stop")
}


class Lobby:
    """A FrameReceiver for a connection without a session: answers events until one needs a session."""

    def __init__(self, link: WyomingLink, factory: SessionFactory) -> None:
        self._link = link
        self._factory = factory
        self._loop = asyncio.get_running_loop()
        #: When the last event came. Bytes of an incomplete event do not count.
        self._heard_at = self._loop.time()
        #: The first event that needs a session; None if the peer is gone.
        self._first: asyncio.Future[bytes | None] = self._loop.create_future()
        link.attach(self)

    async def first_request(self, timeout: float | None) -> bytes | None:
        """Wait for the first event that needs a session; None if the peer disconnects before.

        Raises SessionTimeout if no event comes for ``timeout`` seconds, and the error given to ``refuse``.
        """
        while not self._first.done():
            left = None if timeout is None else self._heard_at + timeout - self._loop.time()
            if left is not None and left <= 0:
                raise SessionTimeout(f"the client was silent for {timeout:g} seconds")
            await asyncio.wait([self._first], timeout=left)
        return self._first.result()

    def refuse(self, error: OmniError) -> None:
        """Make ``first_request`` raise ``error``."""
        if not self._first.done():
            self._first.set_exception(error)

    # what the link calls

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        if self._first.done():
            return
        self._heard_at = self._link.heard_at
        try:
            event = decode_event(bytes(data))
            if not answer_without_session(event, self._link, self._factory) and event.type in _OF_SESSIONS:
                self._link.pause_reading(Pause.EARLY)
                self._first.set_result(bytes(data))
        except OmniError as error:
            self.refuse(error)
        except Exception as error:
            self.refuse(unexpected(error, where="the input of a Wyoming connection"))

    def input_refused(self, error: OmniError) -> None:
        self.refuse(error)

    def connection_closing(self) -> None:
        if not self._first.done():
            self._first.set_result(None)

    def receive_pong(self, data: bytes) -> None:
        """Do nothing: in Wyoming, pongs are ordinary events."""

    def reading_changed(self) -> None:
        """Do nothing: the time-out counts whole events, whether or not the socket is read."""

    def resume_output(self) -> None:
        """Do nothing: no output waits."""
