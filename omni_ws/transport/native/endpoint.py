"""The native WebSocket, ``/v1/streaming_input``: StreamingInput, its front end, and WebSocketSession.

StreamingInput opens and resumes sessions; a WebSocketSession attaches a session to a connection. This module also
encodes the messages of the native protocol, and times the acknowledgements of input.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from msgspec import UNSET, Raw, json, structs
from msgspec.json import encode
from websockets.frames import CloseCode

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import StreamingInputConfig
from omni_ws.core.chunks import (
    AnswerWarning,
    AnyOutput,
    FinalChunk,
    InputChunk,
    Modality,
    OutputChunk,
    OutputModality,
    Task,
    Usage,
)
from omni_ws.core.input_stream import InputStream
from omni_ws.engine.composed.parts import parts_of
from omni_ws.errors import (
    ORDERLY_ENDS,
    EngineOverloaded,
    InvalidRequest,
    InvalidValue,
    NotFound,
    OmniError,
    ResyncRequired,
    SessionConflict,
    SessionNotFound,
    SessionTimeout,
    ShuttingDown,
    SlowConsumer,
    websocket_close_code,
)
from omni_ws.metrics import Metrics
from omni_ws.service import unexpected
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.openai_requests import (
    GivenHistory,
    check_history,
    give_history,
    told_history,
)
from omni_ws.service.conversation.output_log import (
    InputHeard,
    RequestWarning,
    ServerMessage,
)
from omni_ws.service.observing.accounts import take_place, take_trace
from omni_ws.service.observing.observer import Origin, OutputWritten
from omni_ws.service.recording import SessionRecording
from omni_ws.service.sessions.factory import STREAM_FORMATS
from omni_ws.service.sessions.keeper import ReceivedFrame
from omni_ws.service.sessions.session import Session, Sessions
from omni_ws.transport.http.access import (
    MAX_BODY_BYTES,
    NATIVE,
    ClientSecret,
    issued,
)
from omni_ws.transport.http.application import Application, Router, SessionFrontEnd, UpgradeDecision, needs_upgrade
from omni_ws.transport.http.exchange import HttpExchange, read_json_object
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.native.connection import ConnectedSession, StreamConnection, stream_accepted
from omni_ws.transport.native.keep_alive import PeerRounds
from omni_ws.transport.recording import (
    begin_recording,
    recorded,
)
from omni_ws.wire.frames import (
    CancelFrame,
    ClientFrame,
    ConfigPatch,
    FinishFrame,
    HistoryGetFrame,
    HistoryTruncateFrame,
    OutputAckFrame,
    PingFrame,
    RefusedChunk,
    decode_frame,
    decode_input,
    encode_output_audio,
)
from omni_ws.wire.openai_requests import FIELD as HISTORY_ITEMS
from omni_ws.wire.openai_requests import read_history_items
from omni_ws.wire.realtime_session import read_client_secret
from omni_ws.wire.server_frames import (
    BackchannelFrame,
    Capabilities,
    HistoryTruncatedFrame,
    InputAckFrame,
    OutputChunkFrame,
    Part,
    Parts,
    PongFrame,
    ServerFrame,
    SessionClosingFrame,
    SessionCreatedFrame,
    SessionKeptFrame,
    SessionLimits,
    SessionResumedFrame,
    SessionUpdatedFrame,
    UrlCitationFields,
    UsageFields,
    WarningFields,
    encode_frame,
    encode_output,
    error_frame,
    unset,
)
from omni_ws.wire.session_config import SessionConfig

#: Close codes of a client that does not resume its session (RFC 6455, 7.4.1).
_FAREWELLS: Final = frozenset({CloseCode.NORMAL_CLOSURE, CloseCode.GOING_AWAY, CloseCode.NO_STATUS_RCVD})
#: Close codes that the library sends to a client that would break the protocol again.
_VIOLATIONS: Final = frozenset({CloseCode.PROTOCOL_ERROR, CloseCode.INVALID_DATA, CloseCode.MESSAGE_TOO_BIG})
#: Most of the output that is written in one pass of the event loop. Then other connections have their share, and the
#: socket may report that its buffer is full.
WRITE_BATCH_BYTES: Final = 64 * 1024
WRITE_BATCH_MESSAGES: Final = 128
#: How long a client may take to read the last frames.
GOODBYE_TIMEOUT_SEC: Final = 5.0
REPLACED_CLOSE_CODE: Final = 4409
DELETED_CLOSE_CODE: Final = 4404


class WebSocketSession(ConnectedSession):
    """The Attachment of a session to a native WebSocket: receives and sends frames, with backpressure and timers."""

    _connection: StreamConnection

    def __init__(
        self,
        connection: StreamConnection,
        session: Session,
        *,
        binary_audio: bool,
        ack_clock: AcknowledgementClock,
        rounds: PeerRounds,
    ) -> None:
        """``binary_audio``: whether audio is sent in binary frames.

        ``ack_clock`` and ``rounds`` are shared by all connections of a server.
        """
        super().__init__(connection, session, rounds=rounds)
        self._configuration = session.conversation.configuration
        self._stream = session.conversation.stream
        self._observed = session.conversation.observed
        self._binary_audio = binary_audio
        #: Whether messages of the outbox may be written to this connection: from ``run`` to ``_stop_writing``.
        self._writing = False
        #: Set when there is nothing left to write, or it cannot be written here.
        self._emptied = asyncio.Event()
        #: Whether frames are received and sent: True until ``_leave``.
        self._serving = True
        #: Done by ``_leave``. Its result is a function that closes the connection; None if the connection is lost.
        self._left: asyncio.Future[Callable[[], Awaitable[None]] | None] = self._loop.create_future()
        kind = Acknowledgements if session.keeper is None else GroupedAcknowledgements
        self.acks = kind(self._stream, ack_clock.wait, self._acknowledge)

    # life

    async def run(self) -> None:
        """Serve the session until it or the connection is over; then close the connection with the code for the reason.

        Call ``session.attach`` with this object before.
        """
        try:
            self._writing = True
            self.output_ready()
            self._connection.attach(self, self._conversation.account)
            self._watch_peer()
            close = await self._left
            if close is not None:
                await close()
        finally:
            self._leave(None)
            self._ignore_peer()
            self.acks.stop()
            self._session.detach(self)

    def _leave(self, close: Callable[[], Awaitable[None]] | None) -> None:
        """Stop serving the session: ``run`` calls ``close`` and returns. Later calls have no effect."""
        if self._serving:
            self._serving = False
            if not self._left.done():  # it is cancelled with ``run``
                self._left.set_result(close)

    def session_over(self, error: OmniError | None) -> None:
        if self._session.keeper is not None and self._session.keeper.handed_over:
            self._stop_writing()
            self._leave(self._close_handed_over)
            return
        self._leave(None if error is None else partial(self._close_with, error))

    def replaced(self) -> None:
        self._stop_writing()
        self._leave(partial(self._close_left, "replaced", REPLACED_CLOSE_CODE))

    def deleted(self) -> None:
        self._stop_writing()
        self._leave(partial(self._close_left, "deleted", DELETED_CLOSE_CODE))

    def connection_closing(self) -> None:
        self._stop_writing()
        if not self._serving:
            return
        if not self._session.resumable or _ended_by_client(self._connection):
            self._session.end(None)
        else:
            self._leave(None)
            self._session.detach(self)

    def receive_pong(self, data: bytes) -> None:
        if self._serving and not data:  # another one may answer what was sent before the token, see ``answers``
            self._session.confirm_token()

    @property
    def _listening(self) -> bool:
        """Whether input is accepted: the session is not ending, and no other connection has taken it over."""
        return self._serving and self._session.is_open

    # input

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        """Receive one whole message. Runs inside the callback of the socket, and raises nothing."""
        if not self._serving or not self._session.is_open:
            return
        now, stream = self._connection.heard_at, self._stream
        if self._session.spent_token is not None:
            self._session.confirm_token()
        try:
            frame = decode_frame(data) if is_text else decode_input(data)
            if (keeper := self._session.keeper) is not None and type(frame) is not PingFrame:
                whole = data if type(data) is bytes else bytes(data)
                keeper.receive(whole, is_text=is_text, again=type(frame) is InputChunk)
            if type(frame) is InputChunk:
                try:
                    self._configuration.check_chunk(frame)
                except InvalidRequest as refusal:
                    assert frame.sequence_id is not None
                    frame = RefusedChunk(frame.sequence_id, refusal.about(ref=frame.ref))
            if type(frame) is InputChunk:
                try:
                    self._conversation.receive_chunk(frame, now=now)
                except OmniError as error:
                    if error.sequence_id in (None, frame.sequence_id):
                        error.about(ref=frame.ref)
                    raise
            else:
                self._receive_control(frame, now)
        except InvalidRequest as error:
            stream.touch(now=now)
            self._outbox.put_nowait(error)
        except Exception as error:
            self._input_failed(error)
            return
        self.acks.received(now)
        if self._outbox.full_since is not None or self._conversation.input_full():
            self._pause_reading()

    def receive_again(self, frames: Iterable[ReceivedFrame]) -> None:
        """Receive frames that the client sent to another server, before the session is attached to this connection."""
        for frame in frames:
            self.receive_message(frame.data, is_text=frame.is_text)

    def _input_failed(self, error: Exception) -> None:
        match error:
            case OmniError():
                self._session.end(error)
            case UnicodeDecodeError():
                self._fail_connection(CloseCode.INVALID_DATA, "a text frame must be valid UTF-8")
            case _:
                self._session.end(unexpected(error, where="the input of a session"))

    def _receive_control(self, frame: ClientFrame, now: float) -> None:
        conversation = self._conversation
        match frame:
            case RefusedChunk(sequence_id=sequence_id, error=error):
                try:
                    conversation.refuse_chunk(sequence_id)
                except OmniError as unusable:  # its number stays free, and only this error is reported
                    unusable.about(ref=error.ref)
                    raise
                self._outbox.put_nowait(error)
            case FinishFrame():
                conversation.finish()
            case CancelFrame(request_id=request_id):
                conversation.cancel(request_id)
            case HistoryTruncateFrame(request_id=request_id):
                self._truncate_history(request_id)
            case HistoryGetFrame(original=original):
                self._outbox.put_nowait(told_history(conversation, original=original))
                self._connection.end_pass()
            case ConfigPatch(fields=fields):
                self._configure(fields)
                self._connection.end_pass()
            case PingFrame(t=t):  # ``t`` is kept as JSON, which is smaller than the decoded value
                self._outbox.put_nowait(PongFrame(t=Raw(encode(t)), server_time_ms=time.time_ns() // 1_000_000))
            case OutputAckFrame(sequence_id=sequence_id, played_ms=played_ms, request_id=request_id):
                if sequence_id is not None:
                    self._outbox.acknowledge(sequence_id)
                if played_ms is not None:
                    conversation.report_playback(played_ms, request_id=request_id, sequence_id=sequence_id)
            case _:
                raise AssertionError(f"unexpected {frame!r}")
        self._stream.touch(now=now)

    def _configure(self, fields: Mapping[str, Any]) -> None:
        try:
            config = configured(self._conversation, fields)
        except EngineOverloaded as refusal:  # elsewhere it ends a session
            self._outbox.put_nowait(refusal)
            return
        self._outbox.put_nowait(updated_frame(config))
        self._conversation.greet()

    def _truncate_history(self, request_id: str) -> None:
        try:
            dropped = self._conversation.truncate_history(request_id)
        except SessionConflict as refusal:  # elsewhere it ends a session
            self._outbox.put_nowait(refusal)
            return
        ref = unset(self._conversation.ref_of(request_id))
        self._outbox.put_nowait(HistoryTruncatedFrame(request_id=request_id, dropped_requests=dropped, ref=ref))

    def _acknowledge(self) -> None:
        if not self._listening:
            return
        self.acks.sent()
        ack = self._conversation.take_ack()
        if self._session.keeper is not None:
            self._session.keeper.when_settled(partial(self._send_ack, ack))
        else:
            self._send_ack(ack)

    def _send_ack(self, ack: InputAckFrame) -> None:
        if not self._listening or not self._writing:
            return
        if self._outbox or self._connection.paused or not self._connection.is_open:
            self._outbox.put_nowait(ack)
        else:  # the usual case: no message is before it
            self._connection.write_message(encode_frame(ack), is_text=True)

    def input_may_continue(self) -> None:
        super().input_may_continue()
        self._acknowledge()  # with the new credit

    # output: what the outbox queues is written in the next pass of the event loop, one batch in each pass

    def write_now(self, output: OutputChunk) -> bool:
        if self._flush_scheduled or not self._writing or self._connection.paused or not self._connection.is_open:
            return False
        try:
            self._write(output)
        except Exception as error:
            self._output_failed(error)
        return True

    resume_output = ConnectedSession.output_ready

    def _stop_writing(self) -> None:
        """Stop writing: the connection is closing, or the session is no longer this connection's."""
        self._writing = False
        self._emptied.set()

    def write_resumed(self, resumed: SessionResumedFrame, ack: InputAckFrame) -> None:
        """Write the frames that begin a resumed connection, and a ping.

        The connection may be lost again at any moment. Only a pong or a frame from the client proves that the client
        has its new token.
        """
        connection = self._connection
        if connection.is_open:
            connection.write_message(encode_frame(resumed), is_text=True)
            connection.write_message(encode_frame(ack), is_text=True)
            connection.write_ping()

    async def _close_with(self, error: OmniError) -> None:
        """Write the remaining messages of an ended session, and close the connection with the code of ``error``."""
        if isinstance(error, SlowConsumer):
            self._drop(error)
        elif isinstance(error, ORDERLY_ENDS):
            self._session.announce_closing(error, 0)
        self._emptied.clear()
        self._flush()
        if self._connection.is_open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_TIMEOUT_SEC):
                    await self._emptied.wait()
        await self._connection.close_in_time(websocket_close_code(error) or CloseCode.INTERNAL_ERROR, error.message)

    async def _close_left(self, reason: str, code: int) -> None:
        """Close the connection and drop its output: the session was deleted, or has another connection."""
        if self._connection.is_open:
            closing = SessionClosingFrame(reason=reason, retryable=False, time_left_ms=0)
            self._connection.write_message(encode_frame(closing), is_text=True)
        await self._connection.close_in_time(code, reason)

    async def _close_handed_over(self) -> None:
        """Close the connection: the session is in the store, and another server continues it."""
        error = ShuttingDown("the server is shutting down")
        if self._connection.is_open:
            closing = SessionClosingFrame(reason=error.code, retryable=True, time_left_ms=0, resume="now")
            self._connection.write_message(encode_frame(closing), is_text=True)
        await self._connection.close_in_time(websocket_close_code(error) or CloseCode.INTERNAL_ERROR, error.message)

    def _drop(self, error: OmniError) -> None:
        """Discard the messages that the client has not read, and write ``error`` in their place."""
        self._outbox.clear()
        if self._connection.is_open:
            self._connection.write_message(encode_frame(error_frame(error)), is_text=True)

    def _flush(self) -> None:
        """Write a batch of messages of the outbox, and schedule the next batch if there are more."""
        self._flush_scheduled = False
        try:
            if self._writing and not self._connection.paused and self._connection.is_open:
                self._write_batch()
        except Exception as error:
            self._output_failed(error)
        if not self._outbox:
            self._emptied.set()

    def _write_batch(self) -> None:
        """Write as many messages of the outbox as one pass of the event loop allows."""
        size = 0
        for _ in range(WRITE_BATCH_MESSAGES):
            if size >= WRITE_BATCH_BYTES:
                break
            if (message := self._outbox.take()) is None:
                return
            size += self._write(message)
        if self._outbox.ready:
            self.output_ready()

    def _write(self, message: ServerMessage) -> int:
        """Write a message. Returns its size."""
        data, is_binary = encode_message(message, binary_audio=self._binary_audio)
        self._connection.write_message(data, is_text=not is_binary)
        if self._observed.observers.listening_to_outputs and isinstance(message, AnyOutput):
            self._observed.notify(OutputWritten(message))
        return len(data)

    def _output_failed(self, error: Exception) -> None:
        # Not here: this may run inside the conversation.
        self._loop.call_soon(self._session.end, unexpected(error, where="the output of a session"))

    def _fail_connection(self, code: CloseCode, reason: str) -> None:
        self._connection.fail(code, reason)
        self.connection_closing()


