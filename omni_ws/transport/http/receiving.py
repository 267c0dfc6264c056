"""The two directions of an HTTP connection: HttpInput for request bodies, HttpOutput for responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import h11

from omni_ws.errors import SessionTimeout
from omni_ws.transport.http.hang_up import Deadline, PeerGone, Recheck
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.http.strict_h11 import limit_chunk_sizes

# The receiving direction


class RequestBody:
    """The buffer of one request body: bytes that have arrived and were not read yet.

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

    Reading pauses while ``high_water_bytes`` of the body are unread, or as many bytes of pipelined requests are held.

    The deadline runs only while body bytes are due from the peer and the server does not delay them, by a pause in
    reading or by a ``100 Continue`` that it has not sent. It allows ``body_timeout_sec`` of silence and, for the whole
    body, that time plus the time that its bytes take at ``min_rate`` bytes a second. When it expires, readers get
    SessionTimeout.

    ``send_continue`` is called before a body is read whose sender waits for ``100 Continue`` (RFC 9110, section
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
        """Resume reading. Also after the end of the body: only a socket that is read reports that it was closed."""
        if self.pipelined_bytes <= self._high_water_bytes:
            self.resume()
        self._update_deadline()

    def end_request(self) -> None:
        """Stop the deadline: once the response is sent, the peer owes nothing."""
        self._expects_body = False
        self._update_deadline()

    def next_request(self) -> int:
        """Prepare for the next request. Returns how many bytes of it have been received already."""
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

        Reading goes on up to the high-water mark, since only a socket that is read reports that it was closed.
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
        #: From ``close`` on the deadline covers the flush, and resumed writing no longer stops it.
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
        """Set how ``probe`` may interrupt the content of the response whose head has just been sent."""
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
        """Wait until the transport takes more, and yield to the event loop after a fair share. Raises PeerGone."""
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
