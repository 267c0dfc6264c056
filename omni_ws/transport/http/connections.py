"""HTTP connections: their registry and deadlines, the detection of lost peers, and flow control in both directions.

HttpInput receives request bodies, HttpOutput sends responses.
"""

from __future__ import annotations

import asyncio
import enum
import re
import select
import socket
from collections.abc import Callable
from typing import Final, Protocol

import h11
from h11._readers import ChunkedReader
from h11._receivebuffer import ReceiveBuffer

from omni_ws.errors import OmniError, SessionTimeout
from omni_ws.installing import check_private_names
from omni_ws.transport.http.request import HttpRequest


class Deadline:
    """A timer that is cheap to move. It calls ``expired`` once, the given number of seconds after the last ``arm``.

    Moving a deadline to a later time is an assignment: the loop's timer wakes up early and is scheduled again. A new
    timer for each packet of a body would leave thousands of cancelled timers in the loop's heap.
    """

    __slots__ = ("_due", "_expired", "_handle", "_loop", "_scheduled")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._due: float | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._scheduled = 0.0

    def arm(self, seconds: float | None) -> None:
        """Expire ``seconds`` from now, instead of at the time set before; None disarms."""
        if seconds is None:
            self.disarm()
            return
        self._due = self._loop.time() + seconds
        if self._handle is not None and self._scheduled <= self._due:
            return
        self._schedule(self._due)

    def disarm(self) -> None:
        """Cancel the deadline. Does nothing if it is not armed."""
        self._due = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _schedule(self, when: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._scheduled = when
        self._handle = self._loop.call_at(when, self._wake)

    def _wake(self) -> None:
        self._handle = None
        if self._due is None:
            return
        if self._loop.time() < self._due:
            self._schedule(self._due)
            return
        self._due = None
        self._expired()


# Peers that disconnect unnoticed: a server learns of a disconnect from the socket's end of data or from a reset, and
# peers that are unread, half-closed or behind a dead network give neither in time.

#: How long after reading has paused the peer is first checked; the interval then doubles up to ``LONGEST_CHECK_SEC``.
FIRST_CHECK_SEC: Final = 1.0
LONGEST_CHECK_SEC: Final = 4.0
#: The poll event of a peer that closed its sending side, reported before the data in front of it is read. Linux only.
_END_OF_DATA: Final[int] = getattr(select, "POLLRDHUP", 0)

#: Seconds of silence before the kernel's first keep-alive probe, seconds between two probes, and how many may stay
#: unanswered.
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class PeerGone(ConnectionResetError):
    """The client of this connection has disconnected.

    This is a type of its own so that a handler's ConnectionResetError from another connection is not mistaken for it.
    """


class HangUp(enum.Enum):
    """The state of the peer's end of a connection, as far as the kernel knows it."""

    UNKNOWN = "nothing: the peer may be connected, or gone behind more data than the kernel can buffer"
    HALF = "the peer has closed its sending side, and perhaps its socket"
    GONE = "the peer has disconnected"


class Recheck:
    """A timer that calls ``check`` after ``first_sec``, then at intervals that double up to ``longest_sec``.

    The default times suit calls of ``hang_up`` while a socket is not read: the kernel may not have seen the peer's end
    of data yet, as unread data comes before it.
    """

    def __init__(
        self, check: Callable[[], None], first_sec: float = FIRST_CHECK_SEC, longest_sec: float = LONGEST_CHECK_SEC
    ) -> None:
        self._check = check
        self._first_sec = first_sec
        self._longest_sec = longest_sec
        self._interval = first_sec
        self._running = False
        self._deadline = Deadline(asyncio.get_running_loop(), self._due)

    def begin(self) -> None:
        """Start checking. Does nothing if checking has started already."""
        if not self._running:
            self._running = True
            self._interval = self._first_sec
            self._deadline.arm(self._interval)

    def end(self) -> None:
        """Stop checking, but let the timer run out by itself: pauses in reading are frequent and short."""
        self._running = False

    def stop(self) -> None:
        """Stop checking, and cancel the timer."""
        self._running = False
        self._deadline.disarm()

    def _due(self) -> None:
        if not self._running:
            return
        self._interval = min(2 * self._interval, self._longest_sec)
        self._deadline.arm(self._interval)
        self._check()


def hang_up(transport: asyncio.BaseTransport) -> HangUp:
    """Return the state of the peer of ``transport``, without reading from the socket."""
    descriptor = transport.get_extra_info("socket").fileno()
    if descriptor < 0:
        return HangUp.GONE
    poll = select.poll()
    poll.register(descriptor, _END_OF_DATA)
    events = sum(mask for _, mask in poll.poll(0))
    if events & (select.POLLHUP | select.POLLERR):
        return HangUp.GONE
    return HangUp.HALF if events & _END_OF_DATA else HangUp.UNKNOWN


def notice_dead_networks(listening: socket.socket) -> None:
    """Have the kernel drop connections accepted by ``listening`` when their network has been dead for half a minute.

    Accepted sockets inherit the options of the listening one. Systems without these options ignore this.
    """
    if listening.family not in (socket.AF_INET, socket.AF_INET6):
        return
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# The registry

#: Connections over the limit that get a response at the same time; others over the limit are dropped without one.
MAX_TURNED_AWAY: Final = 64


class OpenConnection(Protocol):
    """The methods that the registry calls on a connection."""

    @property
    def busy(self) -> bool:
        """Whether a request is being handled."""
        ...

    def close_if_idle(self) -> None:
        """Close the connection if it is between two requests."""

    def interrupt(self, error: OmniError) -> None:
        """End the work on the current request with ``error``, which the client receives."""

    def abort(self) -> None:
        """Drop the connection, which cancels its handler."""


class Connections:
    """Registry of a server's open HTTP connections, which limits their number and drains them.

    It is needed because the server of the websockets library knows only upgraded connections, while
    ``asyncio.Server.wait_closed`` waits for every transport from Python 3.12 on: drain the registry before calling it.

    Upgraded connections leave the registry; a lost connection stays in it until its handler has ended. ``max_open``
    limits the number of registered and upgraded connections together; None for no limit.
    """

    def __init__(self, *, max_open: int | None = None) -> None:
        self.max_open = max_open
        self._open: set[OpenConnection] = set()
        #: The connections of ``_open`` that are over the limit, while they get their response.
        self._turned_away: set[OpenConnection] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._draining = False
        self._changed: Callable[[], None] = lambda: None

    def report_to(self, changed: Callable[[], None]) -> None:
        """Have ``changed`` called when a connection comes or goes."""
        self._changed = changed

    @property
    def draining(self) -> bool:
        """Whether connections close after their next response."""
        return self._draining

    def __len__(self) -> int:
        return len(self._open)

    @property
    def busy(self) -> int:
        """How many connections are handling a request."""
        return sum(connection.busy for connection in self._open)

    def add(self, connection: OpenConnection) -> None:
        """Register a connection that was accepted."""
        self._open.add(connection)
        self._none_left.clear()
        self._changed()

    def is_full(self, *, upgraded: int) -> bool:
        """Return whether the newest connection is over the limit. ``upgraded``: how many are not registered."""
        return self.max_open is not None and len(self._open) - len(self._turned_away) + upgraded > self.max_open

    def turn_away(self, connection: OpenConnection) -> bool:
        """Mark ``connection`` as over the limit. Returns whether it may get a response before it is closed."""
        self._turned_away.add(connection)
        return len(self._turned_away) <= MAX_TURNED_AWAY

    def discard(self, connection: OpenConnection) -> None:
        """Remove a connection that is closed or upgraded."""
        self._open.discard(connection)
        self._turned_away.discard(connection)
        if not self._open:
            self._none_left.set()
        self._changed()

    def close_idle(self) -> None:
        """Start to drain: connections between two requests close now, the others after their response."""
        self._draining = True
        for connection in tuple(self._open):
            connection.close_if_idle()

    async def wait_idle(self, timeout: float | None) -> bool:
        """Wait until no connection is left. Returns False if that takes longer than ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._none_left.wait()
        except TimeoutError:
            return False
        return True

    def interrupt_all(self, error: OmniError) -> None:
        """End the work on all requests with ``error``, which their clients receive."""
        for connection in tuple(self._open):
            connection.interrupt(error)

    def abort_all(self) -> None:
        """Drop all connections and cancel their handlers. ``wait_idle`` returns when the handlers have ended."""
        for connection in tuple(self._open):
            connection.abort()


# A stricter h11, for input that a proxy in front may parse as another request. Uses private parts of h11.
#
# A release of h11 may change these parts: only its series 0.16 is allowed, and the import fails if one of them is gone.


check_private_names(
    "h11",
    {
        h11.Connection: ("_receive_buffer", "_reader"),
        ReceiveBuffer: ("_data", "_extract", "maybe_extract_lines", "is_next_line_obviously_invalid_request_line"),
        ChunkedReader: ("_bytes_in_chunk", "_bytes_to_discard", "_reading_trailer", "__call__"),
    },
)

#: Digits of a chunk size, enough for 64 bits. Implementations handle more digits differently, and a proxy that reads
#: another size sees another request.
MAX_CHUNK_SIZE_DIGITS: Final = 16

#: Empty lines that are ignored before a request line. Some clients end a body with one that is no part of it (RFC 9112,
#: section 2.2).
MAX_EMPTY_LINES: Final = 2

#: The longest line with the size of a chunk and its extensions, in bytes. No extension is known to be in use.
MAX_CHUNK_LINE: Final = 256

_HEX_DIGITS: Final = frozenset(b"0123456789abcdefABCDEF")
#: The line before a chunk (RFC 9112, section 7.1.1), without blanks after the size.
_CHUNK_LINE: Final = re.compile(rb"[0-9A-Fa-f]+(?:;[\t\x20-\x7e\x80-\xff]*)?")


class BoundedChunkedReader(ChunkedReader):
    """h11's reader of chunked bodies, with stricter rules for the line with a chunk's size and extensions.

    h11 accepts sizes of 20 digits, and any bytes in extensions, even a bare CR. A proxy that takes a bare CR for the
    end of the line would see another request in the same bytes (request smuggling).
    """

    def __call__(self, buffer: ReceiveBuffer) -> h11.Data | h11.EndOfMessage | None:
        if not (self._bytes_in_chunk or self._reading_trailer):
            start = len(self._bytes_to_discard)
            digits = buffer._data[start : start + MAX_CHUNK_SIZE_DIGITS + 1]
            if len(digits) > MAX_CHUNK_SIZE_DIGITS and _HEX_DIGITS.issuperset(digits):
                raise h11.RemoteProtocolError("chunk size too long")
            line = bytes(buffer._data[start : start + MAX_CHUNK_LINE + 2])
            end = line.find(b"\r\n")
            if end < 0 and len(line) > MAX_CHUNK_LINE + 1:
                raise h11.RemoteProtocolError("chunk line too long")
            if end >= 0 and not _CHUNK_LINE.fullmatch(line, 0, end):
                raise h11.RemoteProtocolError("illegal chunk header")
        return super().__call__(buffer)


def limit_chunk_sizes(http: h11.Connection) -> None:
    """Use a BoundedChunkedReader for the request whose head ``http`` has just parsed, if its body is chunked."""
    if isinstance(http._reader, ChunkedReader):
        http._reader = BoundedChunkedReader()


class StrictReceiveBuffer(ReceiveBuffer):
    """h11's receive buffer, which also refuses header lines that end in a bare LF, and header lines that are folded.

    h11 accepts both, as RFC 9112 permits (sections 2.2 and 5.2). But a proxy that parses such lines differently sees
    another request in the same bytes. ``skip_empty_line`` removes an empty line before a head; h11 refuses such a line.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Within ``maybe_extract_lines``, the bytes of the extracted lines; None outside.
        self._raw: bytearray | None = None

    def _extract(self, count: int) -> bytearray:
        extracted = super()._extract(count)
        if self._raw is not None:
            self._raw = extracted
        return extracted

    def skip_empty_line(self) -> bool:
        """Remove the empty line at the beginning of the buffer, if there is one. Returns whether there was one."""
        found = self._data.startswith(b"\r\n")
        if found:
            self._extract(2)
        return found

    def is_next_line_obviously_invalid_request_line(self) -> bool:
        return self._data != b"\r" and super().is_next_line_obviously_invalid_request_line()

    def maybe_extract_lines(self) -> list[bytearray] | None:
        self._raw = bytearray()
        lines = super().maybe_extract_lines()
        raw, self._raw = self._raw, None
        if lines is None:
            return None
        if raw.count(b"\n") != raw.count(b"\r\n"):
            raise h11.RemoteProtocolError("bare LF")
        if any(line.startswith((b" ", b"\t")) for line in lines[1:]):
            raise h11.RemoteProtocolError("folded line")
        return lines


def skip_empty_line(http: h11.Connection) -> bool:
    """Skip an empty line before a head. Returns whether there was one. ``http`` comes from ``strict_http``."""
    buffer = http._receive_buffer
    return isinstance(buffer, StrictReceiveBuffer) and buffer.skip_empty_line()


def strict_http(max_header_bytes: int) -> h11.Connection:
    """Create the server's side of an HTTP/1.1 connection, which parses heads strictly."""
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=max_header_bytes)
    http._receive_buffer = StrictReceiveBuffer()
    return http