def configured(conversation: Conversation, fields: Mapping[str, Any]) -> SessionConfig:
    """Apply the fields of a ``session_config``, earlier turns included, and return the configuration.

    Raises what ``check_history`` and ``Conversation.configure`` raise; then nothing has changed.
    """
    items = fields.get(HISTORY_ITEMS)
    earlier = GivenHistory() if items is None else check_history(conversation, items)
    config = conversation.configure(fields)
    if any(earlier):
        give_history(conversation, earlier)
    return config


def _ended_by_client(connection: StreamConnection) -> bool:
    """Return whether the client closed on purpose, or broke the protocol. Otherwise the network may have failed."""
    protocol = connection.protocol
    if protocol.close_rcvd is not None:
        return protocol.close_rcvd.code in _FAREWELLS
    return protocol.close_sent is not None and protocol.close_sent.code in _VIOLATIONS


# Messages as frames.


def updated_frame(
    config: SessionConfig, *, kind: type[SessionUpdatedFrame] = SessionUpdatedFrame, **more: Any
) -> SessionUpdatedFrame:
    """Return a frame of this ``kind`` with the client's configuration, and with the fields ``more``."""
    return kind(**{name: getattr(config, name) for name in config.__struct_fields__}, **more)


def encode_message(message: ServerMessage, *, binary_audio: bool) -> tuple[bytes, bool]:
    """Encode a message as a frame of the native protocol. Returns the frame, and whether it is a binary one.

    With ``binary_audio``, the frames of audio are binary.
    """
    if isinstance(message, OutputChunk):
        if binary_audio and message.modality is OutputModality.AUDIO:
            return encode_output_audio(message), True
        return encode_output(message), False
    if isinstance(message, FinalChunk):
        return encode_frame(_final(message)), False
    if isinstance(message, RequestWarning):
        message = message.error
    if isinstance(message, OmniError):
        return encode_frame(error_frame(message)), False
    assert not isinstance(message, InputHeard), "no client of this protocol asks for it"
    return encode_frame(message), False


