"""The base class of routes that generate answers: admission, request bodies (whole or streamed), and sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from omni_ws.audio.codec import encode_file
from omni_ws.audio.container import media_type, parse_audio_mime
from omni_ws.audio.pcm import SampleLayout, samples_from_bytes
from omni_ws.config.keys import ApiKey, key_name
from omni_ws.config.model import ServerConfig
from omni_ws.core.chunks import AudioFormat, InputChunk, Modality
from omni_ws.core.file_heads import ENCODINGS, WINDOW_BYTES, FileKind, Look, kind_of_head
from omni_ws.core.quota import Share
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import InvalidValue, OmniError, PayloadTooLarge, SessionTimeout, UnsupportedFormat
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.openai_requests import configure, ended_on_error
from omni_ws.service.sessions.admission import WHY_EVICTED, Admission, Slot, session_too_long
from omni_ws.service.sessions.factory import FILE_FORMATS
from omni_ws.transport.http.application import FrontEnd
from omni_ws.transport.http.exchange import HttpExchange, read_json_object, to_thread_if_large
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.native.endpoint import check_enabled
from omni_ws.transport.routes.sole_request import (
    AnswerSource,
    EventEncoder,
    SoleRequest,
    respond_error_event,
    write_events,
)
from omni_ws.wire.frames import max_frame_bytes
from omni_ws.wire.openai_fields import ConfigurationPatch
from omni_ws.wire.session_config import effective
from omni_ws.wire.streaming_body import (
    CONTENT_TYPE,
    FORM_TYPE,
    NDJSON_TYPE,
    BodyItem,
    BodyReader,
    LoneObject,
    ObjectBody,
    RawAudioBody,
    body_reader,
    placed,
    query_parameters,
)

Request = TypeVar("Request")


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A request body that is one JSON object: its fields, and its size in bytes."""

    fields: dict[str, Any]
    size: int

    async def read(self, read: Callable[[Mapping[str, Any]], Request]) -> Request:
        """Return ``read(fields)``, called in a worker thread if the body is large."""
        return await to_thread_if_large(self.size, partial(read, self.fields))


class GenerationRoutes(FrontEnd):
    """Base class of front ends whose handlers run one session for each request."""

    @asynccontextmanager
    async def admitted(self, exchange: HttpExchange) -> AsyncIterator[str | None]:
        """Authenticate a request, and hold a slot for its session until the block ends. Yields the name of the key.

        The body is throttled to the key's rate and charged to the server's budget. The work is interrupted if it takes
        longer than the key allows. Raises Unauthenticated, and the errors with which admission refuses a session.
        """
        key = self._authenticator.authenticate(exchange.request)
        admission = self._sessions.admission
        async with slot_for_body(exchange, admission, key):
            self._sessions.check_ready()
            exchange.limit_input(admission.input_pace(key), Share(self._sessions.budget))
            with limited(exchange, key):
                yield key_name(key)

    def streaming_body(self, exchange: HttpExchange) -> StreamingBody:
        """Return the body of a Mode A request. Raises NotFound if streaming input is disabled."""
        streaming = self._config.streaming_input
        check_enabled(streaming)
        return StreamingBody(
            exchange, max_chunk_bytes=streaming.max_chunk_bytes, session_timeout_sec=streaming.session_timeout_sec
        )

    @asynccontextmanager
    async def json_body(
        self, exchange: HttpExchange, wants_events: Callable[[Mapping[str, Any]], bool]
    ) -> AsyncIterator[JsonBody]:
        """Read a body that is one JSON object, and yield it. Errors in the block are sent as by ``errors_as_events``.

        ``wants_events`` returns, given the fields, whether the client asks for a stream of events.
        """
        fields, size = await read_json_object(
            exchange, self._config.http.max_body_bytes, hint=f"; streaming input requires {STREAMING_HEADER}"
        )
        async with self.errors_as_events(exchange, wanted=wants_events(fields)):
            yield JsonBody(fields, size)

    @asynccontextmanager
    async def errors_as_events(self, exchange: HttpExchange, *, wanted: bool) -> AsyncIterator[None]:
        """Send an error of the block as an event, if the client wants events (``wanted``) and does not accept JSON.

        Raises the error otherwise, or if the head was sent. OpenAI's SDKs accept JSON even when they stream, and so get
        an HTTP status instead. Other clients read errors only from events.
        """
        try:
            yield
        except OmniError as error:
            accepted = ",".join(exchange.request.headers.get_all("accept")).lower()
            if exchange.head_sent or not wanted or "application/json" in accepted:
                raise
            await respond_error_event(exchange, error)

    def split(self, chunks: Iterable[InputChunk]) -> Iterator[InputChunk]:
        """Split chunks that are larger than sessions accept; images and tool results stay whole."""
        size = self._config.streaming_input.max_chunk_bytes
        for chunk in chunks:
            if chunk.modality is Modality.IMAGE or chunk.tool_call_id is not None:
                yield chunk
                continue
            for start in range(0, max(1, len(chunk.payload)), size):
                yield replace(chunk, payload=chunk.payload[start : start + size])

    def open_session(
        self,
        exchange: HttpExchange,
        patch: ConfigurationPatch,
        *,
        owner: str | None,
        samples: bool,
        streaming_input: bool,
        prepare: Callable[[Conversation], None] = lambda conversation: None,
    ) -> tuple[SoleRequest, AudioFormat]:
        """Open a session for the caller to run. Returns the session, and the audio format that the client asked for.

        Raises an InvalidRequest that names the field of the body.

        Args:
            patch: The settings of the session that the request gives.
            owner: Name of the key.
            samples: Whether the session produces pcm16, for audio that is sent as whole files.
            streaming_input: Whether the input is still arriving.
            prepare: Called with the conversation before the session runs; may raise.
        """
        conversation = self._sessions.open(
            output_formats=FILE_FORMATS,
            single_request=True,
            any_model=True,
            streamed_body=streaming_input,
            owner=owner,
        )
        exchange.belongs_to(conversation.observed.identity.session_id)
        with ended_on_error(conversation):
            target = configure(conversation, patch, samples=samples, whole_input=not streaming_input)
            prepare(conversation)
        session = SoleRequest(conversation)
        exchange.on_interrupt(session.interrupt)
        return session, target

    async def stream_events(
        self,
        exchange: HttpExchange,
        session: AnswerSource,
        encoder: EventEncoder,
        *,
        head_at_start: bool,
        done: bool = True,
    ) -> None:
        """Write the answer of ``session`` as server-sent events. The arguments are those of ``write_events``."""
        await write_events(
            exchange,
            session,
            encoder,
            head_at_start=head_at_start,
            done=done,
            heartbeat_sec=self._config.sse_heartbeat_sec,
        )


