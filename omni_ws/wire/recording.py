"""The lines of a recording of a session's traffic, as JSON structs. The format is described in docs/recording.md."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

FORMAT: Final = "omni_ws"
VERSION: Final = 1

RecordingKind: TypeAlias = Literal["websocket", "http", "session", "telephony", "realtime"]
Side: TypeAlias = Literal["client", "server", "lost"]


class HeaderLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first line."""

    recording: str
    version: int
    #: A native WebSocket session, one HTTP request, a session that spans several HTTP requests, a telephone call, or a
    #: session of the Realtime API.
    kind: RecordingKind
    #: The ID of the session, or of the recording when there is no session.
    id: str
    server: str
    engine: str
    model: str
    #: Wall-clock time (RFC 3339) that corresponds to ``at`` = 0.
    started: str
    #: The name of the API key, never the key itself.
    key: str | None = None
    #: Whether messages are recorded with their content, or only with size and hash.
    payloads: bool


class _Line(Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    #: Milliseconds since the start of the recording, by a monotonic clock.
    at: float


class _OnConnection(_Line, frozen=True, kw_only=True):
    #: The index of the connection, from 0; each HTTP request counts as one.
    connection: int


class OpenedLine(_OnConnection, frozen=True, kw_only=True, tag="open", omit_defaults=True):
    """A WebSocket was opened. ``last_output`` is set when it resumed the session, after that output."""

    target: str
    subprotocol: str | None = None
    last_output: int | None = None


class RequestedLine(_OnConnection, frozen=True, kw_only=True, tag="request", omit_defaults=True):
    """The head of an HTTP request."""

    method: str
    target: str
    headers: dict[str, str] = {}


class _Content(_OnConnection, frozen=True, kw_only=True, omit_defaults=True):
    """A message, or a piece of a body, in one of ``text``, ``binary`` and ``bad_text``.

    A recording without payloads has metadata there, if anything, and the ``size`` and ``sha256`` of the content.
    """

    text: str | None = None
    #: Base64 in the file.
    binary: bytes | None = None
    #: A text message that is not UTF-8.
    bad_text: bytes | None = None
    size: int | None = None
    sha256: str | None = None


class ReceivedLine(_Content, frozen=True, kw_only=True, tag="in", omit_defaults=True):
    """Content from the client."""


class SentLine(_Content, frozen=True, kw_only=True, tag="out", omit_defaults=True):
    """Content from the server."""


class InputEndedLine(_OnConnection, frozen=True, kw_only=True, tag="in_end"):
    """The end of a request's body."""


class AnsweredLine(_OnConnection, frozen=True, kw_only=True, tag="response", omit_defaults=True):
    """The head of an HTTP response."""

    status: int
    headers: dict[str, str] = {}


class OutputEndedLine(_OnConnection, frozen=True, kw_only=True, tag="out_end"):
    """The end of a response's body."""


class ClosedLine(_OnConnection, frozen=True, kw_only=True, tag="close", omit_defaults=True):
    """A connection was closed by ``by`` first; ``code`` is the close code of a WebSocket."""

    by: Side
    code: int | None = None


class CutLine(_Line, frozen=True, kw_only=True, tag="cut"):
    """The recording stops while the session continues."""

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
    | CutLine
    | EndedLine
)

_encoder: Final = msgspec.json.Encoder()
_event_decoder: Final[msgspec.json.Decoder[RecordedLine]] = msgspec.json.Decoder(RecordedLine)
_header_decoder: Final[msgspec.json.Decoder[HeaderLine]] = msgspec.json.Decoder(HeaderLine)


def encode_line(line: HeaderLine | RecordedLine) -> bytes:
    """Return the line as JSON with a newline."""
    return _encoder.encode(line) + b"\n"


def decode_header(line: bytes) -> HeaderLine:
    """Parse the first line. Raises ValueError with the reason for anything but a supported recording."""
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
    """Parse any further line. Raises ValueError with the reason."""
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