def _final(chunk: FinalChunk) -> ServerFrame:
    return OutputChunkFrame(
        request_id=chunk.request_id,
        sequence_id=chunk.sequence_id,
        final=True,
        finish_reason=chunk.finish_reason,
        usage=usage_fields(chunk.usage),
        # Failures, of the input or of parts of the engine, were told as they came.
        warnings=[
            WarningFields(code=one.code, message=one.message, param=one.param)
            for one in chunk.warnings
            if isinstance(one, AnswerWarning)
        ]
        or UNSET,
        annotations=[
            UrlCitationFields(
                title=one.title,
                url=one.url,
                start_index=one.start,
                end_index=one.end,
                license=unset(one.license),
            )
            for one in chunk.citations
        ]
        or UNSET,
        ref=unset(chunk.ref),
        turn_id=unset(chunk.turn_id),
        times=dict(chunk.times) or UNSET,
    )


def usage_fields(usage: Usage) -> UsageFields:
    """Return the usage as the fields of a final frame."""
    return UsageFields(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        total_tokens=usage.total_tokens,
        input_audio_ms=usage.input_audio_ms,
        output_audio_ms=usage.output_audio_ms,
        input_after_start_bytes=usage.input_after_start_bytes,
        cached_tokens=unset(usage.cached_tokens),
    )


