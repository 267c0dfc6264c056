"""The routes of Mode B: a session's input arrives in several HTTP requests, and several readers may read its result.

POST   …/sessions             creates a session, optionally with its first chunks
PATCH  …/sessions/{id}        appends chunks (also POST …/chunks and …/append)
POST   …/sessions/{id}/finish ends the input
GET    …/sessions/{id}        reports the state
GET    …/sessions/{id}/result reads the result, as events or as one object
DELETE …/sessions/{id}        cancels the session and discards its result
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from omni_ws.audio.container import wav_header
from omni_ws.config.keys import ApiKey, key_name
from omni_ws.core.chunks import AudioEncoding, AudioFormat, FinalChunk, OutputChunk
from omni_ws.core.quota import ByteBudget, Share
from omni_ws.core.request_input import InputState
from omni_ws.errors import (
    ORDERLY_ENDS,
    InvalidRequest,
    InvalidValue,
    OmniError,
    PayloadTooLarge,
    SessionConflict,
    SessionExpired,
    SessionNotFound,
    ShuttingDown,
    SlowConsumer,
    websocket_close_code,
)
from omni_ws.service.conversation.openai_requests import (
    chat_options,
    configure,
    earlier_texts,
    ended_on_error,
    prepare_answer,
)
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.transport.http.application import Application, FrontEnd, Router, UpgradeDecision
from omni_ws.transport.http.exchange import HttpExchange, read_json_object, to_thread_if_large
from omni_ws.transport.http.request import HttpRequest, error_object
from omni_ws.transport.mode_b.keeper import ModeBKeeper
from omni_ws.transport.mode_b.session import ModeBSession, ResultForm
from omni_ws.transport.native.connection import StreamConnection
from omni_ws.transport.native.endpoint import (
    NATIVE_PATH,
    SUBPROTOCOL_BINARY,
    check_enabled,
    chosen_subprotocol,
    encode_message,
    refuse,
)
from omni_ws.transport.recording import (
    HttpRecordings,
    recorded,
)
from omni_ws.transport.routes.generation import slot_for_body
from omni_ws.transport.routes.openai import SpokenAnswers
from omni_ws.transport.routes.sole_request import SSE_HEADERS, EventBatch, charging, write_events
from omni_ws.wire import server_frames
from omni_ws.wire.frames import OutputAckFrame, PingFrame, decode_frame, decode_input
from omni_ws.wire.openai_requests import ChatRequest, read_chat
from omni_ws.wire.openai_responses import ChatCompletion, ChatStream, audio_id, ended_normally
from omni_ws.wire.server_frames import PongFrame, SessionClosingFrame, encode_frame, error_frame
from omni_ws.wire.streaming_body import BodyChunk, read_append, read_create

SESSIONS_PATH: Final = f"{NATIVE_PATH}/sessions"
#: Limit of ``?wait=``.
MAX_WAIT_SEC: Final = 60
#: How long ``status`` waits for a session whose input is being fed again; then it reports how far that is.
_STATUS_PATIENCE_SEC: Final = 1.0
#: Sent with a 202: when to ask again for a result that is not complete.
_RETRY_AFTER: Final = ("Retry-After", "1")


class ModeBRoutes(FrontEnd):
    """The front end of Mode B over HTTP: its routes and their handlers."""

    def __init__(self, app: Application, keeper: ModeBKeeper, spoken: SpokenAnswers) -> None:
        super().__init__(app)
        self._keeper = keeper
        self._registry = keeper.registry
        self._spoken = spoken

    def register(self, router: Router) -> None:
        one = f"{SESSIONS_PATH}/{{id}}"
        router.add("POST", SESSIONS_PATH, self.create)
        router.add("GET", one, self.status)
        router.add("PATCH", one, self.append)
        router.add("DELETE", one, self.delete)
        router.add("POST", f"{one}/chunks", self.append)
        router.add("POST", f"{one}/append", self.append)
        router.add("POST", f"{one}/finish", self.finish)
        router.add("GET", f"{one}/result", self.result)

    def serves(self, session_id: str) -> bool:
        return self._registry.knows(session_id)

    def drain(self, time_left: float) -> None:
        self._keeper.drain(ShuttingDown("the server is shutting down"))

    def end_all(self, error: OmniError) -> None:
        self._keeper.end_all(error)

    async def wait_ended(self) -> None:
        await self._registry.wait_released()

    async def create(self, exchange: HttpExchange) -> None:
        """Create a session, and feed it the chunks of the body, if any. Responds with 201 and the session's state."""
        key = self._authenticate(exchange)
        async with slot_for_body(exchange, self._sessions.admission, key) as slot:
            self._sessions.check_ready()
            self._limit_input(exchange, key)
            fields: dict[str, Any] = {}
            size = 0
            if exchange.request.has_body:
                fields, size = await read_json_object(exchange, self._config.http.max_body_bytes, may_be_empty=True)
            request, chunks = await to_thread_if_large(_weight(size, fields), partial(_read_create, fields))
            session = self._open(request, key, slot)
        async with self._keeper.opened(session, key_name(key)):  # if this raises, the client does not learn the id
            async with self._keeper.feeding(session, fields, size):
                await session.feed(chunks)
            exchange.belongs_to(session.id)
            exchange.recording.opens_session(session.id)
            location = ("Location", f"{exchange.request.path}/{session.id}")
            await exchange.respond_json(201, self._status(session), [location])

    def _open(self, request: ChatRequest, key: ApiKey | None, slot: ExitStack) -> ModeBSession:
        """Open and register a session, which takes over ``slot``. Raises InvalidRequest for a refused parameter."""
        conversation = self._registry.open(key)
        with ended_on_error(conversation):
            audio = configure(conversation, request.patch)
            prepare_answer(conversation, request, earlier_texts(request.history), read_whole=request.stream is False)
        options = chat_options(request, model=self._sessions.model.names[0])
        names = replace(request.patch, fields={})
        form = ResultForm(options, audio, events=request.stream is True, names=names)
        return self._registry.add(conversation, form, key=key, slot=slot.pop_all())

    async def append(self, exchange: HttpExchange) -> None:
        """Feed chunks to a session, and wait while the engine is behind. Responds with 202 and its state.

        A body that is too large fails the session.
        """
        async with self._session(exchange) as session:
            self._limit_input(exchange, self._authenticate(exchange))
            try:
                with session.incoming():
                    fields, size = await read_json_object(exchange, self._config.http.max_body_bytes)
                    chunks: list[BodyChunk] = await to_thread_if_large(
                        _weight(size, fields), partial(read_append, fields)
                    )
                    async with self._keeper.feeding(session, fields, size):
                        await session.feed(chunks)
            except PayloadTooLarge as error:
                session.fail(error)
                await self._keeper.settled(session)
                raise
            await exchange.respond_json(202, self._status(session))

    async def finish(self, exchange: HttpExchange) -> None:
        """End the input of a session. Idempotent. Responds with its state."""
        async with self._session(exchange) as session:
            async with self._keeper.feeding(session, None, 0):
                session.finish()
                await session.wait_if_refused()
            await exchange.respond_json(200, self._status(session))

    async def status(self, exchange: HttpExchange) -> None:
        """Respond with the state of a session. Waits for input that is being fed again, but only for a moment."""
        async with self._session(exchange, patience=_STATUS_PATIENCE_SEC) as session:
            await exchange.respond_json(200, self._status(session))

    async def delete(self, exchange: HttpExchange) -> None:
        """Cancel a session, and respond with 204 once its engine has stopped."""
        self._keeper.stop_returning(exchange.path_parameters["id"], self._authenticate(exchange))
        async with self._session(exchange) as session:
            await self._keeper.cancel(session)
            await exchange.respond(204)
            exchange.recording.ends_session()

    async def result(self, exchange: HttpExchange) -> None:
        """Respond with the result: as events while they are produced, or as one object.

        For one object, wait for the end of the answer for at most the seconds of ``?wait=``, and respond with 202 if
        the answer is not complete by then.
        """
        now, wait = asyncio.get_running_loop().time, _wait(exchange)
        until = now() + wait
        async with self._session(exchange, patience=wait) as session:
            if not self._keeper.is_returning(session):
                with session.reading():
                    await self._write_result(exchange, session, max(0.0, until - now()))
                return
            if not _wants_events(exchange, session):
                await exchange.respond_json(202, self._status(session), [_RETRY_AFTER])
                return
        async with self._session(exchange) as session:
            with session.reading():
                await self._write_result(exchange, session, 0.0)

    async def _write_result(self, exchange: HttpExchange, session: ModeBSession, wait: float) -> None:
        options = session.form.options
        # Known to chat under its ``audio.id`` from each reading on, also if the answer was made at another server.
        keep = partial(self._spoken.keep, audio_id(options), key=key_name(self._authenticate(exchange)))
        if _wants_events(exchange, session):
            stream = ChatStream(options, keep_spoken=keep if options.wants_audio else None)
            await write_result_events(exchange, session, stream, heartbeat_sec=self._config.sse_heartbeat_sec)
            exchange.recording.ends_session()
            return
        try:
            async with asyncio.timeout(wait):
                await session.ended.wait()
        except TimeoutError:
            await exchange.respond_json(202, self._status(session), [_RETRY_AFTER])
            return
        await self._keeper.settled(session)
        if session.state is not InputState.FINISHED:
            exchange.recording.ends_session()
            raise session.failure()
        await write_result(exchange, session, keep, budget=self._sessions.budget)
        exchange.recording.ends_session()

    def _authenticate(self, exchange: HttpExchange) -> ApiKey | None:
        """Return the key of a request. Raises NotFound if streaming input is disabled, and Unauthenticated."""
        check_enabled(self._config.streaming_input)
        return self._authenticator.authenticate(exchange.request)

    def _limit_input(self, exchange: HttpExchange, key: ApiKey | None) -> None:
        """Throttle the body to the key's rate, and charge the body to the server's budget."""
        exchange.limit_input(self._sessions.admission.input_pace(key), Share(self._sessions.budget))

    @asynccontextmanager
    async def _session(self, exchange: HttpExchange, *, patience: float | None = None) -> AsyncIterator[ModeBSession]:
        """Find the session that the path names, if the request's key owns it. Raises as ``ModeBKeeper.using`` does."""
        key = self._authenticate(exchange)
        client = exchange.request.client
        session_id = exchange.path_parameters["id"]
        async with self._keeper.using(session_id, key, client=client, patience=patience) as session:
            exchange.belongs_to(session.id)
            yield session

    def _status(self, session: ModeBSession) -> dict[str, Any]:
        """Return the state of a session as clients see it; see protocol/README.md."""
        progress = session.progress
        expires_at = session.expires_at
        left = self._registry.timeout if expires_at is None else expires_at - asyncio.get_running_loop().time()
        return {
            "session_id": session.id,
            "expires_in": min(max(0, math.ceil(left)), math.floor(self._registry.timeout)),
            "state": session.state.value,
            "started": session.started,
            "input_ended": progress.ended,
            "next_sequence_id": progress.next_sequence_id,
            "next_offset": progress.next_offset,
            "buffered_chunks": progress.buffered_chunks,
            "duplicates": progress.duplicates,
            "received_bytes": progress.received_bytes,
            "created_at": session.created_at,
            "error": None if session.error is None else error_object(session.error),
        }


