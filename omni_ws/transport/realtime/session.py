"""``/v1/realtime``: the front end of OpenAI's Realtime API over WebSocket, its connections, sidebands and secrets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol, Self

import msgspec
from msgspec import structs, to_builtins
from websockets.frames import CloseCode

from omni_ws.config.keys import ApiKey
from omni_ws.core.chunks import AnyOutput, FinalChunk
from omni_ws.errors import (
    InvalidRequest,
    InvalidValue,
    OmniError,
    RateLimited,
    SessionConflict,
    SessionNotFound,
    SlowConsumer,
    websocket_close_code,
)
from omni_ws.service import (
    new_id,
    unexpected,
)
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.service.observing.accounts import take_place, take_trace
from omni_ws.service.observing.observer import OutputWritten
from omni_ws.service.sessions.factory import STREAM_FORMATS, SessionFactory
from omni_ws.service.sessions.keeper import held_elsewhere
from omni_ws.service.sessions.session import Session, Sessions
from omni_ws.service.sessions.shared_counts import KNOW_SECRET
from omni_ws.transport.http.access import (
    MAX_BODY_BYTES,
    ClientSecret,
    issued,
)
from omni_ws.transport.http.application import (
    Application,
    FrontEnd,
    Router,
    ServeConnection,
    SessionFrontEnd,
    UpgradeDecision,
    needs_upgrade,
)
from omni_ws.transport.http.exchange import HttpExchange, read_json_object
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.native.connection import (
    Pause,
    SoleConnection,
    SoleLink,
    StreamConnection,
    WatchedPeer,
    stream_accepted,
)
from omni_ws.transport.native.endpoint import record_message
from omni_ws.transport.native.keep_alive import KeepAlive, PeerRounds
from omni_ws.transport.realtime.effects import abilities_of
from omni_ws.transport.realtime.items import Event, SessionDialect
from omni_ws.transport.realtime.kept import (
    REALTIME_KIND,
    SESSION,
    TOKEN,
    ConversationRecord,
    KeptConversation,
    begin_record,
    new_token,
    take_realtime,
)
from omni_ws.transport.realtime.realtime import (
    RealtimeDialect,
    VllmDialect,
    begins_vllm_dialect,
)
from omni_ws.transport.recording import (
    begin_recording,
    recorded,
)
from omni_ws.wire.realtime_events import check_event, decode_event, encode_event, error_event, read
from omni_ws.wire.realtime_session import (
    SessionFields,
    merged_session,
    read_client_secret,
    session_config,
    session_object,
)

#: Events of the Live API that mirror the audio of a call. They have no id.
MIRRORED_AUDIO: Final = frozenset({"session.input_audio.append", "session.output_audio.delta"})
#: Sidebands that a session may have at a time.
MAX_SIDEBANDS: Final = 2
#: Bytes that a sideband may leave unread.
MAX_BEHIND_BYTES: Final = 1 << 20


class Commanded(Protocol):
    """The receiver of a session's events: from its own client, and from a ``sideband``."""

    def receive_message(
        self, data: bytes | bytearray | memoryview, *, is_text: bool, sideband: Sideband | None = None
    ) -> None: ...


