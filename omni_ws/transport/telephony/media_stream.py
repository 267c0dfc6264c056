"""``/v1/telephony/media-stream``: calls over the media stream of a telephony gateway.

Messages are those that Twilio documents for bidirectional streams. Each is a JSON object in a text frame, and ``event``
names its kind. Unknown fields are ignored. Numbers may be strings, as Twilio sends them. Audio is µ-law at 8 kHz
(G.711), mono, in base64.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct
from websockets.frames import CloseCode

from omni_ws.config.keys import ApiKey
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.core.json_values import check_values
from omni_ws.errors import (
    InvalidFrame,
    InvalidRequest,
    InvalidValue,
    OmniError,
    Refused,
    SessionTimeout,
    Unauthenticated,
    UnsupportedFormat,
    websocket_close_code,
)
from omni_ws.service import unexpected
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.service.sessions.session import Session
from omni_ws.transport.http.access import KEY_SUBPROTOCOLS
from omni_ws.transport.http.application import Application, Router, UpgradeDecision, needs_upgrade
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.native.connection import Pause, StreamConnection, stream_accepted
from omni_ws.transport.native.keep_alive import PeerRounds
from omni_ws.transport.native.tcp_link import Playout
from omni_ws.transport.recording import (
    begin_recording,
    recorded,
)
from omni_ws.transport.telephony.call import TELEPHONY_ORIGIN, PhoneCall, PhoneCalls

TELEPHONY_PATH: Final = "/v1/telephony/media-stream"
#: A message of 20 ms of audio has some 300 bytes.
MAX_MESSAGE_BYTES: Final = 64 * 1024
#: Custom parameters of ``start``: the API key, for gateways that cannot send headers, and fields of the session.
KEY_PARAMETER: Final = "api_key"
SESSION_PARAMETERS: Final = ("voice", "instructions", "greeting")

ENCODING: Final = "audio/x-mulaw"
SAMPLE_RATE: Final = 8000
_AUDIO_FORMAT: Final = {"format": AudioEncoding.PCMU.value, "sample_rate": SAMPLE_RATE}


class TelephonyStreams(PhoneCalls):
    """The front end of telephony gateways: accepts their handshakes, and opens a session for each stream."""

    def __init__(self, app: Application) -> None:
        super().__init__(app)
        self._rounds = PeerRounds.configured(self._config.streaming_input)

    def register(self, router: Router) -> None:
        if self._config.telephony.enabled:
            router.add("GET", TELEPHONY_PATH, needs_upgrade)
            router.add_websocket(TELEPHONY_PATH, self.upgrade)

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Accept a handshake. Raises Unauthenticated for an unknown key; a key may also come later, in ``start``."""
        presents_key = "authorization" in request.headers or any(
            entry.startswith(KEY_SUBPROTOCOLS) for entry in request.offered_subprotocols
        )
        key = self._authenticator.authenticate(request) if presents_key else None
        serve = partial(self._serve, client=request.client, key=key, presents_key=presents_key)
        return stream_accepted(self._sessions, key, serve=serve, route=TELEPHONY_PATH, max_size=MAX_MESSAGE_BYTES)

    async def _serve(
        self, connection: StreamConnection, *, client: str, key: ApiKey | None, presents_key: bool
    ) -> None:
        """Serve one connection, from the end of its handshake to its close."""
        opening = StreamOpening(connection)
        self._openings.add(opening.refuse)
        try:
            start = await opening.wait(self._config.http.header_timeout_sec)
            if start is None:
                return
            if not presents_key:
                key = self._key_of(start)
                connection.limit_input(self._sessions.admission.input_pace(key))
            given = start.custom_parameters
            fields: dict[str, str] = {name: given[name] for name in SESSION_PARAMETERS if name in given}
            session = await self._open(key, client, _AUDIO_FORMAT, **fields)
        except OmniError as error:
            await opening.close(close_code(error), error.message)
            return
        finally:
            self._openings.discard(opening.refuse)
        begin_recording(self._recorder, session, TELEPHONY_ORIGIN, key)
        # From here on: the start message may hold a key.
        connection = recorded(connection, session.recording)
        sounds = self._config.telephony.thinking_sound
        call = StreamCall(connection, session, start.stream_sid, rounds=self._rounds, thinking_sound=sounds)
        behind = opening.behind
        del start, given, opening  # with all parameters of the call, which it does not need
        session.attach(call)
        session.conversation.greet()
        await call.run(behind)

    def _key_of(self, start: StreamStart) -> ApiKey | None:
        presented = start.custom_parameters.get(KEY_PARAMETER)
        if presented is None:
            return self._authenticator.authenticate_header(None)
        if not presented.isascii():
            raise Unauthenticated("this key is not known here")
        return self._authenticator.authenticate_header(f"Bearer {presented}")


def close_code(error: OmniError) -> int:
    """Return the code with which to close a stream after ``error``. Gateways read codes, but no error messages."""
    match error:
        case InvalidFrame():
            return CloseCode.INVALID_DATA
        case UnsupportedFormat():
            return CloseCode.UNSUPPORTED_DATA
        case InvalidRequest() | Refused():
            return CloseCode.POLICY_VIOLATION
    return websocket_close_code(error) or CloseCode.INTERNAL_ERROR


