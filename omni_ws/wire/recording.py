"""Structs for the lines of a recording of a session's traffic; and the removal of secrets and content from messages.

The format is described in docs/recording.md.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import orjson
from msgspec import Meta, Struct

from omni_ws.core.chunks import (
    BESIDE_MOMENTS,
    MOMENTS,
)
from omni_ws.wire.frames import HEADER

FORMAT: Final = "omni_ws"
VERSION: Final = 1
#: Three years. No recording is longer: a line with a later time is broken.
MAX_AT_MS: Final = 1e11

RecordingKind: TypeAlias = Literal["websocket", "http", "session", "telephony", "realtime", "live", "webrtc", "wyoming"]
Side: TypeAlias = Literal["client", "server", "lost"]


class HeaderLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first line of a recording."""

    recording: str
    version: int
    #: A native WebSocket session, one HTTP request, a session that spans several HTTP requests, a telephone call, a
    #: session of the Realtime or the Live API over WebSocket, one of either over WebRTC, or a session over Wyoming.
    kind: RecordingKind
    #: The ID of the session, or of the recording if there is no session.
    id: str
    server: str
    engine: str
    model: str
    #: The wall-clock time (RFC 3339) at which ``at`` is 0.
    started: str
    #: The name of the API key, never the key itself.
    key: str | None = None
    #: Whether messages are recorded with their content; otherwise only with size and hash.
    payloads: bool


