"""FrontDoor: the asyncio protocol that serves HTTP/1.1 and WebSocket on one port.

A connection speaks HTTP until the client upgrades it; then a connection of the websockets library takes over the
transport. The front door is the connection factory of the library's own server, whose Unix sockets, extensions and
close codes stay in use:

    connections = Connections()
    door = front_door(application, connections=connections, limits=limits)
    async with serve(websocket_handler, host, port, create_connection=door, compression=None):
        ...

With TLS, the library's server listens without TLS, and ``TlsDoor`` does the TLS handshake: thus a connection counts
from the moment at which it is accepted, and the library knows it only once it is secure.

The library takes over a transport in use if it is given the request head again. That is not documented: the version of
the library is pinned, and tests/transport/http/test_front_door_contract.py checks what the front door relies on.

h11 parses requests, refuses what breaks RFC 9112, and knows what may be sent next. It has no clock, no backpressure and
no tasks; this module adds them. Only the chunks of a response bypass h11, for speed; see ``HttpOutput.send_chunk``.

    transport → data_received → h11 → HttpInput.body → HttpExchange.read ─────────→ handler
    transport ← HttpOutput ←─── h11 ←───────────────── HttpExchange.respond, write ←─ handler

Driving h11: ``data_received`` feeds h11 and dispatches its events until it needs more data. A request head starts an
exchange, which is one task that runs the application's handler; body events go to the handler through HttpInput. The
two directions are independent: a handler may respond while the body still arrives. A read can hold tens of thousands
of tiny chunks, so the connection yields to the event loop after 256 events.

Deadlines: a phase has one (for the head, for keep-alive, for lingering), HttpInput has one for bodies that stall, and
HttpOutput one for peers that do not read. Handlers may take as long as they like.

Pipelining: h11 pauses after a complete request until both sides are done and the next cycle starts. Requests are
served one at a time, in order; bytes of later ones wait in h11's buffer, and past the high-water mark in the kernel.

Half-close: a client may close its sending side and read on. That looks the same as a closed socket until something is
sent, so such a peer is probed with bytes without meaning: an interim response before the head, a comment or a leading
zero of a chunk size after it. A peer that is gone replies with a reset; the connection is lost, which cancels the
handler. Most have closed their socket, so the first probe comes soon; later ones are rare, as a client may count them.
While reading is paused, the kernel is asked about the peer. TLS has no half-close: its end of data is a close.

Closing: a close with unread input makes the kernel send a reset, which overtakes the response. If the peer may still be
sending, the connection therefore closes its sending side only, and lingers while it discards input.

WebSocket: after an upgrade request h11 stops parsing. The transport, the head and the bytes after it go to another
protocol; from then on nothing of this one runs.

Drain: ``Connections.close_idle`` closes connections between two requests; the others close after their response. If
that takes too long, ``interrupt`` ends handlers with an error, and ``abort`` drops the connections that are left.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import enum
import functools
import logging
import os
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import h11
from websockets.asyncio.server import Server, ServerConnection
from websockets.exceptions import InvalidHeader
from websockets.headers import parse_connection, parse_extension, parse_subprotocol
from websockets.http11 import MAX_LINE_LENGTH
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from omni_ws.errors import (
    EngineOverloaded,
    HeaderTooLarge,
    InvalidFrame,
    OmniError,
    SessionTimeout,
    UpgradeRequired,
    http_status,
)
from omni_ws.service import unexpected
from omni_ws.service.sessions.admission import Addresses
from omni_ws.service.sessions.shared_counts import WorkerGroup
from omni_ws.transport.http import access
from omni_ws.transport.http.application import Application, HttpLimits, UpgradeDecision
from omni_ws.transport.http.connections import (
    MAX_EMPTY_LINES,
    Connections,
    Deadline,
    HangUp,
    HttpInput,
    HttpOutput,
    OpenConnection,
    PeerGone,
    Recheck,
    hang_up,
    skip_empty_line,
    strict_http,
)
from omni_ws.transport.http.exchange import JSON, HttpExchange, LogAccess, response_head, serve_exchange
from omni_ws.transport.http.request import HttpRequest, error_body, error_headers, protocol_failure, read_request

logger = logging.getLogger(__name__)

#: Events of h11 handled in one pass of the event loop; others' audio must not wait until a whole read is parsed.
_EVENTS_PER_PASS: Final = 256


class Phase(enum.Enum):
    """The phase of a connection, by which the next bytes from the peer are handled.

    ============ ======================================================= ========================================
    phase        bytes from the peer                                     next
    ============ ======================================================= ========================================
    HEAD         a request head, or nothing yet                          EXCHANGE, HANDED_OVER; on errors and
                                                                         deadlines LINGER or CLOSED
    EXCHANGE     the body, then pipelined requests                       HEAD, LINGER, CLOSED
    LINGER       discarded: the last response is sent, and may need a    CLOSED
                 moment to be read
    HANDED_OVER  read by another protocol                                LINGER or CLOSED if its start failed
    CLOSED       ignored                                                 none
    ============ ======================================================= ========================================
    """

    HEAD = enum.auto()
    EXCHANGE = enum.auto()
    LINGER = enum.auto()
    HANDED_OVER = enum.auto()
    CLOSED = enum.auto()


#: The phases that may follow each.
NEXT_PHASES: Final = {
    Phase.HEAD: frozenset({Phase.EXCHANGE, Phase.HANDED_OVER, Phase.LINGER, Phase.CLOSED}),
    Phase.EXCHANGE: frozenset({Phase.HEAD, Phase.LINGER, Phase.CLOSED}),
    Phase.LINGER: frozenset({Phase.CLOSED}),
    Phase.HANDED_OVER: frozenset({Phase.LINGER, Phase.CLOSED}),
    Phase.CLOSED: frozenset({Phase.CLOSED}),
}


class FrontDoor(asyncio.Protocol):
    """Serves the requests of one connection, one after another, and upgrades it to WebSocket.

    Implements OpenConnection. The library's ``serve`` creates a FrontDoor in place of a ServerConnection. ``protocol``
    provides the limits and extensions for the protocol of an upgraded connection. ``options`` are passed to the factory
    of upgraded connections.
    """

    def __init__(
        self,
        protocol: ServerProtocol,
        server: Server,
        *,
        application: Application,
        connections: Connections,
        limits: HttpLimits,
        log_access: LogAccess,
        addresses: Addresses,
        elsewhere: WorkerGroup | None,
        **options: Any,
    ) -> None:
        self._given_protocol = protocol
        self._server = server
        self._options = options
        self._elsewhere = elsewhere
        #: The TlsDoor that is registered in place of this connection until it is made.
        self._accepted_as: OpenConnection | None = None
        #: Bytes that another process has read from the connection, and whether that process passed the connection on.
        self._received_elsewhere = b""
        self._passed_on = False
        #: The number of the worker that is to get the connection, and the bytes read from it; None if this one serves.
        self._destination: tuple[int, bytes] | None = None
        self._application = application
        self._log_access = log_access
        self._connections = connections
        self._limits = limits
        self._addresses = addresses
        self._loop = asyncio.get_running_loop()
        self._http = strict_http(limits.max_header_bytes)
        self._output = HttpOutput(self._http, timeout_sec=limits.write_timeout_sec, on_timeout=self._write_expired)
        self._input = HttpInput(
            self._http,
            high_water_bytes=limits.body_high_water_bytes,
            body_timeout_sec=limits.body_timeout_sec,
            min_rate=limits.min_body_rate,
            send_continue=self._output.send_continue,
            unread=self._check_hang_up,
        )
        self._transport: asyncio.Transport
        self._secure = False
        self._client = ""
        self._phase = Phase.HEAD
        #: Whether the peer has closed its sending side.
        self._half_closed = False
        #: The first byte of the connection, which tells TLS from HTTP.
        self._first_byte = b""
        #: Bytes received of the head in HEAD, and bytes discarded in LINGER.
        self._head_bytes = self._lingered_bytes = 0
        #: Empty lines that may still precede the next head, and how long to wait for the first byte of that head.
        self._empty_lines_left = MAX_EMPTY_LINES
        self._idle_sec = limits.header_timeout_sec
        self._request: HttpRequest | None = None
        self._is_head_method = False
        #: Owner of all that the handler does; cancelling it is the only way to abort a handler.
        self._task: asyncio.Task[None] | None = None
        self._exchange: HttpExchange | None = None
        self._phase_deadline = Deadline(self._loop, self._phase_expired)
        self._probe = Recheck(self._probe_peer, limits.half_close_probe_sec, limits.half_close_probe_max_sec)

    @property
    def upgraded_connections(self) -> int:
        """The number of unregistered connections: those upgraded by this process, and all those of other workers."""
        elsewhere = 0 if self._elsewhere is None else self._elsewhere.connections_elsewhere
        return len(self._server.all_connections) + elsewhere

    def accept_as(self, connection: OpenConnection) -> None:
        """Note that ``connection``, a TlsDoor, is registered in place of this one until ``connection_made``."""
        self._accepted_as = connection

    def received_elsewhere(self, data: bytes, *, passed_on: bool) -> None:
        """Set the bytes that another process has read from this connection. Call it before ``connection_made``.

        ``passed_on``: that process has passed the connection on, so this one serves the first request in any case.
        """
        self._received_elsewhere = data
        self._passed_on = passed_on

    def _enter(self, phase: Phase) -> None:
        if phase not in NEXT_PHASES[self._phase]:
            raise RuntimeError(f"illegal transition from {self._phase.name} to {phase.name}")
        self._phase = phase

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._accepted_as is not None:
            self._connections.discard(self._accepted_as)
        self._transport = cast("asyncio.Transport", transport)
        self._input.attach(self._transport)
        self._output.attach(self._transport)
        # Read now: once the connection is lost, asyncio's TLS transport no longer knows.
        self._secure = transport.get_extra_info("sslcontext") is not None
        peer = transport.get_extra_info("peername")
        self._client = str(peer[0]) if isinstance(peer, tuple) else ""
        self._connections.add(self)
        if self._connections.is_full(upgraded=self.upgraded_connections):
            self._turn_away()
        else:
            self._phase_deadline.arm(self._limits.header_timeout_sec)
        if self._received_elsewhere:
            self._transport.pause_reading()  # what was read before comes first
            self._loop.call_soon(self._receive_first)

    def _receive_first(self) -> None:
        data, self._received_elsewhere = self._received_elsewhere, b""
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        match self._phase:
            case Phase.HEAD:
                begins = self._head_bytes == 0
                self._first_byte = self._first_byte or data[:1]
                self._head_bytes += len(data)
                self._http.receive_data(data)
                self._dispatch_events()
                if begins and self._head_bytes and self._phase is Phase.HEAD:  # most heads come whole
                    self._phase_deadline.arm(self._limits.header_timeout_sec)
                return
            case Phase.EXCHANGE if self._input.body.complete:
                self._input.hold_pipelined(len(data))
            case Phase.EXCHANGE if self._input.body.ended:
                return  # the framing is broken, or the body timed out: what follows cannot be parsed
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
        self._dispatch_events()

    def eof_received(self) -> bool:
        """Close the connection, or keep it open for the response only. Returns whether the transport stays open."""
        self._half_closed = True
        if self._phase is not Phase.EXCHANGE:
            self._close()
            return False
        if self._secure:
            return False
        self._http.receive_data(b"")
        self._dispatch_events()
        self._probe.begin()
        return True

    def pause_writing(self) -> None:
        self._output.pause()

    def resume_writing(self) -> None:
        self._output.resume()
        if self._destination is not None:
            self._loop.call_soon(self._pass_on)  # a transport may not be aborted from in here

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the handler; when it has ended, ``_exchange_done`` removes the connection from the registry."""
        self._enter(Phase.CLOSED)
        self._detach()
        if self._task is None:
            self._connections.discard(self)
        else:
            self._task.cancel()

    # OpenConnection

    @property
    def busy(self) -> bool:
        return self._phase is Phase.EXCHANGE

    def close_if_idle(self) -> None:
        if self._phase is Phase.HEAD and self._head_bytes == 0:
            self._close()

    def interrupt(self, error: OmniError) -> None:
        if self._exchange is not None:
            self._exchange.interrupt(error)

    def abort(self) -> None:
        self._output.abort()

    # Events of h11

    def _dispatch_events(self) -> None:
        try:
            for _ in range(_EVENTS_PER_PASS):
                if self._phase is Phase.HEAD:
                    self._skip_empty_lines()
                if self._phase not in (Phase.HEAD, Phase.EXCHANGE):
                    return
                event = self._http.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED:
                    return
                if isinstance(event, h11.ConnectionClosed):  # h11 repeats this event forever
                    if self._phase is Phase.HEAD:
                        self._close()
                    return
                self._dispatch(cast("h11.Event", event))
        except h11.RemoteProtocolError as error:
            self._protocol_error(error)
            return
        self._input.yield_to_loop(self._dispatch_events)

    def _skip_empty_lines(self) -> None:
        """Ignore a few empty lines before a head. A connection that sends nothing else still counts as idle."""
        while self._empty_lines_left and skip_empty_line(self._http):
            self._empty_lines_left -= 1
            self._head_bytes -= len(b"\r\n")
            if self._head_bytes:
                continue
            if self._connections.draining:
                self._close()
                return
            self._phase_deadline.arm(self._idle_sec)

    def _dispatch(self, event: h11.Event) -> None:
        match event:
            case h11.Request():
                self._receive_head(event)
            case h11.Data(data=data):
                self._input.feed(data)
            case h11.EndOfMessage():
                self._input.finish_body()

    def _receive_head(self, event: h11.Request) -> None:
        """Start the exchange of a request, upgrade or pass on the connection, or refuse the request."""
        passed_on, self._passed_on = self._passed_on, False
        if self._elsewhere is not None and not passed_on:
            serial = self._elsewhere.destination(event.target)
            if serial is not None:
                self._prepare_to_pass_on(serial, event)
                return
        self._is_head_method = event.method == b"HEAD"
        self._phase_deadline.disarm()
        limit = self._limits.max_header_bytes
        try:
            # h11 limits incomplete heads only, but the limit must not depend on how a head was cut into packets.
            if self._head_bytes > limit and self._head_bytes - len(self._http.trailing_data[0]) > limit:
                raise HeaderTooLarge(f"the request head exceeds {limit} bytes")
            self._request = request = read_request(
                event, client=self._client, secure=self._secure, addresses=self._addresses
            )
            if not self._application.allows_host(request):
                raise access.host_refused(request)
            access.check_origin(request)
            origin_allowed = "origin" not in request.headers or self._application.allows_origin(request)
            if not request.wants_websocket:
                self._begin_exchange(request, origin_allowed=origin_allowed)
            elif origin_allowed:
                self._upgrade(event, request)
            else:
                raise access.origin_refused(request)
        except OmniError as error:
            self._refuse(error)
        except Exception as error:
            self._refuse(unexpected(error, where="the opening of a request"))

    def _protocol_error(self, error: h11.RemoteProtocolError) -> None:
        in_body = self._phase is Phase.EXCHANGE
        failure = protocol_failure(
            error, first_byte=self._first_byte, in_body=in_body, max_header_bytes=self._limits.max_header_bytes
        )
        if in_body:
            self._input.fail_body(failure)
        else:
            self._refuse(failure)

    # One request

    def _begin_exchange(self, request: HttpRequest, *, origin_allowed: bool) -> None:
        self._enter(Phase.EXCHANGE)
        self._input.begin_body(request)
        if self._half_closed:
            self._probe.begin()
        self._exchange = HttpExchange(
            request,
            http_input=self._input,
            http_output=self._output,
            connections=self._connections,
            origin_allowed=origin_allowed,
        )
        self._task = self._loop.create_task(serve_exchange(self._exchange, self._application.handle, self._log_access))
        self._task.add_done_callback(self._exchange_done)

    def _exchange_done(self, task: asyncio.Task[None]) -> None:
        """Handle the end of an exchange: begin the next request, or close the connection."""
        self._task = self._exchange = None
        self._probe.stop()
        self._input.end_request()
        failure = None if task.cancelled() else task.exception()
        if failure is not None and not isinstance(failure, PeerGone):
            logger.error("sending a response failed", exc_info=failure)
        if self._phase is Phase.CLOSED:
            self._connections.discard(self)
        elif failure is not None or task.cancelled() or self._transport.is_closing():
            self.abort()
        elif not self._reusable:
            self._finish()
        else:
            self._next_request()

    @property
    def _reusable(self) -> bool:
        """Whether another request may follow on this connection."""
        idle = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        return idle and not (self._connections.draining and not self._input.pipelined_bytes)

    def _next_request(self) -> None:
        self._http.start_next_cycle()
        self._enter(Phase.HEAD)
        self._request = None
        self._is_head_method = False
        self._output.begin_content(filler=b"", chunked=False)
        self._head_bytes = self._input.next_request()
        self._empty_lines_left = MAX_EMPTY_LINES
        self._idle_sec = self._limits.keepalive_timeout_sec
        self._phase_deadline.arm(self._limits.header_timeout_sec if self._head_bytes else self._idle_sec)
        self._dispatch_events()

    def _refuse(self, error: OmniError) -> None:
        """Respond with ``error`` to a request that cannot be handled, and close the connection."""
        status = http_status(error) or 400
        method = "" if self._request is None else self._request.method
        self._log_access(method, "", status, client=self._client, error=error)
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self._transport.is_closing():
            content = error_body(error)
            fields = [("Content-Type", JSON), ("Content-Length", str(len(content))), *error_headers(error)]
            head = response_head(status, [*fields, ("Connection", "close")])
            self._output.send(head, *([] if self._is_head_method else [h11.Data(data=content)]), h11.EndOfMessage())
        self._finish()

    def _turn_away(self) -> None:
        """Refuse a connection over the limit without waiting for its request, so that a flood of them costs little.

        If too many are being refused, drop it without a response.
        """
        if self._connections.turn_away(self):
            self._refuse(EngineOverloaded("all connections are in use; retry later", retry_after_ms=1000))
        else:
            self.abort()

    # Giving the connection away

    def _prepare_to_pass_on(self, serial: int, event: h11.Request) -> None:
        """Pass the connection on to the worker numbered ``serial``, once all written bytes are sent."""
        received = b"%b %b HTTP/%b\r\n" % (event.method, event.target, event.http_version)
        received += _fields(event) + b"\r\n" + self._http.trailing_data[0]
        self._enter(Phase.HANDED_OVER)
        self._detach()
        self._transport.pause_reading()
        self._destination = (serial, received)
        if self._transport.get_write_buffer_size():  # the response before has not left yet
            self._output.pause()  # which drops the connection if that takes too long
            self._transport.set_write_buffer_limits(0)  # writing resumes once all has left
        else:
            self._pass_on()

    def _pass_on(self) -> None:
        """Pass the connection on to the worker in ``_destination``, and remove it from the registry."""
        if self._elsewhere is None or self._destination is None or self._transport.is_closing():
            return
        try:
            descriptor = os.dup(self._transport.get_extra_info("socket").fileno())
        except OSError:  # this process may open no more files; the client may try again
            self._transport.abort()
            return
        self._connections.discard(self)  # it counts among those elsewhere now
        self._elsewhere.pass_on(self._destination[0], descriptor, self._destination[1])
        self._transport.abort()  # which closes this process's descriptor alone

    def _upgrade(self, event: h11.Request, request: HttpRequest) -> None:
        """Hand the transport over to a WebSocket connection, with the request head and the bytes after the head."""
        check_handshake(event, request)
        decision = self._application.upgrade(request)
        if self._half_closed:
            raise InvalidFrame("a WebSocket requires both directions of the connection; the client has closed one")
        connection = decision.connection(self._protocol_for(decision), self._server, **self._options)
        self._log_access(request.method, decision.route, 101, client=request.client)
        head = b"GET %b HTTP/1.1\r\n" % event.target + _handshake_fields(event)
        trailing = self._http.trailing_data[0]
        # Nothing of this connection runs from here on.
        self._enter(Phase.HANDED_OVER)
        self._detach()
        self._connections.discard(self)
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        connection.data_received(head + b"\r\n" + trailing)

    def _protocol_for(self, decision: UpgradeDecision) -> ServerProtocol:
        """Create the protocol of an upgraded connection, with the subprotocol and the message limit of ``decision``."""

        # ``select`` must not refer to the decision, as the protocol lives as long as the connection.
        subprotocol = None if decision.subprotocol is None else Subprotocol(decision.subprotocol)

        def select(protocol: ServerProtocol, offered: Sequence[Subprotocol]) -> Subprotocol | None:
            return subprotocol

        given = self._given_protocol
        sizes = (given.max_message_size, given.max_fragment_size)
        return ServerProtocol(
            origins=given.origins,
            extensions=given.available_extensions,
            select_subprotocol=select,
            max_size=sizes if decision.max_size is None else decision.max_size,
            logger=given.logger,
        )

    # Closing

    def _finish(self) -> None:
        """Handle no more requests, and close the connection in such a way that the peer receives the last response."""
        if self._half_closed or (self._input.body.complete and not self._input.pipelined_bytes):
            self._close()
            return
        self._enter(Phase.LINGER)
        self._phase_deadline.arm(self._limits.linger_timeout_sec)
        self._input.resume()
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # the peer has disconnected, which connection_lost will report
                self._transport.write_eof()

    def _close(self) -> None:
        self._enter(Phase.CLOSED)
        self._phase_deadline.disarm()
        self._output.close()

    def _detach(self) -> None:
        self._phase_deadline.disarm()
        self._probe.stop()
        self._input.detach()
        self._output.detach()

    # Deadlines and probes

    def _phase_expired(self) -> None:
        if self._phase is Phase.HEAD and self._head_bytes:
            limit = self._limits.header_timeout_sec
            self._refuse(SessionTimeout(f"the request head was incomplete after {limit:g} s"))
        else:
            self._close()

    def _write_expired(self) -> None:
        logger.info("dropped a client that had not read for %g s", self._limits.write_timeout_sec)
        self.abort()

    def _check_hang_up(self) -> None:
        """Ask the kernel about the peer while reading is paused. Abort if the peer has gone; otherwise probe."""
        found = hang_up(self._transport)
        if found is HangUp.UNKNOWN:
            self._output.probe()
        elif found is HangUp.GONE or self._secure:
            self.abort()
        elif self._phase is Phase.EXCHANGE:
            self._probe.begin()

    def _probe_peer(self) -> None:
        """Send something that a connected peer ignores: an interim response (RFC 9110, section 15.2), or a filler.

        Only HTTP/1.1 has interim responses.
        """
        http_1_1 = self._request is not None and self._request.http_version == "1.1"
        if self._http.our_state is h11.SEND_RESPONSE and http_1_1 and not self._transport.is_closing():
            self._output.send_continue()
        else:
            self._output.probe()