# Before and during a call.


class StreamOpening:
    """The FrameReceiver of a connection until its stream starts: receives ``connected`` and ``start``, then pauses."""

    def __init__(self, connection: StreamConnection) -> None:
        self._connection = connection
        self._started: asyncio.Future[StreamStart | None] = asyncio.get_running_loop().create_future()
        self._connected = False
        self._abandoned = False
        #: Messages after ``start`` that were parsed in the same pass. They belong to the call.
        self.behind: list[tuple[bytes, bool]] = []

    async def wait(self, timeout: float) -> StreamStart | None:
        """Wait for ``start``, and return it; None if the peer disconnects first.

        Raises the error of an invalid message, SessionTimeout after ``timeout`` seconds, and the error given to
        ``refuse``.
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


class StreamCall(PhoneCall):
    """A phone call over a media stream: receives media, and sends media, marks and clears. ``stop`` ends the call."""

    def __init__(
        self,
        connection: StreamConnection,
        session: Session,
        stream_sid: str,
        *,
        rounds: PeerRounds,
        thinking_sound: bool,
    ) -> None:
        super().__init__(connection, session, rounds=rounds, thinking_sound=thinking_sound)
        self._stream_sid = stream_sid
        self._playout: MarkedPlayout = MarkedPlayout(stream_sid, self._report)
        self._last_chunk = -1

    def _close_code(self, error: OmniError) -> int:
        return close_code(error)

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

    def _send(self, audio: bytes) -> bool:
        self._connection.write_message(encode_media(self._stream_sid, audio), is_text=True)
        return not self._connection.paused

    def _clear(self) -> None:
        for data in self._playout.silence():
            self._connection.write_message(data, is_text=True)

    def _flush(self) -> None:
        """Send the messages of the outbox, as long as the socket takes them."""
        self._flush_scheduled = False
        connection = self._connection
        while connection.is_open and not connection.paused and (message := self._take_message()) is not None:
            for data in self._playout.render(message):
                connection.write_message(data, is_text=True)
        self._check_silent()


# What the caller hears.

#: µ-law has one byte a sample: 8 bytes a millisecond.
BYTES_PER_MS: Final = 8
#: A packet of the telephone network, 20 ms. Every media message holds whole packets.
FRAME_BYTES: Final = 20 * BYTES_PER_MS
#: The longest media message, and the audio between two marks: 200 ms.
PIECE_BYTES: Final = 10 * FRAME_BYTES
SILENCE: Final = b"\xff"
#: The most marks that are remembered, if a gateway returns none.
MAX_MARKS: Final = 256


class MarkedPlayout(Playout):
    """A Playout that renders answers as media, marks and clears, and learns from marks what the caller has heard.

    A mark is sent before the first audio of an answer, after every 200 ms of it, and after its end. When the gateway
    returns a mark, ``report`` is called with the request id and the position in its answer, in milliseconds, up to
    which audio was played. Marks that return after a ``clear`` were not played, and are ignored. Has no socket and no
    clock.
    """

    def __init__(self, stream_sid: str, report: Callable[[str, float], None]) -> None:
        super().__init__(FRAME_BYTES, AudioFormat(AudioEncoding.PCMU, SAMPLE_RATE), silence=SILENCE)
        self._stream_sid = stream_sid
        self._report = report
        #: The marks that have not returned, oldest first: by name, the request id and the position (ms) to report.
        self._marks: dict[str, tuple[str, float]] = {}
        #: The position of the last mark in the answer that is being sent, in bytes.
        self._marked = 0

    @property
    def unplayed(self) -> bool:
        """Whether audio is queued, or the gateway may still be playing."""
        return bool(self._marks) or super().unplayed

    def render(self, message: ServerMessage) -> list[bytes]:
        """Render one of the session's messages as messages of the stream; none for text, transcripts and errors."""
        if self.hear(message):
            return self.silence()
        messages: list[bytes] = []
        while (played := self.take(PIECE_BYTES)) is not None:
            request_id, position, audio = played
            if not audio:
                messages.append(self._mark(request_id, position, name="end"))
                continue
            if not position:
                messages.append(self._mark(request_id, 0))
            messages.append(encode_media(self._stream_sid, audio))
            position += len(audio)
            if position - self._marked >= PIECE_BYTES:
                messages.append(self._mark(request_id, position))
        return messages

    def mark_returned(self, name: str) -> None:
        """Report the playback up to a mark that the gateway has returned. Unknown names are ignored."""
        if name not in self._marks:
            return
        while self._marks:
            earlier = next(iter(self._marks))
            request_id, played_ms = self._marks.pop(earlier)
            if earlier == name:
                self._report(request_id, played_ms)
                return

    def silence(self) -> list[bytes]:
        """Drop all audio that was not played. Returns the ``clear`` for the gateway; nothing if all was played."""
        unplayed = self.unplayed
        self.clear()
        self._marks.clear()
        return [encode_clear(self._stream_sid)] if unplayed else []

    def _mark(self, request_id: str, position: int, *, name: str | None = None) -> bytes:
        self._marked = position
        position_ms = position / BYTES_PER_MS
        name = f"{request_id}:{name or round(position_ms)}"
        self._marks[name] = (request_id, position_ms)
        if len(self._marks) > MAX_MARKS:
            del self._marks[next(iter(self._marks))]
        return encode_mark(self._stream_sid, name)


