"""HttpExchange: one request with its response, as handlers see them; and the access log, JSON bodies and forms.

    async def handler(exchange: HttpExchange) -> None:
        body = await exchange.read_body(limit)
        await exchange.respond_json(200, {"received": len(body)})

The two directions are independent: a handler may read a part of the body, write a part of the response, and read on.
Writes wait while the peer does not read, and the server receives more of the body only as the handler reads. When the
peer disconnects, the task of the handler is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import unquote_to_bytes

import h11
import orjson
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from omni_ws.core.json_values import MAX_BODY_VALUES
from omni_ws.core.quota import Share
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import InvalidFrame, InvalidValue, OmniError, PayloadTooLarge, UnsupportedFormat, http_status
from omni_ws.metrics import HTTP_METHODS, Metrics
from omni_ws.service import unexpected
from omni_ws.service.observing.accounts import level_of, take_place, take_trace, write_line
from omni_ws.transport.http import access
from omni_ws.transport.http.connections import (
    Connections,
    HttpInput,
    HttpOutput,
    PeerGone,
)
from omni_ws.transport.http.request import HeaderList, HttpRequest, error_body, error_headers
from omni_ws.wire.frames import loads_object

JSON: Final = "application/json"

#: Statuses whose responses have neither content nor Content-Length (RFC 9110, section 8.6).
_BODILESS: Final = frozenset({204, 304})


class ExchangeRecording:
    """Base class of observers of what an exchange reads and writes. Its methods do nothing."""

    def read(self, data: bytes) -> None:
        """Observe a piece of the body, ``b""`` at its end."""

    def begun(self, status: int, headers: HeaderList) -> None:
        """Observe the head of the response."""

    def written(self, data: bytes) -> None:
        """Observe a part of the response's content."""

    def ended(self) -> None:
        """Observe the end of a complete response."""

    def opens_session(self, session_id: str) -> None:
        """Observe that the request has opened a session, to which later requests belong."""

    def ends_session(self) -> None:
        """Observe that no more requests of the session are expected."""

    def over(self) -> None:
        """Observe the end of the exchange, complete or not."""


NOT_RECORDED: Final = ExchangeRecording()


#: Bytes that one ``read`` returns at most of a body that was pushed back.
_PIECE_BYTES: Final = 64 * 1024