# The two directions of an HTTP connection: HttpInput for request bodies, HttpOutput for responses.


# The receiving direction


class RequestBody:
    """The buffer of one request body: the bytes that have arrived and were not yet read.

    Boundaries of chunks have no meaning in HTTP (RFC 9112, section 7.1), so they are not kept. The buffer has no limit
    of its own; ``HttpInput`` pauses the socket.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        #: Bytes received in all.
        self.received = 0
        self._complete = False
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def held(self) -> int:
        """Bytes in the buffer."""
        return len(self._bytes)

    @property
    def ended(self) -> bool:
        """Whether no more bytes follow: the body is complete, or has failed."""
        return self._complete or self._failure is not None

    @property
    def complete(self) -> bool:
        """Whether the whole body has been received."""
        return self._complete

    def feed(self, data: bytes | bytearray) -> None:
        """Append received bytes."""
        self._bytes += data
        self.received += len(data)
        self._changed.set()

    def finish(self) -> None:
        """Mark the body as complete."""
        self._complete = True
        self._changed.set()

    def fail(self, failure: Exception) -> None:
        """Make ``take`` raise ``failure`` once the buffer is empty. Does nothing if the body has ended."""
        if not self.ended:
            self._failure = failure
            self._changed.set()

    async def take(self) -> bytes:
        """Wait until the buffer has bytes, then remove and return all of them; ``b""`` at the end of the body."""
        while not self._bytes:
            if self._failure is not None:
                raise self._failure
            if self._complete:
                return b""
            self._changed.clear()
            await self._changed.wait()
        taken = bytes(self._bytes)
        self._bytes.clear()
        return taken


class HttpInput:
    """The receiving direction of one connection: flow control and the deadline of its request bodies.

    Reading pauses while ``high_water_bytes`` of the body are unread, or that many bytes of pipelined requests are
    buffered.

    The deadline runs only while body bytes are due from the peer and the server does not delay them by a pause in
    reading, or by a ``100 Continue`` that it has not sent. The deadline allows ``body_timeout_sec`` of silence; the
    whole body may take that time plus its size divided by ``min_rate`` (bytes a second). When the deadline expires,
    readers get SessionTimeout.

    ``send_continue`` is called before the body is read, if the client waits for ``100 Continue`` (RFC 9110, section
    10.1.1). ``unread`` is called at intervals while the socket is not read.
    """

    def __init__(
        self,
        http: h11.Connection,
        *,
        high_water_bytes: int,
        body_timeout_sec: float | None,
        min_rate: float | None,
        send_continue: Callable[[], None],
        unread: Callable[[], None],
    ) -> None:
        self._http = http
        self._high_water_bytes = high_water_bytes
        self._default_timeout = body_timeout_sec
        self._timeout = body_timeout_sec
        self._default_min_rate = min_rate
        #: Least average rate of this body in bytes a second; None for no bound.
        self._min_rate = min_rate
        #: Seconds for which bytes of this body were due from the peer, without the time since ``_owed_since``.
        self._owed_for = 0.0
        self._owed_since: float | None = None
        self._send_continue = send_continue
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        #: The current body; between requests an incomplete one, as the peer may be about to send.
        self.body = RequestBody()
        #: Bytes held of requests after the current one.
        self.pipelined_bytes = 0
        self._expects_body = False
        #: Whether the socket is not read, and whether that is so at least until the next pass of the event loop.
        self._paused = self._yielding = False
        self._deadline = Deadline(self._loop, self._expired)
        self._watch = Recheck(unread)

    def attach(self, transport: asyncio.Transport) -> None:
        """Set the transport whose reading is paused and resumed."""
        self._transport = transport

    # The body of one request

    @property
    def body_timeout(self) -> float | None:
        """Longest silence of the peer while it owes body bytes, in seconds; None for no bound."""
        return self._timeout

    def allow_silence(self, seconds: float | None) -> None:
        """Set the longest silence during this body, in seconds; None for no bound."""
        self._timeout = seconds
        self._update_deadline()

    def allow_any_rate(self, silence: float) -> None:
        """Accept this body at any rate, with silences of up to ``silence`` seconds."""
        self._min_rate = None
        self.allow_silence(silence)

    def begin_body(self, request: HttpRequest) -> None:
        """Expect the body of ``request``, whose head h11 has just parsed."""
        self._timeout = self._default_timeout
        self._min_rate = self._default_min_rate
        self._owed_for, self._owed_since = 0.0, None
        self._expects_body = request.has_body
        self._update_deadline()
        limit_chunk_sizes(self._http)

    def feed(self, data: bytes | bytearray) -> None:
        """Append received bytes of the body."""
        self.body.feed(data)
        if self.body.held >= self._high_water_bytes:
            self._pause()
        self._update_deadline()

    def finish_body(self) -> None:
        """Mark the body as complete; further bytes that h11 has buffered belong to pipelined requests."""
        self.body.finish()
        self._update_deadline()
        self.hold_pipelined(len(self._http.trailing_data[0]))

    def fail_body(self, failure: Exception) -> None:
        """Make readers raise ``failure`` after the bytes that have arrived."""
        self.body.fail(failure)
        self._update_deadline()

    def before_read(self) -> None:
        """Send ``100 Continue`` if the sender of the body waits for it. Raises PeerGone."""
        if self._http.they_are_waiting_for_100_continue and not self.body.ended:
            self._send_continue()
            self._update_deadline()

    def after_read(self) -> None:
        """Resume reading, unless too many bytes of pipelined requests wait.

        Also after the end of the body: only while a socket is read is its close noticed.
        """
        if self.pipelined_bytes <= self._high_water_bytes:
            self.resume()
        self._update_deadline()

    def end_request(self) -> None:
        """Stop the deadline: once the response is sent, the peer owes nothing."""
        self._expects_body = False
        self._update_deadline()

    def next_request(self) -> int:
        """Prepare for the next request. Returns how many of its bytes have been received already."""
        self.body = RequestBody()
        waiting, self.pipelined_bytes = self.pipelined_bytes, 0
        self.resume()
        return waiting

    def detach(self) -> None:
        """Stop all timers and fail readers with PeerGone: the transport is closed, or belongs to another protocol."""
        self._deadline.disarm()
        self._watch.stop()
        self.body.fail(PeerGone("the client closed the connection"))

    # Deadline

    def _update_deadline(self) -> None:
        """Run the deadline exactly while bytes are due from the peer and the server does not delay them."""
        held_up = self._paused or self._http.they_are_waiting_for_100_continue
        owing = self._expects_body and not self.body.ended and not held_up
        now = self._loop.time()
        if self._owed_since is not None:
            self._owed_for += now - self._owed_since
        self._owed_since = now if owing else None
        self._deadline.arm(self._allowed_silence() if owing else None)

    def _allowed_silence(self) -> float | None:
        """Return how long the peer may be silent from now on, in seconds; None for no bound."""
        if self._timeout is None or self._min_rate is None:
            return self._timeout
        whole = self._timeout + self.body.received / self._min_rate
        return max(0.0, min(self._timeout, whole - self._owed_for))

    def _expired(self) -> None:
        since = 0.0 if self._owed_since is None else self._loop.time() - self._owed_since
        if self._timeout is None or since >= self._timeout:
            message = f"no data of the request body for {self._timeout:g} s"
        else:
            message = f"the request body arrived at less than {self._min_rate:g} bytes per second"
        self.body.fail(SessionTimeout(message))

    # Backpressure

    def hold_pipelined(self, size: int) -> None:
        """Count ``size`` bytes of pipelined requests, which h11 buffers.

        Reading goes on up to the high-water mark: the close of a socket is noticed only while the socket is read.
        """
        self.pipelined_bytes += size
        if self.pipelined_bytes > self._high_water_bytes:
            self._pause()

    def yield_to_loop(self, catch_up: Callable[[], None]) -> None:
        """Pause reading until the event loop's next pass, and call ``catch_up`` in that pass."""

        def next_pass() -> None:
            self._yielding = False
            if self.body.held < self._high_water_bytes:
                self.resume()
            catch_up()

        if not self._transport.is_closing():
            self._pause()
            self._yielding = True
        self._loop.call_soon(next_pass)

    def resume(self) -> None:
        """Read the socket again, unless the connection has yielded to the event loop."""
        if self._paused and not self._yielding and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()
            self._watch.end()

    def _pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()
            self._watch.begin()