def _read_create(fields: dict[str, Any]) -> tuple[ChatRequest, list[BodyChunk]]:
    """Return the parameters of a new session, and its first chunks. Raises an InvalidRequest that names the field."""
    parameters, chunks = read_create(fields)
    return read_chat(parameters, input_follows=True), chunks


def _weight(size: int, fields: dict[str, Any]) -> int:
    """Return the size of a body for ``to_thread_if_large``: each chunk counts as 1 KiB at least."""
    chunks = fields.get("chunks")
    return max(size, len(chunks) << 10 if isinstance(chunks, list) else 0)


def _wait(exchange: HttpExchange) -> float:
    """Return the seconds of ``?wait=``, at most MAX_WAIT_SEC. Raises InvalidValue."""
    text = exchange.request.query.get("wait")
    try:
        seconds = 0.0 if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InvalidValue("wait must be a number of seconds", param="wait")
    return min(seconds, MAX_WAIT_SEC)


def _wants_events(exchange: HttpExchange, session: ModeBSession) -> bool:
    """Return whether a reader wants events rather than one object.

    ``Accept`` decides; if it names both forms or neither, the choice made when the session was opened.
    """
    accepted = ",".join(exchange.request.headers.get_all("accept")).lower()
    events, whole = "text/event-stream" in accepted, "application/json" in accepted
    return session.form.events if events is whole else events