class Sidebands:
    """The sidebands of one session: further connections of the application that see its events and send commands.

    ``greeting`` returns the first events for a new sideband. ``refused`` maps the types of events that sidebands may
    not send to the reason.
    """

    def __init__(
        self, owner: Commanded, greeting: Callable[[], Iterable[Event]], *, refused: Mapping[str, str]
    ) -> None:
        self.owner = owner
        self.greeting = greeting
        self.refused = refused
        self._joined: list[Sideband] = []
        #: Whether commands have to wait.
        self._held = False
        self._ended = False

    def __bool__(self) -> bool:
        return bool(self._joined)

    def check_room(self) -> None:
        """Raise SessionNotFound if the session has ended, and SessionConflict if it has MAX_SIDEBANDS already."""
        if self._ended:
            raise SessionNotFound("the call has ended")
        if len(self._joined) >= MAX_SIDEBANDS:
            raise SessionConflict(f"a call has at most {MAX_SIDEBANDS} sidebands")

    def join(self, sideband: Sideband) -> None:
        """Send events to ``sideband`` from now on. Raises what ``check_room`` raises."""
        self.check_room()
        self._joined.append(sideband)
        if self._held:
            sideband.hold(True)

    def leave(self, sideband: Sideband) -> None:
        """Send nothing more to ``sideband``."""
        if sideband in self._joined:
            self._joined.remove(sideband)

    def write(self, event: Event) -> None:
        """Send an event to all sidebands, with a new event id if it has none. Mirrored audio gets no id."""
        if self._joined:
            data = _encoded(event)
            for sideband in tuple(self._joined):
                sideband.write(data)

    def hold(self, held: bool) -> None:
        """Pause reading the commands of all sidebands, or resume it."""
        if held is not self._held:
            self._held = held
            for sideband in self._joined:
                sideband.hold(held)

    def end(self, code: int, reason: str) -> None:
        """Close all sidebands, and refuse new ones. May be called repeatedly."""
        self._ended = True
        for sideband in tuple(self._joined):
            sideband.end(code, reason)


class Sideband(WatchedPeer):
    """A further connection to a session, which sees its events and sends commands. A FrameReceiver."""

    def __init__(self, connection: StreamConnection, sidebands: Sidebands, *, rounds: PeerRounds) -> None:
        self._connection: StreamConnection = connection
        self._sidebands = sidebands
        self._loop = asyncio.get_running_loop()
        self._rounds = rounds
        self._keep_alive = KeepAlive(rounds.settings, now=self._loop.time())
        #: Done with the code and the reason to close with.
        self._over: asyncio.Future[tuple[int, str]] = self._loop.create_future()

    async def run(self) -> None:
        """Serve the sideband until it or its session ends, and close its connection."""
        try:
            self._sidebands.join(self)
        except OmniError as error:
            self._connection.ignore_messages()
            self.send(error_event(error))
            self.input_refused(error)
        else:
            for event in self._sidebands.greeting():
                self.send(event)
            self._connection.attach(self)
            self._watch_peer()
        try:
            await self._connection.close_in_time(*await self._over)
        finally:
            self._ignore_peer()
            self._sidebands.leave(self)

    def end(self, code: int, reason: str) -> None:
        """Send nothing more, and close the connection."""
        self._sidebands.leave(self)
        if not self._over.done():
            self._over.set_result((code, reason))

    # output

    def send(self, event: Event) -> None:
        """Send an event only to this sideband."""
        self.write(_encoded(event))

    def write(self, data: bytes) -> None:
        """Send an encoded event without waiting. Drop the sideband if it leaves more than MAX_BEHIND_BYTES unread."""
        if self._connection.is_open:
            self._connection.write_message(data, is_text=True)
            if self._connection.transport.get_write_buffer_size() > MAX_BEHIND_BYTES:
                self.input_refused(SlowConsumer(f"the sideband has left {MAX_BEHIND_BYTES} bytes unread"))

    # commands

    @property
    def heard_at(self) -> float:
        """When the sideband last sent something (loop's clock)."""
        return self._connection.heard_at

    def check(self, kind: str) -> None:
        """Raise InvalidValue if sidebands may not send events of the type ``kind``."""
        if (reason := self._sidebands.refused.get(kind)) is not None:
            raise InvalidValue(reason, param="type")

    def end_pass(self) -> None:
        self._connection.end_pass()

    def hold(self, held: bool) -> None:
        """Pause reading the sideband's commands, or resume it."""
        (self._connection.pause_reading if held else self._connection.resume_reading)(Pause.SESSION)

    # the connection's receiver

    @property
    def _listening(self) -> bool:
        return not self._over.done()

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        if self._listening:
            self._sidebands.owner.receive_message(data, is_text=is_text, sideband=self)

    def receive_pong(self, data: bytes) -> None:
        pass  # ``heard_at`` of the connection is all that counts

    def reading_changed(self) -> None:
        if self._listening:
            if self._connection.is_reading:
                self._connection.touch()
            self._watch_peer()

    def resume_output(self) -> None:
        pass  # nothing waits but in the connection's own buffer

    def input_refused(self, error: OmniError) -> None:
        self.end(websocket_close_code(error) or CloseCode.INTERNAL_ERROR, error.message)

    def connection_closing(self) -> None:
        self.end(CloseCode.NORMAL_CLOSURE, "")


