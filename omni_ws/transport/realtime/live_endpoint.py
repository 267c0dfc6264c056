"""``/v1/live/sessions``: the front end of OpenAI's Live API over WebSocket, and the connections of its sessions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

from websockets.frames import CloseCode

from omni_ws.config.keys import ApiKey
from omni_ws.errors import ORDERLY_ENDS, InvalidFrame, InvalidRequest, OmniError
from omni_ws.service.sessions.session import Session, Sessions
from omni_ws.service.store.session_store import SessionStore
from omni_ws.transport.http.application import Application, Router, SessionFrontEnd, UpgradeDecision, needs_upgrade
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.native.connection import SoleLink, StreamConnection, stream_accepted
from omni_ws.transport.native.keep_alive import PeerRounds
from omni_ws.transport.realtime.items import Event
from omni_ws.transport.realtime.kept import LIVE_KIND, TOKEN, begin_record, check_kept, new_token, read_live
from omni_ws.transport.realtime.live import LiveDialect, session_of
from omni_ws.transport.realtime.session import RealtimeConnection, serve_session
from omni_ws.transport.realtime.sideband import Sideband
from omni_ws.transport.recording.recordings import begin_recording, recorded
from omni_ws.wire.realtime_events import encode_event

LIVE_PATH: Final = "/v1/live/sessions"
FORK_PATH: Final = f"{LIVE_PATH}/{{session_id}}/fork"
#: Label of the sessions in metrics, logs and recordings.
LIVE_ORIGIN: Final = "live"


class Live(SessionFrontEnd):
    """The front end of the Live API: accepts the handshakes of its clients, and opens a session for each."""

    def __init__(self, app: Application) -> None:
        # A session ends with its connection.
        super().__init__(app, Sessions(app.sessions, origin=LIVE_ORIGIN, grace=0, any_model=True))
        self._rounds = PeerRounds.configured(self._config.streaming_input)

    def register(self, router: Router) -> None:
        if self._config.streaming_input.enabled:
            router.add("GET", LIVE_PATH, needs_upgrade)
            router.add_websocket(LIVE_PATH, self.upgrade)
            router.add("GET", FORK_PATH, needs_upgrade)
            router.add_websocket(FORK_PATH, self.fork)

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Accept a handshake. Raises Unauthenticated; an event reports all other errors. The query is ignored."""
        key = self._authenticator.authenticate(request)
        serve = partial(serve_session, request.client, partial(self._begin, key, request.client, None))
        return stream_accepted(self._sessions, key, serve=serve, route=LIVE_PATH)

    def fork(self, request: HttpRequest) -> UpgradeDecision:
        """Accept the handshake of a session that begins with a stored one, as ``upgrade`` does.

        Raises UnsupportedParameter without a store.
        """
        key = self._authenticator.authenticate(request)
        check_kept(self._sessions.store, "fork")
        wanted = (session_of(request.segments[-2]), None if key is not None else request.query.get(TOKEN) or "")
        serve = partial(serve_session, request.client, partial(self._begin, key, request.client, wanted))
        return stream_accepted(self._sessions, key, serve=serve, route=FORK_PATH)

    async def _begin(
        self, key: ApiKey | None, address: str, wanted: tuple[str, str | None] | None, connection: StreamConnection
    ) -> LiveConnection:
        """Open a session, and attach it to ``connection``.

        ``wanted`` is the id of the session with which it begins, if any, and the token of its client. Raises what
        ``Sessions.admit`` and ``read_live`` raise.
        """
        forked = None if wanted is None else await read_live(self._sessions.store, wanted[0], key, wanted[1])
        session = await self._live.admit(key, client=address)
        begin_recording(self._recorder, session, LIVE_ORIGIN, key)
        most = None if key is None else key.max_session_sec
        dialect = LiveDialect(session, self._sessions, max_sec=most, forked=forked)
        link = recorded(connection, session.recording)
        attachment = LiveConnection(link, session, dialect, rounds=self._rounds)
        attachment.keep_in(self._sessions.store, key)
        session.attach(attachment)
        return attachment


class LiveConnection(RealtimeConnection):
    """The connection of a Live session. It ends with ``session.closed``, and then the code 1000.

    A session cannot be resumed, nor moved to another server: as this one ends, the session has expired. One with
    ``store: true`` is kept in the store, and others can begin with it.
    """

    _store: SessionStore | None = None
    _key: ApiKey | None = None

    def __init__(self, connection: SoleLink, session: Session, dialect: LiveDialect, *, rounds: PeerRounds) -> None:
        super().__init__(connection, session, dialect, rounds=rounds)
        self._live = dialect
        dialect.carry(blocked=self._blocks_output, listening=lambda: connection.is_reading, keep=self._begin_record)

    def _blocks_output(self) -> bool:
        """Return whether the client takes no sound now."""
        return self._connection.paused

    def keep_in(self, store: SessionStore | None, key: ApiKey | None) -> None:
        """Keep the session in the store, if there is one, once it has started and if its client wants that."""
        self._store, self._key = store, key

    def _begin_record(self) -> str:
        if self._store is None:
            return ""
        token = new_token() if self._key is None else ""
        self.keep(begin_record(self._store, self._session, LIVE_KIND, self._key, self._live.kept, token), {})
        self._send_settled(())
        return token

    def connection_closing(self) -> None:
        self._live.remember()
        super().connection_closing()

    def _send_settled(self, events: Iterable[Event]) -> None:
        self._send(events)  # what was said is heard later anyway, and sound waits for nothing
        if self._kept is not None:
            self._kept.write()

    def receive_message(
        self, data: bytes | bytearray | memoryview, *, is_text: bool, sideband: Sideband | None = None
    ) -> None:
        if not is_text and self._listening:
            refusal = self._live.error(InvalidFrame("events are text messages"))
            if sideband is not None:
                sideband.send(refusal)
            else:
                self._send([refusal])
            (sideband or self._connection).end_pass()
            return
        super().receive_message(data, is_text=is_text, sideband=sideband)

    async def _say_goodbye(self, error: OmniError) -> None:
        if isinstance(error, ORDERLY_ENDS) and self._live.started:
            self._live.end("expired")
        else:
            await super()._say_goodbye(error)

    def _close_code(self, error: OmniError) -> int:
        if self._live.closed:
            return CloseCode.NORMAL_CLOSURE
        return CloseCode.POLICY_VIOLATION if isinstance(error, InvalidRequest) else super()._close_code(error)

    def _write(self, event: Event) -> None:
        if event["type"] != "session.output_audio.delta":
            super()._write(event)
            return
        # It has no id, and no times on the connection that carries the audio.
        data = encode_event({"type": event["type"], "delta": event["delta"]})
        self._connection.write_message(data, is_text=True)
