"""The lines of a recording: what a client sent, what the server answered, and when. See docs/recording.md."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

FORMAT: Final = "omni_ws"
VERSION: Final = 1

RecordingKind: TypeAlias = Literal["websocket", "http", "session"]
Side: TypeAlias = Literal["client", "server", "lost"]


class HeaderLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first line."""

    recording: str
    version: int
    #: A native WebSocket session; one HTTP request; a session over several HTTP requests.
    kind: RecordingKind
    #: Of the session, or of this recording where there is none.
    id: str
    server: str
    engine: str
    model: str
    #: Wall time of offset 0, RFC 3339.
    started: str
    #: Name of the key, never the key.
    key: str | None = None
    #: Whether what was said is here, and not only how much it was.
    payloads: bool


class _Line(Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    #: Milliseconds since the beginning, by a clock that never jumps.
    at: float


class _OnConnection(_Line, frozen=True, kw_only=True):
    #: Counted from 0. Each HTTP request counts as one.
    connection: int


class OpenedLine(_OnConnection, frozen=True, kw_only=True, tag="open", omit_defaults=True):
    """A WebSocket was opened. With ``last_output`` it came back to the session, having heard up to there."""

    target: str
    subprotocol: str | None = None
    last_output: int | None = None


class RequestedLine(_OnConnection, frozen=True, kw_only=True, tag="request", omit_defaults=True):
    method: str
    target: str
    headers: dict[str, str] = {}


class _Content(_OnConnection, frozen=True, kw_only=True, omit_defaults=True):
    """A message or a piece of a body: in one of the first three, or, where payloads are left out, its size and hash."""

    text: str | None = None
    #: base64, as in every line.
    binary: bytes | None = None
    #: A text message that is not UTF-8.
    bad_text: bytes | None = None
    size: int | None = None
    sha256: str | None = None


class ReceivedLine(_Content, frozen=True, kw_only=True, tag="in", omit_defaults=True):
    pass


class SentLine(_Content, frozen=True, kw_only=True, tag="out", omit_defaults=True):
    pass


class InputEndedLine(_OnConnection, frozen=True, kw_only=True, tag="in_end"):
    """The end of a request's body."""


class AnsweredLine(_OnConnection, frozen=True, kw_only=True, tag="response", omit_defaults=True):
    """The head of an answer."""

    status: int
    headers: dict[str, str] = {}


class OutputEndedLine(_OnConnection, frozen=True, kw_only=True, tag="out_end"):
    """The end of an answer's body."""


class ClosedLine(_OnConnection, frozen=True, kw_only=True, tag="close", omit_defaults=True):
    """``by`` is who closed first; ``code`` is that of a WebSocket."""

    by: Side
    code: int | None = None


class CutLine(_Line, frozen=True, kw_only=True, tag="cut"):
    """The session went on, the recording does not."""

    reason: str


class EndedLine(_Line, frozen=True, kw_only=True, tag="end"):
    """The last line of a whole recording."""


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
    return _encoder.encode(line) + b"\n"


def decode_header(line: bytes) -> HeaderLine:
    """Raises ValueError, which says what is wrong."""
    try:
        first: Any = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"this is no recording: {error}") from None
    if not isinstance(first, dict) or first.get("recording") != FORMAT:
        raise ValueError("this is no recording of omni_ws")
    if first.get("version") != VERSION:
        raise ValueError(f"a recording of version {first.get('version')!r}; this program reads version {VERSION}")
    try:
        return _header_decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


def decode_event(line: bytes) -> RecordedLine:
    """Raises ValueError, which says what is wrong."""
    try:
        event = _event_decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    except UnicodeDecodeError:
        raise ValueError("this is not UTF-8") from None
    if isinstance(event, ReceivedLine | SentLine):
        forms = (event.text, event.binary, event.bad_text, event.size)
        if all(form is None for form in forms):
            raise ValueError("a message without content")
    return event