@contextmanager
def limited(exchange: HttpExchange, key: ApiKey | None) -> Iterator[None]:
    """Interrupt the work on a request if the block takes longer than ``key`` allows for a session."""
    if key is None or key.max_session_sec is None:
        yield
        return
    error = session_too_long(key.max_session_sec)
    timer = asyncio.get_running_loop().call_later(key.max_session_sec, exchange.interrupt, error)
    try:
        yield
    finally:
        timer.cancel()


async def encode_audio_file(pcm: bytes, target: AudioFormat) -> bytes:
    """Encode pcm16 at the sample rate of ``target`` as a whole file of ``target``, in a worker thread."""

    def encode() -> bytes:
        return encode_file(samples_from_bytes(pcm, SampleLayout.S16), source_rate=target.sample_rate, target=target)

    return await run_work(Work.ENCODING, encode)


# Mode A: one request whose body is a stream of input, answered while it is still arriving

#: The header that selects Mode A, whatever the type of the body is.
STREAMING_HEADER: Final = "X-Streaming-Input: true"
#: Fields that mark an object as the body of an ordinary request, if the headers do not tell.
ORDINARY_FIELDS: Final = frozenset({"messages", "input"})
#: White space of JSON.
_BLANKS: Final = b" \t\r\n"
#: Bytes that are parsed in one pass: a few milliseconds if all lines or frames in them are as short as possible.
PIECE_BYTES: Final = 16 * 1024


def is_streaming_input(request: HttpRequest) -> bool:
    """Return whether the headers of a request say that its body is a stream of input."""
    if (request.headers.get("x-streaming-input") or "").strip().lower() in ("true", "1"):
        return True
    return request.content_type == CONTENT_TYPE


async def has_streaming_input(exchange: HttpExchange, config: ServerConfig) -> bool:
    """Return whether the body of ``exchange`` is streaming input, by its headers or by its first bytes.

    Without headers that say so, three kinds of bodies are streaming input: a chunked body of the type NDJSON; a body of
    the type that curl sends by default (a form), if it begins like an audio file; and a chunked body of that type,
    unless it is the JSON object of an ordinary request. The bytes read for this decision are pushed back.

    Raises UnsupportedFormat for a chunked body of any type but these and JSON, PayloadTooLarge if the limit of ordinary
    bodies comes before the decision, and what ``HttpExchange.read`` raises.
    """
    request = exchange.request
    if is_streaming_input(request):
        return True
    if not request.has_body:
        return False
    if request.content_type == FORM_TYPE and await is_file(exchange):
        return True
    if request.content_length is not None:
        return False
    match request.content_type:
        case "" | "application/json":
            return False
        case kind if kind == NDJSON_TYPE:
            return True
        case kind if kind == FORM_TYPE:
            return not await _is_ordinary(exchange, config)
        case kind:
            message = f"a chunked body must be JSON or NDJSON, got {kind[:64]!r}"
            raise UnsupportedFormat(f"{message}; streaming input requires {STREAMING_HEADER}", param="Content-Type")