class HttpExchange:
    """A request and the response to it.

    Handlers call the methods that configure the body before they read it. Response methods raise PeerGone once the
    client has disconnected.
    """

    def __init__(
        self,
        request: HttpRequest,
        *,
        http_input: HttpInput,
        http_output: HttpOutput,
        connections: Connections,
        origin_allowed: bool,
    ) -> None:
        self.request = request
        #: Template of the matched route; "" if none matched.
        self.route: str = ""
        self.path_parameters: Mapping[str, str] = {}
        #: For the access log: the session of the request, and an error that the handler sent as part of a response.
        self.session_id: str = ""
        self.error: OmniError | None = None
        #: Status of the response; 0 before its head was sent.
        self.status = 0
        #: Bytes of content sent.
        self.sent_bytes = 0
        #: Whether pages of the request's ``Origin`` may use this server.
        self.origin_allowed = origin_allowed
        self._input = http_input
        self._body = http_input.body
        self._output = http_output
        self._connections = connections
        #: See ``limit_input``, ``feed_live`` and ``watch_body``.
        self._input_pace: Callable[[int], float] | None = None
        self._on_throttled: Callable[[bool], None] = lambda held: None
        self._input_share: Share | None = None
        self._on_body: Callable[[bytes], None] | None = None
        self._on_live: Callable[[], None] = lambda: None
        #: See ``on_interrupt``; and the error of ``interrupt``, once that was called.
        self._interrupts: list[Callable[[OmniError], None]] = []
        self._interruption: OmniError | None = None
        self.recording = NOT_RECORDED
        #: Set when content of a live body has arrived, not only parameters.
        self.has_content = False
        #: Bytes that were pushed back, which ``read`` returns again; and whether the body ends with them.
        self._pushed_back = bytearray()
        self._ended_there = False
        #: Whether the head of the response has been sent, so that its status can no longer change; and whether the end
        #: of the response has been sent. h11 refuses events that come at the wrong time, so they need no check here.
        self.head_sent = self._ended = False
        #: Whether parts of the response are sent as chunks.
        self._chunked = False

    # The body of the request

    @property
    def received_bytes(self) -> int:
        """Bytes received of the body."""
        return self._body.received

    def end_body(self, error: OmniError) -> None:
        """Make ``read`` raise ``error`` after the bytes that have arrived."""
        self._input.fail_body(error)

    @property
    def body_timeout(self) -> float | None:
        """Longest silence of the peer while it owes body bytes, in seconds; None for no bound."""
        return self._input.body_timeout

    def allow_silence(self, seconds: float | None) -> None:
        """Set the longest silence of the peer while it owes body bytes, in seconds; None for no bound."""
        self._input.allow_silence(seconds)

    def body_is_live(self, silence: float) -> None:
        """Accept a body that is produced while it is sent: at any rate, with pauses of up to ``silence`` seconds.

        Raises what the ``on_live`` of ``watch_body`` raises.
        """
        self._input.allow_any_rate(silence)
        self._on_live()

    def limit_input(self, pace: Callable[[int], float] | None, share: Share) -> None:
        """Throttle the body by ``pace``, and let ``charge`` resize ``share``, which the exchange releases at its end.

        ``pace`` is called with the size of every piece in bytes, and returns for how many seconds to delay the piece.
        During the delay the socket is read only up to the high-water mark.
        """
        self._input_pace, self._input_share = pace, share

    def feed_live(self, on_throttled: Callable[[bool], None]) -> None:
        """Turn off the body's time-out for silence: the body feeds a session, which has such a time-out of its own.

        ``on_throttled`` is called with True when the delay of a piece begins, and with False when the delay ends.
        """
        self._on_throttled = on_throttled
        self.allow_silence(None)

    def watch_body(self, on_body: Callable[[bytes], None], on_live: Callable[[], None]) -> None:
        """Have ``on_body`` called with every piece before it is throttled, and with ``b""`` at the end.

        Errors that ``on_body`` raises are raised by ``read``. ``on_live`` is called by ``body_is_live``.
        """
        self._on_body, self._on_live = on_body, on_live

    def content_came(self) -> None:
        """Note that a live body has brought content, not only parameters."""
        self.has_content = True

    # The end of the work

    def on_interrupt(self, end: Callable[[OmniError], None]) -> None:
        """Have ``end`` called with an error that is to end the work on this request; at once if there is one."""
        self._interrupts.append(end)
        if self._interruption is not None:
            end(self._interruption)

    def interrupt(self, error: OmniError) -> None:
        """End the work on this request, begun or not, with ``error``, which the client receives."""
        self._interruption = error
        for end in self._interrupts:
            end(error)
        if not self._interrupts:
            self.end_body(error)

    # Notes for the log, the metrics and the recording

    def found(self, route: str, path_parameters: Mapping[str, str]) -> None:
        """Note the route that the router has found."""
        self.route, self.path_parameters = route, path_parameters

    def belongs_to(self, session_id: str) -> None:
        """Note the session that the request belongs to."""
        self.session_id = session_id

    def tell_error(self, error: OmniError) -> None:
        """Note an error that the handler sends as part of the response."""
        self.error = error

    def allow_origin(self, allowed: bool) -> None:
        """Set whether pages of the request's ``Origin`` may read the response, whatever ``--allow-origin`` says."""
        self.origin_allowed = allowed

    def record(self, recording: ExchangeRecording) -> None:
        """Report everything that is read and written from now on to ``recording``."""
        self.recording = recording

    async def read(self) -> bytes:
        """Wait for body bytes and return them; return ``b""`` at the end of the body.

        Raises UnsupportedFormat for a body with a Content-Encoding, SessionTimeout for a peer that stopped sending or
        is too slow, InvalidFrame for broken framing, the error given to ``end_body``, and PeerGone.
        """
        self._refuse_encoded_body()
        if self._pushed_back or self._ended_there:
            return self._read_again()
        self._input.before_read()
        chunk = await self._body.take()
        if self._on_body is not None:
            self._on_body(chunk)
        if self._input_pace is not None and chunk and (seconds := self._input_pace(len(chunk))):
            self._on_throttled(True)
            try:
                await asyncio.sleep(seconds)
            finally:
                self._on_throttled(False)
        self._input.after_read()
        self.recording.read(chunk)
        return chunk

    def push_back(self, data: bytearray, *, ended: bool) -> None:
        """Make ``read`` return ``data`` again, in pieces, and then the end of the body if the body has ``ended``.

        ``read`` removes the pieces from ``data``. ``charge`` also charges the bytes that are left in ``data``.
        """
        self._pushed_back, self._ended_there = data, ended

    def _read_again(self) -> bytes:
        piece = bytes(self._pushed_back[:_PIECE_BYTES])
        del self._pushed_back[:_PIECE_BYTES]
        self._ended_there = self._ended_there and bool(piece)
        return piece

    async def body(self) -> AsyncIterator[bytes]:
        """Iterate over the body as it arrives. Raises what ``read`` raises."""
        while chunk := await self.read():
            yield chunk

    async def read_body(self, limit: int) -> bytes:
        """Read a whole body of at most ``limit`` bytes.

        Raises PayloadTooLarge (before reading, if Content-Length is too large), and what ``read`` and ``charge`` raise.
        """
        self._refuse_encoded_body()
        if (self.request.content_length or 0) > limit:
            raise PayloadTooLarge(f"the request body exceeds {limit} bytes")
        whole = bytearray()
        while chunk := await self.read():
            whole += chunk
            if len(whole) > limit:
                raise PayloadTooLarge(f"the request body exceeds {limit} bytes")
            self.charge(len(whole))
        return bytes(whole)

    def charge(self, size: int) -> None:
        """Set the memory charged for the body to ``size`` bytes, the part of the body that the handler holds now.

        Does nothing without ``limit_input``. Raises EngineOverloaded if the server's budget has no room for that.
        """
        if self._input_share is not None:
            self._input_share.resize(size + len(self._pushed_back))

    def _refuse_encoded_body(self) -> None:
        for coding in self.request.headers.tokens("content-encoding"):
            if coding.lower() != "identity":
                raise UnsupportedFormat(
                    f"Content-Encoding {coding[:40]!r} is not supported; send the body without content coding",
                    param="Content-Encoding",
                )

    # The response

    async def respond(self, status: int, headers: Iterable[tuple[str, str]] = (), body: bytes = b"") -> None:
        """Send a whole response.

        The connection closes after the response if the server is draining, or if a part of the request's body has not
        arrived: the next request would come only after that part.
        """
        fields = [*headers]
        if status not in _BODILESS:
            fields.append(("Content-Length", str(len(body))))
        if self._connections.draining or not self._body.complete:
            fields.append(("Connection", "close"))
        events: list[h11.Event] = [self._head(status, fields)]
        if body and self._sends_content(status):
            events.append(h11.Data(data=body))
            self.sent_bytes = len(body)
        self._output.send(*events, h11.EndOfMessage())
        self.head_sent = self._ended = True
        self.recording.begun(status, fields)
        self.recording.written(body)
        self.recording.ended()
        await self._output.drain()

    async def respond_json(self, status: int, content: Any, headers: Iterable[tuple[str, str]] = ()) -> None:
        """Send a whole response whose content is ``content`` as JSON."""
        await self.respond(status, [("Content-Type", JSON), *headers], orjson.dumps(content))

    async def respond_error(self, error: OmniError) -> None:
        """Send ``error`` as a response. Drops the connection if the head was sent, or ``error`` has no status."""
        status = http_status(error)
        if self.head_sent or status is None:
            self._output.abort()
            return
        headers: HeaderList = [("Content-Type", JSON), *error_headers(error)]
        if status == 415 and error.param == "Content-Encoding":
            headers.append(("Accept-Encoding", "identity"))
        await self.respond(status, headers, error_body(error))

    async def respond_options(self, methods: Iterable[str]) -> None:
        """Respond to OPTIONS for a path with these ``methods``, with CORS fields if it is a browser's preflight."""
        allow = tuple(methods)
        headers: HeaderList = [("Allow", ", ".join(allow))]
        if self.origin_allowed and access.is_preflight(self.request):
            headers += access.preflight_headers(self.request, allow)
        await self.respond(204, headers)

    async def start(self, status: int, headers: Iterable[tuple[str, str]] = (), *, filler: bytes = b"") -> None:
        """Send the head of a response of unknown length, and wait while the peer does not read.

        The content is sent in chunks; to an HTTP/1.0 client it is sent as it is, and the close of the connection ends
        it. ``filler`` is content without meaning that may be sent between any two parts, to probe a half-closed client;
        without a filler, chunked responses are probed with zeros in front of a chunk size.
        """
        self.start_now(status, headers, filler=filler)
        await self._output.drain()

    @property
    def startable(self) -> bool:
        """Whether the response has not started, and ``start`` would not wait."""
        return not self.head_sent and self._output.has_room

    def start_now(
        self, status: int, headers: Iterable[tuple[str, str]] = (), *, filler: bytes = b"", content: bytes = b""
    ) -> None:
        """Send the head, as ``start`` does, and the first part of the content with one write, without waiting."""
        fields = [*headers]
        if self._connections.draining:
            fields.append(("Connection", "close"))
        events: list[h11.Event] = [self._head(status, fields)]
        if content and self._sends_content(status):
            events.append(h11.Data(data=content))
            self.sent_bytes = len(content)
        self._output.send(*events)
        self.head_sent = True
        self.recording.begun(status, fields)
        self.recording.written(content)
        # h11 chooses chunks under the same conditions.
        sized = any(name.lower() == "content-length" for name, _ in fields)
        self._chunked = self.request.http_version == "1.1" and self._sends_content(status) and not sized
        if self.request.method != "HEAD":
            self._output.begin_content(filler=filler, chunked=self._chunked)

    async def write(self, data: bytes) -> None:
        """Send a part of a started response, and wait while the peer does not read."""
        self.write_now(data)
        await self._output.drain()

    def write_all(self, parts: Sequence[bytes]) -> Coroutine[Any, Any, None]:
        """Send several parts with one write."""
        return self.write(b"".join(parts))

    @property
    def writable(self) -> bool:
        """Whether the response has started and not ended, and ``write`` would not wait."""
        return self.head_sent and not self._ended and self._output.has_room

    def write_now(self, data: bytes) -> None:
        """Send a part of a started response without waiting. Call it only while the response is ``writable``."""
        if data and self._chunked and not self._ended:
            self.sent_bytes += len(data)
            self._output.send_chunk(data)
        elif data and self.request.method != "HEAD":
            self.sent_bytes += len(data)
            self._output.send(h11.Data(data=data))
        self.recording.written(data)

    async def end(self, parts: Sequence[bytes] = ()) -> None:
        """Send ``parts`` and the end of a started response, with one write. Does nothing if the response has ended."""
        if self._ended:
            return
        data = b"".join(parts)
        events: list[h11.Event] = []
        if data and self.request.method != "HEAD":
            self.sent_bytes += len(data)
            events.append(h11.Data(data=data))
        self._output.send(*events, h11.EndOfMessage())
        self._ended = True
        self.recording.written(data)
        self.recording.ended()
        await self._output.drain()

    def close(self) -> None:
        """Release what the exchange holds and end its recording, once its handler has returned or was cancelled."""
        self._pushed_back = bytearray()
        self.charge(0)
        self.recording.over()

    def _sends_content(self, status: int) -> bool:
        return self.request.method != "HEAD" and status not in _BODILESS

    def _head(self, status: int, headers: HeaderList) -> h11.Response:
        self.status = status
        return response_head(status, [*headers, *access.response_headers(self.request, allowed=self.origin_allowed)])