# The messages of a gateway.

#: The track with the caller's audio.
INBOUND: Final = "inbound"
#: Characters of a stream's id, which is kept during the call, and repeated in each message to the gateway.
MAX_STREAM_SID: Final = 256


class _Event(Struct, frozen=True, kw_only=True, tag_field="event", rename="camel"):
    pass


class ConnectedMessage(_Event, frozen=True, kw_only=True, tag="connected"):
    """The first message of a stream."""

    protocol: str = ""
    version: str = ""


class MediaFormat(Struct, frozen=True, kw_only=True, rename="camel"):
    encoding: str
    sample_rate: int
    channels: int = 1


class StreamStart(Struct, frozen=True, kw_only=True, rename="camel"):
    """The description of a stream: its ids, its format, and the parameters that the call's script has set."""

    stream_sid: str
    media_format: MediaFormat
    call_sid: str = ""
    account_sid: str = ""
    tracks: tuple[str, ...] = (INBOUND,)
    custom_parameters: dict[str, str] = {}


class StartMessage(_Event, frozen=True, kw_only=True, tag="start"):
    """The second message of a stream: audio follows."""

    start: StreamStart


class MediaFields(Struct, frozen=True, kw_only=True, rename="camel"):
    payload: bytes
    track: str = INBOUND
    #: Counts the messages of the track.
    chunk: int | None = None
    #: Milliseconds since the start of the stream.
    timestamp: int | None = None


class MediaMessage(_Event, frozen=True, kw_only=True, tag="media"):
    """A piece of the caller's audio, usually 20 ms."""

    media: MediaFields


class PressedKey(Struct, frozen=True, kw_only=True):
    digit: str = ""


class DtmfMessage(_Event, frozen=True, kw_only=True, tag="dtmf"):
    """A key that the caller pressed."""

    dtmf: PressedKey = PressedKey()


class MarkName(Struct, frozen=True, kw_only=True):
    name: str


class MarkMessage(_Event, frozen=True, kw_only=True, tag="mark"):
    """A mark that the gateway returns: the audio before the mark was played, or dropped by a ``clear``."""

    mark: MarkName


class StopMessage(_Event, frozen=True, kw_only=True, tag="stop"):
    """The last message of a stream: the call has ended."""


StreamMessage: TypeAlias = ConnectedMessage | StartMessage | MediaMessage | DtmfMessage | MarkMessage | StopMessage
_decoder: Final = msgspec.json.Decoder(StreamMessage, strict=False)


def decode_stream_message(data: bytes | bytearray | memoryview, *, is_text: bool) -> StreamMessage:
    """Decode a message of a gateway.

    Raises UnsupportedFormat for a binary message, InvalidFrame for a message that is not JSON, and InvalidValue for an
    unknown event, a missing field, or a payload that is not base64.
    """
    if not is_text:
        raise UnsupportedFormat("messages must be JSON text frames")
    try:
        check_values(data)
        message: StreamMessage = _decoder.decode(data)
    except msgspec.ValidationError as error:
        raise InvalidValue(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidFrame("a message is not valid JSON") from None
    return message


def check_start(start: StreamStart) -> None:
    """Check the description of a stream.

    Raises UnsupportedFormat for audio other than µ-law at 8 kHz, and InvalidValue for a stream without the caller's
    track or with a long id.
    """
    audio = start.media_format
    if (audio.encoding, audio.sample_rate, audio.channels) != (ENCODING, SAMPLE_RATE, 1):
        raise UnsupportedFormat(f"media must be {ENCODING} at {SAMPLE_RATE} Hz with one channel")
    if len(start.stream_sid) > MAX_STREAM_SID:
        raise InvalidValue(f"streamSid has at most {MAX_STREAM_SID} characters", param="start.streamSid")
    if INBOUND not in start.tracks:
        raise InvalidValue(f"the stream has no {INBOUND} track", param="start.tracks")


# The messages of the server. The bytes in them are written as base64.


def encode_media(stream_sid: str, payload: bytes) -> bytes:
    """Encode audio for the gateway, which appends it to the audio that it plays."""
    return msgspec.json.encode({"event": "media", "streamSid": stream_sid, "media": {"payload": payload}})


def encode_mark(stream_sid: str, name: str) -> bytes:
    """Encode a mark. The gateway returns it once all audio before it was played."""
    return msgspec.json.encode({"event": "mark", "streamSid": stream_sid, "mark": {"name": name}})


def encode_clear(stream_sid: str) -> bytes:
    """Encode a ``clear``: the gateway drops all audio not played, and returns the marks in that audio immediately."""
    return msgspec.json.encode({"event": "clear", "streamSid": stream_sid})
