"""Readers of what upstreams send in pieces: events (EventReader), their JSON, and audio (UpstreamAudio)."""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import Any, Final, NamedTuple

import orjson

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.container import WavHeaderReader
from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import MAX_SAMPLE_RATE, MIN_SAMPLE_RATE, AudioEncoding, AudioFormat
from omni_ws.core.json_values import MAX_BODY_VALUES, MAX_MESSAGE_VALUES, check_values
from omni_ws.engine.base import AudioOutput
from omni_ws.engine.remote.refusal import stream_error
from omni_ws.errors import EngineFailed, InvalidFrame, OmniError

# Server-sent events (WHATWG HTML, "Server-sent events").

#: The limit on an event, in bytes. One event may be the whole audio of an answer in base64.
MAX_EVENT_BYTES: Final = 64 * 1024 * 1024

#: The name of the event that stands for a whole body which is not a stream of events.
WHOLE_BODY: Final = "whole body"

#: The limit on white space before such a body, in bytes.
_MOST_BLANKS: Final = 256

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class ServerSentEvent(NamedTuple):
    """A server-sent event; ``name`` is ``message`` if the sender gives none."""

    name: str
    data: bytes


class EventReader:
    """A parser of server-sent events. A body that begins like a JSON object is a single event, named WHOLE_BODY.

    Lines end with LF, CR or CRLF, and pieces may be cut anywhere; comments, IDs and reconnection times are skipped.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._after_carriage_return = False
        self._at_start = True
        self._is_whole = False
        #: Whether the last piece contained a part of an event that is not complete yet.
        self.grows = False
        self._name = b""
        #: The lines of data so far, each with its end.
        self._data = bytearray()

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """Return the events that ``data`` completes. Raises EngineFailed for an event that is too long."""
        if self._is_whole:
            self._data += data
            self.grows = True
            self._check_size()
            return []
        before, events = self._pending, self._read(data)
        self.grows = self._pending > (0 if events else before)
        self._check_size()
        return events

    @property
    def _pending(self) -> int:
        return len(self._data) + (len(self._line) if self._line.startswith(b"data:") else 0)

    def _read(self, data: bytes) -> list[ServerSentEvent]:
        if self._after_carriage_return and data.startswith(b"\n"):
            data = data[1:]
            self._after_carriage_return = False
        if not data:
            return []
        self._after_carriage_return = data.endswith(b"\r")
        if self._at_start and len(self._line) < _MOST_BLANKS and _is_object(self._line + data):
            self._is_whole, self._data, self._line = True, self._line + data, bytearray()
            return []
        first, *others = _LINE_END.split(data)
        self._line += first
        events: list[ServerSentEvent] = []
        for following in others:
            self._end_line(events)
            self._line += following
        return events

    def finish(self) -> list[ServerSentEvent]:
        """Return the event that the end of the stream completes, if any: some servers omit the last blank line."""
        if self._is_whole:
            return [ServerSentEvent(WHOLE_BODY, bytes(self._data).removeprefix(_BYTE_ORDER_MARK))]
        events: list[ServerSentEvent] = []
        if self._line:
            self._end_line(events)
        self._dispatch(events)
        return events

    def _check_size(self) -> None:
        if len(self._line) + len(self._data) > MAX_EVENT_BYTES:
            raise EngineFailed("the upstream sent an event without an end")

    def _end_line(self, events: list[ServerSentEvent]) -> None:
        line, self._line = bytes(self._line), bytearray()
        if self._at_start:
            line, self._at_start = line.removeprefix(_BYTE_ORDER_MARK), False
        if not line:
            self._dispatch(events)
            return
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data += value
            self._data += b"\n"
        elif field == b"event":
            self._name = value

    def _dispatch(self, events: list[ServerSentEvent]) -> None:
        if self._data:
            name = self._name.decode("utf-8", "replace") or "message"
            del self._data[-1:]
            events.append(ServerSentEvent(name, bytes(self._data)))
        self._name, self._data = b"", bytearray()


def _is_object(body: bytes | bytearray) -> bool:
    """Whether a body begins like a JSON object."""
    return body.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"{"


# The content of events, in JSON.

#: The last event of a stream.
DONE: Final = b"[DONE]"
#: The fields with a model's reasoning: of vLLM, llama.cpp and LM Studio; of Ollama and newer vLLM.
THOUGHTS: Final = ("reasoning_content", "reasoning")
#: The fields with texts that arrive in pieces, also in lists of content parts.
_CUT_TEXTS: Final = frozenset({"content", *THOUGHTS, "refusal", "arguments", "transcript", "text", "thinking"})
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def event_content(event: ServerSentEvent, *, upstream: str, log_content: bool = False) -> dict[str, Any]:
    """Return the JSON object of an event. Raises the error of an error event, or EngineFailed if it is no object."""
    try:
        check_values(event.data, MAX_BODY_VALUES if event.name == WHOLE_BODY else MAX_MESSAGE_VALUES)
        content = orjson.loads(event.data)
    except InvalidFrame as error:
        raise EngineFailed(f"the upstream sent an event that is not read: {error.message}") from None
    except orjson.JSONDecodeError:
        if event.name == "error":
            message = event.data.decode("utf-8", "replace")
            raise stream_error({"message": message}, upstream=upstream, log_content=log_content) from None
        content = _with_halves(event.data)
    if not isinstance(content, dict):
        raise EngineFailed("the upstream sent an event that is not an object")
    if event.name == "error" or content.get("error") is not None:
        raise stream_error(content, upstream=upstream, log_content=log_content)
    return content


def _with_halves(data: bytes) -> Any:
    """Parse an event whose texts may begin or end with half a surrogate pair, as from servers that cut text in UTF-16.

    Halves are kept only in the texts of an answer, where the next event has the other half. Raises EngineFailed.
    """
    # Of the available parsers only the standard library's returns single surrogates.
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise EngineFailed("the upstream sent an event that is not JSON") from None
    return _mended(content, keeps=False)


def _mended(value: Any, *, keeps: bool) -> Any:
    if isinstance(value, str):
        return value if keeps else whole_text(value)
    if isinstance(value, list):
        return [_mended(one, keeps=keeps) for one in value]
    if isinstance(value, dict):
        return {whole_text(name): _mended(one, keeps=name in _CUT_TEXTS) for name, one in value.items()}
    return value


class Halves:
    """A joiner of surrogate pairs that are split between pieces of a text, as by servers that cut text in UTF-16."""

    def __init__(self) -> None:
        self._half = ""

    def feed(self, text: str) -> str:
        """Return the next piece without a trailing high surrogate, which is kept for the next call."""
        text, self._half = self._half + text, ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return whole_text(text)

    def finish(self) -> str:
        """Return U+FFFD if a high surrogate was kept; otherwise an empty text."""
        half, self._half = self._half, ""
        return whole_text(half)


def whole_text(text: str) -> str:
    """Return a text with its surrogate pairs joined to characters, and single surrogates replaced by U+FFFD."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# Audio.

