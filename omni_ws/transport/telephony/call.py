"""PhoneCall: a started media stream, and the session that talks over it."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from websockets.frames import CloseCode

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.output import OutputChunk
from omni_ws.errors import (
    ORDERLY_ENDS,
    EngineOverloaded,
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
from omni_ws.transport.native.keep_alive import KeepAlive, KeepAliveSettings, PeerState
from omni_ws.transport.native.pause import Pause
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


class PhoneCall:
    """One call: media in, the answers' media, marks and clears out; see FrameReceiver and Attachment.

    The call ends when the session does: with an error of the stream, with ``stop``, with the connection, or with the
    server. Before an orderly end the caller hears the answer to its end.
    """

    def __init__(
        self, connection: StreamConnection, session: LiveSession, stream_sid: str, *, keep_alive: KeepAliveSettings
    ) -> None:
        self._connection = connection
        self._session = session
        self._conversation = session.conversation
        self._outbox = session.outbox
        self._playout = Playout(stream_sid, session.conversation.loudspeaker.report)
        self._loop = asyncio.get_running_loop()
        self._keep_alive = KeepAlive(keep_alive, now=self._loop.time())
        self._last_chunk = -1
        self._reading_paused = False
        self._flush_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        #: The end of the session: its reason, or None for the caller's own.
        self._over: asyncio.Future[OmniError | None] = self._loop.create_future()
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
            if self._timer is not None:
                self._timer.cancel()
            self._session.detach(self)

    async def _played(self) -> None:
        """Waits until the gateway has returned the last mark."""
        lead_ms = self._conversation.configuration.effective.max_lead_ms or 0
        try:
            async with asyncio.timeout(lead_ms / 1000 + PLAYOUT_MARGIN_SEC):
                await self._silent.wait()
        except TimeoutError:
            logger.debug("the gateway did not return the last mark of an answer")

    def session_over(self, error: OmniError | None) -> None:
        if not self._over.done():
            self._over.set_result(error)

    def replaced(self) -> None:
        raise AssertionError("calls cannot be resumed")

    def connection_closing(self) -> None:
        self._silent.set()
        self._session.end(None)

    @property
    def _listening(self) -> bool:
        return self._session.is_open

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
                case DtmfMessage():
                    logger.debug("session %s: ignored a key press", self._session.session_id)
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
        if not self._reading_paused and (self._outbox.full or self._conversation.input_full()):
            self._reading_paused = True
            self._connection.pause_reading(Pause.SESSION)

    def input_refused(self, error: EngineOverloaded) -> None:
        self._session.end(error)

    def input_may_continue(self) -> None:
        if self._reading_paused and not self._outbox.full and not self._conversation.input_full():
            self._reading_paused = False
            self.resume_input()
            self._connection.resume_reading(Pause.SESSION)

    output_has_room = input_may_continue

    def resume_input(self) -> None:
        self._conversation.stream.unheard(now=self._connection.touch())

    def receive_pong(self, data: bytes) -> None:
        pass

    # output

    def write_now(self, output: OutputChunk) -> bool:
        return False  # its marks and pauses are rendered in ``_flush``

    def output_ready(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    resume_output = output_ready

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

    # time

    def timer_changed(self) -> None:
        if self._listening:
            self._arm(self._loop.time())

    def _arm(self, now: float) -> None:
        self._keep_alive.last_sign_of_life = self._connection.heard_at
        deadlines = (
            self._conversation.get_timer(),
            self._keep_alive.get_timer(listening=self._connection.is_reading),
        )
        if self._timer is not None:
            self._timer.cancel()
        when = min((deadline for deadline in deadlines if deadline is not None), default=None)
        self._timer = None if when is None else self._loop.call_at(max(when, now), self._on_timer, when)

    def _on_timer(self, due: float) -> None:
        self._timer = None
        if not self._listening:
            return
        now = max(self._loop.time(), due)  # a timer may fire a little early
        if self._connection.held_to_pace or self._reading_paused:
            self._conversation.stream.unheard(now=now)  # it is the server that does not read
        try:
            self._conversation.handle_timer(now)
        except OmniError as error:
            self._session.end(error)
            return
        self._keep_alive.last_sign_of_life = self._connection.heard_at
        match self._keep_alive.handle_timer(now, listening=self._connection.is_reading):
            case PeerState.SILENT if self._connection.is_open:
                self._connection.write_ping()
            case PeerState.GONE:
                self._connection.fail(CloseCode.INTERNAL_ERROR, "keepalive ping timeout")
                self.connection_closing()
        self._arm(now)