# The sending direction

#: Output after which a writing handler yields to the event loop, however fast its peer reads.
_FAIR_SHARE_BYTES: Final = 64 * 1024
#: Leading zeros of one chunk size; some readers take 16 digits in all.
_MAX_ZEROS: Final = 7


class HttpOutput:
    """The sending direction of one connection: writes h11's bytes, with flow control, a write time-out and probes.

    Writing never blocks; ``drain`` waits while the transport's buffer is above its high-water mark. ``on_timeout`` is
    called when that lasts for ``timeout_sec``, or when a closing connection does not flush within that time.
    """

    def __init__(self, http: h11.Connection, *, timeout_sec: float, on_timeout: Callable[[], None]) -> None:
        self._http = http
        self._timeout_sec = timeout_sec
        self._transport: asyncio.Transport
        self._writable = asyncio.Event()
        self._writable.set()
        self._deadline = Deadline(asyncio.get_running_loop(), on_timeout)
        #: Whether ``close`` was called: then the deadline covers the flush, and resumed writing does not stop it.
        self._closing = False
        self._unshared_bytes = 0
        #: Content without meaning that a probe may send between two parts of the response; empty for none.
        self._filler = b""
        #: Whether the response is chunked, and how many leading zeros of the next chunk size have been sent as probes.
        self._chunked = False
        self._zeros = 0

    def attach(self, transport: asyncio.Transport) -> None:
        """Set the transport that is written to."""
        self._transport = transport

    def send(self, *events: h11.Event) -> None:
        """Send ``events`` with one write.

        Raises PeerGone; h11.LocalProtocolError for events that do not fit the state of the response.
        """
        if self._transport.is_closing():
            # A closed transport never pauses its writers, so backpressure would not stop the handler.
            raise PeerGone("the client closed the connection")
        self._write(b"".join([self._http.send(event) or b"" for event in events]))

    def send_chunk(self, data: bytes) -> None:
        """Send ``data``, which is not empty, as one chunk of a chunked response. Raises PeerGone.

        Bypasses h11, which keeps no state between the head and the end of a chunked response; its event for each chunk
        would cost more than the token that the chunk carries.
        """
        if self._transport.is_closing():
            raise PeerGone("the client closed the connection")
        self._zeros = 0
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        self._unshared_bytes += len(chunk)
        self._transport.write(chunk)

    def send_continue(self) -> None:
        """Send ``100 Continue`` (RFC 9110, section 15.2.1). Raises PeerGone."""
        self.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))

    def begin_content(self, *, filler: bytes, chunked: bool) -> None:
        """Set how ``probe`` may interrupt the content of the response whose head has just been sent.

        ``filler`` is content without meaning, empty for none; ``chunked``: whether the content is sent in chunks.
        """
        self._filler = filler
        self._chunked = chunked
        self._zeros = 0

    def probe(self) -> None:
        """Send bytes without meaning in the middle of a response, if the response allows any.

        A peer that has closed its socket answers with a reset, and the connection is lost.
        """
        if self._transport.is_closing() or self._http.our_state is not h11.SEND_BODY:
            return
        if self._filler:
            self.send(h11.Data(data=self._filler))
        elif self._chunked and self._zeros < _MAX_ZEROS:
            self._zeros += 1
            self._write(b"0")  # a chunk size may begin with zeros (RFC 9112, section 7.1)

    def _write(self, data: bytes) -> None:
        if data:
            self._unshared_bytes += len(data)
            self._transport.write(data)

    @property
    def has_room(self) -> bool:
        """Whether ``drain`` would return, or raise PeerGone, without waiting."""
        return self._writable.is_set() and self._unshared_bytes <= _FAIR_SHARE_BYTES

    async def drain(self) -> None:
        """Wait until the transport takes more output. Raises PeerGone.

        Yields to the event loop after ``_FAIR_SHARE_BYTES`` of output, even if the transport always takes more.
        """
        if self._writable.is_set() and self._unshared_bytes > _FAIR_SHARE_BYTES:
            # Waiting for an event that is set does not yield, and a peer on a fast link keeps it set.
            self._unshared_bytes = 0
            await asyncio.sleep(0)
        if not self._writable.is_set():
            await self._writable.wait()
        if self._transport.is_closing():
            raise PeerGone("the client closed the connection")

    def pause(self) -> None:
        """Make ``drain`` wait: the transport's buffer is above its high-water mark."""
        self._writable.clear()
        self._deadline.arm(self._timeout_sec)

    def resume(self) -> None:
        """Wake writers: the transport's buffer is below its low-water mark."""
        self._writable.set()
        if not self._closing:
            self._deadline.disarm()

    def close(self) -> None:
        """Close the transport after all that was written is sent; abort it after the write time-out."""
        self._closing = True
        self._deadline.arm(self._timeout_sec)
        self._transport.close()

    def abort(self) -> None:
        """Drop the connection; buffered output is lost."""
        self._transport.abort()

    def detach(self) -> None:
        """Stop the timer and wake all writers: the transport is closed, or belongs to another protocol."""
        self._deadline.disarm()
        self._writable.set()
