"""Telephone calls from Asterisk, over its AudioSocket: a TCP port of its own."""

from __future__ import annotations

import asyncio
import logging
from typing import Final
from uuid import UUID

from omni_ws.config.keys import ApiKey
from omni_ws.core.chunks import AudioEncoding
from omni_ws.errors import OmniError, ShuttingDown
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.live_session import LiveSession, LiveSessions
from omni_ws.transport.http.access import Authenticator
from omni_ws.transport.http.application import LiveFrontEnd
from omni_ws.transport.http.hang_up import notice_dead_networks
from omni_ws.transport.telephony.audiosocket_call import AudioSocketCall
from omni_ws.transport.telephony.audiosocket_link import AudioSocketLink
from omni_ws.transport.telephony.call import TELEPHONY_ORIGIN, call_configuration

logger = logging.getLogger(__name__)

_AUDIO: Final = {"format": AudioEncoding.PCM16.value, "sample_rate": 8000}


class AudioSocketCalls(LiveFrontEnd):
    """Listens for Asterisk, and opens a session for each call. Where the server has keys, a call's UUID is one."""

    def __init__(self, sessions: SessionFactory, authenticator: Authenticator) -> None:
        super().__init__(LiveSessions(sessions, origin=TELEPHONY_ORIGIN, grace=0))
        self._sessions = sessions
        self._authenticator = authenticator
        self._server: asyncio.Server | None = None
        self._openings: set[AudioSocketLink] = set()
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int | None:
        """The port that it listens on; None where it does not."""
        if self._server is None or not self._server.sockets:
            return None
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def open_ports(self) -> None:
        settings = self._sessions.config.telephony
        if settings.audiosocket_port is None:
            return
        host = settings.audiosocket_host
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: AudioSocketLink(self._accept), host, settings.audiosocket_port
            )
        except OSError as error:
            raise OSError(
                f"AudioSocket cannot listen on {host}, port {settings.audiosocket_port}, {error.strerror}: "
                "stop the process that uses the port, or choose another with --telephony.audiosocket-port (0: any)"
            ) from error
        for listening in self._server.sockets:
            notice_dead_networks(listening)
        logger.info("AudioSocket listens on %s, port %d", host, self.port)

    def _accept(self, link: AudioSocketLink) -> None:
        if len(self._calls) >= self._sessions.config.limits.max_connections:
            link.abort()
            return
        call = asyncio.create_task(self._serve(link), name="call over AudioSocket")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _serve(self, link: AudioSocketLink) -> None:
        """One connection, from its first frame to its close."""
        self._openings.add(link)
        try:
            identifier = await link.identified(self._sessions.config.http.header_timeout_sec)
            if identifier is None:
                return
            key = self._key_of(identifier)
            link.input_pace = self._sessions.admission.input_pace(key) or link.input_pace
            session = await self._begin(key, link.client)
        except OmniError as error:
            logger.info("refused a call over AudioSocket from %s: %s", link.client, error.message)
            await link.close_in_time(0, error.message)
            return
        finally:
            self._openings.discard(link)
        call = AudioSocketCall(link, session)
        session.attach(call)
        session.conversation.greet()
        await call.serve()

    def _key_of(self, identifier: UUID) -> ApiKey | None:
        """Raises Unauthenticated for a UUID that is no key of a server with keys."""
        return self._authenticator.authenticate_header(f"Bearer {identifier}")

    async def _begin(self, key: ApiKey | None, client: str) -> LiveSession:
        """Raises what the call is refused with."""
        settings = self._sessions.config.telephony
        session = await self._live.admit(key, client=client)
        fields = {"instructions": settings.audiosocket_instructions, "greeting": settings.audiosocket_greeting}
        given = {name: text for name, text in fields.items() if text is not None}
        try:
            session.conversation.configure(call_configuration(_AUDIO, **given))
        except OmniError:
            session.end(None)
            raise
        return session

    def drain(self, time_left: float) -> None:
        self._refuse_openings(ShuttingDown("the server is shutting down"))
        super().drain(time_left)

    def end_all(self, error: OmniError) -> None:
        if self._server is not None:
            self._server.close()
        self._refuse_openings(error)
        super().end_all(error)

    async def wait_closed(self) -> None:
        if self._calls:
            await asyncio.wait(tuple(self._calls))
        await super().wait_closed()
        if self._server is not None:
            await self._server.wait_closed()

    def _refuse_openings(self, error: OmniError) -> None:
        for link in self._openings:
            link.refuse(error)