async def serve_exchange(
    exchange: HttpExchange, handle: Callable[[HttpExchange], Awaitable[None]], log_access: LogAccess
) -> None:
    """Run ``handle`` for one exchange, make sure that a response is sent, and log the request.

    An error becomes a response if none has started, and drops the connection otherwise. Raises PeerGone, and what
    sending a response raises.
    """
    loop = asyncio.get_running_loop()
    begin = loop.time()
    error: OmniError | None = None
    take_trace(exchange.request.headers.get)
    take_place(exchange.request.client, exchange.request.headers.get)
    try:
        error = await _respond(exchange, handle)
    finally:
        exchange.close()
        request = exchange.request
        log_access(
            request.method,
            exchange.route,
            exchange.status,
            seconds=loop.time() - begin,
            received_bytes=exchange.received_bytes,
            sent_bytes=exchange.sent_bytes,
            client=request.client,
            error=error or exchange.error,
            session_id=exchange.session_id,
        )


async def _respond(exchange: HttpExchange, handle: Callable[[HttpExchange], Awaitable[None]]) -> OmniError | None:
    """Run ``handle``. If it raises, respond with the error, and return the error."""
    request = exchange.request
    try:
        if not exchange.origin_allowed and (request.method not in access.SAFE_METHODS or access.is_preflight(request)):
            raise access.origin_refused(request)
        await handle(exchange)
        if not exchange.head_sent:
            raise RuntimeError(f"the handler of {_where(exchange)} returned without a response")
        await exchange.end()
    except Exception as raised:
        cause = _sole_cause(raised)
        if isinstance(cause, PeerGone):
            raise cause from None
        error = cause if isinstance(cause, OmniError) else unexpected(raised, where=_where(exchange))
        await exchange.respond_error(error)
        return error
    return None