# Results: as events that can be resumed, or as one JSON object

#: The number of events, skipped because the client has them, after which other tasks have a turn on the event loop.
_SKIPPED_AT_A_STRETCH: Final = 64


async def write_result_events(
    exchange: HttpExchange, session: ModeBSession, stream: ChatStream, *, heartbeat_sec: float
) -> None:
    """Write the result as events of ``stream``: all of them, or those after the ``Last-Event-ID`` of the request.

    ``heartbeat_sec`` is that of ``write_events``. Encoding is deterministic: each reader gets the same events with the
    same numbers. Raises InvalidValue for a ``Last-Event-ID`` that is no id of an event.
    """
    events = NumberedEvents(exchange, _last_event_id(exchange))
    reader = ResultReader(session, events)
    await write_events(
        events,
        reader,
        stream,
        head_at_start=True,
        head_by_heartbeat=True,
        heartbeat_sec=heartbeat_sec,
    )


async def write_result(
    exchange: HttpExchange, session: ModeBSession, keep_spoken: Callable[[str], None], *, budget: ByteBudget
) -> None:
    """Respond with the result of a finished session as one object.

    ``keep_spoken`` is called before with the transcript of a spoken answer. Raises EngineOverloaded if ``budget`` has
    no room for the result.
    """
    size = session.output.held
    with charging(budget) as charge:
        charge(2 * size)  # the outputs, and their base64
        # Taken now, since the session may be deleted or expire during the write.
        messages = session.output.messages
        result, completion = await to_thread_if_large(size, lambda: result_object(session.form, messages))
        if session.form.options.wants_audio:
            keep_spoken(completion.spoken)
        await exchange.respond_json(200, result)


