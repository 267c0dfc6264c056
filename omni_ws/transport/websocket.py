"""The native WebSocket: one connection, one conversation."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Final

from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.protocol import State

from omni_ws.core.chunks import FinishReason, InputChunk
from omni_ws.core.input_stream import ACK_DELAY_SEC
from omni_ws.errors import (
    InvalidRequest,
    OmniError,
    SessionTimeout,
    ShuttingDown,
    SlowConsumer,
    websocket_close_code,
)
from omni_ws.service.conversation import Conversation
from omni_ws.service.failure import unexpected
from omni_ws.service.outbox import Outbox
from omni_ws.transport.output_frames import encode_message
from omni_ws.transport.websocket_connection import StreamConnection
from omni_ws.wire.binary import decode_input
from omni_ws.wire.frames import (
    CancelFrame,
    ClientFrame,
    ConfigPatch,
    FinishFrame,
    OutputAckFrame,
    PingFrame,
    PongFrame,
    RefusedChunk,
    SessionClosing,
    SessionUpdated,
    decode_frame,
)

#: Encoded output is given to the socket in pieces of about this size, looking in between whether it still takes any.
WRITE_BATCH_BYTES: Final = 64 * 1024
#: How long a client may take to take the last frames before its connection is closed.
GOODBYE_TIMEOUT_SEC: Final = 5.0
#: Errors that are orderly ends: the client hears ``session_closing`` instead of ``error``.
ORDERLY: Final = (SessionTimeout, ShuttingDown)
MAX_CLOSE_REASON_BYTES: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAlive:
    """Seconds; None turns it off. Any frame of the client counts as a sign of life, not only pongs."""

    ping_interval: float | None = 20
    ping_timeout: float | None = 20


class WebSocketSession:
    """Frames in, frames out, the clock; what they mean is the conversation's business."""

    def __init__(
        self,
        connection: StreamConnection,
        conversation: Conversation,
        outbox: Outbox,
        *,
        binary_audio: bool,
        keep_alive: KeepAlive,
    ) -> None:
        self._connection = connection
        self._conversation = conversation
        self._outbox = outbox
        self._binary_audio = binary_audio
        self._keep_alive = keep_alive
        self._loop = asyncio.get_running_loop()
        #: Set when the session must end: with the reason to tell the client, None where there is nobody to tell.
        self._ending: asyncio.Future[OmniError | None] = self._loop.create_future()
        self._flush_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._reading_paused = False
        self._room = asyncio.Event()
        self._last_sign_of_life = self._loop.time()
        self._pinged = False
        self._announced_closing = False
        self._emptied = asyncio.Event()

    # life

    async def run(self) -> None:
        """Serve the connection until its session is over, and close it the way that end calls for."""
        self._outbox.on_ready = self._schedule_flush
        self._outbox.on_room = self._conversation.on_input_room = self._resume_reading
        answers = asyncio.create_task(self._conversation.run(), name="conversation")
        messages = asyncio.create_task(self._read_messages(), name="fragmented messages")
        try:
            self._schedule_flush()
            self._connection.attach(self)
            self._arm(self._loop.time())
            ends: list[asyncio.Future[Any]] = [answers, messages, self._ending]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            error = self._reason_to_end(answers)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            answers.cancel()
            messages.cancel()
            await asyncio.gather(answers, messages, return_exceptions=True)
        if error is not None:
            await self._say_goodbye(error)

    def end(self, error: OmniError | None) -> None:
        """End the session for this reason, at the next opportunity."""
        if self._ending.done():
            return
        self._ending.set_result(error)
        if error is not None and not isinstance(error, ORDERLY):
            # Before the finals of the requests that end with the session.
            self._conversation.finish_reason_at_end = FinishReason.ERROR
            self._outbox.put_nowait(error)

    def drain(self, time_left: float) -> None:
        """The server is going: requests that are open get their answers, then the connection is closed."""
        self._announce_closing(ShuttingDown("the server is shutting down"), time_left if self._conversation.busy else 0)
        self._conversation.drain()
        self._conversation.close()

    def _reason_to_end(self, answers: asyncio.Task[None]) -> OmniError | None:
        """None when the client has gone by itself."""
        if self._ending.done():
            return self._ending.result()
        if not answers.done():
            return None
        failure = answers.exception()
        if failure is None:
            return ShuttingDown("the server is shutting down")
        return failure if isinstance(failure, OmniError) else unexpected(failure, where="a conversation")

    async def _say_goodbye(self, error: OmniError) -> None:
        code = websocket_close_code(error) or CloseCode.INTERNAL_ERROR
        if isinstance(error, SlowConsumer):
            self._drop_output(error)
        elif isinstance(error, ORDERLY):
            self._announce_closing(error, 0)
        self._flush()
        if self._outbox and self._is_open():
            try:
                async with asyncio.timeout(GOODBYE_TIMEOUT_SEC):
                    await self._emptied.wait()
            except TimeoutError:
                pass
        reason = error.message.encode()[:MAX_CLOSE_REASON_BYTES].decode("utf-8", "ignore")
        await self._connection.close(code, reason)

    def _drop_output(self, error: OmniError) -> None:
        """What the client did not read is dropped: the error is the next thing that it gets, if it ever reads again."""
        while self._outbox.take() is not None:
            pass
        data, _ = encode_message(error, binary_audio=False)
        if self._is_open():
            self._connection.protocol.send_text(data)
            self._connection.send_data()

    def _announce_closing(self, error: OmniError, time_left: float) -> None:
        if not self._announced_closing:
            self._announced_closing = True
            self._outbox.put_nowait(
                SessionClosing(reason=error.code, retryable=error.wire.retryable, time_left_ms=round(time_left * 1000))
            )

    # input

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        """One whole message. Runs inside the socket's callback, so nothing may escape."""
        if self._ending.done():
            return
        now = self._last_sign_of_life = self._loop.time()
        try:
            frame = decode_frame(data) if is_text else decode_input(data)
            if type(frame) is InputChunk:
                self._receive_chunk(frame)
            else:
                self._receive_control(frame, now)
        except InvalidRequest as error:
            self._conversation.stream.touch(now=now)
            self._outbox.put_nowait(error)
        except OmniError as error:
            self.end(error)
        except UnicodeDecodeError:
            self._fail_connection(CloseCode.INVALID_DATA, "a text frame is UTF-8")
        except Exception as error:
            self.end(unexpected(error, where="the input of a session"))
        conversation = self._conversation
        if conversation.stream.ack_due:
            self._outbox.put_nowait(conversation.take_ack())
        if self._outbox.full or conversation.input_full:
            self._pause_reading()
        if self._timer is None or self._timer.when() > now + ACK_DELAY_SEC:
            self._arm(now)

    def receive_anything(self) -> None:
        self._last_sign_of_life = self._loop.time()

    def _receive_chunk(self, chunk: InputChunk) -> None:
        conversation = self._conversation
        try:
            conversation.configuration.check_chunk(chunk)
        except InvalidRequest as error:
            assert chunk.sequence_id is not None
            self._outbox.put_nowait(error)
            conversation.refuse_chunk(chunk.sequence_id)
            return
        conversation.receive_chunk(chunk)

    def _receive_control(self, frame: ClientFrame, now: float) -> None:
        conversation = self._conversation
        match frame:
            case RefusedChunk(sequence_id=sequence_id, error=error):
                self._outbox.put_nowait(error)
                conversation.refuse_chunk(sequence_id)
            case FinishFrame():
                conversation.finish()
            case CancelFrame(request_id=request_id):
                conversation.cancel(request_id)
            case ConfigPatch(fields=fields):
                config = conversation.configure(fields)
                self._outbox.put_nowait(SessionUpdated(**{f: getattr(config, f) for f in config.__struct_fields__}))
            case PingFrame(t=t):
                self._outbox.put_nowait(PongFrame(t=t, server_time_ms=time.time_ns() // 1_000_000))
            case OutputAckFrame():
                pass  # nothing is kept for a resume in this version
            case _:
                raise AssertionError(f"unexpected {frame!r}")
        conversation.stream.touch(now=now)

    async def _read_messages(self) -> None:
        """Fragmented messages, and all that follow one; otherwise just the wait for the connection's end."""
        try:
            while True:
                message = await self._connection.recv()
                while self._reading_paused:
                    self._room.clear()
                    await self._room.wait()
                self.receive_message(
                    message.encode() if isinstance(message, str) else message, is_text=isinstance(message, str)
                )
        except ConnectionClosed:
            return

    def _pause_reading(self) -> None:
        if not self._reading_paused:
            self._reading_paused = True
            self._connection.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused and not self._outbox.full and not self._conversation.input_full:
            self._reading_paused = False
            self._last_sign_of_life = self._loop.time()
            self._room.set()
            if self._is_open():
                self._connection.transport.resume_reading()

    # output

    def resume_output(self) -> None:
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write until everything is written or the socket takes no more."""
        self._flush_scheduled = False
        connection = self._connection
        while self._outbox and not connection.paused and self._is_open():
            size = 0
            while size < WRITE_BATCH_BYTES and (message := self._outbox.take()) is not None:
                data, is_binary = encode_message(message, binary_audio=self._binary_audio)
                (connection.protocol.send_binary if is_binary else connection.protocol.send_text)(data)
                size += len(data)
            connection.send_data()
        if not self._outbox:
            self._emptied.set()
        if self._outbox.full and (self._timer is None or self._timer.when() > self._outbox.get_timer()):  # type: ignore[operator]
            self._arm(self._loop.time())

    def _is_open(self) -> bool:
        return self._connection.state is State.OPEN

    # time

    def _arm(self, now: float) -> None:
        deadlines = [self._conversation.get_timer(), self._keep_alive_deadline()]
        when = min((deadline for deadline in deadlines if deadline is not None), default=None)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if when is None else self._loop.call_at(max(when, now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._ending.done():
            return
        if not self._is_open():
            self.end(None)
            return
        now = self._loop.time()
        try:
            self._conversation.handle_timer()
        except OmniError as error:
            self.end(error)
            return
        if self._conversation.stream.ack_due:
            self._outbox.put_nowait(self._conversation.take_ack())
        self._check_peer(now)
        self._arm(now)

    def _keep_alive_deadline(self) -> float | None:
        interval, timeout = self._keep_alive.ping_interval, self._keep_alive.ping_timeout
        if interval is None or self._reading_paused:
            return None
        if not self._pinged:
            return self._last_sign_of_life + interval
        return None if timeout is None else self._last_sign_of_life + interval + timeout

    def _check_peer(self, now: float) -> None:
        """Ping a peer that has been silent; give up on one that stays so.

        While we do not read, silence says nothing.
        """
        deadline = self._keep_alive_deadline()
        interval = self._keep_alive.ping_interval
        if interval is not None and now < self._last_sign_of_life + interval:
            self._pinged = False
        elif deadline is not None and now >= deadline and self._is_open():
            if self._pinged:
                self._fail_connection(CloseCode.INTERNAL_ERROR, "keepalive ping timeout")
            else:
                self._pinged = True
                self._connection.protocol.send_ping(b"")
                self._connection.send_data()

    def _fail_connection(self, code: CloseCode, reason: str) -> None:
        """Close from below, as the WebSocket layer does for its own errors: without an error frame."""
        self._connection.protocol.fail(code, reason)
        self._connection.send_data()
        self.end(None)