def _sole_cause(raised: Exception) -> Exception:
    """Return the only exception in a group, or in nested groups, such as task groups raise; otherwise ``raised``."""
    while isinstance(raised, ExceptionGroup) and len(raised.exceptions) == 1:
        raised = raised.exceptions[0]
    return raised


def _where(exchange: HttpExchange) -> str:
    """Return the method and route of a request, for the log. The path is left out: its text is the client's."""
    return f"{exchange.request.method} {exchange.route or 'a request'}"


# The head of a response

SERVER_NAME: Final = "omni_ws"


def response_head(status: int, headers: HeaderList) -> h11.Response:
    """Return the head of a response, with the fields that all responses of this server have."""
    return _head_at(int(time.time()), status, tuple(headers))


@lru_cache(maxsize=64)
def _head_at(second: int, status: int, headers: tuple[tuple[str, str], ...]) -> h11.Response:
    """Build a head. Equal heads within a second are cached: building and checking one takes longer than sending it."""
    fields = [("Date", formatdate(second, usegmt=True)), ("Server", SERVER_NAME), *headers]
    return h11.Response(status_code=status, headers=fields, reason=_reason(status))


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode("ascii")
    except ValueError:
        return b""


# The access log

logger = logging.getLogger("omni_ws.http")

#: Routes that monitoring systems request all the time; successes are logged at debug level.
_MONITORED = frozenset({"/health", "/metrics"})


