"""The messages of a media stream, in the format that Twilio documents for bidirectional streams.

Every message is a JSON object in a text frame, and ``event`` names its kind. Unknown fields are ignored. Numbers may be
strings, as Twilio sends them. Audio is µ-law at 8 kHz (G.711), mono, in base64.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from omni_ws.core.json_values import check_values
from omni_ws.errors import InvalidFrame, InvalidValue, UnsupportedFormat

ENCODING: Final = "audio/x-mulaw"
SAMPLE_RATE: Final = 8000
INBOUND: Final = "inbound"
#: It is kept for the length of the call, and repeated in each message of it.
MAX_STREAM_SID: Final = 256


class _Event(Struct, frozen=True, kw_only=True, tag_field="event", rename="camel"):
    pass


class ConnectedMessage(_Event, frozen=True, kw_only=True, tag="connected"):
    """The first message."""

    protocol: str = ""
    version: str = ""


class MediaFormat(Struct, frozen=True, kw_only=True, rename="camel"):
    encoding: str
    sample_rate: int
    channels: int = 1


class StreamStart(Struct, frozen=True, kw_only=True, rename="camel"):
    """What a stream is: the call that it belongs to, and the parameters that the call's script set for it."""

    stream_sid: str
    media_format: MediaFormat
    call_sid: str = ""
    account_sid: str = ""
    tracks: tuple[str, ...] = (INBOUND,)
    custom_parameters: dict[str, str] = {}


class StartMessage(_Event, frozen=True, kw_only=True, tag="start"):
    """The second message: audio follows."""

    start: StreamStart


class MediaFields(Struct, frozen=True, kw_only=True, rename="camel"):
    payload: bytes
    track: str = INBOUND
    #: Counts the messages of the track.
    chunk: int | None = None
    #: Milliseconds since the start of the stream.
    timestamp: int | None = None


class MediaMessage(_Event, frozen=True, kw_only=True, tag="media"):
    """A piece of audio, 20 ms as a rule."""

    media: MediaFields


class PressedKey(Struct, frozen=True, kw_only=True):
    digit: str = ""


class DtmfMessage(_Event, frozen=True, kw_only=True, tag="dtmf"):
    """A key was pressed."""

    dtmf: PressedKey = PressedKey()


class MarkName(Struct, frozen=True, kw_only=True):
    name: str


class MarkMessage(_Event, frozen=True, kw_only=True, tag="mark"):
    """The audio before the mark of this name was played, or was dropped by a ``clear``."""

    mark: MarkName


class StopMessage(_Event, frozen=True, kw_only=True, tag="stop"):
    """The call has ended."""


StreamMessage: TypeAlias = ConnectedMessage | StartMessage | MediaMessage | DtmfMessage | MarkMessage | StopMessage

_decoder: Final = msgspec.json.Decoder(StreamMessage, strict=False)


def decode_stream_message(data: bytes | bytearray | memoryview, *, is_text: bool) -> StreamMessage:
    """Raises UnsupportedFormat for a binary message, InvalidFrame for what is not JSON, and InvalidValue for an unknown
    event, a missing field, or a payload that is not base64."""
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
    """Raises UnsupportedFormat for other audio than µ-law, and InvalidValue for a stream without the caller's track."""
    audio = start.media_format
    if (audio.encoding, audio.sample_rate, audio.channels) != (ENCODING, SAMPLE_RATE, 1):
        raise UnsupportedFormat(f"media must be {ENCODING} at {SAMPLE_RATE} Hz with one channel")
    if len(start.stream_sid) > MAX_STREAM_SID:
        raise InvalidValue(f"streamSid has at most {MAX_STREAM_SID} characters", param="start.streamSid")
    if INBOUND not in start.tracks:
        raise InvalidValue(f"the stream has no {INBOUND} track", param="start.tracks")


class _Sent(Struct, frozen=True, kw_only=True, tag_field="event", rename="camel"):
    stream_sid: str


class _SentPayload(Struct, frozen=True):
    payload: bytes


class _SentMedia(_Sent, frozen=True, kw_only=True, tag="media"):
    media: _SentPayload


class _SentMark(_Sent, frozen=True, kw_only=True, tag="mark"):
    mark: MarkName


class _SentClear(_Sent, frozen=True, kw_only=True, tag="clear"):
    pass


def encode_media(stream_sid: str, payload: bytes) -> bytes:
    """Encode audio that the gateway appends to what it plays."""
    return msgspec.json.encode(_SentMedia(stream_sid=stream_sid, media=_SentPayload(payload)))


def encode_mark(stream_sid: str, name: str) -> bytes:
    """Encode a mark, which the gateway returns once it has played everything before it."""
    return msgspec.json.encode(_SentMark(stream_sid=stream_sid, mark=MarkName(name=name)))


def encode_clear(stream_sid: str) -> bytes:
    """Encode the command that drops everything that is not played. The marks in it are returned at once."""
    return msgspec.json.encode(_SentClear(stream_sid=stream_sid))