async def is_file(exchange: HttpExchange) -> bool:
    """Return whether the body begins like an audio file. The bytes read for this are pushed back."""
    return isinstance(await _head(exchange), FileKind)


async def _head(exchange: HttpExchange) -> FileKind | bytes:
    """Return the kind of audio file as which the body begins, or else the first byte that is not JSON white space."""
    data, ended = bytearray(), False
    while True:
        kind = kind_of_head(bytes(data), final=ended)
        blank = len(data) - len(data.lstrip(_BLANKS))
        if ended or (kind is not Look.MORE and blank < len(data)):
            break
        piece = await exchange.read()
        data += piece
        ended = not piece
        exchange.charge(len(data))
        if blank > WINDOW_BYTES:
            break
    first = bytes(data[blank : blank + 1])
    exchange.push_back(data, ended=ended)
    return kind if isinstance(kind, FileKind) else first


async def _is_ordinary(exchange: HttpExchange, config: ServerConfig) -> bool:
    """Return whether the body is the JSON object of an ordinary request. The bytes read for this are pushed back.

    Raises PayloadTooLarge beyond the limit of ordinary bodies.
    """
    streaming, limit = config.streaming_input, config.http.max_body_bytes
    exchange.allow_silence(streaming.session_timeout_sec)
    body = LoneObject(ORDINARY_FIELDS, max_line_bytes=max_frame_bytes(streaming.max_chunk_bytes))
    ordinary: bool | None = None
    while ordinary is None and (data := await exchange.read()):
        ordinary = body.feed(data)
        if ordinary is None and len(body.data) > limit:
            raise PayloadTooLarge(f"the request body exceeds {limit} bytes")
        exchange.charge(len(body.data))
    ended = ordinary is None
    if ordinary is None:
        ordinary = await to_thread_if_large(len(body.data), body.finish)
    exchange.push_back(body.data, ended=ended)
    return ordinary


class StreamingBody:
    """The body of a Mode A request: its parameters, then its chunks.

    ``max_chunk_bytes`` limits one chunk; ``session_timeout_sec`` is the longest pause in the upload.
    """

    def __init__(self, exchange: HttpExchange, *, max_chunk_bytes: int, session_timeout_sec: float) -> None:
        self._exchange = exchange
        exchange.body_is_live(session_timeout_sec)
        self._max_chunk_bytes = max_chunk_bytes
        #: Chosen by ``parameters``, by the type of the body or its first bytes.
        self._reader: BodyReader = ObjectBody(max_chunk_bytes=max_chunk_bytes)
        self._items: Iterator[BodyItem] = iter(())
        #: Bytes read and not parsed yet.
        self._unread = b""
        self._ended = False
        self._first: InputChunk | None = None
        #: Set by ``feed``; from then on the session's clock times out a silent client, not the body's deadline.
        self._session: SoleRequest | None = None

    async def parameters(self) -> dict[str, Any]:
        """Return the parameters: for raw audio from the query, otherwise from the first object of the body.

        Call it once, before ``feed``.

        If the content type does not say which of these the body is, its first bytes decide: it is raw audio if it
        begins like an audio file, and lines of JSON if the type is not audio and the body begins with an object. A body
        that begins with a chunk has no parameters ({}). Raises UnsupportedFormat for any other body, and the errors of
        reading it.
        """
        self._reader = await self._chosen_reader()
        if isinstance(self._reader, RawAudioBody):
            first = await self._next()
            assert not isinstance(first, dict), "raw audio has its parameters in the query"
            self._first = first
            fields = query_parameters(self._exchange.request.query.items())
            return fields | {"input_audio": _audio_format(self._reader.media_type, fields.get("input_audio"))}
        item = await self._next()
        if isinstance(item, dict):
            return item
        self._first = item
        return {}

    async def _chosen_reader(self) -> BodyReader:
        content_type = self._exchange.request.headers.get("content-type") or ""
        if self._exchange.request.content_type == CONTENT_TYPE:
            return body_reader(content_type, max_chunk_bytes=self._max_chunk_bytes)
        head = await _head(self._exchange)
        if isinstance(head, FileKind):
            kind = media_type(AudioFormat(ENCODINGS[head]))
            return RawAudioBody(media_type=kind, max_chunk_bytes=self._max_chunk_bytes)
        if head == b"{" and not self._exchange.request.content_type.startswith("audio/"):
            return ObjectBody(max_chunk_bytes=self._max_chunk_bytes)
        if head and not content_type.strip():
            message = "a streamed body without a Content-Type must be a known audio file or lines of JSON"
            raise UnsupportedFormat(message, param="Content-Type")
        return body_reader(content_type, max_chunk_bytes=self._max_chunk_bytes)

    async def feed(self, session: SoleRequest) -> None:
        """An InputSource: feed all chunks of the body to ``session``, and end its input at the end of the body."""
        self._session = session
        self._exchange.feed_live(session.hold_clocks)
        chunk = self._first or await self._next()
        while chunk is not None:
            assert isinstance(chunk, InputChunk), "only the first object of a body can be its parameters"
            try:
                await session.feed(chunk)
            except OmniError as error:
                raise placed(error, self._reader.place) from None
            chunk = await self._next()
        session.end_input()

    async def _next(self) -> BodyItem | None:
        """Read the next item; return None at the end of the body."""
        while (item := next(self._items, None)) is None:
            if self._unread:
                await asyncio.sleep(0)  # one read may hold thousands of items
                self._items = self._reader.feed(self._next_piece())
                continue
            self._exchange.charge(self._reader.unfinished_bytes)
            if self._ended:
                break
            self._unread = await self._exchange.read()
            self._exchange.charge(0)  # charged again once it is known how much of it is an incomplete item
            if self._session is not None:
                self._session.touch()
            self._ended = not self._unread
            self._items = self._reader.finish() if self._ended else self._reader.feed(self._next_piece())
        if isinstance(item, InputChunk) and item.payload:
            self._exchange.content_came()
        return item

    def _next_piece(self) -> bytes:
        size = len(self._unread) if isinstance(self._reader, RawAudioBody) else PIECE_BYTES
        piece, self._unread = self._unread[:size], self._unread[size:]
        return piece