#: An ``AccessLog``, or a function with its arguments: called at the end of every request, refused and upgraded ones
#: included.
LogAccess: TypeAlias = Callable[..., None]


class AccessLog:
    """The access log: writes a log line for each request, and counts the request in the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __call__(
        self,
        method: str,
        route: str,
        status: int,
        *,
        seconds: float = 0,
        received_bytes: int = 0,
        sent_bytes: int = 0,
        client: str = "",
        error: OmniError | None = None,
        session_id: str = "",
    ) -> None:
        """Log a request that is over. Only ``method`` and ``client`` may contain text that the client chose.

        Args:
            route: The template of the path; "" if none matched.
            status: 0 if the client disconnected before the response.
            received_bytes: Size of the request's body; ``sent_bytes`` is that of the response.
            error: May also be one that occurred after the head of the response.
        """
        # With methods that clients make up as labels, the number of time series would be unbounded.
        method = method if method in HTTP_METHODS else "other"
        level = logging.INFO if error is None else level_of(error)
        if route in _MONITORED and status == 200:
            level = logging.DEBUG
        route = route or "unmatched"
        self._metrics.http_requests.labels(method, route, status).inc()
        if status != 101:
            self._metrics.http_request_seconds.labels(route).observe(seconds)
        write_line(
            logger,
            level,
            "http request",
            method=method,
            route=route,
            status=status,
            code=None if error is None else error.code,
            client=client or None,
            session_id=session_id or None,
            received_bytes=received_bytes,
            sent_bytes=sent_bytes,
            seconds=round(seconds, 4),
        )


# JSON bodies

#: Larger bodies are parsed, and their base64 decoded, in a worker thread; on the event loop that would delay the audio
#: of every other session.
INLINE_BYTES: Final = 256 * 1024

#: Content types of JSON bodies besides those that end in ``+json``: JSON, and the defaults of clients that name none.
_JSON_TYPES: Final = frozenset({"", "application/json", "application/x-www-form-urlencoded", "text/plain", "text/json"})

Result = TypeVar("Result")


async def to_thread_if_large(size: int, work: Callable[[], Result]) -> Result:
    """Run ``work``, which handles ``size`` bytes: on the event loop if they are few, else in a worker thread."""
    return await run_work(Work.BODIES, work) if size > INLINE_BYTES else work()


async def read_json_object(
    exchange: HttpExchange, limit: int, *, hint: str = "", may_be_empty: bool = False
) -> tuple[dict[str, Any], int]:
    """Read a body of at most ``limit`` bytes that is one JSON object. Returns the object and the size of the body.

    With ``may_be_empty``, an empty body counts as an object without fields. ``hint`` is appended to the error message
    for another content type. Raises what ``HttpExchange.read_body`` raises, UnsupportedFormat for another content type,
    and InvalidFrame for anything but a JSON object.
    """
    kind = exchange.request.content_type
    if kind not in _JSON_TYPES and not kind.endswith("+json"):
        raise UnsupportedFormat(f"the body must be JSON, got {kind[:64]!r}{hint}", param="Content-Type")
    data = await exchange.read_body(limit)
    if may_be_empty and not data:
        return {}, 0
    try:
        return await to_thread_if_large(len(data), partial(loads_object, data, most=MAX_BODY_VALUES)), len(data)
    except UnicodeDecodeError:
        raise InvalidFrame("the body is not valid UTF-8") from None


# Forms (RFC 7578)

FORM_TYPE: Final = "multipart/form-data"
#: The name of the part that is a file even without a file name.
FILE_FIELD: Final = b"file"
_EXTENDED_FILENAME: Final = re.compile(rb";\s*filename\*\s*=\s*[\w-]+'[\w-]*'([^;\s]*)", re.IGNORECASE)
#: Parts of one form.
MAX_PARTS: Final = 64
#: Size of a part that is not a file.
MAX_FIELD_BYTES: Final = 64 * 1024
#: Size of one header line of a part.
_MAX_HEADER_BYTES: Final = 4096


@dataclass(slots=True)
class FormPart:
    """One part of a form.

    ``filename`` is None if the part is not a file, and "" for a file without a name; ``content_type`` is "" if the part
    has none.
    """

    name: str
    filename: str | None
    content_type: str
    data: bytearray = field(default_factory=bytearray)


async def read_form(exchange: HttpExchange, limit: int) -> list[FormPart]:
    """Read a body of at most ``limit`` bytes, and return its parts in order.

    Raises UnsupportedFormat for another content type, InvalidFrame for a malformed form, InvalidValue for too many
    parts, PayloadTooLarge, and what ``HttpExchange.read`` and ``charge`` raise.
    """
    reader = FormReader(exchange.request.headers.get("content-type") or "")
    if (exchange.request.content_length or 0) > limit:
        raise PayloadTooLarge(f"the request body exceeds {limit} bytes")
    size = 0
    async for data in exchange.body():
        size += len(data)
        if size > limit:
            raise PayloadTooLarge(f"the request body exceeds {limit} bytes")
        exchange.charge(size)
        reader.feed(data)
    return reader.finish()


class FormReader:
    """Incremental parser of a form: python-multipart's, with limits on parts and fields.

    The result does not depend on how the body is cut into pieces. Time is linear in the size of the body, and memory is
    bounded by that size. Raises UnsupportedFormat for a content type that is not a form's, or has no boundary, and
    InvalidFrame for an invalid boundary.
    """

    def __init__(self, content_type: str) -> None:
        kind, parameters = parse_options_header(content_type)
        boundary = parameters.get(b"boundary")
        if kind.decode("latin-1").lower() != FORM_TYPE or not boundary:
            raise UnsupportedFormat(f"the body must be {FORM_TYPE} with a boundary", param="Content-Type")
        self._parts: list[FormPart] = []
        self._headers: dict[str, bytes] = {}
        self._name, self._value = b"", b""
        self._ended = False
        #: The delimiter that the body must begin with, and what has arrived of it; None once it is complete.
        self._delimiter = b"--" + boundary
        self._beginning: bytes | None = b""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_end": self._on_end,
                },
                max_header_size=_MAX_HEADER_BYTES,
            )
        except FormParserError as error:
            raise InvalidFrame(f"invalid boundary: {str(error)[:80]}") from None

    def feed(self, data: bytes) -> None:
        """Parse the next piece. Raises InvalidFrame, InvalidValue or PayloadTooLarge."""
        if self._beginning is not None:
            # The parser skips a preamble, and what it takes for one depends on how the body is cut.
            data = (self._beginning + data).lstrip(b"\r\n")
            if not data.startswith(self._delimiter[: len(data)]):
                raise InvalidFrame("the form must begin with its boundary")
            whole = len(data) >= len(self._delimiter)
            self._beginning = None if whole else data
            if not whole:
                return
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidFrame(f"invalid form: {str(error)[:80]}") from None

    def finish(self) -> list[FormPart]:
        """Return the parts, at the end of the body. Raises InvalidFrame if the closing delimiter is missing."""
        if not self._ended:
            raise InvalidFrame("the form ended before its last boundary")
        return self._parts

    def _on_part_begin(self) -> None:
        if len(self._parts) == MAX_PARTS:
            raise InvalidValue(f"at most {MAX_PARTS} parts per form")
        self._headers = {}

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._name.decode("latin-1").lower()] = self._value
        self._name, self._value = b"", b""

    def _on_headers_finished(self) -> None:
        disposition = self._headers.get("content-disposition", b"")
        kind, options = parse_options_header(disposition)
        name, filename = options.get(b"name"), options.get(b"filename")
        if kind != b"form-data" or name is None:
            raise InvalidFrame("a part of the form has no name")
        if filename is None:
            filename = _extended_filename(disposition)
        if filename is None and name == FILE_FIELD:
            filename = b""
        self._parts.append(
            FormPart(
                name.decode("utf-8", "replace"),
                None if filename is None else filename.decode("utf-8", "replace"),
                self._headers.get("content-type", b"").decode("latin-1"),
            )
        )

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = self._parts[-1]
        part.data.extend(data[start:end])
        if part.filename is None and len(part.data) > MAX_FIELD_BYTES:
            raise PayloadTooLarge(f"at most {MAX_FIELD_BYTES} bytes per form field")

    def _on_end(self) -> None:
        self._ended = True


def _extended_filename(disposition: bytes) -> bytes | None:
    """Return the file name in the form of RFC 5987 (``filename*=``), which the parser ignores; None without one."""
    found = _EXTENDED_FILENAME.search(disposition)
    return None if found is None else unquote_to_bytes(found[1])
