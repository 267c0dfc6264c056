"""Readers of upstreams' responses: events (EventReader), their JSON, audio (UpstreamAudio), and errors.

Upstreams' errors are converted to errors for our clients. If an upstream refuses a request, the client gets the
upstream's message, in which everything that looks like a key is masked. Messages about this server's own key, and about
failures, are for the operator only.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple

import orjson

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.container import WavHeaderReader
from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import MAX_SAMPLE_RATE, MIN_SAMPLE_RATE, AudioEncoding, AudioFormat
from omni_ws.core.json_values import MAX_BODY_VALUES, MAX_MESSAGE_VALUES, check_values, json_or_none
from omni_ws.engine.base import AudioOutput
from omni_ws.errors import (
    ContextLengthExceeded,
    EmptyInput,
    EngineFailed,
    EngineOverloaded,
    InvalidFrame,
    InvalidRequest,
    InvalidValue,
    ModelNotFound,
    OmniError,
    PayloadTooLarge,
    UnsupportedFormat,
    UnsupportedModality,
    UnsupportedParameter,
)
from omni_ws.wire.openai_fields import UPSTREAM_FIELDS
from omni_ws.wire.session_config import SamplingConfig

logger = logging.getLogger(__name__)

_MAX_MESSAGE: Final = 300
_MASK: Final = "***"
#: What looks like a key: after a name such as "key", in a URL, by its prefix, or by its random characters.
_NAMED_KEY: Final = re.compile(
    r"(?i)(\bbearer\s+|\b(?:x-)?api[-_ ]?key(?: provided)?\W{1,4}|\b(?:token|secret|password)\s*[:=]\W{0,2})"
    r"[^\s\"',;)]+"
)
_PASSWORD: Final = re.compile(r"(?<=://)[^/\s@]+@")
_KEY: Final = re.compile(r"[A-Za-z0-9*][A-Za-z0-9_*-]{6,}")
_PREFIXED_KEY: Final = re.compile(
    r"(?i)(?:sk|pk|rk|gsk|xai|hf|nvapi|pplx|csk|ghp|github_pat|glpat|tgp|fw|r8|eyj)[-_*]|AIza|eyJ"
)
_MAX_PARAM: Final = 128
_MAX_RETRY_AFTER_SEC: Final = 3600.0
_DEFAULT_RETRY_AFTER_MS: Final = 1000

#: Error codes, of OpenAI and our own, that are more specific than the status.
_BY_CODE: Final[Mapping[str, type[InvalidRequest]]] = {
    "unsupported_value": UnsupportedParameter,
    "unknown_parameter": UnsupportedParameter,
} | {
    error.wire.code: error
    for error in (
        InvalidValue,
        UnsupportedParameter,
        UnsupportedFormat,
        UnsupportedModality,
        EmptyInput,
    )
}

#: The status by the server's type of error, for errors inside a stream, which have no HTTP status.
_STATUS_BY_KIND: Final[Mapping[str, int]] = {
    "invalid_request_error": 400,
    "badrequesterror": 400,
    "bad_request_error": 400,
    "notfounderror": 404,
    "not_found_error": 404,
    "authentication_error": 401,
    "permission_error": 403,
    "rate_limit_error": 429,
    "ratelimiterror": 429,
    "overloaded_error": 503,
    "engine_overloaded": 503,
    "rate_limited": 429,
    "shutting_down": 503,
    "service_unavailable": 503,
    "serviceunavailableerror": 503,
    "payload_too_large": 413,
    "model_not_found": 404,
}

#: Fields in the body of an upstream's request, with the parameters of our own client that they come from. Other fields,
#: such as ``messages`` and ``stream_options``, are made by this server.
_FIELDS: Final[Mapping[str, str]] = {
    **{name: f"sampling.{name}" for name in SamplingConfig.__struct_fields__},
    "max_completion_tokens": "sampling.max_tokens",
    "voice": "voice",
    "speed": "speed",
    "audio.voice": "voice",
    **{name: name for name in ("tools", "tool_choice", "parallel_tool_calls", "stage_sampling", "stage_params")},
    **{name: name for name in ("response_format", "n", "logprobs", "top_logprobs", "priority")},
    **{name: name for name in UPSTREAM_FIELDS},
}


@dataclass(frozen=True, slots=True)
class UpstreamError:
    """An error as an upstream reports it; fields that the upstream did not send are empty."""

    message: str = ""
    kind: str = ""
    code: str = ""
    param: str | None = None
    #: The context of the model and the length of the prompt, in tokens, if the upstream reports them.
    limit: int | None = None
    tokens: int | None = None

    @property
    def too_long(self) -> bool:
        """Whether the error means that the prompt is too long for the model."""
        return says_too_long(self.message, code=self.code, kind=self.kind)


def read_error(content: object) -> UpstreamError:
    """Return the error in a response body of any common form.

    The forms are OpenAI's error object, a text in its place, the fields without the object, and FastAPI's list. For any
    other body, all fields of the result are empty.
    """
    if isinstance(content, Mapping):
        error = content.get("error", content.get("detail"))
        if isinstance(error, Mapping):
            return _from_fields(error)
        if isinstance(error, str):
            return _from_fields({"message": error})
        if isinstance(error, list) and error and isinstance(error[0], Mapping):
            return _from_validation(error[0])
        return _from_fields(content)
    return UpstreamError()


def refusal(
    status: int,
    body: bytes,
    *,
    retry_after: str | None,
    upstream: str,
    log_content: bool = False,
    where_key: str = "",
) -> OmniError:
    """Log an upstream's response with the HTTP error ``status``, and return the error for our client.

    ``retry_after`` is the header Retry-After; ``upstream`` is the upstream's name in the log; ``where_key`` tells the
    operator where the API key comes from. The upstream's message may quote the client's text, so it is logged only with
    ``log_content``, or if it is about the key.
    """
    error = read_error(json_or_none(body))
    mapped = _mapped(status, error, retry_after, where_key)
    logger.log(
        logging.DEBUG if isinstance(mapped, InvalidRequest) else logging.WARNING,
        "upstream %s answered %d: %s",
        upstream,
        status,
        _logged(error, log_content or status in (401, 403)),
    )
    return mapped


def stream_error(content: object, *, upstream: str, log_content: bool = False) -> OmniError:
    """Log the error event of a stream, and return the error for our client; see ``refusal``."""
    error = read_error(content)
    status = _STATUS_BY_KIND.get(error.code.lower()) or _STATUS_BY_KIND.get(error.kind.lower())
    if error.code.isdecimal() and len(error.code) == 3:
        status = int(error.code)
    if error.code in _BY_CODE:
        status = 400
    logger.warning("upstream %s broke off: %s", upstream, _logged(error, log_content))
    return _mapped(status or 500, error, None)


def retry_after_seconds(value: str | None) -> float | None:
    """Return the seconds to wait by a header Retry-After, which has seconds or a date (RFC 9110, 10.2.3).

    At most an hour; None without the header, or for another value.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    if seconds != seconds:
        return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_SEC)