class _Line(Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    #: Milliseconds since the start of the recording, by a monotonic clock.
    at: Annotated[float, Meta(ge=0, le=MAX_AT_MS)]


class _OnConnection(_Line, frozen=True, kw_only=True):
    #: The index of the connection, from 0; each HTTP request counts as one.
    connection: int


class OpenedLine(_OnConnection, frozen=True, kw_only=True, tag="open", omit_defaults=True):
    """A WebSocket was opened. If it resumes a session, ``last_output`` is the number of the last output received."""

    target: str
    subprotocol: str | None = None
    last_output: int | None = None


class RequestedLine(_OnConnection, frozen=True, kw_only=True, tag="request", omit_defaults=True):
    """The head of an HTTP request."""

    method: str
    target: str
    headers: dict[str, str] = {}


class _Content(_OnConnection, frozen=True, kw_only=True, omit_defaults=True):
    """A message, or a piece of a body, as one of ``text``, ``binary`` and ``bad_text``.

    A recording without payloads has only metadata in these fields, and ``size`` and ``sha256`` of the whole content.
    """

    text: str | None = None
    #: Base64 in the JSON.
    binary: bytes | None = None
    #: A text message that is not UTF-8.
    bad_text: bytes | None = None
    size: int | None = None
    sha256: str | None = None


class ReceivedLine(_Content, frozen=True, kw_only=True, tag="in", omit_defaults=True):
    """Content that the client sent."""


class SentLine(_Content, frozen=True, kw_only=True, tag="out", omit_defaults=True):
    """Content that the server sent."""


class InputEndedLine(_OnConnection, frozen=True, kw_only=True, tag="in_end"):
    """The body of a request ended."""


class AnsweredLine(_OnConnection, frozen=True, kw_only=True, tag="response", omit_defaults=True):
    """The head of an HTTP response."""

    status: int
    headers: dict[str, str] = {}


class OutputEndedLine(_OnConnection, frozen=True, kw_only=True, tag="out_end"):
    """The body of a response ended."""


class ClosedLine(_OnConnection, frozen=True, kw_only=True, tag="close", omit_defaults=True):
    """A connection was closed; ``by`` is the side that closed it first, ``code`` the close code of a WebSocket."""

    by: Side
    code: int | None = None


class SoundLine(_Line, frozen=True, kw_only=True, tag="sound", omit_defaults=True):
    """Sound that is not in a message, but on a media track or a telephone line.

    The user's sound ends at ``at``. The server's sound is played from ``at`` on, or once all earlier sound was played.
    """

    by: Literal["user", "server"]
    format: str
    sample_rate: int
    #: Base64 in the JSON.
    audio: bytes
    #: The request to whose answer the sound belongs; None for other sound, and for the user's.
    request_id: str | None = None


class ToldLine(_Line, frozen=True, kw_only=True, tag="told"):
    """An event of the session, as a frame of the native WebSocket without its sound.

    Written only if the client speaks another protocol. The texts of a Wyoming client are written as ``input_chunk``.
    """

    text: str


class PlayedLine(_Line, frozen=True, kw_only=True, tag="played"):
    """The length of an answer that was played by now, in ms, as known to the server without the client's reports."""

    request_id: str
    played_ms: float


class StoredLine(_Line, frozen=True, kw_only=True, tag="stored"):
    """The client asked for the session to be stored (``store`` of the Live API), so that it may read the recording."""


class CutLine(_Line, frozen=True, kw_only=True, tag="cut"):
    """The recording stops here, while the session continues."""

    reason: str


class EndedLine(_Line, frozen=True, kw_only=True, tag="end"):
    """The last line of a complete recording."""


RecordedLine: TypeAlias = (
    OpenedLine
    | RequestedLine
    | ReceivedLine
    | SentLine
    | InputEndedLine
    | AnsweredLine
    | OutputEndedLine
    | ClosedLine
    | SoundLine
    | ToldLine
    | PlayedLine
    | StoredLine
    | CutLine
    | EndedLine
)
#: Lines with more than the messages of the connections. A replay has no use for them.
BesideLine: TypeAlias = SoundLine | ToldLine | PlayedLine | StoredLine

_encoder: Final = msgspec.json.Encoder()
_event_decoder: Final[msgspec.json.Decoder[RecordedLine]] = msgspec.json.Decoder(RecordedLine)
_header_decoder: Final[msgspec.json.Decoder[HeaderLine]] = msgspec.json.Decoder(HeaderLine)


def encode_line(line: HeaderLine | RecordedLine) -> bytes:
    """Encode a line as JSON, with a newline at the end."""
    return _encoder.encode(line) + b"\n"


def decode_header(line: bytes) -> HeaderLine:
    """Parse the first line. Raises ValueError with the reason if it is not the header of a supported recording."""
    try:
        first: Any = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a recording: {error}") from None
    if not isinstance(first, dict) or first.get("recording") != FORMAT:
        raise ValueError("not a recording of omni_ws")
    if first.get("version") != VERSION:
        raise ValueError(
            f"unsupported recording version {first.get('version')!r}; this program reads version {VERSION}"
        )
    try:
        return _header_decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


def decode_event(line: bytes) -> RecordedLine:
    """Parse any line after the first. Raises ValueError with the reason."""
    try:
        event = _event_decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    except UnicodeDecodeError:
        raise ValueError("invalid UTF-8") from None
    if isinstance(event, ReceivedLine | SentLine):
        forms = (event.text, event.binary, event.bad_text, event.size)
        if all(form is None for form in forms):
            raise ValueError("a message must have content")
    return event


# What a recording omits: credentials always, and content unless payloads are recorded.

_SECRET: Final = b'"resume_token"'
REDACTED: Final = "redacted"

#: The fields of frames that hold metadata. All other fields, also unknown ones, are treated as content.
_HARMLESS: Final = frozenset(
    {
        *("type", "sequence_id", "modality", "format", "timestamp_ms", "end_of_input", "request_id", "session_id"),
        *("next_sequence_id", "buffered_chunks", "received_bytes", "credit_bytes", "trigger", "input_mode", "final"),
        *("finish_reason", "usage", "start_ms", "sample_rate", "interim", "audio_ms", "played_ms", "replayed", "code"),
        *("reason", "retryable", "retry_after_ms", "time_left_ms", "server_time_ms", "expires_in", "channels"),
        *("input_tokens", "output_tokens", "total_tokens", "cached_tokens", "input_audio_ms", "output_audio_ms"),
        *("input_after_start_bytes", "limits", "capabilities", "turn_detection", "start_policy", "after_start"),
        *("input_audio", "output_audio", "modalities", "overlap", "task", "alignment", "alignment_window_ms"),
        *("out_of_order", "resume_token", "dropped_requests", "turn_id"),
        *MOMENTS,
        *BESIDE_MOMENTS,
    }
)
_OBJECTS: Final = frozenset({"error", "usage", "times", "input_audio", "output_audio"})


def without_secrets(data: bytes) -> bytes:
    """Return a JSON frame with its resume token masked: whoever reads the token could take over the session."""
    if _SECRET not in data:
        return data
    try:
        frame = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data
    if not isinstance(frame, dict) or not isinstance(frame.get("resume_token"), str):
        return data
    return orjson.dumps(frame | {"resume_token": REDACTED})


def digest(data: bytes) -> tuple[int, str]:
    """Return the size of ``data`` and its SHA-256 in hexadecimal."""
    return len(data), hashlib.sha256(data).hexdigest()


def without_content(data: bytes) -> bytes | None:
    """Return a JSON frame with all content replaced by size and hash; None for anything but a JSON object."""
    try:
        frame = orjson.loads(data)
        return orjson.dumps(_emptied(frame, is_inner=False)) if isinstance(frame, dict) else None
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # encoding fails for objects that are nested too deeply
        return None


def without_payload(data: bytes) -> tuple[bytes, int, str]:
    """Return the header of a binary frame, and the size and hash of its payload."""
    return data[: HEADER.size], *digest(data[HEADER.size :])


def _emptied(fields: dict[str, Any], *, is_inner: bool) -> dict[str, Any]:
    emptied: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _OBJECTS and isinstance(value, dict) and not is_inner:
            emptied[name] = _emptied(value, is_inner=True)
        elif (name in _HARMLESS - _OBJECTS) or value is None or isinstance(value, bool):
            emptied[name] = value
        else:
            content = value.encode() if isinstance(value, str) else orjson.dumps(value)
            size, sha256 = digest(content)
            emptied[name] = {"size": size, "sha256": sha256}
    return emptied