class TlsDoor(asyncio.Protocol):
    """The protocol of an accepted connection until its TLS handshake is done; then ``door`` takes over.

    Implements OpenConnection.
    """

    busy = False

    def __init__(self, door: FrontDoor, connections: Connections, context: ssl.SSLContext, limits: HttpLimits) -> None:
        self._door = door
        self._connections = connections
        self._context = context
        self._timeout_sec = limits.header_timeout_sec
        self._shaking: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        full = self._connections.is_full(upgraded=self._door.upgraded_connections)
        try:
            if full and not self._connections.turn_away(self):
                return
            # The transport of the handshake is another one: no byte may go to this one.
            accepted = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            self._shaking = asyncio.get_running_loop().create_task(self._shake_hands(accepted), name="TLS handshake")
        except OSError:  # this process may open no more files; the client may try again
            return
        finally:
            transport.abort()  # which closes its own descriptor alone
            if self._shaking is None:
                self._connections.discard(self)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        self._door.accept_as(self)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._door, accepted, ssl=self._context, ssl_handshake_timeout=self._timeout_sec
            )
        except OSError:  # the peer failed the handshake, or took too long
            accepted.close()
        finally:
            self._connections.discard(self)

    # OpenConnection

    def close_if_idle(self) -> None:
        self.abort()

    def interrupt(self, error: OmniError) -> None:
        pass

    def abort(self) -> None:
        if self._shaking is not None:
            self._shaking.cancel()