def _mapped(status: int, error: UpstreamError, retry_after: str | None, where_key: str = "") -> OmniError:
    match status:
        case 400 | 413 | 422 | 500 if error.too_long:
            message = _line(error.message) or "the input is too long for the model"
            return ContextLengthExceeded(
                message, param=_client_field(error.param), limit=error.limit, tokens=error.tokens
            )
        case 400 | 415 | 422:
            return _clients_fault(status, error)
        case 401 | 403:
            said = " ".join(filter(None, (_line(error.message), where_key and f"({where_key})")))
            return EngineFailed("the upstream does not accept the key of this server", private=said)
        case 404 if error.param == "model" or error.code == "model_not_found" or "model" in error.message.lower():
            return ModelNotFound(_line(error.message) or "the upstream does not serve the model", param="model")
        case 413:
            return PayloadTooLarge(_line(error.message) or "the request is too large for the upstream")
        case 429 | 503:
            seconds = retry_after_seconds(retry_after)
            milliseconds = _DEFAULT_RETRY_AFTER_MS if seconds is None else round(seconds * 1000)
            message = _line(error.message) or "the upstream has no capacity at the moment"
            return EngineOverloaded(message, retry_after_ms=milliseconds)
        case _ if 400 <= status < 500 and error.message:
            return EngineFailed(_line(error.message), logged=f"the upstream refused the request (status {status})")
    return EngineFailed(f"the upstream failed (status {status})")