def _encoded(event: Event) -> bytes:
    given = event if event["type"] in MIRRORED_AUDIO else {"event_id": new_id("event_"), **event}
    return encode_event(given)


# ``/v1/realtime``: the front end of OpenAI's Realtime API over WebSocket, and the connections of its sessions.


REALTIME_PATH: Final = "/v1/realtime"
SUBPROTOCOL: Final = "realtime"
#: The query parameter that names a call which the connection is to join.
CALL_ID: Final = "call_id"
#: Label of the sessions in metrics, logs and recordings.
REALTIME_ORIGIN: Final = "realtime"


@dataclass(frozen=True, slots=True)
class RealtimeCaller:
    """The client of a connection: its key, its address, and the session settings of its client secret."""

    key: ApiKey | None
    address: str
    bound: SessionFields = field(default_factory=SessionFields)
    #: Whether it has a client secret in place of the key.
    by_secret: bool = False

    @classmethod
    def of(cls, request: HttpRequest, key: ApiKey | None, secret: ClientSecret | None) -> Self:
        """Return the client that sent ``request``, with a key or a client secret of that key."""
        if secret is None:
            return cls(key, request.client)
        return cls(key, request.client, secret.settings(), by_secret=True)

    @property
    def needs_token(self) -> bool:
        """Whether the client must present a token to continue a stored session: it has no key, or a client secret."""
        return self.key is None or self.by_secret


def accepted(
    request: HttpRequest, sessions: SessionFactory, key: ApiKey | None, *, serve: ServeConnection, route: str
) -> UpgradeDecision:
    """Accept a handshake, to be served by ``serve``; see ``stream_accepted``."""
    subprotocol = SUBPROTOCOL if SUBPROTOCOL in request.offered_subprotocols else None
    return stream_accepted(sessions, key, serve=serve, route=route, subprotocol=subprotocol)


async def serve_session(
    address: str, begin: Callable[[StreamConnection], Awaitable[RealtimeConnection]], connection: StreamConnection
) -> None:
    """Serve one connection of the client at ``address``, from the end of its handshake to its close.

    ``begin`` opens a session and attaches it to the connection. If it raises an OmniError, an event reports the error,
    and the connection is closed.
    """
    if connection.request is not None:
        take_trace(connection.request.headers.get)
        take_place(address, connection.request.headers.get)
    try:
        attachment = await begin(connection)
    except OmniError as error:
        connection.ignore_messages()
        if connection.is_open:
            write_event(connection, error_event(error))
        await connection.close_in_time(close_code(error), error.code)
        return
    await attachment.run()


