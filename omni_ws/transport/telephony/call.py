"""PhoneCall: a started media stream, and the session that talks over it."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from websockets.frames import CloseCode

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.errors import (
    ORDERLY_ENDS,
    InvalidFrame,
    InvalidRequest,
    InvalidValue,
    OmniError,
    Refused,
    UnsupportedFormat,
    websocket_close_code,
)
from omni_ws.service.conversation.whole_requests import WholeRequest, respond
from omni_ws.service.failure import unexpected
from omni_ws.service.sessions.live_session import LiveSession
from omni_ws.transport.native.connection import StreamConnection
from omni_ws.transport.native.keep_alive import KeepAliveSettings
from omni_ws.transport.native.pause import Pause
from omni_ws.transport.native.sole_connection import SoleConnection
from omni_ws.transport.telephony.messages import (
    INBOUND,
    DtmfMessage,
    MarkMessage,
    MediaFields,
    MediaMessage,
    StopMessage,
    decode_stream_message,
)
from omni_ws.transport.telephony.playout import Playout
from omni_ws.transport.telephony.pressed_keys import PressedKeys

logger = logging.getLogger(__name__)

#: How long the last mark may take to return, beyond the audio before it.
PLAYOUT_MARGIN_SEC: Final = 1.0


def close_code(error: OmniError) -> int:
    """The code that a stream is closed with. A gateway reads no error messages, so every refusal closes the stream."""
    match error:
        case InvalidFrame():
            return CloseCode.INVALID_DATA
        case UnsupportedFormat():
            return CloseCode.UNSUPPORTED_DATA
        case InvalidRequest() | Refused():
            return CloseCode.POLICY_VIOLATION
    return websocket_close_code(error) or CloseCode.INTERNAL_ERROR


class PhoneCall(SoleConnection):
    """One call: media in, the answers' media, marks and clears out; see FrameReceiver and Attachment.

    The call ends when the session does: with an error of the stream, with ``stop``, with the connection, or with the
    server. Before an orderly end the caller hears the answer to its end.
    """

    def __init__(
        self, connection: StreamConnection, session: LiveSession, stream_sid: str, *, keep_alive: KeepAliveSettings
    ) -> None:
        super().__init__(connection, session, keep_alive=keep_alive)
        self._playout = Playout(stream_sid, session.conversation.loudspeaker.report)
        self._keys = PressedKeys(self._keys_entered)
        self._last_chunk = -1
        #: Set when everything is sent and played, or nothing can be sent any more.
        self._silent = asyncio.Event()

    async def run(self, behind: list[tuple[bytes, bool]]) -> None:
        """Serves the call to its end, and closes the connection. ``behind`` are messages that arrived with ``start``.

        The session must be attached to this.
        """
        try:
            self._connection.attach(self)
            for data, is_text in behind:
                self.receive_message(data, is_text=is_text)
            self._connection.resume_reading(Pause.SESSION)
            self.timer_changed()
            error = await self._over
            self._connection.resume_reading(Pause.SESSION)  # for the marks that are due, and the peer's closing frame
            self._flush()
            if isinstance(error, ORDERLY_ENDS):
                await self._played()
            code = CloseCode.NORMAL_CLOSURE if error is None else close_code(error)
            await self._connection.close_in_time(code, "" if error is None else error.message)
        finally:
            self._keys.close()
            self._disarm()
            self._session.detach(self)

    async def _played(self) -> None:
        """Waits until the gateway has returned the last mark."""
        lead_ms = self._conversation.configuration.effective.max_lead_ms or 0
        try:
            async with asyncio.timeout(lead_ms / 1000 + PLAYOUT_MARGIN_SEC):
                await self._silent.wait()
        except TimeoutError:
            logger.debug("the gateway did not return the last mark of an answer")

    def connection_closing(self) -> None:
        self._silent.set()
        self._session.end(None)

    # input

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        try:
            message = decode_stream_message(data, is_text=is_text)
            if isinstance(message, MarkMessage):  # also while the session ends, which waits for the last one
                self._playout.mark_returned(message.mark.name)
                self._check_silent()
                return
            if not self._listening:
                return
            match message:
                case MediaMessage(media=media):
                    self._receive_media(media)
                case StopMessage():
                    self._session.end(None)
                case DtmfMessage(dtmf=key):
                    self._conversation.stream.touch(now=self._connection.heard_at)
                    self._keys.press(key.digit)
                case _:
                    raise InvalidValue("the stream has already started", param="event")
        except OmniError as error:
            self._session.end(error)
        except Exception as error:
            self._session.end(unexpected(error, where="the input of a call"))

    def _receive_media(self, media: MediaFields) -> None:
        if media.track != INBOUND:
            return
        if media.chunk is not None:
            if media.chunk <= self._last_chunk:
                raise InvalidValue("media.chunk must increase", param="media.chunk")
            self._last_chunk = media.chunk
        if media.payload:
            self._conversation.receive_chunk(
                InputChunk(Modality.AUDIO, media.payload, timestamp_ms=media.timestamp), now=self._connection.heard_at
            )
            self._conversation.take_ack()  # the stream has no acknowledgements; the metrics count input by them
        self._pause_if_blocked()

    def _keys_entered(self, keys: str) -> None:
        """What a caller enters is a turn, which interrupts the answer as speech does."""
        if not self._listening:
            return
        conversation = self._conversation
        for data in self._playout.clear():
            self._connection.write_message(data, is_text=True)
        conversation.cancel()
        text = InputChunk(Modality.TEXT, f"(On the telephone's keys: {' '.join(keys)})".encode())
        try:
            respond(conversation, WholeRequest(chunks=[text], config=conversation.configuration.effective))
        except OmniError as error:
            self._session.end(error)

    # output

    resume_output = SoleConnection.output_ready

    def _flush(self) -> None:
        """Send what the outbox holds, for as long as the socket takes it."""
        self._flush_scheduled = False
        connection = self._connection
        while connection.is_open and not connection.paused and (message := self._outbox.take()) is not None:
            for data in self._playout.render(message):
                connection.write_message(data, is_text=True)
        self._check_silent()

    def _check_silent(self) -> None:
        if not self._outbox and not self._playout.unplayed:
            self._silent.set()
        elif self._connection.is_open:
            self._silent.clear()