def _clients_fault(status: int, error: UpstreamError) -> InvalidRequest:
    message = _line(error.message) or "the upstream refused the request"
    kind = _BY_CODE.get(error.code) or (UnsupportedFormat if status == 415 else InvalidValue)
    return kind(message, param=_client_field(error.param))


def _client_field(param: str | None) -> str | None:
    """Return the client's parameter that became ``param``, a field of the upstream's body; None if there is none."""
    for theirs, ours in _FIELDS.items():
        if param is not None and (param == theirs or param.startswith((f"{theirs}.", f"{theirs}["))):
            return ours + param.removeprefix(theirs)
    return None


def _from_fields(fields: Mapping[str, Any]) -> UpstreamError:
    code, param, message = fields.get("code"), fields.get("param"), _text(fields.get("message"))
    return UpstreamError(
        message=message,
        kind=_text(fields.get("type")),
        code=str(code) if isinstance(code, str | int) and not isinstance(code, bool) else "",
        param=param[:_MAX_PARAM] if isinstance(param, str) and param else None,
        limit=context_limit(message, fields),
        tokens=prompt_tokens(message, fields),
    )


def _from_validation(fields: Mapping[str, Any]) -> UpstreamError:
    place = fields.get("loc")
    names = [str(name) for name in place if name != "body"] if isinstance(place, list) else []
    return UpstreamError(_text(fields.get("msg")), param=".".join(names)[:_MAX_PARAM] or None)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _logged(error: UpstreamError, whole: bool) -> str:
    """Return the text to log for an error: with ``whole`` its message, otherwise its code or type."""
    return (_line(error.message) if whole else _line(error.code or error.kind)[:_MAX_PARAM]) or "(not said)"


def _line(text: str) -> str:
    """Return ``text`` as one printable line of bounded length, in which everything that looks like a key is masked."""
    text = text[: 2 * _MAX_MESSAGE]
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    line = _NAMED_KEY.sub(rf"\1{_MASK}", line)
    line = _PASSWORD.sub(f"{_MASK}@", line)
    line = _KEY.sub(lambda found: _MASK if _is_random(found[0]) else found[0], line)
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 1] + "…"


def _is_random(word: str) -> bool:
    """Whether a word looks like a key: it has the prefix of a key, is a UUID, or has a long part with digits."""
    if _PREFIXED_KEY.match(word):
        return True
    longest = max(word.replace("_", "-").split("-"), key=len)
    digits = sum(map(str.isdigit, word))
    is_uuid = len(word) == 36 and word.count("-") == 4
    return is_uuid or (len(longest) >= 20 and digits > 0)


# How servers report that their model takes no tools.

#: Phrases of Ollama and others; of llama.cpp without ``--jinja``, of vLLM without a parser of calls, and of OpenRouter.
_NO_TOOLS: Final = re.compile(
    r"(?:not|n't) support(?:ed)? (?:the )?(?:tool|function)"
    r"|(?:tools?|functions?)(?: calls?| calling)? (?:is|are) not support"
    r"|tools param requires|enable-auto-tool-choice|support tool use",
    re.IGNORECASE,
)


def says_no_tools(body: bytes) -> bool:
    """Whether the body of an error response means that the model supports no tools at all."""
    return _NO_TOOLS.search(read_error(json_or_none(body)).message[:_MOST_SEARCHED]) is not None


# How servers report that a prompt is too long for the model, and with which numbers.

#: Codes and types of this error.
_TOO_LONG_KINDS: Final = frozenset({"context_length_exceeded", "exceed_context_size_error"})
#: Phrases in messages of servers without such a code: vLLM, OpenAI; llama.cpp; LM Studio; Ollama.
_TOO_LONG_PHRASES: Final = (
    *("maximum context length", "maximum model length", "model's context length", "max_model_len"),
    "available context size",
    *("greater than the context length", "context the overflows"),
    "exceeds the context length",
)
#: The limit, in characters, on the part of a message that is searched.
_MOST_SEARCHED: Final = 1000
_CONTEXT_LENGTH: Final = re.compile(
    r"(?:context length (?:is|of)(?: only)?|context size \(|model length(?: of)?|max_model_len(?: of|=)?) ?\(?(\d{1,9})"
)
#: Phrases with the number of tokens of the prompt alone. A number after "at least" is no count.
_PROMPT_LENGTHS: Final = (
    re.compile(r"prompt contains (\d{1,9}) input tokens"),
    re.compile(r"messages resulted in (\d{1,9}) tokens"),
    re.compile(r"\((\d{1,9}) in the messages"),
    re.compile(r"passed (\d{1,9}) input tokens"),
    re.compile(r"request \((\d{1,9}) tokens\)"),
    re.compile(r"prompt \((\d{1,9}) tokens?\)"),
)