class ResultReader:
    """An AnswerSource that reads the output log of a session from its beginning."""

    def __init__(self, session: ModeBSession, events: NumberedEvents) -> None:
        self._session = session
        self._events = events
        self._position = 0

    def take(self) -> ServerMessage | None:
        """Return the next message of the log. Raises the error that ended the session."""
        found = self._session.output.find(self._position)
        return None if found is None else self._read(*found)

    async def wait(self, *, idle_sec: float | None = None, meanwhile: EventBatch | None = None) -> bool:
        """Wait for the log to grow; see ``AnswerSource``."""
        if self._position >= self._session.output.end:
            await self._events.caught_up()
        try:
            async with asyncio.timeout(idle_sec):
                found = await self._session.output.get(self._position)
        except TimeoutError:
            return False
        if found is None:
            raise self._session.failure()
        return True

    def _read(self, position: int, message: ServerMessage) -> ServerMessage:
        self._position = position
        if isinstance(message, OmniError):
            raise copy.copy(message)
        if isinstance(message, FinalChunk) and not ended_normally(message):
            raise self._session.failure()
        return message

    def written(self) -> None:
        """Do nothing: only live answers report what is written."""


class NumberedEvents:
    """An EventSink that numbers events from 1 on and skips those that the client has received.

    The head of the response is deferred until there is an event or a heartbeat to send, or the client has all events so
    far and more may follow. If the answer has ended by then, the response is a 204; an unknown ``Last-Event-ID`` is
    refused with an error status.
    """

    def __init__(self, exchange: HttpExchange, last_event_id: int) -> None:
        self._exchange = exchange
        self._last_event_id = last_event_id
        self._number = 0
        #: Whether an event was written to this connection.
        self._written = False
        self._started = False

    def tell_error(self, error: OmniError) -> None:
        self._exchange.tell_error(error)

    @property
    def head_sent(self) -> bool:
        """Whether the response has started, on this connection or on an earlier one of the same client."""
        return self._started or self._exchange.head_sent

    async def start(self, status: int, headers: Iterable[tuple[str, str]] = (), *, filler: bytes = b"") -> None:
        """Defer the head until there is an event to write."""
        self._started = True

    async def write_all(self, parts: Sequence[bytes]) -> None:
        for part in parts:
            await self.write(part)

    @property
    def startable(self) -> bool:
        return False  # skipping has to yield to the event loop

    def start_now(
        self, status: int, headers: Iterable[tuple[str, str]] = (), *, filler: bytes = b"", content: bytes = b""
    ) -> None:
        raise RuntimeError("never startable")

    @property
    def writable(self) -> bool:
        return False

    def write_now(self, data: bytes) -> None:
        raise RuntimeError("never writable")

    async def write(self, data: bytes) -> None:
        """Write an event with its number, unless the client has the event. Heartbeats have no number."""
        if data != server_frames.HEARTBEAT_BLOCK:
            self._number += 1
            if self._number <= self._last_event_id:
                if self._number % _SKIPPED_AT_A_STRETCH == 0:
                    await asyncio.sleep(0)
                return
            self._written = True
            data = b"id: %d\n%b" % (self._number, data)
        elif self._written:
            data = server_frames.HEARTBEAT
        await self._send_head()
        await self._exchange.write(data)

    async def caught_up(self) -> None:
        """Send the head, if ``start`` was called: all events so far are written, and more may follow.

        Raises InvalidValue for a ``Last-Event-ID`` beyond these events.
        """
        if self._started:
            self._check_number()
            await self._send_head()

    async def end(self, parts: Sequence[bytes] = ()) -> None:
        """End the response; respond with 204 if no event followed ``Last-Event-ID``.

        Raises InvalidValue for a ``Last-Event-ID`` beyond the last event.
        """
        await self.write_all(parts)
        if self._exchange.head_sent:
            await self._exchange.end()
            return
        self._check_number()
        # Stops an EventSource from reconnecting (HTML standard, section 9.2.3).
        await self._exchange.respond(204)

    async def _send_head(self) -> None:
        if not self._exchange.head_sent:
            await self._exchange.start(200, SSE_HEADERS, filler=server_frames.HEARTBEAT)

    def _check_number(self) -> None:
        """Raise InvalidValue for a ``Last-Event-ID`` beyond the events that exist."""
        if self._number < self._last_event_id:
            self._started = False
            self._last_event_id = 0  # the error event itself must not be skipped
            raise InvalidValue("Last-Event-ID is greater than the last event of this answer", param="Last-Event-ID")


