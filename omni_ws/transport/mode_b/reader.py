"""WebSockets that read the answer of a Mode B session, and accept no input."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig
from omni_ws.errors import (
    ORDERLY_ENDS,
    InvalidRequest,
    OmniError,
    SessionConflict,
    SessionExpired,
    SessionNotFound,
    SlowConsumer,
    websocket_close_code,
)
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.transport.http.access import Authenticator
from omni_ws.transport.http.application import FrontEnd, Router, UpgradeDecision
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.mode_b.keeper import ModeBKeeper
from omni_ws.transport.mode_b.session import ModeBSession
from omni_ws.transport.native.connection import StreamConnection
from omni_ws.transport.native.endpoint import NATIVE_PATH, SUBPROTOCOL_BINARY, check_enabled, chosen_subprotocol, refuse
from omni_ws.transport.native.session import encode_message
from omni_ws.transport.recording.recordings import HttpRecordings, recorded
from omni_ws.wire.frames import OutputAckFrame, PingFrame, decode_frame, decode_input
from omni_ws.wire.server_frames import PongFrame, SessionClosingFrame, encode_frame, error_frame

#: Limit of a client's message. Only pings and acknowledgements are expected.
_MAX_MESSAGE_BYTES: Final = 1 << 16
_INPUT_REFUSED: Final = "this connection only reads the session's answer and does not accept input"


class ModeBReaders(FrontEnd):
    """The front end of WebSockets that read the answers of Mode B sessions."""

    def __init__(
        self,
        config: ServerConfig,
        authenticator: Authenticator,
        keeper: ModeBKeeper,
        recordings: HttpRecordings | None = None,
    ) -> None:
        self._recordings = recordings
        self._streaming = config.streaming_input
        self._authenticator = authenticator
        self._keeper = keeper

    def register(self, router: Router) -> None:
        router.add_websocket(NATIVE_PATH, self.upgrade, takes=self.is_meant)

    def is_meant(self, request: HttpRequest) -> bool:
        """Return whether a handshake names a Mode B session; with a ``resume_token`` it resumes a native session."""
        return "session_id" in request.query and "resume_token" not in request.query

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Accept a handshake. Raises NotFound and Unauthenticated; a frame reports all other errors."""
        check_enabled(self._streaming)
        key = self._authenticator.authenticate(request)
        subprotocol = chosen_subprotocol(request)
        return UpgradeDecision(
            connection=partial(
                StreamConnection, budget=self._keeper.registry.budget, write_timeout=self._streaming.write_timeout_sec
            ),
            serve=partial(
                self._serve,
                session_id=request.query.get("session_id") or "",
                key=key,
                client=request.client,
                binary_audio=subprotocol == SUBPROTOCOL_BINARY,
            ),
            subprotocol=subprotocol,
            max_size=_MAX_MESSAGE_BYTES,
            route=NATIVE_PATH,
        )

    async def _serve(
        self, connection: StreamConnection, *, session_id: str, key: ApiKey | None, client: str, binary_audio: bool
    ) -> None:
        """Serve one connection, from the end of its handshake to its close."""
        streaming = self._streaming
        try:
            async with self._find(session_id, key, client) as session:
                if self._recordings is not None:
                    connection = recorded(connection, self._recordings.find(session_id, key))
                with session.reading():
                    await ModeBReader(
                        connection,
                        session,
                        binary_audio=binary_audio,
                        ping_interval=streaming.ping_interval_sec or None,
                        write_timeout=streaming.write_timeout_sec,
                    ).run()
                if self._recordings is not None and not session.live:
                    self._recordings.answer_read(session_id)
        except OmniError as error:
            await refuse(connection, error)

    @asynccontextmanager
    async def _find(self, session_id: str, key: ApiKey | None, client: str) -> AsyncIterator[ModeBSession]:
        try:
            async with self._keeper.using(session_id, key, client=client) as session:
                yield session
        except SessionExpired as error:
            # A WebSocket does not distinguish between sessions that expired and those that never existed.
            raise SessionNotFound(error.message, param="session_id") from None


