"""One HTTP/1.1 connection: a socket's bytes through h11, one handler task for each request, and every way to end.

h11 keeps the protocol's state machine and refuses what breaks it. What stands here is what h11 leaves to its user:
timers, back-pressure in bytes, pipelined requests that wait, answers to what cannot be understood, and the closing of a
connection so that its last answer still arrives.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import enum
import logging
from typing import Final, cast

import h11

from omni_ws.core.addresses import Addresses
from omni_ws.errors import EngineOverloaded, HeaderTooLarge, OmniError, OriginNotAllowed, SessionTimeout, http_status
from omni_ws.service.failure import unexpected
from omni_ws.transport.http import cors
from omni_ws.transport.http.application import Application, HttpLimits
from omni_ws.transport.http.body import PeerGone
from omni_ws.transport.http.chunk_sizes import bound_chunk_sizes
from omni_ws.transport.http.connections import Connections
from omni_ws.transport.http.deadline import Deadline
from omni_ws.transport.http.error_response import error_body, error_headers
from omni_ws.transport.http.exchange import JSON, HttpExchange, answer_head
from omni_ws.transport.http.half_close import HalfCloseProbe
from omni_ws.transport.http.hang_up import HangUp
from omni_ws.transport.http.receiving import HttpInput
from omni_ws.transport.http.request import HttpRequest, protocol_failure, read_request
from omni_ws.transport.http.sending import HttpOutput
from omni_ws.transport.http.served_request import Account, answer_request, refused

logger = logging.getLogger(__name__)

#: Events of one connection's input handled at a stretch. One read can hold tens of thousands of tiny chunks, and the
#: other connections' audio must not wait until all of them are parsed.
_EVENTS_PER_TURN: Final = 256


class Phase(enum.Enum):
    """What the next bytes from the peer mean."""

    HEAD = "a request head, or nothing yet"
    EXCHANGE = "the body of the request being answered, then pipelined requests"
    LINGER = "nothing: the last answer is out, and the peer may need a moment to read it"
    HANDED_OVER = "another protocol, which reads them itself"
    CLOSED = "nothing"


class HttpConnection(asyncio.Protocol, abc.ABC):
    """Fulfils OpenConnection for the registry."""

    def __init__(
        self,
        *,
        application: Application,
        connections: Connections,
        limits: HttpLimits,
        account: Account,
        addresses: Addresses,
    ) -> None:
        self._application = application
        self.account = account
        self._connections = connections
        self._limits = limits
        self._addresses = addresses
        self._loop = asyncio.get_running_loop()
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.max_header_bytes)
        self._output = HttpOutput(self._http, timeout_sec=limits.write_timeout_sec, stuck=self._drop_slow_peer)
        self._input = HttpInput(
            self._http,
            high_water_bytes=limits.body_high_water_bytes,
            body_timeout_sec=limits.body_timeout_sec,
            min_rate=limits.min_body_rate,
            invite=self._output.send_continue,
            unread=self._look_after_unread,
        )
        self._transport: asyncio.Transport
        self._secure = False
        self._client = ""
        self._phase = Phase.HEAD
        self._peer_finished = False
        self._first_byte = b""
        #: Received of the head being read, and of what is thrown away.
        self._head_bytes = 0
        self._lingered_bytes = 0
        #: The request being answered, and the owner of everything that its handler does.
        self._request: HttpRequest | None = None
        self._is_head_method = False
        self._task: asyncio.Task[None] | None = None
        self._exchange: HttpExchange | None = None
        self._phase_deadline = Deadline(self._loop, self._phase_expired)
        first, longest = limits.half_close_probe_sec, limits.half_close_probe_max_sec
        self._probe = HalfCloseProbe(self._loop, self._ask_peer, first_sec=first, longest_sec=longest)

    @abc.abstractmethod
    def upgrade(self, event: h11.Request, request: HttpRequest) -> None:
        """Turn the connection over to WebSocket, after ``release``. An exception refuses the upgrade."""

    @property
    @abc.abstractmethod
    def upgraded_connections(self) -> int:
        """How many connections of the same port have been turned over."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._input.attach(self._transport)
        self._output.attach(self._transport)
        # Asked now: once the connection is lost, the TLS transport of the standard library no longer knows.
        self._secure = transport.get_extra_info("sslcontext") is not None
        peer = transport.get_extra_info("peername")
        self._client = str(peer[0]) if isinstance(peer, tuple) else ""
        self._connections.add(self)
        if self._connections.is_full(upgraded=self.upgraded_connections):
            self._turn_away()
        else:
            self._phase_deadline.arm(self._limits.header_timeout_sec)

    def data_received(self, data: bytes) -> None:
        match self._phase:
            case Phase.HEAD:
                if self._head_bytes == 0:
                    self._first_byte = self._first_byte or data[:1]
                    self._phase_deadline.arm(self._limits.header_timeout_sec)
                self._head_bytes += len(data)
            case Phase.EXCHANGE if self._input.body.complete:
                self._input.hold(len(data))
            case Phase.EXCHANGE if self._input.body.ended:
                return  # broken framing, or too late: no sense can be made of the rest
            case Phase.EXCHANGE:
                pass
            case Phase.LINGER:
                self._lingered_bytes += len(data)
                if self._lingered_bytes > self._limits.linger_bytes:
                    self._close()
                return
            case Phase.HANDED_OVER | Phase.CLOSED:
                return
        self._http.receive_data(data)
        self._advance()

    def eof_received(self) -> bool:
        self._peer_finished = True
        if self._phase is not Phase.EXCHANGE:
            self._close()
            return False
        if self._secure:
            return False  # TLS cannot be half closed
        self._http.receive_data(b"")
        self._advance()
        self._probe.begin()
        return True

    def pause_writing(self) -> None:
        self._output.pause()

    def resume_writing(self) -> None:
        self._output.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = Phase.CLOSED
        self._detach()
        if self._task is None:
            self._connections.discard(self)
        else:
            self._task.cancel()

    # OpenConnection, for the registry

    @property
    def busy(self) -> bool:
        return self._phase is Phase.EXCHANGE

    def close_if_idle(self) -> None:
        if self._phase is Phase.HEAD and self._head_bytes == 0:
            self._close()

    def interrupt(self, error: OmniError) -> None:
        if self._exchange is not None:
            for interrupt in self._exchange.interrupts:
                interrupt(error)

    def abort(self) -> None:
        self._output.abort()

    # h11's events, one effect each

    def _advance(self) -> None:
        try:
            for _ in range(_EVENTS_PER_TURN):
                if self._phase not in (Phase.HEAD, Phase.EXCHANGE):
                    return
                event = self._http.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED:
                    return
                if isinstance(event, h11.ConnectionClosed):  # h11 would say so again and again
                    if self._phase is Phase.HEAD:
                        self._close()
                    return
                self._dispatch(cast("h11.Event", event))
        except h11.RemoteProtocolError as error:
            self._misunderstood(error)
            return
        self._input.fall_behind(self._advance)

    def _dispatch(self, event: h11.Event) -> None:
        match event:
            case h11.Request():
                self._receive_head(event)
            case h11.Data(data=data):
                self._input.feed(data)
            case h11.EndOfMessage():
                self._input.finish()

    def _receive_head(self, event: h11.Request) -> None:
        self._is_head_method = event.method == b"HEAD"
        self._phase_deadline.disarm()
        limit = self._limits.max_header_bytes
        try:
            # h11 bounds incomplete heads only; how a head was cut into packets must not decide about it.
            if self._head_bytes > limit and self._head_bytes - len(self._http.trailing_data[0]) > limit:
                raise HeaderTooLarge(f"the request head has more than {limit} bytes")
            self._request = request = read_request(
                event, client=self._client, secure=self._secure, addresses=self._addresses
            )
            if not self._application.allows_host(request):
                raise OriginNotAllowed("without keys this server answers to no such Host; --allow-host names others")
            cors.check_origin(request)
            origin_allowed = "origin" not in request.headers or self._application.allows_origin(request)
            if not request.wants_websocket:
                self._begin(request, origin_allowed=origin_allowed)
            elif origin_allowed:
                self.upgrade(event, request)
            else:
                raise OriginNotAllowed("pages of this origin may not use this server")
        except OmniError as error:
            self._refuse(error)
        except Exception as error:
            self._refuse(unexpected(error, where="the opening of a request"))

    def _misunderstood(self, error: h11.RemoteProtocolError) -> None:
        in_body = self._phase is Phase.EXCHANGE
        failure = protocol_failure(
            error, first_byte=self._first_byte, in_body=in_body, max_header_bytes=self._limits.max_header_bytes
        )
        if in_body:
            self._input.fail(failure)
        else:
            self._refuse(failure)

    # One request

    def _begin(self, request: HttpRequest, *, origin_allowed: bool) -> None:
        self._phase = Phase.EXCHANGE
        self._input.begin(request)
        bound_chunk_sizes(self._http)
        if self._peer_finished:
            self._probe.begin()
        self._exchange = exchange = HttpExchange(
            request,
            http_input=self._input,
            http_output=self._output,
            connections=self._connections,
            origin_allowed=origin_allowed,
        )
        # Cancelling this task is the one way to abort what a handler does.
        work = answer_request(self._application, exchange, origin_allowed=origin_allowed, account=self.account)
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        """The request's task is done: on to the next request, or to the connection's end."""
        self._task = self._exchange = None
        self._probe.stop()
        self._input.over()
        failure = None if task.cancelled() else task.exception()
        if failure is not None and not isinstance(failure, PeerGone):
            logger.error("an answer could not be sent", exc_info=failure)
        if self._phase is Phase.CLOSED:
            self._connections.discard(self)
        elif failure is not None or task.cancelled() or self._transport.is_closing():
            self.abort()
        elif not self._reusable:
            self._end()
        else:
            self._next_request()

    @property
    def _reusable(self) -> bool:
        idle = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        return idle and not (self._connections.draining and not self._input.pipelined_bytes)

    def _next_request(self) -> None:
        self._http.start_next_cycle()
        self._phase = Phase.HEAD
        self._request = None
        self._is_head_method = False
        self._output.begin_content(filler=b"", chunked=False)
        self._head_bytes = self._input.next_request()
        waiting = self._head_bytes > 0
        self._phase_deadline.arm(self._limits.header_timeout_sec if waiting else self._limits.keepalive_timeout_sec)
        self._advance()

    def _refuse(self, error: OmniError) -> None:
        """Answer what never became an exchange, and end the connection."""
        self.account(refused(self._request, http_status(error) or 400, client=self._client, error=error))
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self._transport.is_closing():
            content = error_body(error)
            fields = [("Content-Type", JSON), ("Content-Length", str(len(content))), *error_headers(error)]
            head = answer_head(http_status(error) or 400, [*fields, ("Connection", "close")])
            self._output.send(head, *([] if self._is_head_method else [h11.Data(data=content)]), h11.EndOfMessage())
        self._end()

    def _turn_away(self) -> None:
        """Before anything was read: what a flood of connections costs is their acceptance."""
        if self._connections.turn_away(self):
            self._refuse(EngineOverloaded("all connections are taken", retry_after_ms=1000))
        else:
            self.abort()

    # How a connection ends

    def release(self) -> None:
        """Let go of the transport, which another protocol is about to get."""
        self._phase = Phase.HANDED_OVER
        self._detach()
        self._connections.discard(self)

    def _end(self) -> None:
        """No more requests. Where the peer may still be sending, closing at once would make the kernel drop the answer
        (a reset overtakes data): what it sends is then read and thrown away for a while."""
        if self._peer_finished or (self._input.body.complete and not self._input.pipelined_bytes):
            self._close()
            return
        self._phase = Phase.LINGER
        self._phase_deadline.arm(self._limits.linger_timeout_sec)
        self._input.resume()
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # of a peer that is gone, which the loop is about to say
                self._transport.write_eof()

    def _close(self) -> None:
        self._phase = Phase.CLOSED
        self._phase_deadline.disarm()
        self._output.close()

    def _detach(self) -> None:
        """Stop every timer and wake every waiter: the transport is gone, or another's."""
        self._phase_deadline.disarm()
        self._probe.stop()
        self._input.lost()
        self._output.lost()

    def _drop_slow_peer(self) -> None:
        logger.info("dropped a client that did not read for %g s", self._limits.write_timeout_sec)
        self.abort()

    def _look_after_unread(self, found: HangUp) -> None:
        """Of a peer that is not being read, the end of what it sends would be read late, or never."""
        if found is HangUp.UNKNOWN:
            self._output.ask()
        elif found is HangUp.GONE or self._secure:
            self.abort()
        elif self._phase is Phase.EXCHANGE:
            self._probe.begin()

    # Deadlines

    def _phase_expired(self) -> None:
        if self._phase is Phase.HEAD and self._head_bytes:
            limit = self._limits.header_timeout_sec
            self._refuse(SessionTimeout(f"the request head was not complete after {limit:g} s"))
        else:
            self._close()

    def _ask_peer(self) -> None:
        """Send what is harmless to a peer that listens: an interim answer (RFC 9110, 15.2), or what an answer under way
        has for it. Where nobody does, the connection is lost, and the request is given up."""
        modern = self._request is not None and self._request.http_version == "1.1"
        if self._http.our_state is h11.SEND_RESPONSE and modern and not self._transport.is_closing():
            self._output.send_continue()
        else:
            self._output.ask()