def front_door(
    application: Application,
    *,
    connections: Connections,
    limits: HttpLimits | None = None,
    log_access: LogAccess = lambda *request, **what: None,
    addresses: Addresses | None = None,
    elsewhere: WorkerGroup | None = None,
    tls: ssl.SSLContext | None = None,
) -> type[ServerConnection]:
    """Return the argument ``create_connection`` for the library's ``serve``.

    With ``tls``, ``serve`` must get no argument ``ssl``. ``log_access`` is called at the end of every request, see
    AccessLog; ``addresses`` knows the trusted proxies; ``elsewhere`` is the group of the other processes that serve the
    same port.
    """
    limits = limits or HttpLimits()
    door: Callable[..., FrontDoor] = functools.partial(
        FrontDoor,
        application=application,
        connections=connections,
        limits=limits,
        log_access=log_access,
        addresses=addresses or Addresses(),
        elsewhere=elsewhere,
    )

    def secure(protocol: ServerProtocol, server: Server, **options: Any) -> TlsDoor:
        assert tls is not None
        return TlsDoor(door(protocol, server, **options), connections, tls, limits)

    # websockets documents a wrapper or a subclass of ServerConnection, and annotates the latter only.
    return cast("type[ServerConnection]", door if tls is None else secure)


# WebSocket handshakes