class ModeBReader:
    """One WebSocket that reads the answer of a Mode B session from its beginning.

    ``ping_interval`` and ``write_timeout`` are in seconds. A client that does not read delays nobody but itself: the
    session goes on, and the connection is closed after ``write_timeout``.
    """

    def __init__(
        self,
        connection: StreamConnection,
        session: ModeBSession,
        *,
        binary_audio: bool,
        ping_interval: float | None,
        write_timeout: float,
    ) -> None:
        self._connection = connection
        self._session = session
        self._binary_audio = binary_audio
        self._ping_interval = ping_interval
        self._write_timeout = write_timeout
        self._writing: asyncio.Task[None] | None = None
        #: Why the connection is closed before the end of the answer.
        self._refusal: OmniError | None = None

    async def run(self) -> None:
        """Send the whole answer until the session ends, and close the connection with the code for that end."""
        self._writing = asyncio.create_task(self._write_all(), name=f"output of {self._session.id}")
        self._connection.attach(self)
        try:
            await asyncio.wait([self._writing])
        finally:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        if self._writing.cancelled():
            if self._refusal is not None:
                await self._close_with(self._refusal)
            return  # the connection is gone
        try:
            self._writing.result()
            await self._close_with(self._session.error)
        except SlowConsumer as error:
            self._refusal = error
            await self._close_with(error)
        except ConnectionClosed:
            pass

    async def _write_all(self) -> None:
        position = 0
        while (found := await self._next(position)) is not None:
            position, message = found
            data, is_binary = encode_message(message, binary_audio=self._binary_audio)
            await self._send(data, is_text=not is_binary)

    async def _next(self, position: int) -> tuple[int, ServerMessage] | None:
        """Wait for the next message, and send pings meanwhile.

        Proxies drop silent connections, and a ping over a broken connection reveals that it is broken.
        """
        while True:
            try:
                async with asyncio.timeout(self._ping_interval):
                    return await self._session.output.get(position)
            except TimeoutError:
                await self._connection.ping()

    async def _send(self, data: bytes, *, is_text: bool) -> None:
        try:
            async with asyncio.timeout(self._write_timeout):
                await self._connection.send(data, text=is_text)
        except TimeoutError:
            raise SlowConsumer(f"the client has not read for {self._write_timeout:g} seconds") from None

    async def _close_with(self, error: OmniError | None) -> None:
        if isinstance(error, ORDERLY_ENDS):
            closing = SessionClosingFrame(reason=error.code, retryable=error.wire.retryable, time_left_ms=0)
            await self._send(encode_frame(closing), is_text=True)
        elif error is not None and error is self._refusal:
            self._write(encode_frame(error_frame(error)))
        # An error of the request alone is in its own frame, and has no close code.
        code = None if error is None else websocket_close_code(error)
        reason = "" if error is None else error.message
        await self._connection.close_in_time(code or CloseCode.NORMAL_CLOSURE, reason)

    def _write(self, data: bytes) -> None:
        """Send a small frame without waiting. While too much is unwritten, the client is not read."""
        if self._connection.is_open:
            self._connection.write_message(data, is_text=True)

    # the client's frames

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        try:
            frame = decode_frame(data) if is_text else decode_input(data)
            match frame:
                case PingFrame(t=t):
                    self._write(encode_frame(PongFrame(t=t, server_time_ms=time.time_ns() // 1_000_000)))
                case OutputAckFrame():
                    pass  # the answer is kept for other readers, too
                case _:
                    raise SessionConflict(_INPUT_REFUSED)
        except (InvalidRequest, SessionConflict) as error:
            self._write(encode_frame(error_frame(error)))
        except UnicodeDecodeError:
            self._connection.fail(CloseCode.INVALID_DATA, "a text frame must be valid UTF-8")
            self.connection_closing()

    def input_refused(self, error: OmniError) -> None:
        self._refusal = error
        self.connection_closing()

    def connection_closing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()

    def reading_changed(self) -> None:
        pass  # no silence times out here

    def receive_pong(self, data: bytes) -> None:
        pass

    def resume_output(self) -> None:
        pass  # the library wakes ``send``