def record_message(recording: SessionRecording | None, message: ServerMessage) -> None:
    """Record a message, if the session is recorded. Audio is left out: the connection's recording has it."""
    if recording is None or isinstance(message, InputHeard | BackchannelFrame):
        return
    if isinstance(message, OutputChunk) and message.modality is OutputModality.AUDIO:
        message = structs.replace(message, payload=b"")
    recording.told(encode_message(message, binary_audio=False)[0])


# Acknowledgements of input.

ACK_EVERY_CHUNKS: Final = 16
ACK_DELAY_SEC: Final = 0.1
#: A chunk that arrives this long before the acknowledgement is due brings it forward: a wake-up for the acknowledgement
#: alone costs as much as a chunk.
ACK_EARLY_SEC: Final = 0.025


class Acknowledgements:
    """Decides when one connection acknowledges its input: delayed and grouped, as in RFC 9000, section 13.2.

    An acknowledgement is sent after ACK_EVERY_CHUNKS accepted chunks, or ACK_DELAY_SEC after the first of them,
    whichever is first. Some events are acknowledged immediately: a duplicate, a filled gap, an end of the input, and
    chunks that were discarded.

    ``send`` is called when an acknowledgement is due. After each acknowledgement that is sent, for whatever reason,
    ``sent`` must be called. ``wait`` must call ``acknowledge`` at the given time, if ``due_at`` is still that time: see
    AcknowledgementClock.
    """

    __slots__ = ("_acknowledged", "_reorder", "_reported", "_send", "_stream", "_wait", "due_at")

    def __init__(
        self, stream: InputStream, wait: Callable[[float, Acknowledgements], None], send: Callable[[], None]
    ) -> None:
        self._stream = stream
        self._reorder = stream.reorder
        self._wait = wait
        self._send = send
        self.due_at = math.inf
        #: ``next_sequence_id`` and ``notable_events`` of the stream at the last acknowledgement.
        self._acknowledged = self._reorder.next_sequence_id
        self._reported = stream.notable_events

    def received(self, now: float) -> None:
        """Acknowledge the frame that the stream processed at ``now``: immediately, or later together with others."""
        chunks = self._reorder.next_sequence_id - self._acknowledged
        if (
            chunks >= ACK_EVERY_CHUNKS
            or self._stream.notable_events != self._reported
            or now + ACK_EARLY_SEC >= self.due_at
        ):
            self.acknowledge()
        elif chunks and self.due_at == math.inf:
            self.due_at = now + ACK_DELAY_SEC
            self._wait(self.due_at, self)

    @property
    def pending(self) -> bool:
        """Whether there is anything to acknowledge."""
        return self._reorder.next_sequence_id != self._acknowledged or self._stream.notable_events != self._reported

    def acknowledge(self) -> None:
        """Send an acknowledgement now, if there is anything to acknowledge."""
        self.due_at = math.inf
        if self.pending:
            self._send()

    def sent(self) -> None:
        """Note that an acknowledgement of everything that the stream has received was sent."""
        self._acknowledged = self._reorder.next_sequence_id
        self._reported = self._stream.notable_events

    def stop(self) -> None:
        """Cancel the acknowledgement that is due, as the connection has ended."""
        self.due_at = math.inf


