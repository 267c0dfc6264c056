"""``/v1/realtime``: the handshake of the Realtime API, and the session behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import orjson

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.errors import OmniError
from omni_ws.service.observing.accounts import take_place, take_trace
from omni_ws.service.recording.recorder import Recorder
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.live_session import LiveSessions
from omni_ws.transport.http.access import Authenticator, presented_key
from omni_ws.transport.http.application import LiveFrontEnd, Router, UpgradeDecision, needs_upgrade
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.native.connection import StreamConnection
from omni_ws.transport.native.keep_alive import KeepAliveSettings
from omni_ws.transport.realtime.client_secrets import ClientSecrets
from omni_ws.transport.realtime.commands import Commands
from omni_ws.transport.realtime.session import RealtimeConnection, close_code, write_event
from omni_ws.transport.recording.recordings import recorded
from omni_ws.wire.frames import max_frame_bytes
from omni_ws.wire.realtime_events import error_fields

REALTIME_PATH: Final = "/v1/realtime"
SUBPROTOCOL: Final = "realtime"
#: Label of the sessions in metrics, logs and recordings.
REALTIME_ORIGIN: Final = "realtime"


@dataclass(frozen=True, slots=True)
class RealtimeCaller:
    """Who a connection is of, and the settings that its client secret is bound to."""

    key: ApiKey | None
    address: str
    bound: Mapping[str, Any] = field(default_factory=dict)


def identify(request: HttpRequest, authenticator: Authenticator, secrets: ClientSecrets) -> RealtimeCaller:
    """A client secret stands for the key that made it. Raises Unauthenticated."""
    secret = secrets.find(presented_key(request), asyncio.get_running_loop().time())
    if secret is None:
        return RealtimeCaller(authenticator.authenticate(request), request.client)
    return RealtimeCaller(secret.key, request.client, orjson.loads(secret.session))


class Realtime(LiveFrontEnd):
    """Accepts the handshakes of OpenAI's clients, and opens a session for each."""

    def __init__(
        self,
        sessions: SessionFactory,
        authenticator: Authenticator,
        secrets: ClientSecrets,
        recorder: Recorder | None = None,
    ) -> None:
        # These clients do not resume: a session ends with its connection.
        super().__init__(LiveSessions(sessions, origin=REALTIME_ORIGIN, grace=0, any_model=True))
        self._sessions = sessions
        self._authenticator = authenticator
        self._secrets = secrets
        self._recorder = recorder
        self._keep_alive = KeepAliveSettings.configured(sessions.config.streaming_input)

    def register(self, router: Router) -> None:
        if self._sessions.config.streaming_input.enabled:
            router.add("GET", REALTIME_PATH, needs_upgrade)
            router.add_websocket(REALTIME_PATH, self.upgrade)

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Raises Unauthenticated or ModelNotFound, for an HTTP status. An event reports all other errors."""
        client = identify(request, self._authenticator, self._secrets)
        if request.query.get("intent") == "transcription":
            client = replace(client, bound={**client.bound, "type": "transcription"})
        self._sessions.any_model.check(request.query.get("model"))
        return UpgradeDecision(
            connection=partial(
                StreamConnection,
                input_pace=self._sessions.admission.input_pace(client.key),
                budget=self._sessions.budget,
                write_timeout=self._sessions.config.streaming_input.write_timeout_sec,
            ),
            serve=partial(self._serve, client),
            subprotocol=SUBPROTOCOL if SUBPROTOCOL in request.offered_subprotocols else None,
            route=REALTIME_PATH,
            max_size=max_frame_bytes(self._sessions.config.streaming_input.max_chunk_bytes),
        )

    async def _serve(self, client: RealtimeCaller, connection: StreamConnection) -> None:
        """One connection, from the end of its handshake to its close."""
        if connection.request is not None:
            take_trace(connection.request.headers.get)
            take_place(client.address, connection.request.headers.get)
        try:
            attachment = await self._begin(client, connection)
        except OmniError as error:
            connection.ignore_messages()
            if connection.is_open:
                write_event(connection, {"type": "error", "error": error_fields(error)})
            await connection.close_in_time(close_code(error), error.code)
            return
        await attachment.run()

    async def _begin(self, client: RealtimeCaller, connection: StreamConnection) -> RealtimeConnection:
        """Raises what ``LiveSessions.open`` raises."""
        session = await self._live.admit(client.key, client=client.address)
        if self._recorder is not None:
            name = key_name(client.key)
            session.recording = self._recorder.begin(REALTIME_ORIGIN, key=name, name=session.session_id)
        try:
            commands = Commands(session, self._sessions, client.bound)
        except OmniError:
            session.end(None)
            raise
        connection = recorded(connection, session.recording)
        attachment = RealtimeConnection(connection, session, commands, keep_alive=self._keep_alive)
        session.attach(attachment)
        return attachment