#: Size of a decoded Sec-WebSocket-Key (RFC 6455, section 4.1).
_KEY_BYTES: Final = 16
#: Header fields that the library parses, and its parsers.
_LISTS: Final[tuple[tuple[str, Callable[[str], object]], ...]] = (
    ("Connection", parse_connection),
    ("Sec-WebSocket-Protocol", parse_subprotocol),
    ("Sec-WebSocket-Extensions", parse_extension),
)
_FIELD_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")


def _fields(event: h11.Request) -> bytes:
    return b"".join(b"%b: %b\r\n" % field for field in event.headers.raw_items())


def _handshake_fields(event: h11.Request) -> bytes:
    """Return the header fields for the library, with ``Upgrade: websocket`` alone: it accepts no list of protocols."""
    fields = (field for field in event.headers.raw_items() if field[0].lower() != b"upgrade")
    return b"".join(b"%b: %b\r\n" % field for field in fields) + b"Upgrade: websocket\r\n"


def check_handshake(event: h11.Request, request: HttpRequest) -> None:
    """Check a handshake by the library's rules (RFC 6455, section 4.2.1), so that refusals are JSON responses.

    Raises InvalidFrame, UpgradeRequired or HeaderTooLarge. The library itself would refuse with text.
    """
    if request.headers.get_all("sec-websocket-version") != ("13",):
        raise UpgradeRequired("unsupported WebSocket version; this server supports version 13")
    keys = request.headers.get_all("sec-websocket-key")
    if len(keys) != 1 or not _is_key(keys[0]):
        raise InvalidFrame("Sec-WebSocket-Key must be one base64 value of 16 bytes")
    fields = event.headers.raw_items()
    longest = max(
        len(b"GET  HTTP/1.1\r\n") + len(event.target), *(len(name) + len(value) + 4 for name, value in fields)
    )
    if longest > MAX_LINE_LENGTH:
        raise HeaderTooLarge(f"at most {MAX_LINE_LENGTH} bytes per header field of a WebSocket handshake")
    if not all(_FIELD_VALUE.fullmatch(value) for _, value in fields):
        raise InvalidFrame("a header field value contains control characters")
    for name, parse in _LISTS:
        for value in request.headers.get_all(name):
            try:
                parse(value)
            except InvalidHeader:
                raise InvalidFrame(f"{name} is not a valid list (RFC 6455)") from None


def _is_key(value: str) -> bool:
    try:
        return len(base64.b64decode(value.encode("ascii"), validate=True)) == _KEY_BYTES
    except (binascii.Error, UnicodeEncodeError):
        return False