#: Of sessions in a store: the steps in which acknowledgements come, so that sessions share the commits before them.
KEPT_ACK_STEP_SEC: Final = ACK_DELAY_SEC


class GroupedAcknowledgements(Acknowledgements):
    """Acknowledgements that, if they are delayed, all sessions send at the same moments.

    Input is committed to the store before it is acknowledged. Sessions that acknowledge together share a commit.
    """

    __slots__ = ()

    def received(self, now: float) -> None:
        chunks = self._reorder.next_sequence_id - self._acknowledged
        if chunks >= ACK_EVERY_CHUNKS or self._stream.notable_events != self._reported:
            self.acknowledge()
        elif chunks and self.due_at == math.inf:
            self.due_at = math.ceil(now / KEPT_ACK_STEP_SEC) * KEPT_ACK_STEP_SEC
            self._wait(self.due_at, self)


class AcknowledgementClock:
    """A shared timer that sends the delayed acknowledgements of all connections of a server.

    The delay is the same for all connections, so that the first to wait is the first to be due. Nearly every
    acknowledgement is sent earlier, with a chunk, and no timer is cancelled or armed for that: an entry whose time has
    changed is skipped.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, Acknowledgements]] = deque()
        self._armed = False

    def wait(self, when: float, waiting: Acknowledgements) -> None:
        """Call ``waiting.acknowledge`` at ``when``, unless its ``due_at`` has changed by then."""
        self._waiting.append((when, waiting))
        if not self._armed:
            self._arm(when)

    def _arm(self, when: float) -> None:
        self._armed = True
        asyncio.get_running_loop().call_at(when, self._on_timer, when)

    def _on_timer(self, due: float) -> None:
        self._armed = False
        # Loops round: a timer that fires a little early would be armed again and again until its time has come.
        now = max(asyncio.get_running_loop().time(), due)
        while self._waiting:
            when, waiting = self._waiting[0]
            if waiting.due_at == when:
                if when > now:
                    self._arm(when)
                    return
                waiting.acknowledge()
            self._waiting.popleft()


# ``/v1/streaming_input``: the front end of the native WebSocket, which opens and resumes sessions.


#: A function that creates the WebSocketSession of a connection and its session.
_Make: TypeAlias = Callable[[StreamConnection, Session], WebSocketSession]
_WHOLE_NUMBER: Final = re.compile(r"-1|[0-9]{1,10}")

NATIVE_PATH: Final = "/v1/streaming_input"
NATIVE_SECRETS_PATH: Final = "/v1/streaming_input/client_secrets"
SESSION_PATH: Final = "/v1/sessions/{id}"
SUBPROTOCOL_JSON: Final = "omni.v1+json"
SUBPROTOCOL_BINARY: Final = "omni.v1+binary"


def check_enabled(streaming: StreamingInputConfig) -> None:
    """Raise NotFound if the operator has disabled streaming input, over WebSocket and HTTP alike."""
    if not streaming.enabled:
        raise NotFound("streaming input is disabled on this server")


def chosen_subprotocol(request: HttpRequest) -> str | None:
    """Return the first offered subprotocol that the server knows; None if there is none."""
    return next((one for one in request.offered_subprotocols if one in (SUBPROTOCOL_BINARY, SUBPROTOCOL_JSON)), None)


async def refuse(connection: StreamConnection, error: OmniError) -> None:
    """Report ``error`` to a client that gets no session, and close the connection."""
    connection.ignore_messages()
    _report(connection, error)
    await connection.close_in_time(websocket_close_code(error) or CloseCode.INTERNAL_ERROR, error.code)


@dataclass(frozen=True, slots=True)
class Return:
    """The session that a client wants to resume, according to the query of its handshake.

    ``last_output`` is the number of the last output that the client received, -1 for none. ``resumable`` is False if
    the client was told that the session in the store is out of date; then the store is not asked.
    """

    session_id: str
    resume_token: str = field(repr=False)
    last_output: int
    resumable: bool = True


class StreamingInput(SessionFrontEnd):
    """The front end of the native WebSocket: accepts handshakes, and attaches each connection to its session."""

    def __init__(self, app: Application) -> None:
        sessions, streaming = app.sessions, app.sessions.config.streaming_input
        live = Sessions(sessions, origin=Origin.WEBSOCKET, grace=streaming.resume_grace_sec, store=sessions.store)
        super().__init__(app, live)
        self._ack_clock = AcknowledgementClock()
        self._rounds = PeerRounds.configured(streaming)

    def register(self, router: Router) -> None:
        router.add("GET", NATIVE_PATH, self._without_upgrade)
        router.add_websocket(NATIVE_PATH, self.upgrade)
        router.add("DELETE", SESSION_PATH, self.delete)
        router.add("POST", NATIVE_SECRETS_PATH, self.create_secret)

    def connect_gauges(self, metrics: Metrics) -> None:
        metrics.sessions_away.set_function(lambda: self.sessions_away)

    async def _without_upgrade(self, exchange: HttpExchange) -> None:
        check_enabled(self._config.streaming_input)
        await needs_upgrade(exchange)

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Accept a handshake. Raises NotFound, Unauthenticated or InvalidValue; a frame reports later errors."""
        check_enabled(self._config.streaming_input)
        key, secret = self._identified(request, NATIVE)
        bound: Mapping[str, Any] = {} if secret is None else json.decode(secret.session)
        returning = _returning(request)
        refusal: OmniError | None = None
        if returning is None and "resume_token" in request.query:
            refusal = SessionNotFound("resume_token requires session_id", param="session_id")
        subprotocol = chosen_subprotocol(request)
        serve = partial(
            self._serve,
            key=key,
            bound=bound,
            client=request.client,
            binary_audio=subprotocol == SUBPROTOCOL_BINARY,
            refusal=refusal,
            returning=returning,
        )
        return stream_accepted(self._sessions, key, serve=serve, route=NATIVE_PATH, subprotocol=subprotocol)

    async def create_secret(self, exchange: HttpExchange) -> None:
        """Respond with a new client secret. Its sessions begin with the fields of ``session_config`` in ``session``.

        Raises NotFound if streaming input is disabled, Unauthenticated, RateLimited if the key has too many secrets,
        and the error of a field that is refused.
        """
        check_enabled(self._config.streaming_input)
        key = self._authenticator.authenticate(exchange.request)
        self._sessions.check_ready()
        fields, _ = await read_json_object(exchange, MAX_BODY_BYTES, may_be_empty=True)
        body = read_client_secret(fields)
        session = body.session or {}
        self._sessions.configuration(STREAM_FORMATS).apply(session)
        if (items := session.get(HISTORY_ITEMS)) is not None:
            read_history_items(items)
        secret = ClientSecret(key=key, session=json.encode(session), kind=NATIVE)
        told = await issued(self._secrets, secret, lifetime=body.lifetime, group=self._sessions.group)
        await exchange.respond_json(200, {**told, "session": session}, [("Cache-Control", "no-store")])

    async def _serve(
        self,
        connection: StreamConnection,
        *,
        key: ApiKey | None,
        bound: Mapping[str, Any],
        client: str,
        binary_audio: bool,
        refusal: OmniError | None,
        returning: Return | None,
    ) -> None:
        """Serve one connection, from the end of its handshake to its close.

        Args:
            bound: The configuration with which a fresh session begins, from its client secret.
            client: Address of the client.
            refusal: The error to report by a frame if the client gets no session; None if it gets one.
            returning: The session to resume; None for a fresh one.
        """
        if connection.request is not None:  # set while the connection is open
            take_trace(connection.request.headers.get)
            take_place(client, connection.request.headers.get)
        try:
            if refusal is not None:
                raise refusal
            make = partial(
                WebSocketSession,
                binary_audio=binary_audio,
                ack_clock=self._ack_clock,
                rounds=self._rounds,
            )
            attachment = await self._resume(connection, returning, key, client, make) if returning else None
            if attachment is None:
                if not connection.is_open:  # nobody would learn of the session
                    return
                attachment = await self._begin(connection, key, client, make, bound=bound)
            await attachment.run()
        except OmniError as error:
            # By a frame, since a browser cannot read the HTTP status of a handshake.
            await refuse(connection, error)

    async def _begin(
        self, connection: StreamConnection, key: ApiKey | None, client: str, make: _Make, *, bound: Mapping[str, Any]
    ) -> WebSocketSession:
        """Open a session, and attach it to ``connection``. Raises what ``Sessions.admit`` and ``configure`` raise."""
        session = await self._live.admit(key, client=client)
        try:
            if bound:
                configured(session.conversation, bound)
        except OmniError:  # the engine has become another one since the secret was made
            session.end(None)
            raise
        begin_recording(self._recorder, session, "websocket", key)
        session.outbox.put_nowait(self._created(session))
        self._tell(session)
        attachment = make(recorded(connection, session.recording), session)
        session.attach(attachment)
        return attachment

    async def _resume(
        self, connection: StreamConnection, returning: Return, key: ApiKey | None, client: str, make: _Make
    ) -> WebSocketSession | None:
        """Resume a session, and return its new attachment. Raises what ``take_over`` raises.

        Returns None, after telling the client, if a fresh session must follow: either the session has discarded outputs
        that the client lacks, and is ended, or the store has no session with this id and token that this server can
        read.
        """
        resumes = self._sessions.metrics.resumes
        while True:
            try:
                session, frames, outcome = await self._returned(connection, returning, key, client)
            except (SessionNotFound, SessionTimeout) as error:
                resumes.labels("refused").inc()
                if not self._live.has_store or isinstance(error, SessionTimeout):
                    raise
                message = "no session to go on with is known by this session_id and resume_token; a new session follows"
                _report(connection, ResyncRequired(message, param="session_id"))
                return None
            connection = recorded(connection, session.recording, last_output=returning.last_output)
            attachment = make(connection, session)
            attachment.receive_again(frames)
            session.spend(returning.resume_token)
            if not session.resumable or not session.can_resume(returning.last_output):
                resumes.labels("resync").inc()
                message = f"the outputs after {returning.last_output} are no longer available; a new session follows"
                _report(connection, ResyncRequired(message, param="last_output"))
                await self._live.end(session)
                return None
            resumed, ack = session.resume(attachment, returning.last_output)
            try:
                # Above all the token that the client is told. Another server may have had the session meanwhile.
                if session.keeper is None or await session.keeper.settled():
                    break
            except BaseException:
                session.detach(attachment)
                raise
        resumes.labels(outcome).inc()
        attachment.write_resumed(resumed, ack)
        self._tell(session)
        return attachment

    async def _returned(
        self, connection: StreamConnection, returning: Return, key: ApiKey | None, client: str
    ) -> tuple[Session, list[ReceivedFrame], str]:
        """Find the session that a client resumes, here or in the store.

        Returns the session, the frames that it must receive again, and the outcome for the metrics: "resumed" if the
        session was in this process, else "taken_over".
        """
        session_id, token = returning.session_id, returning.resume_token
        try:
            return await self._live.claim_alive(session_id, token, key, answers=connection.answers), [], "resumed"
        except SessionNotFound:
            if not returning.resumable:
                raise
        session, frames = await self._live.take_over(
            session_id, token, key, last_output=returning.last_output, client=client, answers=connection.answers
        )
        return session, frames, "taken_over"

    def _tell(self, session: Session) -> None:
        """Let the session tell the client when the engine is replaced, and whether the store keeps the session."""
        session.conversation.followed = partial(self._tell_change, session)
        if session.keeper is not None:
            session.keeper.tell(partial(self._tell_kept, session))

    async def delete(self, exchange: HttpExchange) -> None:
        """End a session, in whichever process it is, and delete its record in the store. Responds with 204.

        Raises NotFound if streaming input is disabled, Unauthenticated, and what ``Sessions.delete`` raises.
        """
        check_enabled(self._config.streaming_input)
        request = exchange.request
        key = self._authenticator.authenticate(request)
        session_id = exchange.path_parameters["id"]
        if "sess_" not in session_id:  # as the Live API names it
            session_id = session_id.replace("live_", "sess_", 1)
        await self._live.delete(session_id, request.query.get("resume_token"), key)
        await exchange.respond(204)

    @property
    def sessions_away(self) -> int:
        """How many sessions are disconnected, within their grace period."""
        return self._live.disconnected

    def _created(self, session: Session) -> SessionCreatedFrame:
        config: Any = session.conversation.configuration.effective
        streaming = self._config.streaming_input
        return SessionCreatedFrame(
            session_id=session.session_id,
            resume_token=session.new_token(),
            expires_in=streaming.session_timeout_sec,
            model=config.model,
            input_audio=config.input_audio,
            output_audio=config.output_audio,
            start_policy=config.start_policy,
            after_start=config.after_start,
            parts=self._parts(),
            advice=self._sessions.advise(),
            recorded=True if session.recording is not None else UNSET,
            capabilities=self._capabilities(session),
            limits=SessionLimits(
                max_chunk_bytes=streaming.max_chunk_bytes,
                max_payload_per_session=streaming.max_payload_per_session,
                reorder_window_chunks=streaming.reorder_window_chunks,
                reorder_timeout_sec=streaming.reorder_timeout_sec,
                max_pending_requests=streaming.max_pending_requests,
            ),
        )

    def _tell_change(self, session: Session, config: SessionConfig) -> None:
        """Tell the client its new configuration and capabilities after the engine was replaced."""
        if not session.is_open:
            return
        session.outbox.put_nowait(
            updated_frame(
                config,
                parts=self._parts(),
                advice=self._sessions.advise(),
                capabilities=self._capabilities(session),
            )
        )

    def _tell_kept(self, session: Session, resumable: bool) -> None:
        """Tell the client whether the session is kept in the store."""
        if session.is_open:
            config = session.conversation.configuration.effective
            session.outbox.put_nowait(updated_frame(config, kind=SessionKeptFrame, resumable=resumable))
            session.outbox.put_nowait(structs.replace(session.conversation.take_ack(), resumable=resumable))

    def _parts(self) -> Parts:
        parts = parts_of(self._sessions.engine).items()
        return Parts(**{role: None if part is None else Part(**asdict(part)) for role, part in parts})

    def _capabilities(self, session: Session) -> Capabilities:
        able = self._sessions.engine.capabilities
        hears = Modality.AUDIO in able.input_modalities
        turn_detection_types = self._sessions.speech_workers.turn_detection_types if hears else ()
        return Capabilities(
            input_modalities=sorted(able.input_modalities),
            output_modalities=sorted(able.output_modalities),
            tasks=sorted(able.tasks - ({Task.CHAT} if able.chat_refusal else set())),
            voices=list(able.voices),
            voice_languages=dict(able.voice_languages) or UNSET,
            languages=sorted(able.languages) or UNSET,
            speech_languages=sorted(able.speech_languages) or UNSET,
            speed=able.speed,
            sampling=sorted(able.sampling),
            sampling_no_ops=sorted(able.sampling_no_ops),
            extend=able.extend,
            tools=able.tools,
            logprobs=able.logprobs,
            structured_output=able.structured_output,
            turn_detection=bool(turn_detection_types),
            turn_detection_types=list(turn_detection_types),
            duck=bool(turn_detection_types),
            backchannel="semantic_vad" in turn_detection_types and Task.SPEECH in able.tasks,
            resume=session.resumable,
            transcripts=able.transcripts,
            keywords=able.keywords or UNSET,
            lexicon=able.lexicon or UNSET,
            webrtc=self._sessions.takes_calls or UNSET,
        )


def _returning(request: HttpRequest) -> Return | None:
    """Read from a handshake which session it resumes; None for a fresh session.

    Raises InvalidValue for a ``last_output`` that is neither the number of an output nor -1.
    """
    query = request.query
    session_id, token = query.get("session_id"), query.get("resume_token")
    if session_id is None or token is None:
        return None
    last_output = query.get("last_output")
    if last_output is None:
        last_output = "-1"
    if not _WHOLE_NUMBER.fullmatch(last_output):
        raise InvalidValue("last_output must be the number of the last output received, or -1", param="last_output")
    return Return(session_id, token, int(last_output), query.get("resumable") != "false")


def _report(connection: StreamConnection, error: OmniError) -> None:
    if connection.is_open:
        # Without waiting: the frame is small, and the client may not read at all.
        connection.write_message(encode_frame(error_frame(error)), is_text=True)