def says_too_long(message: str, *, code: str, kind: str) -> bool:
    """Whether an error means that the prompt is too long."""
    if code in _TOO_LONG_KINDS or kind in _TOO_LONG_KINDS:
        return True
    read = message[:_MOST_SEARCHED].lower()
    return any(phrase in read for phrase in _TOO_LONG_PHRASES)


def context_limit(message: str, fields: Mapping[str, Any]) -> int | None:
    """Return the model's context in tokens, from llama.cpp's ``n_ctx`` or the message; None if neither has it."""
    return _number(fields.get("n_ctx")) or _first_number(message, (_CONTEXT_LENGTH,))


def prompt_tokens(message: str, fields: Mapping[str, Any]) -> int | None:
    """Return the prompt's length in tokens, from llama.cpp's ``n_prompt_tokens`` or the message; None if in neither."""
    return _number(fields.get("n_prompt_tokens")) or _first_number(message, _PROMPT_LENGTHS)


def _first_number(message: str, patterns: tuple[re.Pattern[str], ...]) -> int | None:
    for pattern in patterns:
        if (found := pattern.search(message[:_MOST_SEARCHED])) is not None:
            return int(found.group(1)) or None
    return None


def _number(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


# Readers of what upstreams send in pieces: events (EventReader), their JSON, and audio (UpstreamAudio).


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
    """A parser of server-sent events. A body that begins like a JSON object becomes one event, named WHOLE_BODY.

    Lines end with LF, CR or CRLF. The body may be cut into pieces anywhere. Comments, IDs and reconnection times are
    skipped.
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
        """Add ``data``; return the events that are now complete. Raises EngineFailed for an event that is too long."""
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
        """End the stream, and return its last event, if it was not returned: some servers omit the last blank line."""
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
    """Return the JSON object in an event. Raises the error of an error event, or EngineFailed for other contents."""
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
    """Parse an event whose texts may begin or end with half a surrogate pair: some servers cut text in UTF-16.

    Halves are kept only in the texts of an answer, where the next event has the other half; elsewhere U+FFFD replaces
    them. Raises EngineFailed.
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
    """A joiner of surrogate pairs that are split between two pieces of a text: some servers cut text in UTF-16."""

    def __init__(self) -> None:
        self._half = ""

    def feed(self, text: str) -> str:
        """Return the next piece of the text; a high surrogate at its end is kept for the next call."""
        text, self._half = self._half + text, ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return whole_text(text)

    def finish(self) -> str:
        """Return U+FFFD if a high surrogate was kept; otherwise an empty text."""
        half, self._half = self._half, ""
        return whole_text(half)


def whole_text(text: str) -> str:
    """Return ``text`` with surrogate pairs joined to characters, and with U+FFFD in place of single surrogates."""
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
    """A converter of an upstream's audio, which arrives in pieces, to samples at one rate.

    The audio may be raw 16-bit samples, one WAV stream, or pieces that are WAV files each. ``sample_rate`` is the rate
    of raw samples in Hz. All outputs have the rate of the first audio.
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
        """Add a piece of base64, padded or not; otherwise as ``feed``."""
        text = self._base64 + text
        whole = len(text) - len(text) % 4
        self._base64 = text[whole:]
        return self.feed(_decoded_base64(text[:whole]), sample_rate=sample_rate)

    def feed(self, data: bytes, *, sample_rate: int | None = None) -> list[AudioOutput]:
        """Add a piece of audio, and return the audio that is complete. Raises EngineFailed for other data.

        ``sample_rate`` is the rate of raw samples in Hz, if the upstream reports it.
        """
        if not data:
            return []
        try:
            return self._outputs(self._decoded(data, sample_rate))
        except OmniError as error:
            raise EngineFailed(f"the upstream sent audio that cannot be read: {error.message}") from error

    def flush(self) -> list[AudioOutput]:
        """End the audio, and return the rest that unpadded base64 and the resampler held back.

        Raises EngineFailed if the audio is incomplete or cannot be read.
        """
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
