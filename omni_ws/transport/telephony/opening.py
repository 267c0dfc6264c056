"""StreamOpening: the connection of a media stream until its ``start`` message."""

from __future__ import annotations

import asyncio

from omni_ws.errors import InvalidValue, OmniError, SessionTimeout
from omni_ws.transport.native.connection import Pause, StreamConnection
from omni_ws.transport.telephony.messages import (
    ConnectedMessage,
    StartMessage,
    StreamStart,
    check_start,
    decode_stream_message,
)


class StreamOpening:
    """Receives ``connected`` and ``start``, and pauses the connection there; see FrameReceiver."""

    def __init__(self, connection: StreamConnection) -> None:
        self._connection = connection
        self._started: asyncio.Future[StreamStart | None] = asyncio.get_running_loop().create_future()
        self._connected = False
        self._abandoned = False
        #: Messages behind ``start`` that were parsed in the same pass. They belong to the call.
        self.behind: list[tuple[bytes, bool]] = []

    async def wait(self, timeout: float) -> StreamStart | None:
        """Waits for ``start``; None when the peer disconnects first.

        Raises what is wrong with the messages, SessionTimeout after ``timeout`` seconds, and what ``refuse`` is given.
        """
        self._connection.attach(self)
        try:
            async with asyncio.timeout(timeout):
                return await self._started
        except TimeoutError:
            raise SessionTimeout(f"no start message within {timeout:g} seconds") from None

    def refuse(self, error: OmniError) -> None:
        """Make ``wait`` raise ``error``."""
        self._abandoned = True
        if not self._started.done():
            self._started.set_exception(error)

    async def close(self, code: int, reason: str) -> None:
        """Close the connection instead of starting a call."""
        self._abandoned = True
        self._connection.ignore_messages()
        self._connection.resume_reading(Pause.SESSION)  # to receive the peer's closing frame
        await self._connection.close_in_time(code, reason)

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        if self._abandoned:
            return
        if self._started.done():
            self.behind.append((bytes(data), is_text))
            return
        try:
            match decode_stream_message(data, is_text=is_text):
                case ConnectedMessage() if not self._connected:
                    self._connected = True
                case StartMessage(start=start):
                    check_start(start)
                    self._connection.pause_reading(Pause.SESSION)
                    self._started.set_result(start)
                case _:
                    raise InvalidValue("the first messages must be connected and start", param="event")
        except OmniError as error:
            self.refuse(error)

    def input_refused(self, error: OmniError) -> None:
        self.refuse(error)

    def connection_closing(self) -> None:
        if not self._started.done():
            self._started.set_result(None)

    def receive_pong(self, data: bytes) -> None:
        pass

    def resume_output(self) -> None:
        pass

    def reading_changed(self) -> None:
        pass