def _last_event_id(exchange: HttpExchange) -> int:
    """Return the number of the last event that the client has; 0 for none. Raises InvalidValue."""
    text = exchange.request.headers.get("last-event-id")
    if not text:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise InvalidValue("Last-Event-ID must be the id of an event of this answer", param="Last-Event-ID")
    return int(text)


def result_object(form: ResultForm, messages: Iterable[ServerMessage]) -> tuple[dict[str, object], ChatCompletion]:
    """Build the JSON object of a finished session from all of its messages; return it, and what it was built with."""
    completion = ChatCompletion(form.options)
    final: FinalChunk | None = None
    for message in messages:
        match message:
            case OutputChunk():
                completion.output(message)
            case FinalChunk():
                final = message
    assert final is not None, "a finished session must have a final"
    return completion.final(final, audio=_file(completion.audio, form.audio)), completion


def _file(audio: bytes, target: AudioFormat) -> bytes:
    """Turn an audio stream into a file: write the length into the header of a WAV stream."""
    if target.encoding is not AudioEncoding.WAV or not audio:
        return audio
    header = wav_header(sample_rate=target.sample_rate, channels=target.channels, data_bytes=None)
    samples = audio.removeprefix(header)
    return wav_header(sample_rate=target.sample_rate, channels=target.channels, data_bytes=len(samples)) + samples