class Realtime(SessionFrontEnd):
    """The front end of the Realtime API: accepts the handshakes of its clients, and opens a session for each."""

    def __init__(self, app: Application) -> None:
        # These clients do not resume: a session ends with its connection.
        super().__init__(app, Sessions(app.sessions, origin=REALTIME_ORIGIN, grace=0, any_model=True))
        self._rounds = PeerRounds.configured(self._config.streaming_input)

    def register(self, router: Router) -> None:
        if self._config.streaming_input.enabled:
            router.add("GET", REALTIME_PATH, needs_upgrade)
            router.add_websocket(REALTIME_PATH, self.upgrade, takes=lambda request: CALL_ID not in request.query)

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Accept a handshake. Raises Unauthenticated or ModelNotFound; an event reports all other errors."""
        client = RealtimeCaller.of(request, *self._identified(request, REALTIME_ORIGIN))
        if request.query.get("intent") == "transcription":
            client = replace(client, bound=structs.replace(client.bound, type="transcription"))
        self._sessions.any_model.check(request.query.get("model"))
        wanted = (request.query.get(SESSION), request.query.get(TOKEN) or "")
        serve = partial(serve_session, client.address, partial(self._begin, client, wanted))
        return accepted(request, self._sessions, client.key, serve=serve, route=REALTIME_PATH)

    async def _begin(
        self, client: RealtimeCaller, wanted: tuple[str | None, str], connection: StreamConnection
    ) -> RealtimeConnection:
        """Open a session, and attach it to ``connection``.

        ``wanted`` is the id of the stored session to continue, None for a new conversation, and the client's token.
        Raises what ``Sessions.admit`` and ``take_realtime`` raise.
        """
        store, (session_id, token) = self._sessions.store, wanted
        kept: KeptConversation | None = None
        if session_id is not None:
            kept = await take_realtime(store, session_id, client.key, token if client.needs_token else None)
        try:
            session = await self._live.admit(client.key, client=client.address, session_id=session_id)
            begin_recording(self._recorder, session, REALTIME_ORIGIN, client.key)
            try:
                if kept is not None and kept.lease.lost:  # meanwhile
                    raise held_elsewhere()
                dialect = self._dialect(session, client.bound, kept)
            except OmniError:
                session.end(None)
                raise
        except BaseException:
            if kept is not None and store is not None:
                store.release(kept.lease, delete=False)
            raise
        connection = recorded(connection, session.recording)
        attachment = RealtimeConnection(connection, session, dialect, rounds=self._rounds)
        if store is not None:
            if kept is None:
                token = new_token() if client.needs_token else ""
                record = begin_record(store, session, REALTIME_KIND, client.key, dialect.kept, token)
                attachment.keep(record, {"resume_token": token} if token else {})
            else:
                record = ConversationRecord(store, kept.lease, session, dialect.kept, tokens=kept.tokens)
                attachment.keep(record, {"item_ids": [item.item_id for item in kept.content.items]})
        session.attach(attachment)
        return attachment

    def _dialect(self, session: Session, bound: SessionFields, kept: KeptConversation | None) -> RealtimeDialect:
        if kept is None:
            return RealtimeDialect(session, self._sessions, bound)
        fields = merged_session(kept.content.session, to_builtins(bound))
        return RealtimeDialect(session, self._sessions, fields, kept=kept.content)


# A session.

#: Messages of the session that are written in one pass of the event loop.
WRITE_BATCH_MESSAGES: Final = 128
#: Events of which fifty a second may come: they do not end the pass of the event loop.
AUDIO_EVENTS: Final = frozenset(
    {"input_audio_buffer.append", "session.input_audio_buffer.append", "session.input_audio.append"}
)
#: The most events that wait for the record, beyond which the client's input waits, too.
MAX_HELD_EVENTS: Final = 64
#: How long a client may take to read the last events.
GOODBYE_TIMEOUT_SEC: Final = 5.0


def close_code(error: OmniError) -> int:
    """Return the code with which to close a connection after ``error``.

    OpenAI's clients reconnect after the codes 1012 and 1013, but not after this server's own codes.
    """
    if isinstance(error, RateLimited):
        return CloseCode.TRY_AGAIN_LATER
    return websocket_close_code(error) or CloseCode.INTERNAL_ERROR


def write_event(connection: SoleLink, event: Event) -> int:
    """Send an event, with a new event id if it has none. Returns its size in bytes."""
    data = encode_event({"event_id": new_id("event_"), **event})
    connection.write_message(data, is_text=True)
    return len(data)


class RealtimeConnection(SoleConnection):
    """The connection of a Realtime session: receives and sends events; a FrameReceiver and an Attachment.

    A session of the Realtime API cannot be resumed: it ends with its connection. If the session is kept in the store,
    another session can continue its conversation.
    """

    #: Its record in the store; None if it is not kept.
    _kept: ConversationRecord | None = None
    #: Events that wait until the record is settled; None if nothing waits.
    _held: list[Event] | None = None

    def __init__(
        self,
        connection: SoleLink,
        session: Session,
        dialect: SessionDialect,
        *,
        rounds: PeerRounds,
    ) -> None:
        super().__init__(connection, session, rounds=rounds)
        self._created = dialect.connect(self._send, self._output_cleared)
        self._dialect = dialect
        #: Whether the dialect is known: from the route, or from the client's first event.
        self._dialect_known = not dialect.may_be_vllm
        self._observed = session.conversation.observed
        #: Raises an InvalidRequest for types of events that the client may not send; None if it may send all.
        self._check_kind: Callable[[str], None] | None = None
        #: Set when everything is written, or nothing can be written any more.
        self._emptied = asyncio.Event()

    def keep(self, record: ConversationRecord, told: Mapping[str, Any]) -> None:
        """Keep the session in the store from now on. ``told`` are fields to add to its first event."""
        self._kept = record
        if self._created:
            self._created[0] |= told

    def drop_record(self) -> None:
        """Delete the record in the store, if there is one."""
        if self._kept is not None:
            self._kept.drop()
            self._kept = None

    async def run(self) -> None:
        """Serve the session to its end, and close the connection. Call ``session.attach`` with this object before."""
        try:
            self._send_settled(self._created)
            self._connection.attach(self, self._conversation.account)
            self._watch_peer()
            error = await self._over
            code, reason = int(CloseCode.NORMAL_CLOSURE), ""
            if error is not None:
                await self._say_goodbye(error)
                code, reason = self._close_code(error), error.message
            self._closing(code, reason)
            await self._connection.close_in_time(code, reason)
        finally:
            self._ignore_peer()
            if self._kept is not None:
                self._kept.end()
            self._dialect.close()
            self._session.detach(self)

    def replaced(self) -> None:
        self._held = None
        self.session_over(None)  # another server has the session, or it was deleted

    def _close_code(self, error: OmniError) -> int:
        return close_code(error)

    def _closing(self, code: int, reason: str) -> None:
        """Do nothing. Called after the last event was written, before the connection is closed."""

    async def _say_goodbye(self, error: OmniError) -> None:
        """Write the remaining events, and the error that ends the session."""
        if isinstance(error, SlowConsumer):
            self._outbox.clear()
        self._emptied.clear()
        self._flush()
        if self._connection.is_open:
            try:
                async with asyncio.timeout(GOODBYE_TIMEOUT_SEC):
                    await self._emptied.wait()
            except TimeoutError:
                return
        if not self._dialect.reported(error):
            self._send([self._dialect.error(error)])

    def connection_closing(self) -> None:
        if self._kept is not None and self._session.is_open:
            self._kept.write()  # the conversation forgets what was heard of its answers as it ends
        self._emptied.set()
        self._session.end(None)

    # input

    def receive_message(
        self, data: bytes | bytearray | memoryview, *, is_text: bool, sideband: Sideband | None = None
    ) -> None:
        """Receive one event of the client, or of a ``sideband``."""
        if not self._listening:
            return
        heard_at = (sideband or self._connection).heard_at
        event_id: str | None = None
        try:
            event = decode_event(data)
            event_id = event["event_id"] if isinstance(event.get("event_id"), str) else None
            check_event(event)
            if (check := self._check_kind if sideband is None else sideband.check) is not None:
                check(event["type"])
            if not self._dialect_known:
                self._dialect_known = True
                if begins_vllm_dialect(event):
                    self.drop_record()
                    self._dialect.close()
                    self._dialect = VllmDialect(self._conversation)
                    self._dialect.connect(self._send, self._output_cleared)
            self._dialect.receive(event, now=heard_at)
            if event["type"] not in AUDIO_EVENTS:
                (sideband or self._connection).end_pass()
        except InvalidRequest as error:
            refusal = self._dialect.error(error, event_id=event_id)
            if sideband is not None:
                sideband.send(refusal)
            else:
                self._send([refusal])
        except OmniError as error:
            self._session.end(error)
        except Exception as error:
            self._session.end(unexpected(error, where="the input of a Realtime session"))
        self._conversation.stream.touch(now=heard_at)
        self._pause_if_blocked()

    @property
    def _input_blocked(self) -> bool:
        return len(self._held or ()) > MAX_HELD_EVENTS or self._connection.paused or super()._input_blocked

    # output

    def resume_output(self) -> None:
        self.output_ready()
        self.input_may_continue()

    def _flush(self) -> None:
        """Write a batch of the messages in the outbox, as long as the socket takes them."""
        self._flush_scheduled = False
        try:
            for _ in range(WRITE_BATCH_MESSAGES):
                if not self._connection.is_open or self._connection.paused or self._held is not None:
                    break
                if (message := self._outbox.take()) is None:
                    break
                record_message(self._session.recording, message)
                send = self._send if self._kept is None or type(message) is not FinalChunk else self._send_settled
                send(self._render(message))
                if self._observed.observers.listening_to_outputs and isinstance(message, AnyOutput):
                    self._observed.notify(OutputWritten(message))
        except OmniError as error:
            self._loop.call_soon(self._session.end, error)
            return
        except Exception as error:
            self._loop.call_soon(self._session.end, unexpected(error, where="the output of a Realtime session"))
            return
        if self._held is not None:
            return
        if not self._outbox:
            self._emptied.set()
        elif self._connection.is_open and not self._connection.paused:
            self.output_ready()

    def _render(self, message: ServerMessage) -> Iterator[Event]:
        return self._dialect.render(message)

    def _output_cleared(self, response_id: str | None) -> None:
        """Confirm ``output_audio_buffer.clear`` to the client, if the event has cancelled a response."""
        if response_id is not None:
            self._send([{"type": "output_audio_buffer.cleared", "response_id": response_id}])

    def _send(self, events: Iterable[Event]) -> None:
        """Write events without waiting. If the connection is gone, they are still rendered, but dropped."""
        if self._held is not None:
            self._held += events
            return
        for event in events:
            if self._connection.is_open:
                self._write(event)

    def _send_settled(self, events: Iterable[Event]) -> None:
        """Write events, and all later ones, once a snapshot that includes them is settled in the store."""
        if self._kept is None:
            self._send(events)
            return
        held = self._held = [*(self._held or ())]
        try:
            held += events  # what is sent while they are rendered comes between them
        finally:
            self._kept.write()
            self._kept.when_settled(partial(self._release, held))

    def _release(self, held: list[Event]) -> None:
        if self._held is held:
            self._held = None
            self._send(held)
            self.output_ready()
            self.input_may_continue()

    def _write(self, event: Event) -> None:
        write_event(self._connection, event)


CLIENT_SECRETS_PATH: Final = "/v1/realtime/client_secrets"


class ClientSecretRoutes(FrontEnd):
    """The front end that creates client secrets. If keys are configured, requests need a key, not a secret."""

    def __init__(self, app: Application) -> None:
        super().__init__(app)
        if app.sessions.group is not None:
            app.sessions.group.on(KNOW_SECRET, self._know)

    async def _know(self, made: tuple[int, bytes, ClientSecret]) -> None:
        """Keep a secret that another worker made.

        ``made`` is the Unix time of its expiry, the digest of its value, and the secret.
        """
        expires_at, digest, secret = made
        self._secrets.keep(digest, secret, until=asyncio.get_running_loop().time() + expires_at - time.time())

    def register(self, router: Router) -> None:
        if self._config.streaming_input.enabled:
            router.add("POST", CLIENT_SECRETS_PATH, self.create)

    async def create(self, exchange: HttpExchange) -> None:
        """Respond with a new client secret for sessions with the settings in the body.

        Raises Unauthenticated, RateLimited if the key has too many secrets, ModelNotFound, and the error of session
        settings that are not accepted.
        """
        key = self._authenticator.authenticate(exchange.request)
        self._sessions.check_ready()
        fields, _ = await read_json_object(exchange, MAX_BODY_BYTES, may_be_empty=True)
        body = read_client_secret(fields)
        given = body.session or {}
        if given.get("model") is not None:
            self._sessions.any_model.check(read(given["model"], str, "session.model"))
        session = merged_session(SessionFields(), given)
        shown = self._shown(session)
        secret = ClientSecret(key=key, session=msgspec.json.encode(session))
        told = await issued(self._secrets, secret, lifetime=body.lifetime, group=self._sessions.group)
        await exchange.respond_json(200, {**told, "session": shown}, [("Cache-Control", "no-store")])

    def _shown(self, session: SessionFields) -> dict[str, Any]:
        """Return the session object of ``session.created`` for these settings."""
        configuration = self._sessions.configuration(STREAM_FORMATS, any_model=True)
        config = configuration.apply(session_config(session, abilities_of(self._sessions)))
        return session_object(session, config, session_id=new_id("sess_"))
