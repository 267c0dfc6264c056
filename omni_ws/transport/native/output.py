"""The output of a session over one native WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from websockets.frames import CloseCode

from omni_ws.core.chunks import AnyOutput, OutputChunk
from omni_ws.errors import ORDERLY_ENDS, OmniError, SlowConsumer, websocket_close_code
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.service.failure import unexpected
from omni_ws.service.observing.observer import OutputWritten
from omni_ws.service.sessions.live_session import LiveSession
from omni_ws.transport.native.connection import StreamConnection
from omni_ws.transport.native.frames import encode_message
from omni_ws.wire.server_frames import (
    InputAckFrame,
    SessionClosingFrame,
    SessionResumedFrame,
    encode_frame,
    error_frame,
)

#: Most of the output that is written in one pass of the event loop. Then other connections have their share, and the
#: socket may report that its buffer is full.
WRITE_BATCH_BYTES: Final = 64 * 1024
WRITE_BATCH_MESSAGES: Final = 128
#: How long a client may take to read the last frames.
GOODBYE_TIMEOUT_SEC: Final = 5.0
REPLACED_CLOSE_CODE: Final = 4409


class WebSocketOutput:
    """Writes the messages of the outbox to the socket.

    What the outbox queues is written in the next pass of the event loop, and one batch in each pass after that. Writing
    stops while the write buffer is over its high-water mark.
    """

    def __init__(self, connection: StreamConnection, session: LiveSession, *, binary_audio: bool) -> None:
        self._connection = connection
        self._session = session
        self._outbox = session.outbox
        self._observed = session.conversation.observed
        self._binary_audio = binary_audio
        self._loop = asyncio.get_running_loop()
        self._flush_scheduled = False
        #: Whether the messages in the outbox are for this connection: from ``start`` to ``stop``.
        self._speaking = False
        #: Set when there is nothing left to write, or it cannot be written here.
        self._emptied = asyncio.Event()

    def start(self) -> None:
        """Write what is in the outbox, and all that follows."""
        self._speaking = True
        self.schedule()

    def write_now(self, output: OutputChunk) -> bool:
        """See OutboxReader."""
        if self._flush_scheduled or not self._speaking or self._connection.paused or not self._connection.is_open:
            return False
        try:
            self._write(output)
        except Exception as error:
            self._failed(error)
        return True

    def schedule(self) -> None:
        """Write in the next pass."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def stop(self) -> None:
        """Write nothing more: the connection is closing, or another has taken over the session."""
        self._speaking = False
        self._emptied.set()

    def write_resumed(self, resumed: SessionResumedFrame, ack: InputAckFrame) -> None:
        """Write the frames that begin a resumed connection, and a ping.

        The connection may be lost again at any moment. Only the pong, or a frame, proves that the client has its new
        token.
        """
        connection = self._connection
        if connection.is_open:
            connection.write_message(encode_frame(resumed), is_text=True)
            connection.write_message(encode_frame(ack), is_text=True)
            connection.write_ping()

    async def close_with(self, error: OmniError) -> None:
        """Write what is left of a session that is over, and close the connection with the code of ``error``."""
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

    async def close_replaced(self) -> None:
        """Close the connection, since another has taken over the session, and what was not written yet."""
        if self._connection.is_open:
            closing = SessionClosingFrame(reason="replaced", retryable=False, time_left_ms=0)
            self._connection.write_message(encode_frame(closing), is_text=True)
        await self._connection.close_in_time(REPLACED_CLOSE_CODE, "replaced")

    def _drop(self, error: OmniError) -> None:
        """Discard what the client has not read, and write the error in its place."""
        self._outbox.clear()
        if self._connection.is_open:
            self._connection.write_message(encode_frame(error_frame(error)), is_text=True)

    def _flush(self) -> None:
        """Write a batch, and schedule the next one while there is more to write."""
        self._flush_scheduled = False
        try:
            if self._speaking and not self._connection.paused and self._connection.is_open:
                self._write_batch()
        except Exception as error:
            self._failed(error)
        if not self._outbox:
            self._emptied.set()

    def _write_batch(self) -> None:
        """Write as much as one pass allows."""
        size = 0
        for _ in range(WRITE_BATCH_MESSAGES):
            if size >= WRITE_BATCH_BYTES:
                break
            if (message := self._outbox.take()) is None:
                return
            size += self._write(message)
        if self._outbox:
            self.schedule()

    def _write(self, message: ServerMessage) -> int:
        """Write a message. Returns its size."""
        data, is_binary = encode_message(message, binary_audio=self._binary_audio)
        self._connection.write_message(data, is_text=not is_binary)
        if self._observed.listening_to_outputs and isinstance(message, AnyOutput):
            self._observed.notify(OutputWritten(message))
        return len(data)

    def _failed(self, error: Exception) -> None:
        # Not here: this may run inside the conversation.
        self._loop.call_soon(self._session.end, unexpected(error, where="the output of a session"))
