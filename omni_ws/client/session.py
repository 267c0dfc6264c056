"""ClientSession, the client's interface for applications; and Link, its connection, replaced when it is lost."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from omni_ws.client.connection import (
    DEFAULT_URL,
    ConnectionLost,
    Endpoint,
    OpenedConnection,
    ResumedConnection,
    Route,
    ServerError,
    chunk_encoder,
    encode_config,
    is_retryable,
    open_session,
    resume_session,
)
from omni_ws.client.events import (
    Answer,
    AnswerCollector,
    Closing,
    ErrorEvent,
    Event,
    EventQueue,
    Final,
    Reconnected,
    Reconnecting,
    Resumed,
)
from omni_ws.client.halves import (
    PIECE_BYTES,
    IncomingFrames,
    OutgoingInput,
    OutgoingRequest,
    SentFrame,
    SentFrames,
    SentKind,
    pieces_of,
)
from omni_ws.core.chunks import MAX_REF_CHARACTERS, FinishReason, InputChunk, Modality
from omni_ws.errors import (
    InvalidFrame,
    OmniError,
    PayloadTooLarge,
    SessionConflict,
    SessionNotFound,
    SessionTimeout,
    ShuttingDown,
)
from omni_ws.wire.frames import (
    CancelFrame,
    FinishFrame,
    HistoryGetFrame,
    HistoryTruncateFrame,
    OutputAckFrame,
    PingFrame,
)
from omni_ws.wire.server_frames import SessionCreatedFrame, SessionResumedFrame, SessionUpdatedFrame
from omni_ws.wire.session_config import InputAudioConfig, OutputAudioConfig, merge

_REASONS: dict[str, type[OmniError]] = {
    "deleted": SessionNotFound,
    "session_timeout": SessionTimeout,
    "shutting_down": ShuttingDown,
}
#: The close codes after which reconnecting may help: the fault is not the client's.
_RETRYABLE_CODES = frozenset(
    {CloseCode.ABNORMAL_CLOSURE, CloseCode.GOING_AWAY, CloseCode.SERVICE_RESTART, CloseCode.TRY_AGAIN_LATER}
)
#: The close codes that no error frame explains: an error before such a close is not its cause.
_UNEXPLAINED = frozenset(
    {CloseCode.NORMAL_CLOSURE, CloseCode.GOING_AWAY, CloseCode.NO_STATUS_RCVD, CloseCode.ABNORMAL_CLOSURE}
)
#: The number of outputs between two acknowledgements; until then the server keeps them for a resume.
OUTPUTS_PER_ACK = 32
#: The time without a connection, with the wait that begins, from which on attempts are reported as events.
TOLD_WAIT_SEC = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """The limits of a client session, in bytes and seconds."""

    #: Frames that are queued for the socket.
    send_buffer_bytes: int = 256 << 10
    #: Input that was sent and not acknowledged, whatever credit the server grants.
    window_bytes: int = 4 << 20
    #: Input of unfinished requests that is kept to be sent again; used only with ``reconnect``.
    keep_bytes: int = 16 << 20
    #: Events that are queued for the application; while the queue is full, the socket is not read.
    event_bytes: int = 32 << 20
    #: Without credit: the interval of probes for credit, and the time after which input is sent without credit.
    credit_probe_sec: float = 0.25
    credit_patience_sec: float = 5
    #: The silence after which the server is pinged, and the silence after the ping after which the connection counts as
    #: lost. A ping may have to wait until a large chunk is sent, at the rate of the slowest network that is supported.
    keepalive_sec: float = 20
    slowest_bytes_per_sec: int = 16_000
    #: The delay before each attempt to reconnect, for the half minute in which servers keep sessions; another replica
    #: may continue the session immediately. The sequence starts over once the server has acknowledged something new:
    #: input that it never had, output of a resumed session, or a ping after a silence. That a connection opens is not
    #: enough: whatever ended the last connection may end the next one.
    reconnect_delays: tuple[float, ...] = (0, 0.05, 0.1, 0.2, 0.4, 0.8, *(1,) * 40)
    #: The time for the handshake of the first attempt to reconnect: behind a front, a server that hangs accepts it and
    #: never answers. Each further attempt has twice as long, up to ``open_timeout``.
    first_handshake_sec: float = 1.5
    close_timeout: float = 5


@dataclass(frozen=True, slots=True)
class Ending:
    """How a connection, or the whole session, has ended.

    ``error`` is raised by later calls. ``orderly`` means that nothing failed, ``retryable`` that reconnecting may help.
    """

    error: Exception
    orderly: bool
    retryable: bool


class Link:
    """The current connection of a session: sends frames, receives events, and reconnects.

    One task owns the connection and reads from it; a child task writes. ``encode`` converts a chunk to a frame, and
    returns the frame, and whether it is a text frame. ``wanted`` is the configuration that a fresh session is given.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        opened: OpenedConnection,
        *,
        wanted: dict[str, Any],
        encode: Callable[[InputChunk], tuple[bytes, bool]],
        reconnect: bool,
        limits: ClientLimits,
    ) -> None:
        self.limits = limits
        self.wanted: Mapping[str, Any] = wanted
        self.outgoing = OutgoingInput(
            window_bytes=limits.window_bytes, keep_bytes=limits.keep_bytes if reconnect else 0
        )
        self.events = EventQueue(limits.event_bytes)
        #: How the session ended; None while it lasts.
        self.ending: Ending | None = None
        self._endpoint = endpoint
        self._encode = encode
        self._reconnect = reconnect
        self._sent = SentFrames()
        #: The token for the next resume; None if the session cannot be resumed.
        self._resume_token: str | None = None
        self._acknowledged_output = -1
        #: The ids of tool calls that earlier sessions made.
        self.lost_calls: set[str] = set()
        self._outbox: deque[tuple[bytes, bool]] = deque()
        self._outbox_bytes = 0
        self._outbox_changed = asyncio.Event()
        self._progress = asyncio.Event()
        #: When the last message or pong was received, and an event that each message sets.
        self._heard_at = 0.0
        self._sign = asyncio.Event()
        #: Whether the reader waits for the application to consume events: then no sign of life can be received.
        self._delivering = False
        self._kept_alive = 0
        self._is_resumed = False
        #: Why the session was not resumed, if a fresh one follows.
        self._lost_by: Exception | None = None
        self._attach(opened)
        self._task = asyncio.create_task(self._run(), name=f"client of {opened.created.session_id}")

    def _attach(self, opened: OpenedConnection) -> None:
        self.websocket: ClientConnection = opened.websocket
        self.created = opened.created
        self._resume_token = opened.created.resume_token
        self._is_resumed = False
        self._acknowledged_output = -1
        self._sent.clear()
        self.incoming = IncomingFrames(opened.created, opened.updated, self.outgoing)
        self.outgoing.configured(None if opened.updated is None else opened.updated.turn_detection)

    @property
    def route(self) -> Route | None:
        return self._endpoint.routes.current

    # sending

    def check_open(self) -> None:
        """Raise the error that ended the session, if it has ended."""
        if self.ending is not None:
            raise self.ending.error

    def write_soon(self, frame: bytes, is_text: bool) -> None:
        """Queue a frame for the socket. Frames are written in the order of these calls."""
        self._outbox.append((frame, is_text))
        self._outbox_bytes += len(frame)
        self._outbox_changed.set()

    def send_control(self, kind: SentKind, frame: bytes) -> None:
        """Queue a frame without a number. After a resume it is sent again if it may have been lost."""
        self._remember(SentFrame(self.outgoing.next_sequence_id, kind, frame, is_text=True))
        self.write_soon(frame, True)

    def _remember(self, frame: SentFrame) -> None:
        if self._reconnect and self._resume_token is not None:
            self._sent.add(frame)

    def send(self, chunk: InputChunk) -> int:
        """Number and queue a chunk; return its number, or -1 if its request has already ended and it is dropped."""
        numbered = self.outgoing.add(chunk, output_audio=self.incoming.output_audio)
        if numbered is None or numbered.sequence_id is None:
            return -1
        frame, is_text = self._encode(numbered)
        self._remember(SentFrame(numbered.sequence_id, SentKind.CHUNK, frame, is_text))
        self.write_soon(frame, is_text)
        return numbered.sequence_id

    async def wait_for_room(self, size: int) -> None:
        """Wait until ``size`` bytes may be sent: the send buffer, the window and the server's credit allow it.

        Credit is advisory. If there is none, and no acknowledgement is due that could grant some, the method probes for
        credit, and after ``credit_patience_sec`` it returns without credit.
        """
        patience = self.limits.credit_patience_sec
        while True:
            self.check_open()
            buffered = self._outbox_bytes >= self.limits.send_buffer_bytes
            if not buffered and (self.outgoing.has_room(size) or (self.outgoing.starved and patience <= 0)):
                return
            self._progress.clear()
            if buffered or not self.outgoing.starved:
                await self._progress.wait()
                continue
            try:
                async with asyncio.timeout(self.limits.credit_probe_sec):
                    await self._progress.wait()
            except TimeoutError:
                patience -= self.limits.credit_probe_sec
                self._probe_credit()

    def _probe_credit(self) -> None:
        """Send the number of an accepted chunk again, without payload, for an acknowledgement that states the credit.

        The server drops the chunk as a duplicate.
        """
        known = self.outgoing.acknowledged_sequence_id - 1
        if known >= 0 and not self._outbox:
            self.write_soon(b'{"type":"input_chunk","sequence_id":%d}' % known, True)

    def want(self, fields: Mapping[str, Any]) -> None:
        """Remember fields that the server has accepted, for the configuration of a fresh session that may follow."""
        self.wanted = merge(self.wanted, fields)

    def cancel(self, request_id: str | None) -> None:
        """Send a ``cancel`` frame."""
        kind = SentKind.CANCEL if request_id is None else SentKind.CANCEL_BY_ID
        self.send_control(kind, msgspec.json.encode(CancelFrame(request_id)))

    def stop(self, request: OutgoingRequest) -> None:
        """Cancel one request by its id, or as soon as the server has reported the id."""
        is_open, is_alone = request is self.outgoing.receiving, len(self.outgoing.requests) == 1
        self.outgoing.stop(request)
        if request.request_id is not None or (is_alone and not self.outgoing.open_microphone):
            self.cancel(request.request_id)
            return
        request.cancel_later()
        if is_open:
            self.send_control(SentKind.FINISH, msgspec.json.encode(FinishFrame()))

    def abandon(self, request: OutgoingRequest) -> None:
        """Drop the events of a request, those in the queue and those still to arrive. Does not cancel it."""
        request.mute()
        request_id = request.request_id
        if request_id is not None:
            self.events.discard(lambda event: getattr(event, "request_id", None) == request_id)

    # connection

    async def close(self, *, flush: bool) -> None:
        """Close the session: flush queued frames if wanted, close the connection, and end the tasks. Idempotent."""
        if flush and self.ending is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.limits.close_timeout):
                    await self._flushed()
        # Unblocks the reader, which may be waiting on the full queue, so that it sees the closing handshake.
        self.events.close()
        self._end(Ending(ConnectionLost("the session was closed"), orderly=True, retryable=False))
        try:
            async with asyncio.timeout(self.limits.close_timeout):
                await self.websocket.close()
        except TimeoutError:
            pass
        finally:
            self.websocket.transport.abort()
            self._task.cancel()
            await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _flushed(self) -> None:
        while self._outbox and self.ending is None and self.websocket.close_code is None:
            self._progress.clear()
            await self._progress.wait()

    async def _run(self) -> None:
        """Run the connection, and replace it as long as that is possible."""
        ending = Ending(ConnectionLost("the client failed"), orderly=False, retryable=False)
        delays = iter(self.limits.reconnect_delays)
        try:
            while True:
                before = self._advances
                ending = await self._run_connection()
                self._progress.set()
                if self.ending is not None or not (self._reconnect and ending.retryable):
                    return
                if self._advances != before:
                    delays = iter(self.limits.reconnect_delays)
                self.incoming.fail_pings(ending.error)
                match await self._reopen(delays, ending):
                    case OpenedConnection() as opened:
                        self._start_over(opened)
                    case (websocket, resumed):
                        self._continue_session(websocket, resumed)
        except (OmniError, ConnectionError) as error:
            ending = Ending(error, orderly=False, retryable=False)
        finally:
            self._end(ending)

    def _end(self, ending: Ending) -> None:
        if self.ending is None:
            self.ending = ending
        self.events.close()
        self.incoming.fail(self.ending.error)
        self._progress.set()

    @property
    def _advances(self) -> tuple[int, int, int]:
        """Counters that change when the server has acknowledged something new."""
        output = self.incoming.last_output_sequence_id if self._is_resumed else -1
        return self.outgoing.advances, self._kept_alive, output

    async def _run_connection(self) -> Ending:
        """Read and write until the connection is closed. Return how it ended."""
        name = self._task.get_name()
        writer = asyncio.create_task(self._write(), name=f"{name}, writing")
        watch = asyncio.create_task(self._watch(), name=f"{name}, keeping alive")
        try:
            ending = await self._read()
        finally:
            writer.cancel()
            watch.cancel()
            await asyncio.wait([writer, watch])
        if not watch.cancelled() and watch.result():
            self._endpoint.routes.fails()
            silent = ConnectionLost("the connection was lost: the server does not answer")
            return Ending(silent, orderly=False, retryable=True)
        return ending

    async def _watch(self) -> bool:
        """Ping the server after a silence; if it stays silent, drop the connection and return True.

        The silence counts from the last message or pong.
        """
        now, patience = asyncio.get_running_loop().time, self.limits.keepalive_sec
        self._heard_at = now()
        while True:
            left = self._heard_at + patience - now()
            if left > 0 or self._delivering:
                await asyncio.sleep(patience if self._delivering else left)
                continue
            try:
                alive = await self._answers_ping()
            except ConnectionClosed:
                return False
            if not alive and not self._delivering:
                self.websocket.transport.abort()
                return True

    async def _answers_ping(self) -> bool:
        upload_sec = self.outgoing.largest_unacknowledged / self.limits.slowest_bytes_per_sec
        self._sign.clear()
        sign = asyncio.create_task(self._sign.wait())
        try:
            async with asyncio.timeout(self.limits.keepalive_sec + upload_sec):
                pong = asyncio.ensure_future(await self.websocket.ping())
                await asyncio.wait([pong, sign], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            return False
        finally:
            sign.cancel()
        if pong.done():
            pong.result()
            self._kept_alive += 1
        self._heard_at = asyncio.get_running_loop().time()
        return True

    async def _write(self) -> None:
        with suppress(ConnectionClosed):  # the reader reports it
            while True:
                while self._outbox:
                    frame, is_text = self._outbox[0]
                    await self.websocket.send(frame, text=is_text)
                    self._outbox.popleft()
                    self._outbox_bytes -= len(frame)
                    self._progress.set()
                self._outbox_changed.clear()
                await self._outbox_changed.wait()

    async def _read(self) -> Ending:
        incoming, now = self.incoming, asyncio.get_running_loop().time
        try:
            async for message in self.websocket:
                self._heard_at = now()
                self._sign.set()
                event = incoming.receive(message)
                while self.outgoing.to_cancel:
                    self.cancel(self.outgoing.to_cancel.pop())
                self._sent.accepted(self.outgoing.acknowledged_sequence_id)
                self._acknowledge_output()
                self._progress.set()
                if isinstance(event, Closing) and self._resumes(event):
                    self._endpoint.routes.fails()  # which takes no session any more
                    event = None
                if event is not None:
                    self._delivering = True
                    await self.events.put(event)
                    self._delivering = False
                    self._heard_at = now()
        except ConnectionClosed:
            pass
        except InvalidFrame as error:
            await self.websocket.close(1002, "not a frame of this protocol")
            return Ending(error, orderly=False, retryable=False)
        if incoming.closing is not None and self._resumes(incoming.closing):
            return Ending(ConnectionLost("the server hands the session over"), orderly=False, retryable=True)
        return _ending_of(self.websocket, incoming.closing, incoming.last_error)

    def _resumes(self, closing: Closing) -> bool:
        """Return whether the session can be continued over another connection without delay."""
        return closing.resumes and self._reconnect and self._resume_token is not None

    def _acknowledge_output(self) -> None:
        last = self.incoming.last_output_sequence_id
        if self._resume_token is not None and last >= self._acknowledged_output + OUTPUTS_PER_ACK:
            self._acknowledged_output = last
            self.write_soon(msgspec.json.encode(OutputAckFrame(last)), True)

    async def _reopen(self, delays: Iterator[float], ending: Ending) -> OpenedConnection | ResumedConnection:
        """Resume the session, or open a fresh one if it has ended.

        Raises the error that makes further attempts useless, or ConnectionLost after the last attempt.
        """
        # Only after a lost connection is there a session to resume; an error or a Closing ends it.
        resume_token = self._resume_token if isinstance(ending.error, ConnectionLost) and not ending.orderly else None
        self._lost_by = last = ending.error
        away = 0.0
        for tried, delay in enumerate(delays):
            if resume_token is None and self.outgoing.not_kept:
                raise _input_not_kept() from ending.error
            asked_for = getattr(last, "retry_after_ms", None) or 0
            seconds = max(delay * random.uniform(0.5, 1), asked_for / 1000)
            away += seconds
            if away >= TOLD_WAIT_SEC:
                self.events.put_nowait(Reconnecting(seconds, last))
            await asyncio.sleep(seconds)
            # A front may send the next attempt to a server that answers.
            patience = self.limits.first_handshake_sec * 2**tried
            try:
                if resume_token is None:
                    return await open_session(self._endpoint, self._wanted_again, handshake_timeout=patience)
                opened = await resume_session(
                    self._endpoint,
                    self.created.session_id,
                    resume_token,
                    self.incoming.last_output_sequence_id,
                    self._wanted_again,
                    resumable=self.incoming.resumable,
                    handshake_timeout=patience,
                )
                if isinstance(opened, OpenedConnection) or self._goes_on(opened[1]):
                    return opened
                opened[0].transport.abort()
                raise SessionNotFound("the session is there as it was before its last input")
            except SessionNotFound as error:
                resume_token, self._lost_by, last = None, error, error
            except (ConnectionError, SessionTimeout) as error:  # the latter: a pong came too late
                last = error
            except OmniError as error:
                if not is_retryable(error):
                    raise
                last = error
        raise ConnectionLost(f"the connection was lost and could not be re-established: {last}") from last

    def _goes_on(self, resumed: SessionResumedFrame) -> bool:
        """Return whether the server has all input that was acknowledged; without its store, it may have less."""
        return resumed.next_sequence_id >= self.outgoing.acknowledged_sequence_id

    @property
    def _wanted_again(self) -> Mapping[str, Any]:
        """The configuration for a fresh session; without the greeting if that has ended."""
        if not self.outgoing.greeted:
            return self.wanted
        return {name: value for name, value in self.wanted.items() if name != "greeting"}

    def _start_over(self, opened: OpenedConnection) -> None:
        """Send all unfinished requests to a fresh session.

        Never awaits, so that no other frame is queued in between.
        """
        if self.outgoing.not_kept:
            opened.websocket.transport.abort()
            raise _input_not_kept()
        self.incoming.fail(ConnectionLost("the connection was lost"))
        self.lost_calls |= self.incoming.calls
        self._attach(opened)
        self._outbox.clear()
        self._outbox_bytes = 0
        limit = opened.created.limits.max_chunk_bytes
        chunks, over = self.outgoing.restart(max_chunk_bytes=limit)
        for request in over:
            if request.cancelled and not request.muted:
                final = Final(request.request_id or "", None, FinishReason.CANCELLED, None, ref=request.ref)
                self.events.put_nowait(final)
        self.events.put_nowait(Reconnected(opened.created.session_id, len(chunks), self._lost_by))
        for request in over:
            if not request.cancelled:
                self.events.put_nowait(ErrorEvent(call_is_gone(request.ref), blocks_request=True))
        for chunk in chunks:
            self.write_soon(*self._encode(chunk))
        self._progress.set()

    def _continue_session(self, websocket: ClientConnection, resumed: SessionResumedFrame) -> None:
        """Resend, in order, the frames that had not arrived before a resume.

        Never awaits, so that no other frame is queued in between.
        """
        self.websocket = websocket
        self._resume_token = resumed.resume_token
        self._is_resumed = True
        self.incoming.resumed()
        frames = self._sent.to_resend(resumed.next_sequence_id, self._may_resend)
        self.events.put_nowait(Resumed(resumed.session_id, len(frames), resumed.replayed))
        self._outbox.clear()
        self._outbox_bytes = 0
        for frame in frames:
            self.write_soon(frame.frame, frame.is_text)
        for number in self.incoming.waiting_pings:  # begun while there was no connection
            self.write_soon(msgspec.json.encode(PingFrame(number)), True)
        if self.incoming.truncations_resent():
            number, pong = self.incoming.expect_pong()
            pong.add_done_callback(self.incoming.settle_truncations)
            self.write_soon(msgspec.json.encode(PingFrame(number)), True)
        self._progress.set()

    def _may_resend(self, sent: SentFrame) -> bool:
        """Return whether sending a frame again is harmless if it has already arrived."""
        match sent.kind:
            case SentKind.CONFIG:
                return self.incoming.awaits_configuration(sent.frame)
            case SentKind.CANCEL:
                return len(self.outgoing.requests) == 1  # otherwise it could cancel another request
            case SentKind.TRUNCATE:
                return self.incoming.awaits_truncation(sent.frame)
            case SentKind.HISTORY:
                return self.incoming.awaits_history(sent.frame)
            case _:
                return True


def call_is_gone(ref: str | None) -> SessionConflict:
    """Return the error for a result whose tool call was made by an earlier session, which is lost."""
    return SessionConflict("an earlier session made this call, and it is lost", param="tool_call_id", ref=ref)


def _input_not_kept() -> ConnectionLost:
    return ConnectionLost("the connection was lost, and the unfinished input was too large to be kept")


def _ending_of(websocket: ClientConnection, closing: Closing | None, last_error: ErrorEvent | None) -> Ending:
    """Determine how a connection ended, from its close code, ``session_closing`` and the last error frame."""
    code = websocket.close_code
    if closing is not None:
        kind = _REASONS.get(closing.reason)
        message = f"the server closed the session: {closing.reason}"
        return Ending(kind(message) if kind else ConnectionLost(message), True, closing.retryable)
    if last_error is not None and code not in _UNEXPLAINED:
        return Ending(last_error.error, False, last_error.retryable)
    if code == CloseCode.MESSAGE_TOO_BIG:
        return Ending(PayloadTooLarge("a frame was larger than the server takes"), False, False)
    reason = f" ({websocket.close_reason})" if websocket.close_reason else ""
    error = ConnectionLost(f"the connection was lost with code {code}{reason}")
    return Ending(error, code == CloseCode.NORMAL_CLOSURE, code in _RETRYABLE_CODES)


# ClientSession: the interface of the client for applications.


_encode = msgspec.json.Encoder().encode


@asynccontextmanager
async def connect(
    url: str | Sequence[str] = DEFAULT_URL,
    *,
    api_key: str | None = None,
    binary: bool = True,
    config: Mapping[str, Any] | None = None,
    ssl: SSLContext | None = None,
    reconnect: bool = False,
    open_timeout: float = 10,
    limits: ClientLimits = ClientLimits(),  # frozen
) -> AsyncIterator[ClientSession]:
    """Open a session, which is closed at the end of the block.

    Raises ConnectionFailed if no server answers, InvalidValue for an invalid URL, and the error of the server if it
    refuses the session or ``config``.

    ``binary``, ``ssl`` and ``open_timeout`` are as in Endpoint. With ``reconnect`` a session whose connection is lost
    is resumed over another one (:class:`Resumed`). Where servers share a store, this may be with another server:
    ``url`` may be several URLs, and a host name may have several addresses or get a new one. If the session has ended,
    or the server does not resume sessions, a fresh one gets the configuration and all unfinished requests, whole and
    numbered from 0 (:class:`Reconnected`).

    A ``greeting`` in ``config`` is the first answer of the session, before that to any request: take it with
    ``answer``, or from the events. A fresh session does not repeat a greeting that has ended.
    """
    endpoint = Endpoint(url=url, api_key=api_key, binary=binary, ssl=ssl, open_timeout=open_timeout)
    wanted = merge({}, config or {})
    opened = await open_session(endpoint, wanted)
    link = Link(
        endpoint, opened, wanted=wanted, encode=chunk_encoder(binary=binary), reconnect=reconnect, limits=limits
    )
    session = ClientSession(link)
    try:
        yield session
    except BaseException:
        await session.close(flush=False)
        raise
    await session.close()


class ClientSession:
    """A session with a server, made by :func:`connect`. Belongs to one event loop.

    Send methods return once the frame is queued for the socket, and wait while the send buffer, the window or the
    server's credit is exhausted. Read events concurrently: while more than ``ClientLimits.event_bytes`` of them wait,
    the socket is not read, so acknowledgements do not arrive either.

    Consume the events by only one of ``events``, ``response`` and ``answer`` at a time.

    Each request has a name, its ``ref``: the one that its first chunk was sent with, or else a generated one. The
    events, errors and the answer of the request have that name, so matching them never depends on their order. Speech
    that the server detects has a ``turn_id`` instead.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sending = asyncio.Lock()
        self._answers = AnswerCollector()

    # state

    @property
    def session_id(self) -> str:
        """The id of the current session; it changes with a Reconnected event."""
        return self._link.created.session_id

    @property
    def created(self) -> SessionCreatedFrame:
        """The ``session_created`` frame: limits, defaults and the model."""
        return self._link.created

    @property
    def config(self) -> SessionUpdatedFrame | None:
        """The configuration in effect, as the server reported it; None before the first report."""
        return self._link.incoming.config

    @property
    def input_audio(self) -> InputAudioConfig:
        """The format that ``send_audio`` takes."""
        config = self.config
        return config.input_audio if config else self.created.input_audio

    @property
    def output_audio(self) -> OutputAudioConfig:
        """The format of the audio of answers."""
        return self._link.incoming.output_audio

    @property
    def route(self) -> Route | None:
        """The URL and address of the current server, or of the one that was tried last."""
        return self._link.route

    @property
    def resumable(self) -> bool:
        """Whether another server could continue the session now; True unless the server says otherwise."""
        return self._link.incoming.resumable

    @property
    def last_output_sequence_id(self) -> int:
        """The highest number of an output that was received, or -1."""
        return self._link.incoming.last_output_sequence_id

    @property
    def queued_event_bytes(self) -> int:
        """The size of the events that were received and not consumed."""
        return self._link.events.queued

    # sending

    async def configure(self, **fields: Any) -> SessionUpdatedFrame:
        """Change configuration fields from the next request on; None restores a default.

        Return the configuration in effect. Raises the error of the server if it refuses; nothing has changed then.
        """
        frame = encode_config(fields)
        self._link.check_open()
        reply = self._link.incoming.expect_configuration(frame)
        self._link.send_control(SentKind.CONFIG, frame)

        def answered(reply: asyncio.Future[SessionUpdatedFrame]) -> None:
            if reply.exception() is None:
                self._link.want(fields)

        reply.add_done_callback(answered)
        return await asyncio.shield(reply)  # what the server accepts is in effect, even if this call is cancelled

    async def send_audio(
        self, audio: bytes, *, end: bool = False, timestamp_ms: int | None = None, ref: str | None = None
    ) -> int:
        """Send audio in the format of ``input_audio``; return its sequence number.

        Chunks may be cut anywhere; large ones are sent in pieces, and the number is that of the last piece. ``end``
        ends the input of the request. ``timestamp_ms`` is the time of recording, on any clock of the client. ``ref`` is
        your name for the request that the chunk opens, of 1 to 64 characters.

        With ``turn_detection`` configured, audio opens no request: the server opens one when it detects speech. Such
        audio is not sent again after a Reconnected.
        """
        chunk = InputChunk(Modality.AUDIO, audio, timestamp_ms=timestamp_ms, end_of_input=end, ref=ref)
        return await self.send_chunk(chunk)

    async def send_text(self, text: str, *, end: bool = False, ref: str | None = None) -> int:
        """Send text, in pieces if it is long; return the number of the last. ``end`` ends the input of the request.

        ``ref`` is your name for the request, if the text opens one.
        """
        return await self.send_chunk(InputChunk(Modality.TEXT, text.encode(), end_of_input=end, ref=ref))

    async def send_tool_result(self, call_id: str, result: str, *, end: bool = False, ref: str | None = None) -> int:
        """Send the result of a tool call of an earlier answer; it may be empty.

        ``end`` ends the input, which starts the next request to the model; it would also end speech that has just
        begun. Without it, servers that name requests start the request once all calls of that answer have their
        results. Raises SessionConflict if a lost session made the call: no other session knows the call.
        """
        if call_id in self._link.lost_calls and call_id not in self._link.incoming.calls:
            raise call_is_gone(ref)
        chunk = InputChunk(Modality.TEXT, result.encode(), end_of_input=end, tool_call_id=call_id, ref=ref)
        return await self.send_chunk(chunk)

    async def send_image(
        self,
        image: bytes,
        *,
        format: str | None = None,
        end: bool = False,
        timestamp_ms: int | None = None,
        ref: str | None = None,
    ) -> int:
        """Send one image. ``format`` is its MIME type; with None the server detects it.

        The other arguments are as for ``send_audio``.
        """
        return await self.send_chunk(
            InputChunk(Modality.IMAGE, image, format=format, timestamp_ms=timestamp_ms, end_of_input=end, ref=ref)
        )

    async def send_chunk(self, chunk: InputChunk) -> int:
        """Number and send a chunk of any modality; return its sequence number.

        Numbers start over in a fresh session. -1 means that the request had already ended and the chunk was dropped. A
        large chunk of audio, text or a video file is sent in pieces, all with its timestamp; the number is that of the
        last.

        Waits for the send buffer, the window and, for a limited time, credit. If it is cancelled while it waits,
        nothing was sent, or only the first pieces. Raises PayloadTooLarge if a picture or the result of a tool exceeds
        the server's limit, ValueError for a negative timestamp or a ``ref`` that is too long or empty, and the error
        that ended the session if it has ended.
        """
        number, _ = await self._send(chunk)
        return number

    async def _send(self, chunk: InputChunk) -> tuple[int, str | None]:
        """Send a chunk; return its number, and the name of its request."""
        if chunk.timestamp_ms is not None and chunk.timestamp_ms < 0:
            raise ValueError("timestamp_ms must not be negative")
        if chunk.ref is not None and not 1 <= len(chunk.ref) <= MAX_REF_CHARACTERS:
            raise ValueError(f"a ref has 1 to {MAX_REF_CHARACTERS} characters")
        self._check_size(chunk)
        number, ref = -1, chunk.ref
        async with self._sending:
            for piece in pieces_of(chunk, min(PIECE_BYTES, self.created.limits.max_chunk_bytes)):
                await self._link.wait_for_room(len(piece.payload))
                for part in pieces_of(piece, self.created.limits.max_chunk_bytes):  # a fresh session may accept less
                    self._check_size(part)
                    number, ref = self._link.send(part), self._link.outgoing.last_ref
        return number, ref

    def _check_size(self, chunk: InputChunk) -> None:
        """Raise PayloadTooLarge for a chunk that is larger than the server accepts and that cannot be cut."""
        limit = self.created.limits.max_chunk_bytes
        largest = max(len(piece.payload) for piece in pieces_of(chunk, limit))
        if largest > limit:
            raise PayloadTooLarge(f"a chunk may hold {limit} bytes, this one has {largest}", param="payload")

    async def finish(self) -> None:
        """End the input of the open request. Does nothing if none is open.

        Raises EmptyInput if the server refused every chunk of it.
        """
        async with self._sending:
            self._link.check_open()
            if self._link.outgoing.finish():
                self._link.send_control(SentKind.FINISH, _encode(FinishFrame()))

    async def cancel(self, request_id: str | None = None, *, ref: str | None = None) -> None:
        """Cancel the request with this id or name, and end its input. Its Final still arrives.

        With neither, it cancels the running and the open request. While a microphone is open, that includes speech that
        has just begun: pass an id or a name. A name also works before the request has an id; if no unfinished request
        has it, nothing happens.
        """
        self._link.check_open()
        if ref is not None:
            request = self._link.outgoing.waiting(ref)
            if request is not None:
                self._link.stop(request)
            return
        self._link.outgoing.cancel(request_id)
        self._link.cancel(request_id)

    async def truncate_history(self, request_id: str) -> int:
        """Drop a request and all later ones from the history; the next request sees only the earlier ones.

        Returns the number of requests that were dropped, 0 if an earlier truncation dropped this one. Raises
        SessionConflict while a request is open or being answered, and InvalidValue for a request that the history does
        not have. After an error, nothing has changed.
        """
        self._link.check_open()
        frame = _encode(HistoryTruncateFrame(request_id))
        reply = self._link.incoming.expect_truncation(request_id, frame)
        self._link.send_control(SentKind.TRUNCATE, frame)
        return await reply

    async def history(self, *, original: bool = False) -> list[dict[str, Any]]:
        """Return the history as requests see it now, in the form of ``history_items`` of a new session's ``config``.

        The first item may be a summary of earlier messages. ``original``: all messages that the server keeps, and no
        summary.
        """
        self._link.check_open()
        frame = _encode(HistoryGetFrame(original))
        reply = self._link.incoming.expect_history(frame)
        self._link.send_control(SentKind.HISTORY, frame)
        return await reply

    async def acknowledge_output(self, *, played_ms: float | None = None, request_id: str | None = None) -> None:
        """Acknowledge all output received so far. Does nothing before the first output.

        ``played_ms`` reports how much of the answer to ``request_id`` has been played: by it the server paces audio and
        computes what was heard before a barge-in. Without ``request_id`` the report is about the answer that, by the
        server's estimate, plays now.
        """
        self._link.check_open()
        if self.last_output_sequence_id >= 0:
            frame = OutputAckFrame(self.last_output_sequence_id, played_ms, request_id)
            self._link.write_soon(_encode(frame), True)

    async def ping(self) -> float:
        """Ping the server. Return the round-trip time in seconds, including the time in the queue of frames."""
        self._link.check_open()
        number, pong = self._link.incoming.expect_pong()
        loop = asyncio.get_running_loop()
        sent = loop.time()
        self._link.write_soon(_encode(PingFrame(number)), True)
        await pong
        return loop.time() - sent

    # receiving

    async def events(self) -> AsyncIterator[Event]:
        """Yield all events until the session ends.

        Raises the error that ended the session, unless it ended normally: by ``close``, or after a Closing event.
        """
        while (event := await self._link.events.get()) is not None:
            yield event
        ending = self._link.ending
        if ending is not None and not ending.orderly:
            raise ending.error

    async def response(self, ref: str | None = None) -> AsyncIterator[Event]:
        """Yield events up to and including the next Final or, with ``ref``, the Final of the request of this name.

        Events of other requests are among them. Raises the error that ends the session, and that of an ErrorEvent with
        ``blocks_request`` (for the request of this name).
        """
        while (event := await self._link.events.get()) is not None:
            yield event
            if isinstance(event, Final | ErrorEvent) and ref not in (None, event.ref):
                continue
            if isinstance(event, Final):
                return
            if isinstance(event, ErrorEvent) and event.blocks_request:
                raise event.error
        self._link.check_open()

    async def answer(self, ref: str | None = None) -> Answer:
        """Return the answer to the request of this name or, without ``ref``, the next answer.

        Raises the error with which the request, or the session, ended. Answers to other requests that arrive meanwhile
        are kept for later calls. Things that the server says unasked between the answers are skipped, except a
        greeting. Transcripts that arrive after the Final (``late``) are in the answer only if it was kept for a later
        call meanwhile. If the call is cancelled, it cancels only its own request, and drops the events that still
        arrive for that request.
        """
        request = self._link.outgoing.waiting(ref)
        try:
            while (answer := self._answers.take(ref)) is None:
                event = await self._link.events.get()
                if event is None:
                    self._link.check_open()
                    raise ConnectionLost("the session has ended")
                self._answers.add(event)
        except (asyncio.CancelledError, OmniError):
            if request is not None and request in self._link.outgoing.requests:
                self._link.abandon(request)
                self._answers.drop(request.request_id or "")
                self._link.stop(request)
            raise
        if answer.finish_reason in (FinishReason.ERROR, None):
            raise answer.errors[-1] if answer.errors else ServerError("the request failed", code="engine_failed")
        return answer

    async def ask_text(self, text: str, *, ref: str | None = None) -> Answer:
        """Send a text as a whole request named ``ref``; return the answer to this request."""
        _, name = await self._send(InputChunk(Modality.TEXT, text.encode(), end_of_input=True, ref=ref))
        return await self.answer(name)

    # closing

    async def close(self, *, flush: bool = True) -> None:
        """Close the session. Writes queued frames first unless ``flush`` is False. Idempotent."""
        await self._link.close(flush=flush)
