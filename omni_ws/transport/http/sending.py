"""The sending half of an HTTP connection: h11's bytes onto the transport, and the waiting for a slow peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import h11

from omni_ws.transport.http.body import PeerGone
from omni_ws.transport.http.deadline import Deadline

#: Output after which a writing handler lets others run, however fast its peer reads.
_FAIR_SHARE_BYTES: Final = 64 * 1024
#: In front of the length of one chunk; readers are known that take 16 digits in all.
_MAX_ZEROS: Final = 7


class HttpOutput:
    """``stuck`` is called when the output stays over its high-water mark, or undelivered while closing, for
    ``timeout_sec``."""

    def __init__(self, http: h11.Connection, *, timeout_sec: float, stuck: Callable[[], None]) -> None:
        self._http = http
        self._timeout_sec = timeout_sec
        self._transport: asyncio.Transport
        self._writable = asyncio.Event()
        self._writable.set()
        self._deadline = Deadline(asyncio.get_running_loop(), stuck)
        self._closing = False
        self._unshared_bytes = 0
        #: What may be sent at any moment of the answer under way, and means nothing.
        self._filler = b""
        #: Whether that answer is sent in chunks; and the zeros that the length of the next one begins with already.
        self._chunked = False
        self._zeros = 0

    def attach(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def send(self, *events: h11.Event) -> None:
        """Raises PeerGone; h11.LocalProtocolError for events that do not fit the state of the answer."""
        if self._transport.is_closing():
            # The output of a dead transport never fills, so waiting for room would not stop a writer.
            raise PeerGone("the client closed the connection")
        self._write(b"".join([self._http.send(event) or b"" for event in events]))

    def send_chunk(self, data: bytes) -> None:
        """``data``, which is not empty, as one chunk of a chunked answer. Raises PeerGone.

        Past h11: between the head and the end of such an answer there is no state for it to keep, and a token is small
        beside what it costs there.
        """
        if self._transport.is_closing():
            raise PeerGone("the client closed the connection")
        self._zeros = 0
        self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def send_continue(self) -> None:
        """An interim answer (RFC 9110, 15.2). Raises PeerGone."""
        self.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))

    def begin_content(self, *, filler: bytes, chunked: bool) -> None:
        """The head of an answer is out. ``filler`` is content that may stand between any two parts of it."""
        self._filler = filler
        self._chunked = chunked
        self._zeros = 0

    def ask(self) -> None:
        """Send what is harmless in the middle of an answer, if there is anything: a peer that is gone resets then."""
        if self._transport.is_closing() or self._http.our_state is not h11.SEND_BODY:
            return
        if self._filler:
            self.send(h11.Data(data=self._filler))
        elif self._chunked and self._zeros < _MAX_ZEROS:
            self._zeros += 1
            self._write(b"0")  # the length of a chunk may begin with zeros (RFC 9112, 7.1)

    def _write(self, data: bytes) -> None:
        if data:
            self._unshared_bytes += len(data)
            self._transport.write(data)

    @property
    def has_room(self) -> bool:
        """Whether ``drain`` would return at once."""
        is_fair = self._unshared_bytes <= _FAIR_SHARE_BYTES
        return is_fair and self._writable.is_set() and not self._transport.is_closing()

    async def drain(self) -> None:
        """Wait for room. Raises PeerGone."""
        if self._writable.is_set() and self._unshared_bytes > _FAIR_SHARE_BYTES:
            # Waiting for an event that is set does not yield, and a peer on a fast link keeps it set.
            self._unshared_bytes = 0
            await asyncio.sleep(0)
        if not self._writable.is_set():
            await self._writable.wait()
        if self._transport.is_closing():
            raise PeerGone("the client closed the connection")

    def pause(self) -> None:
        self._writable.clear()
        self._deadline.arm(self._timeout_sec)

    def resume(self) -> None:
        self._writable.set()
        if not self._closing:
            self._deadline.disarm()

    def close(self) -> None:
        """Close the transport behind what was sent; a peer that does not take that in time is dropped."""
        self._closing = True
        self._deadline.arm(self._timeout_sec)
        self._transport.close()

    def abort(self) -> None:
        """Drop the connection; what was not sent is lost."""
        self._transport.abort()

    def lost(self) -> None:
        """The transport is gone, or another's: let writers go."""
        self._deadline.disarm()
        self._writable.set()
