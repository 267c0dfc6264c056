"""``/v1/streaming_input``: the front end of the native WebSocket, which opens and resumes sessions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from msgspec import UNSET, json, structs
from websockets.frames import CloseCode

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import StreamingInputConfig
from omni_ws.core.chunks import Modality, Task
from omni_ws.engine.composed.parts import parts_of
from omni_ws.errors import (
    InvalidValue,
    NotFound,
    OmniError,
    ResyncRequired,
    SessionNotFound,
    SessionTimeout,
    websocket_close_code,
)
from omni_ws.metrics import Metrics
from omni_ws.service.observing.accounts import take_place, take_trace
from omni_ws.service.observing.observer import Origin
from omni_ws.service.sessions.factory import STREAM_FORMATS
from omni_ws.service.sessions.keeper import ReceivedFrame
from omni_ws.service.sessions.session import Session, Sessions
from omni_ws.transport.http.access import (
    MAX_BODY_BYTES,
    NATIVE,
    ClientSecret,
    issued,
)
from omni_ws.transport.http.application import Application, Router, SessionFrontEnd, UpgradeDecision, needs_upgrade
from omni_ws.transport.http.exchange import HttpExchange, read_json_object
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.native.connection import StreamConnection, stream_accepted
from omni_ws.transport.native.keep_alive import AcknowledgementClock, PeerRounds
from omni_ws.transport.native.session import WebSocketSession, updated_frame
from omni_ws.transport.recording.recordings import begin_recording, recorded
from omni_ws.wire.realtime_session import read_client_secret
from omni_ws.wire.server_frames import (
    Capabilities,
    Part,
    Parts,
    SessionCreatedFrame,
    SessionKeptFrame,
    SessionLimits,
    encode_frame,
    error_frame,
)
from omni_ws.wire.session_config import SessionConfig

#: A function that creates the WebSocketSession of a connection and its session.
_Make: TypeAlias = Callable[[StreamConnection, Session], WebSocketSession]
_WHOLE_NUMBER: Final = re.compile(r"-1|[0-9]{1,10}")

NATIVE_PATH: Final = "/v1/streaming_input"
NATIVE_SECRETS_PATH: Final = "/v1/streaming_input/client_secrets"
SESSION_PATH: Final = "/v1/sessions/{id}"
SUBPROTOCOL_JSON: Final = "omni.v1+json"
SUBPROTOCOL_BINARY: Final = "omni.v1+binary"


def check_enabled(streaming: StreamingInputConfig) -> None:
    """Raise NotFound if the operator has disabled streaming input, over WebSocket and HTTP alike."""
    if not streaming.enabled:
        raise NotFound("streaming input is disabled on this server")


def chosen_subprotocol(request: HttpRequest) -> str | None:
    """Return the first offered subprotocol that the server knows; None if there is none."""
    return next((one for one in request.offered_subprotocols if one in (SUBPROTOCOL_BINARY, SUBPROTOCOL_JSON)), None)


async def refuse(connection: StreamConnection, error: OmniError) -> None:
    """Report ``error`` to a client that gets no session, and close its connection."""
    connection.ignore_messages()
    _report(connection, error)
    await connection.close_in_time(websocket_close_code(error) or CloseCode.INTERNAL_ERROR, error.code)


@dataclass(frozen=True, slots=True)
class Return:
    """The session to which a client returns, according to the query of its handshake.

    ``last_output`` is the number of the last output that the client received, -1 for none. ``resumable`` is False if
    the client was told that the store does not have the session as it is: what is there is from before.
    """

    session_id: str
    resume_token: str = field(repr=False)
    last_output: int
    resumable: bool = True


class StreamingInput(SessionFrontEnd):
    """The front end of the native WebSocket: accepts handshakes, and attaches each connection to its session."""

    def __init__(self, app: Application) -> None:
        sessions, streaming = app.sessions, app.sessions.config.streaming_input
        live = Sessions(sessions, origin=Origin.WEBSOCKET, grace=streaming.resume_grace_sec, store=sessions.store)
        super().__init__(app, live)
        self._ack_clock = AcknowledgementClock()
        self._rounds = PeerRounds.configured(streaming)

    def register(self, router: Router) -> None:
        router.add("GET", NATIVE_PATH, self._without_upgrade)
        router.add_websocket(NATIVE_PATH, self.upgrade)
        router.add("DELETE", SESSION_PATH, self.delete)
        router.add("POST", NATIVE_SECRETS_PATH, self.create_secret)

    def connect_gauges(self, metrics: Metrics) -> None:
        metrics.sessions_away.set_function(lambda: self.sessions_away)

    async def _without_upgrade(self, exchange: HttpExchange) -> None:
        check_enabled(self._config.streaming_input)
        await needs_upgrade(exchange)

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Accept a handshake. Raises NotFound, Unauthenticated or InvalidValue; a frame reports all other errors."""
        check_enabled(self._config.streaming_input)
        key, secret = self._identified(request, NATIVE)
        bound: Mapping[str, Any] = {} if secret is None else json.decode(secret.session)
        returning = _returning(request)
        refusal: OmniError | None = None
        if returning is None and "resume_token" in request.query:
            refusal = SessionNotFound("resume_token requires session_id", param="session_id")
        subprotocol = chosen_subprotocol(request)
        serve = partial(
            self._serve,
            key=key,
            bound=bound,
            client=request.client,
            binary_audio=subprotocol == SUBPROTOCOL_BINARY,
            refusal=refusal,
            returning=returning,
        )
        return stream_accepted(self._sessions, key, serve=serve, route=NATIVE_PATH, subprotocol=subprotocol)

    async def create_secret(self, exchange: HttpExchange) -> None:
        """Create a client secret, whose sessions begin with the fields of ``session_config`` in ``session``.

        Raises Unauthenticated, RateLimited if the key has too many, and the error of fields that are not accepted.
        """
        check_enabled(self._config.streaming_input)
        key = self._authenticator.authenticate(exchange.request)
        self._sessions.check_ready()
        fields, _ = await read_json_object(exchange, MAX_BODY_BYTES, may_be_empty=True)
        body = read_client_secret(fields)
        session = body.session or {}
        self._sessions.configuration(STREAM_FORMATS).apply(session)
        secret = ClientSecret(key=key, session=json.encode(session), kind=NATIVE)
        told = await issued(self._secrets, secret, lifetime=body.lifetime, group=self._sessions.group)
        await exchange.respond_json(200, {**told, "session": session}, [("Cache-Control", "no-store")])

    async def _serve(
        self,
        connection: StreamConnection,
        *,
        key: ApiKey | None,
        bound: Mapping[str, Any],
        client: str,
        binary_audio: bool,
        refusal: OmniError | None,
        returning: Return | None,
    ) -> None:
        """Serve one connection, from the end of its handshake to its close.

        Args:
            bound: The configuration that a fresh session begins with, by its client secret.
            client: Address of the client.
            refusal: Why there is no session, to be reported by an error frame; None if there is one.
            returning: The session to resume; None for a fresh one.
        """
        if connection.request is not None:  # set while the connection is open
            take_trace(connection.request.headers.get)
            take_place(client, connection.request.headers.get)
        try:
            if refusal is not None:
                raise refusal
            make = partial(
                WebSocketSession,
                binary_audio=binary_audio,
                ack_clock=self._ack_clock,
                rounds=self._rounds,
            )
            attachment = await self._resume(connection, returning, key, client, make) if returning else None
            if attachment is None:
                if not connection.is_open:  # nobody would learn of the session
                    return
                attachment = await self._begin(connection, key, client, make, bound=bound)
            await attachment.run()
        except OmniError as error:
            # By a frame, since a browser cannot read the HTTP status of a handshake.
            await refuse(connection, error)

    async def _begin(
        self, connection: StreamConnection, key: ApiKey | None, client: str, make: _Make, *, bound: Mapping[str, Any]
    ) -> WebSocketSession:
        """Open a session, and attach it to ``connection``. Raises what ``Sessions.admit`` and ``configure`` raise."""
        session = await self._live.admit(key, client=client)
        try:
            if bound:
                session.conversation.configure(bound)
        except OmniError:  # the engine has become another one since the secret was made
            session.end(None)
            raise
        begin_recording(self._recorder, session, "websocket", key)
        session.outbox.put_nowait(self._created(session))
        self._tell(session)
        attachment = make(recorded(connection, session.recording), session)
        session.attach(attachment)
        return attachment

    async def _resume(
        self, connection: StreamConnection, returning: Return, key: ApiKey | None, client: str, make: _Make
    ) -> WebSocketSession | None:
        """Resume a session, and return its new attachment. Raises what ``take_over`` raises.

        Returns None if a fresh session must follow, which is reported to the client: the session has discarded outputs
        that the client lacks, and is ended; or the store has none with this id and token that this server can read.
        """
        resumes = self._sessions.metrics.resumes
        while True:
            try:
                session, frames, outcome = await self._returned(connection, returning, key, client)
            except (SessionNotFound, SessionTimeout) as error:
                resumes.labels("refused").inc()
                if not self._live.has_store or isinstance(error, SessionTimeout):
                    raise
                message = "no session to go on with is known by this session_id and resume_token; a new session follows"
                _report(connection, ResyncRequired(message, param="session_id"))
                return None
            connection = recorded(connection, session.recording, last_output=returning.last_output)
            attachment = make(connection, session)
            attachment.receive_again(frames)
            session.spend(returning.resume_token)
            if not session.resumable or not session.can_resume(returning.last_output):
                resumes.labels("resync").inc()
                message = f"the outputs after {returning.last_output} are no longer available; a new session follows"
                _report(connection, ResyncRequired(message, param="last_output"))
                await self._live.end(session)
                return None
            resumed, ack = session.resume(attachment, returning.last_output)
            try:
                # Above all the token that the client is told. Another server may have had the session meanwhile.
                if session.keeper is None or await session.keeper.settled():
                    break
            except BaseException:
                session.detach(attachment)
                raise
        resumes.labels(outcome).inc()
        attachment.write_resumed(resumed, ack)
        self._tell(session)
        return attachment

    async def _returned(
        self, connection: StreamConnection, returning: Return, key: ApiKey | None, client: str
    ) -> tuple[Session, list[ReceivedFrame], str]:
        """Return the session that a client returns to, frames that it is to receive again, and what became of it."""
        session_id, token = returning.session_id, returning.resume_token
        try:
            return await self._live.claim_alive(session_id, token, key, answers=connection.answers), [], "resumed"
        except SessionNotFound:
            if not returning.resumable:
                raise
        session, frames = await self._live.take_over(
            session_id, token, key, last_output=returning.last_output, client=client, answers=connection.answers
        )
        return session, frames, "taken_over"

    def _tell(self, session: Session) -> None:
        """Have a client told of changes that it did not ask for."""
        session.conversation.followed = partial(self._tell_change, session)
        if session.keeper is not None:
            session.keeper.tell(partial(self._tell_kept, session))

    async def delete(self, exchange: HttpExchange) -> None:
        """End a session, wherever it is, and delete what is kept of it."""
        check_enabled(self._config.streaming_input)
        request = exchange.request
        key = self._authenticator.authenticate(request)
        session_id = exchange.path_parameters["id"]
        if "sess_" not in session_id:  # as the Live API names it
            session_id = session_id.replace("live_", "sess_", 1)
        await self._live.delete(session_id, request.query.get("resume_token"), key)
        await exchange.respond(204)

    @property
    def sessions_away(self) -> int:
        """How many sessions are disconnected, within their grace period."""
        return self._live.disconnected

    def _created(self, session: Session) -> SessionCreatedFrame:
        config: Any = session.conversation.configuration.effective
        streaming = self._config.streaming_input
        return SessionCreatedFrame(
            session_id=session.session_id,
            resume_token=session.new_token(),
            expires_in=streaming.session_timeout_sec,
            model=config.model,
            input_audio=config.input_audio,
            output_audio=config.output_audio,
            start_policy=config.start_policy,
            after_start=config.after_start,
            parts=self._parts(),
            advice=self._sessions.advise(),
            recorded=True if session.recording is not None else UNSET,
            capabilities=self._capabilities(session),
            limits=SessionLimits(
                max_chunk_bytes=streaming.max_chunk_bytes,
                max_payload_per_session=streaming.max_payload_per_session,
                reorder_window_chunks=streaming.reorder_window_chunks,
                reorder_timeout_sec=streaming.reorder_timeout_sec,
                max_pending_requests=streaming.max_pending_requests,
            ),
        )

    def _tell_change(self, session: Session, config: SessionConfig) -> None:
        """Tell the client that the engine has become another one."""
        if not session.is_open:
            return
        session.outbox.put_nowait(
            updated_frame(
                config,
                parts=self._parts(),
                advice=self._sessions.advise(),
                capabilities=self._capabilities(session),
            )
        )

    def _tell_kept(self, session: Session, resumable: bool) -> None:
        """Tell the client whether the session is kept in the store."""
        if session.is_open:
            config = session.conversation.configuration.effective
            session.outbox.put_nowait(updated_frame(config, kind=SessionKeptFrame, resumable=resumable))
            session.outbox.put_nowait(structs.replace(session.conversation.take_ack(), resumable=resumable))

    def _parts(self) -> Parts:
        parts = parts_of(self._sessions.engine).items()
        return Parts(**{role: None if part is None else Part(**asdict(part)) for role, part in parts})

    def _capabilities(self, session: Session) -> Capabilities:
        able = self._sessions.engine.capabilities
        hears = Modality.AUDIO in able.input_modalities
        turn_detection_types = self._sessions.speech_workers.turn_detection_types if hears else ()
        return Capabilities(
            input_modalities=sorted(able.input_modalities),
            output_modalities=sorted(able.output_modalities),
            tasks=sorted(able.tasks - ({Task.CHAT} if able.chat_refusal else set())),
            voices=list(able.voices),
            voice_languages=dict(able.voice_languages) or UNSET,
            languages=sorted(able.languages) or UNSET,
            speech_languages=sorted(able.speech_languages) or UNSET,
            speed=able.speed,
            sampling=sorted(able.sampling),
            sampling_no_ops=sorted(able.sampling_no_ops),
            extend=able.extend,
            tools=able.tools,
            logprobs=able.logprobs,
            structured_output=able.structured_output,
            turn_detection=bool(turn_detection_types),
            turn_detection_types=list(turn_detection_types),
            duck=bool(turn_detection_types),
            backchannel="semantic_vad" in turn_detection_types and Task.SPEECH in able.tasks,
            resume=session.resumable,
            transcripts=able.transcripts,
            keywords=able.keywords or UNSET,
            lexicon=able.lexicon or UNSET,
            webrtc=self._sessions.takes_calls or UNSET,
        )


def _returning(request: HttpRequest) -> Return | None:
    """Read which session a handshake resumes; None for a fresh one.

    Raises InvalidValue for a ``last_output`` that is neither the number of an output nor -1.
    """
    query = request.query
    session_id, token = query.get("session_id"), query.get("resume_token")
    if session_id is None or token is None:
        return None
    last_output = query.get("last_output")
    if last_output is None:
        last_output = "-1"
    if not _WHOLE_NUMBER.fullmatch(last_output):
        raise InvalidValue("last_output must be the number of the last output received, or -1", param="last_output")
    return Return(session_id, token, int(last_output), query.get("resumable") != "false")


def _report(connection: StreamConnection, error: OmniError) -> None:
    if connection.is_open:
        # Without waiting: the frame is small, and the client may not read at all.
        connection.write_message(encode_frame(error_frame(error)), is_text=True)
