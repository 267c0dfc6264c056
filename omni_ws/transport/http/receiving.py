"""The receiving half of an HTTP connection: the body under way, its deadline, and when the socket is not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import h11

from omni_ws.errors import SessionTimeout
from omni_ws.transport.http.body import PeerGone, RequestBody
from omni_ws.transport.http.deadline import Deadline
from omni_ws.transport.http.hang_up import HangUp, HangUpWatch
from omni_ws.transport.http.request import HttpRequest


class HttpInput:
    """Bounds what is held: ``high_water_bytes`` of unread body, and as much of requests ahead of their turn.

    ``invite`` asks for a body whose sender waits for that (RFC 9110, 10.1.1). ``unread`` hears now and then what has
    become of a peer that is not being read.
    """

    def __init__(
        self,
        http: h11.Connection,
        *,
        high_water_bytes: int,
        body_timeout_sec: float | None,
        min_rate: float | None,
        invite: Callable[[], None],
        unread: Callable[[HangUp], None],
    ) -> None:
        self._http = http
        self._high_water_bytes = high_water_bytes
        self._default_timeout = body_timeout_sec
        self._timeout = body_timeout_sec
        self._default_min_rate = min_rate
        #: Bytes a second with which the body has to come on the whole, after the time-out; None for no bound.
        self.min_rate = min_rate
        #: Seconds in which the peer owed bytes of this body, up to the time from which on it does so again.
        self._owed_for = 0.0
        self._owed_since: float | None = None
        self._invite = invite
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        #: Incomplete also where there is no request: then, too, it is not known what the peer is about to send.
        self.body = RequestBody()
        self.pipelined_bytes = 0
        self._owing = False
        self._paused = False
        self._behind = False
        self._deadline = Deadline(self._loop, self._expired)
        self._watch = HangUpWatch(self._loop, unread)

    def attach(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    # The body of one request

    @property
    def body_timeout(self) -> float | None:
        return self._timeout

    @body_timeout.setter
    def body_timeout(self, seconds: float | None) -> None:
        self._timeout = seconds
        self.watch()

    def begin(self, request: HttpRequest) -> None:
        self._timeout = self._default_timeout
        self.min_rate = self._default_min_rate
        self._owed_for, self._owed_since = 0.0, None
        self._owing = request.has_body
        self.watch()

    def feed(self, data: bytes | bytearray) -> None:
        self.body.feed(data)
        if self.body.held >= self._high_water_bytes:
            self._pause()
        self.watch()

    def finish(self) -> None:
        """The body is complete; what else has arrived belongs to the next request."""
        self.body.finish()
        self.watch()
        self.hold(len(self._http.trailing_data[0]))

    def fail(self, failure: Exception) -> None:
        self.body.fail(failure)
        self.watch()

    def wanted(self) -> None:
        """The handler is about to wait for body bytes. Raises PeerGone."""
        if self._http.they_are_waiting_for_100_continue and not self.body.ended:
            self._invite()
            self.watch()

    def taken(self) -> None:
        """The handler made room. After the end, too, the socket is read: a paused one would not tell that it closed."""
        if self.pipelined_bytes <= self._high_water_bytes:
            self.resume()
        self.watch()

    def over(self) -> None:
        """The request was answered: nothing is owed any more."""
        self._owing = False
        self.watch()

    def next_request(self) -> int:
        """Make ready for it; how many of its bytes have been received already."""
        self.body = RequestBody()
        waiting, self.pipelined_bytes = self.pipelined_bytes, 0
        self.resume()
        return waiting

    def lost(self) -> None:
        """The transport is gone, or another's."""
        self._deadline.disarm()
        self._watch.stop()
        self.body.fail(PeerGone("the client closed the connection"))

    def watch(self) -> None:
        """Run the deadline exactly while the peer owes bytes and nothing of ours holds it up."""
        held_up = self._paused or self._http.they_are_waiting_for_100_continue
        owing = self._owing and not self.body.ended and not held_up
        now = self._loop.time()
        if self._owed_since is not None:
            self._owed_for += now - self._owed_since
        self._owed_since = now if owing else None
        self._deadline.arm(self._patience() if owing else None)

    def _patience(self) -> float | None:
        """How long the peer may be silent from now on, in seconds."""
        if self._timeout is None or self.min_rate is None:
            return self._timeout
        # The whole body has the time-out and what its bytes take at the least rate.
        whole = self._timeout + self.body.received / self.min_rate
        return max(0.0, min(self._timeout, whole - self._owed_for))

    def _expired(self) -> None:
        since = 0.0 if self._owed_since is None else self._loop.time() - self._owed_since
        if self._timeout is None or since >= self._timeout:
            message = f"the request body stood still for {self._timeout:g} s"
        else:
            message = f"the request body came with less than {self.min_rate:g} bytes a second"
        self.body.fail(SessionTimeout(message))

    # Back-pressure

    def hold(self, size: int) -> None:
        """Requests ahead of their turn are held, not stopped at once: a paused socket would not tell of its end."""
        self.pipelined_bytes += size
        if self.pipelined_bytes > self._high_water_bytes:
            self._pause()

    def fall_behind(self, catch_up: Callable[[], None]) -> None:
        """Read no more until ``catch_up`` was called, in the loop's next turn."""

        def turn() -> None:
            self._behind = False
            if self.body.held < self._high_water_bytes:
                self.resume()
            catch_up()

        self._pause()
        self._behind = True
        self._loop.call_soon(turn)

    def _pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()
            self._watch.begin(self._transport)

    def resume(self) -> None:
        if self._paused and not self._behind and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()
            self._watch.end()