#: Limit of a client's message. Only pings and acknowledgements are expected.
_MAX_MESSAGE_BYTES: Final = 1 << 16
_INPUT_REFUSED: Final = "this connection only reads the session's answer and does not accept input"


class ModeBReaders(FrontEnd):
    """The front end of WebSockets that read the answers of Mode B sessions."""

    def __init__(self, app: Application, keeper: ModeBKeeper, recordings: HttpRecordings | None) -> None:
        super().__init__(app)
        self._recordings = recordings
        self._streaming = self._config.streaming_input
        self._keeper = keeper

    def register(self, router: Router) -> None:
        router.add_websocket(NATIVE_PATH, self.upgrade, takes=self.is_meant)

    def is_meant(self, request: HttpRequest) -> bool:
        """Return whether a handshake names a Mode B session. With a ``resume_token`` it names a native one."""
        return "session_id" in request.query and "resume_token" not in request.query

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Accept a handshake. Raises NotFound and Unauthenticated; a frame reports later errors."""
        check_enabled(self._streaming)
        key = self._authenticator.authenticate(request)
        subprotocol = chosen_subprotocol(request)
        return UpgradeDecision(
            connection=partial(
                StreamConnection, budget=self._keeper.registry.budget, write_timeout=self._streaming.write_timeout_sec
            ),
            serve=partial(
                self._serve,
                session_id=request.query.get("session_id") or "",
                key=key,
                client=request.client,
                binary_audio=subprotocol == SUBPROTOCOL_BINARY,
            ),
            subprotocol=subprotocol,
            max_size=_MAX_MESSAGE_BYTES,
            route=NATIVE_PATH,
        )

    async def _serve(
        self, connection: StreamConnection, *, session_id: str, key: ApiKey | None, client: str, binary_audio: bool
    ) -> None:
        """Serve one connection, from the end of its handshake to its close."""
        streaming = self._streaming
        try:
            async with self._find(session_id, key, client) as session:
                if self._recordings is not None:
                    connection = recorded(connection, self._recordings.find(session_id, key))
                with session.reading():
                    await ModeBReader(
                        connection,
                        session,
                        binary_audio=binary_audio,
                        ping_interval=streaming.ping_interval_sec or None,
                        write_timeout=streaming.write_timeout_sec,
                    ).run()
                if self._recordings is not None and not session.live:
                    self._recordings.answer_read(session_id)
        except OmniError as error:
            await refuse(connection, error)

    @asynccontextmanager
    async def _find(self, session_id: str, key: ApiKey | None, client: str) -> AsyncIterator[ModeBSession]:
        try:
            async with self._keeper.using(session_id, key, client=client) as session:
                yield session
        except SessionExpired as error:
            # A WebSocket does not distinguish between sessions that expired and those that never existed.
            raise SessionNotFound(error.message, param="session_id") from None


class ModeBReader:
    """One WebSocket that reads the answer of a Mode B session from its beginning.

    ``binary_audio``: whether audio is sent in binary frames. ``ping_interval`` and ``write_timeout`` are in seconds. A
    client that does not read delays only itself: the session goes on, and the connection is closed after
    ``write_timeout``.
    """

    def __init__(
        self,
        connection: StreamConnection,
        session: ModeBSession,
        *,
        binary_audio: bool,
        ping_interval: float | None,
        write_timeout: float,
    ) -> None:
        self._connection = connection
        self._session = session
        self._binary_audio = binary_audio
        self._ping_interval = ping_interval
        self._write_timeout = write_timeout
        self._writing: asyncio.Task[None] | None = None
        #: Why the connection is closed before the end of the answer.
        self._refusal: OmniError | None = None

    async def run(self) -> None:
        """Send the whole answer until the session ends, then close the connection with the code for how it ended."""
        self._writing = asyncio.create_task(self._write_all(), name=f"output of {self._session.id}")
        self._connection.attach(self)
        try:
            await asyncio.wait([self._writing])
        finally:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        if self._writing.cancelled():
            if self._refusal is not None:
                await self._close_with(self._refusal)
            return  # the connection is gone
        try:
            self._writing.result()
            await self._close_with(self._session.error)
        except SlowConsumer as error:
            self._refusal = error
            await self._close_with(error)
        except ConnectionClosed:
            pass

    async def _write_all(self) -> None:
        position = 0
        while (found := await self._next(position)) is not None:
            position, message = found
            data, is_binary = encode_message(message, binary_audio=self._binary_audio)
            await self._send(data, is_text=not is_binary)

    async def _next(self, position: int) -> tuple[int, ServerMessage] | None:
        """Wait for the message after ``position``, and send pings meanwhile. Returns the new position and the message.

        Proxies drop silent connections, and a ping over a broken connection reveals that it is broken.
        """
        while True:
            try:
                async with asyncio.timeout(self._ping_interval):
                    return await self._session.output.get(position)
            except TimeoutError:
                await self._connection.ping()

    async def _send(self, data: bytes, *, is_text: bool) -> None:
        try:
            async with asyncio.timeout(self._write_timeout):
                await self._connection.send(data, text=is_text)
        except TimeoutError:
            raise SlowConsumer(f"the client has not read for {self._write_timeout:g} seconds") from None

    async def _close_with(self, error: OmniError | None) -> None:
        if isinstance(error, ORDERLY_ENDS):
            closing = SessionClosingFrame(reason=error.code, retryable=error.wire.retryable, time_left_ms=0)
            await self._send(encode_frame(closing), is_text=True)
        elif error is not None and error is self._refusal:
            self._write(encode_frame(error_frame(error)))
        # An error of the request alone is in its own frame, and has no close code.
        code = None if error is None else websocket_close_code(error)
        reason = "" if error is None else error.message
        await self._connection.close_in_time(code or CloseCode.NORMAL_CLOSURE, reason)

    def _write(self, data: bytes) -> None:
        """Send a small frame without waiting. While too many bytes are unwritten, input from the client is not read."""
        if self._connection.is_open:
            self._connection.write_message(data, is_text=True)

    # the client's frames

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        try:
            frame = decode_frame(data) if is_text else decode_input(data)
            match frame:
                case PingFrame(t=t):
                    self._write(encode_frame(PongFrame(t=t, server_time_ms=time.time_ns() // 1_000_000)))
                case OutputAckFrame():
                    pass  # the answer is kept for other readers, too
                case _:
                    raise SessionConflict(_INPUT_REFUSED)
        except (InvalidRequest, SessionConflict) as error:
            self._write(encode_frame(error_frame(error)))
        except UnicodeDecodeError:
            self._connection.fail(CloseCode.INVALID_DATA, "a text frame must be valid UTF-8")
            self.connection_closing()

    def input_refused(self, error: OmniError) -> None:
        self._refusal = error
        self.connection_closing()

    def connection_closing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()

    def reading_changed(self) -> None:
        pass  # no silence times out here

    def receive_pong(self, data: bytes) -> None:
        pass

    def resume_output(self) -> None:
        pass  # the library wakes ``send``
