"""The Wyoming protocol, by which Home Assistant talks to voice services: the bounds of its events, and their fields.

An event is a line of JSON (``type``, ``data``), then ``data_length`` bytes of JSON that are merged into ``data``, then
``payload_length`` bytes of content, which is raw PCM. Events and fields that have no struct here are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import orjson
from msgspec import Meta, Struct

from omni_ws.core.chunks import MAX_CHANNELS
from omni_ws.errors import InvalidFrame, OmniError, PayloadTooLarge
from omni_ws.wire.frames import loads_object
from omni_ws.wire.session_config import SampleRate

#: The longest line, without its end: what readers of the reference implementation take.
MAX_LINE_BYTES: Final = 64 * 1024
#: The most bytes of data after it: a text of a hundred pages.
MAX_DATA_BYTES: Final = 256 * 1024
#: The longest payload: half a minute of speech, or a second of 24 channels.
MAX_PAYLOAD_BYTES: Final = 1 << 20
#: Values of a line, or of data: they are few.
_MAX_VALUES: Final = 10_000

# Bounds.


class _Head(Struct):
    #: Checked with the event; here only what its size depends on.
    data_length: int | None = None
    payload_length: int | None = None


class EventBounds:
    """Finds the end of each event in a stream, in time that is linear in the bytes of the stream."""

    def __init__(self) -> None:
        #: The number of bytes at the beginning of the event that were searched, and have no line end.
        self._scanned = 0
        #: The size of the event, once its line is complete.
        self._size: int | None = None

    def end(self, received: bytearray, start: int) -> int | None:
        """Return the end of the event that begins at ``start`` of ``received``; None while it is incomplete.

        Until a call returns the end, all calls must be about the same event. Raises InvalidFrame or PayloadTooLarge;
        after that, no further event of the stream can be found.
        """
        if self._size is None:
            at = received.find(b"\n", start + self._scanned)
            line = (len(received) if at < 0 else at) - start
            if line > MAX_LINE_BYTES:
                raise PayloadTooLarge(f"the line of an event may have {MAX_LINE_BYTES} bytes")
            if at < 0:
                self._scanned = line
                return None
            self._size = line + 1 + _rest(bytes(received[start:at]))
        if len(received) - start < self._size:
            return None
        end = start + self._size
        self._scanned, self._size = 0, None
        return end


def _rest(line: bytes) -> int:
    """Return the number of bytes that follow the first line of an event."""
    try:
        head = msgspec.json.decode(line, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidFrame("an event must begin with a line of JSON, an object") from None
    rest = 0
    for name, most in (("data_length", MAX_DATA_BYTES), ("payload_length", MAX_PAYLOAD_BYTES)):
        length = getattr(head, name) or 0
        if length < 0:
            raise InvalidFrame(f"{name} must not be negative")
        if length > most:
            raise PayloadTooLarge(f"{name} may be {most}, not {length}")
        rest += length
    return rest


# Events.


class WyomingEvent(NamedTuple):
    """One event, of any type."""

    type: str
    data: Mapping[str, Any]
    payload: bytes = b""


def decode_event(frame: bytes) -> WyomingEvent:
    """Decode a whole event, of which ``EventBounds`` has found the end. Raises InvalidFrame."""
    line, _, rest = frame.partition(b"\n")
    try:
        head = loads_object(line, most=_MAX_VALUES)
        length = head.get("data_length") or 0
        data = head.get("data") or {}
        if length:
            data = {**data, **loads_object(rest[:length], most=_MAX_VALUES)}
    except (UnicodeDecodeError, TypeError):
        raise InvalidFrame("the data of an event must be an object in UTF-8") from None
    kind = head.get("type")
    if not isinstance(kind, str) or not isinstance(data, dict):
        raise InvalidFrame("an event must have a type, a text; its data must be an object")
    return WyomingEvent(kind, data, rest[length:])


def encode_event(kind: str, data: Mapping[str, Any] | None = None, payload: bytes = b"") -> bytes:
    """Encode an event. Its data follow the line, since readers take a line of at most 64 KiB."""
    body = orjson.dumps(data) if data else b""
    head = {"type": kind, "data_length": len(body), "payload_length": len(payload)}
    return b"".join((orjson.dumps({name: value for name, value in head.items() if value}), b"\n", body, payload))


def error_event(error: OmniError) -> bytes:
    """Encode the event that reports an error."""
    return encode_event("error", {"text": error.message, "code": error.code})


# The fields of events that clients send.

#: A tag of a language, also with an underscore, as some voices are named.
LanguageTag: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z]{2,8}([-_][A-Za-z0-9]{1,8})*$", max_length=64)]
#: The longest name of a conversation that is known again.
MAX_CONVERSATION_ID: Final = 128
Stage: TypeAlias = Literal["wake", "asr", "intent", "handle", "tts"]


class NoFields(Struct, frozen=True):
    """The fields of an event that needs none; any that it has are ignored."""


class PcmFields(Struct, frozen=True):
    """The format of the sound of an ``audio-start`` or ``audio-chunk``. ``width`` is in bytes a sample."""

    rate: SampleRate
    width: Annotated[int, Meta(ge=1, le=4)]
    channels: Annotated[int, Meta(ge=1, le=MAX_CHANNELS)]


class TranscribeFields(Struct, frozen=True, kw_only=True):
    """A request to transcribe the speech that follows, which may contain these names and terms."""

    name: str | None = None
    language: LanguageTag | None = None
    transcript_names: list[str] | None = None
    transcript_terms: list[str] | None = None


class VoiceFields(Struct, frozen=True, kw_only=True):
    """The voice that a client wants; a name takes precedence over a language."""

    name: str | None = None
    language: LanguageTag | None = None
    speaker: str | None = None


class SpeechFields(Struct, frozen=True, kw_only=True):
    """A ``synthesize-start``: how to read aloud the texts that follow."""

    voice: VoiceFields | None = None
    text_format: str | None = None


class TextToSpeak(SpeechFields, frozen=True, kw_only=True):
    """A ``synthesize``: a text to read aloud."""

    text: str


class TextPiece(Struct, frozen=True):
    """A ``synthesize-chunk``: the next piece of a text to read aloud."""

    text: str


class TextToHandle(Struct, frozen=True, kw_only=True):
    """A ``transcript``: the words of a user, to be answered. The answer has the same ``context``."""

    text: str
    context: dict[str, Any] | None = None

    @property
    def conversation_id(self) -> str | None:
        """The client's id for the conversation, which may continue over another connection; None without one."""
        found = None if self.context is None else self.context.get("conversation_id")
        return found if isinstance(found, str) and 0 < len(found) <= MAX_CONVERSATION_ID else None


class PipelineFields(Struct, frozen=True, kw_only=True):
    """A ``run-pipeline`` of a satellite: the first and the last stage that process the sound that follows."""

    start_stage: Stage
    end_stage: Stage
    restart_on_end: bool = False


class ProgramName(Struct, frozen=True):
    """A ``select-program``: the name of one of the programs in ``info``."""

    name: str


class PingFields(Struct, frozen=True):
    """A ``ping``, whose text the ``pong`` repeats."""

    text: str | None = None
