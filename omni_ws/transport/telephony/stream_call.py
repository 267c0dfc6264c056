"""StreamCall: a call over the media stream of a telephony gateway."""

from __future__ import annotations

from websockets.frames import CloseCode

from omni_ws.errors import (
    InvalidFrame,
    InvalidRequest,
    InvalidValue,
    OmniError,
    Refused,
    UnsupportedFormat,
    websocket_close_code,
)
from omni_ws.service.failure import unexpected
from omni_ws.service.sessions.live_session import LiveSession
from omni_ws.transport.native.connection import StreamConnection
from omni_ws.transport.native.keep_alive import KeepAliveSettings
from omni_ws.transport.telephony.call import PhoneCall
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


class StreamCall(PhoneCall):
    """One call: media in, the answers' media, marks and clears out. The call ends with ``stop``, too."""

    def __init__(
        self, connection: StreamConnection, session: LiveSession, stream_sid: str, *, keep_alive: KeepAliveSettings
    ) -> None:
        super().__init__(connection, session, keep_alive=keep_alive)
        self._playout = Playout(stream_sid, self._report)
        self._last_chunk = -1

    def _close_code(self, error: OmniError) -> int:
        return close_code(error)

    @property
    def _unplayed(self) -> bool:
        return self._playout.unplayed

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
                    self._press(key.digit)
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
        self._hear(media.payload, media.timestamp)

    # output

    def _clear(self) -> None:
        for data in self._playout.clear():
            self._connection.write_message(data, is_text=True)

    def _flush(self) -> None:
        """Send what the outbox holds, for as long as the socket takes it."""
        self._flush_scheduled = False
        connection = self._connection
        while connection.is_open and not connection.paused and (message := self._outbox.take()) is not None:
            for data in self._playout.render(message):
                connection.write_message(data, is_text=True)
        self._check_silent()