#: A piece of audio may be a whole answer; it is passed on in pieces of this length.
_OUTPUT_MS: Final = 500
_WAV: Final = b"RIFF"
#: The first bytes of compressed files, which would sound like noise if they were taken for samples.
_COMPRESSED: Final = (b"ID3", b"fLaC", b"OggS", b"\x1aE\xdf\xa3")


class UpstreamAudio:
    """A converter of audio that an upstream sends in pieces to samples at one rate.

    The audio may be raw 16-bit samples, one WAV stream, or pieces that are WAV files. ``sample_rate`` is that of raw
    samples. All outputs have the rate of the first audio.
    """

    def __init__(self, *, sample_rate: int) -> None:
        self.output_ms = 0.0
        self._bare_rate = sample_rate
        self._rate: int | None = None
        self._base64 = ""
        self._decoder: AudioDecoder | None = None
        #: The beginning of a WAV file whose header is incomplete.
        self._header: WavHeaderReader | None = None
        self._head = bytearray()

    def feed_base64(self, text: str, *, sample_rate: int | None = None) -> list[AudioOutput]:
        """Return the audio that a piece of base64, padded or not, completes. Raises EngineFailed for invalid base64."""
        text = self._base64 + text
        whole = len(text) - len(text) % 4
        self._base64 = text[whole:]
        return self.feed(_decoded_base64(text[:whole]), sample_rate=sample_rate)

    def feed(self, data: bytes, *, sample_rate: int | None = None) -> list[AudioOutput]:
        """Return the audio that ``data`` completes. Raises EngineFailed for other data.

        ``sample_rate`` is the rate of raw samples, if the upstream reports it.
        """
        if not data:
            return []
        try:
            return self._outputs(self._decoded(data, sample_rate))
        except OmniError as error:
            raise EngineFailed(f"the upstream sent audio that cannot be read: {error.message}") from error

    def flush(self) -> list[AudioOutput]:
        """Return the audio that was held back, at the end: the rest of unpadded base64, and of the resampler."""
        held, self._base64 = self._base64.rstrip("="), ""
        if len(held) == 1:
            raise EngineFailed("the upstream's audio ends in the middle of a sample")
        outputs = self.feed(_decoded_base64(held + "=" * (-len(held) % 4)))
        if self._header is not None:
            raise EngineFailed("the upstream's audio ends in the middle of its header")
        return outputs + self._outputs(self._close())

    def _decoded(self, data: bytes, sample_rate: int | None) -> list[Samples]:
        if self._header is None and data.startswith(_WAV):
            pieces = self._close()
            self._header, self._head = WavHeaderReader(), bytearray()
            return pieces + self._feed_header(data)
        if self._header is not None:
            return self._feed_header(data)
        if self._decoder is None:
            if data.startswith(_COMPRESSED):
                raise EngineFailed("it is neither 16-bit samples nor wav")
            self._open(AudioFormat(AudioEncoding.PCM16, sample_rate or self._bare_rate))
        assert self._decoder is not None
        return [self._decoder.decode(data)]

    def _feed_header(self, data: bytes) -> list[Samples]:
        assert self._header is not None
        self._header.feed(data)
        self._head += data
        if self._header.header is None:
            return []
        self._open(AudioFormat(AudioEncoding.WAV, self._header.header.sample_rate))
        head, self._head, self._header = bytes(self._head), bytearray(), None
        assert self._decoder is not None
        return [self._decoder.decode(head)]

    def _open(self, source: AudioFormat) -> None:
        if not MIN_SAMPLE_RATE <= source.sample_rate <= MAX_SAMPLE_RATE:
            raise EngineFailed(f"its sample rate is {source.sample_rate} Hz")
        self._rate = self._rate or source.sample_rate
        self._decoder = AudioDecoder(source, sample_rate=self._rate)

    def _close(self) -> list[Samples]:
        decoder, self._decoder = self._decoder, None
        return [] if decoder is None else [decoder.flush()]

    def _outputs(self, pieces: list[Samples]) -> list[AudioOutput]:
        outputs: list[AudioOutput] = []
        for samples in pieces:
            if len(samples) == 0:
                continue
            assert self._rate is not None
            self.output_ms += len(samples) * 1000 / self._rate
            step = self._rate * _OUTPUT_MS // 1000
            outputs += [
                AudioOutput(samples[start : start + step], self._rate) for start in range(0, len(samples), step)
            ]
        return outputs


def _decoded_base64(text: str) -> bytes:
    """Decode base64. Raises EngineFailed if it is invalid."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise EngineFailed("the upstream sent audio that is not base64") from None
