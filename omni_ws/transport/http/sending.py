"""The sending half of an HTTP connection: h11's bytes onto the transport, and backpressure from a slow peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import h11

from omni_ws.transport.http.deadline import Deadline
from omni_ws.transport.http.hang_up import PeerGone

#: Output after which a writing handler yields to the event loop, however fast its peer reads.
_FAIR_SHARE_BYTES: Final = 64 * 1024
#: Leading zeros of one chunk size; some readers take 16 digits in all.
_MAX_ZEROS: Final = 7


class HttpOutput:
    """Writer of one connection, with flow control, a write time-out and probes.

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
        """Send something without meaning in the middle of a response, if there is anything such.

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
        """Whether ``drain`` would not wait. On a closed connection it raises PeerGone, as sending does."""
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
        """Close the transport behind what was written, within the write time-out."""
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