def _audio_format(content_type: str, from_query: Any) -> dict[str, Any]:
    """Return ``input_audio`` for raw audio. The content type decides; the query adds what the type leaves open."""
    if from_query is not None and not isinstance(from_query, dict):
        raise InvalidValue("input_audio must be an object", param="input_audio")
    defaults = effective({"input_audio": {**(from_query or {}), "format": "pcm16"}}).input_audio
    try:
        audio = parse_audio_mime(content_type, default=defaults.encoded)
    except (InvalidValue, UnsupportedFormat) as error:
        error.about(param="Content-Type")
        raise
    told = {"format": audio.encoding.value, "sample_rate": audio.sample_rate, "channels": audio.channels}
    return {**(from_query or {}), **told}


# Admission


@dataclass(frozen=True, slots=True, eq=False)
class _LiveBody:
    """A body that is the live input of a session. As an EmptySession, it may be evicted while it has no content."""

    exchange: HttpExchange
    slot: Slot

    @property
    def has_content(self) -> bool:
        return self.exchange.has_content

    def evict(self) -> None:
        self.exchange.end_body(SessionTimeout(WHY_EVICTED))
        self.slot.release()


@asynccontextmanager
async def slot_for_body(exchange: HttpExchange, admission: Admission, key: ApiKey | None) -> AsyncIterator[ExitStack]:
    """Take a slot for a session when the body of ``exchange``, the session's first input, begins to arrive.

    While only the head has arrived, no slot is taken. The yielded stack holds the slot, and releases it at the end of
    the block unless the caller has moved it elsewhere.

    Until an ordinary body is complete, its slot is *lent*: another session may take it, so that slow uploads block
    nobody. A body that is live keeps its slot as soon as that is known, since it is slow by nature; while it has no
    content, it may be evicted like other empty sessions. Waits as ``Admission.room`` does. ``exchange.read`` and
    ``exchange.body_is_live`` may also raise what ``Admission.session`` raises.
    """
    slot: Slot | None = None
    live = False
    client = exchange.request.client
    await admission.room(key, client=client)
    with ExitStack() as held:

        def body_received(data: bytes) -> None:
            nonlocal slot
            if slot is None:
                slot = held.enter_context(admission.session(key, client=client, lent=not live))
                if live and data:
                    has_no_content(slot)
            if not data:
                exchange.content_came()
                slot.keep()

        def body_is_live() -> None:
            nonlocal live
            live = True
            if slot is not None:
                slot.keep()
                if not exchange.has_content:
                    has_no_content(slot)

        def has_no_content(slot: Slot) -> None:
            body = _LiveBody(exchange, slot)
            admission.opened_empty(body)
            held.callback(admission.ended, body)

        if exchange.request.has_body:
            exchange.watch_body(body_received, body_is_live)
        else:
            body_received(b"")
        yield held
