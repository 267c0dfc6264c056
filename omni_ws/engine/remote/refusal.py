"""Converts errors of upstreams to errors for our clients, and estimates what fits an upstream's context.

A client gets the upstream's message on why its request was refused, with everything masked that looks like a key.
Messages about this server's own key, and about failures, are for the operator only.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

from omni_ws.core.json_values import json_or_none
from omni_ws.errors import (
    ContextLengthExceeded,
    EmptyInput,
    EngineFailed,
    EngineOverloaded,
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
    """An error in an upstream's words; fields that it lacks are empty."""

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
    """Return the error in a body of any common form: OpenAI's object, a text, the bare fields, or FastAPI's list."""
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
    """Return the error for our client if an upstream responds with the HTTP status ``status``, and log it.

    ``upstream`` is its name in the log; ``where_key`` tells the operator where the key comes from. The upstream's
    message may quote the client's text: it is logged only with ``log_content``, or if it is about the key.
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
    """Return the error for our client if a stream contains an error event; see ``refusal``."""
    error = read_error(content)
    status = _STATUS_BY_KIND.get(error.code.lower()) or _STATUS_BY_KIND.get(error.kind.lower())
    if error.code.isdecimal() and len(error.code) == 3:
        status = int(error.code)
    if error.code in _BY_CODE:
        status = 400
    logger.warning("upstream %s broke off: %s", upstream, _logged(error, log_content))
    return _mapped(status or 500, error, None)


def retry_after_seconds(value: str | None) -> float | None:
    """Return the seconds to wait, from a Retry-After of seconds or a date (RFC 9110, 10.2.3); None if it is neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
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
    """Return our client's parameter for ``param``, a field of the upstream's body; None if it has none."""
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
    """Return the text to log for an error: its message if ``whole``, or else its code or type."""
    return (_line(error.message) if whole else _line(error.code or error.kind)[:_MAX_PARAM]) or "(not said)"


def _line(text: str) -> str:
    """Return ``text`` as one printable line of bounded length, with everything masked that looks like a key."""
    text = text[: 2 * _MAX_MESSAGE]
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    line = _NAMED_KEY.sub(rf"\1{_MASK}", line)
    line = _PASSWORD.sub(f"{_MASK}@", line)
    line = _KEY.sub(lambda found: _MASK if _is_random(found[0]) else found[0], line)
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 1] + "…"


def _is_random(word: str) -> bool:
    """Whether a word has the prefix of a key, is a UUID, or has a long part with digits."""
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
    """Whether the body of a refusal means that the model takes no tools at all, whatever they are."""
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
    """Return the context in tokens, from llama.cpp's ``n_ctx`` or the message; None if neither has it."""
    return _number(fields.get("n_ctx")) or _first_number(message, (_CONTEXT_LENGTH,))


def prompt_tokens(message: str, fields: Mapping[str, Any]) -> int | None:
    """Return the tokens of the prompt, from llama.cpp's ``n_prompt_tokens`` or the message; None if neither has it."""
    return _number(fields.get("n_prompt_tokens")) or _first_number(message, _PROMPT_LENGTHS)


def _first_number(message: str, patterns: tuple[re.Pattern[str], ...]) -> int | None:
    for pattern in patterns:
        if (found := pattern.search(message[:_MOST_SEARCHED])) is not None:
            return int(found.group(1)) or None
    return None


def _number(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


# How much of the history to send to an upstream with a limited context.

#: The assumed tokens per byte of UTF-8 until an upstream has reported a count: more than in most texts.
_FIRST_RATE: Final = 0.3
#: Counts of prompts of fewer bytes are ignored, since they depend more on the chat template than on the text.
_LEAST_COUNTED_BYTES: Final = 200
#: The factor by which an estimate may be wrong.
_MARGIN: Final = 1.05
#: The number of tokens that are kept free for an answer without a limit.
_ANSWER_RESERVE: Final = 256
#: How often one request may be sent again with fewer turns; the last time it has none.
MOST_TRIES: Final = 5


class ContextWindow:
    """The context of a model, as its server reports it or as its refusals show, and an estimate of tokens per byte.

    The number of tokens of a text is estimated from the counts that the server reported for earlier prompts.
    """

    def __init__(self) -> None:
        self._told: int | None = None
        self._learnt: int | None = None
        self._rate = _FIRST_RATE

    @property
    def limit(self) -> int | None:
        """The context in tokens, for prompt and answer together; None while it is unknown."""
        known = [limit for limit in (self._told, self._learnt) if limit is not None]
        return min(known, default=None)

    def tell(self, limit: int | None) -> None:
        """Set the context that the upstreams report now. If it changes, what refusals have shown is forgotten."""
        if limit != self._told:
            self._told, self._learnt = limit, None

    def count(self, tokens: int, size: int) -> None:
        """Learn from an upstream's count of the tokens in a text prompt of ``size`` bytes."""
        cut = self.limit is not None and tokens > 0.9 * self.limit  # Ollama cuts, and counts what is left
        if size >= _LEAST_COUNTED_BYTES and not cut:
            self._rate = tokens / size

    def refuse(self, limit: int | None, tokens: int | None, size: int) -> None:
        """Learn from the refusal of a prompt of ``size`` bytes, and the numbers in it, if any."""
        if limit is not None:
            self._learnt = limit
        if tokens is not None and size >= _LEAST_COUNTED_BYTES:
            self._rate = tokens / size

    def left_out(self, turns: Sequence[int], *, fixed: int, answer: int | None) -> int:
        """Return how many of the oldest turns have to be dropped.

        ``turns`` are the sizes of the turns, ``fixed`` is the size of everything else in the prompt, both in bytes;
        ``answer`` is the limit on the answer in tokens.
        """
        if self.limit is None:
            return 0
        room = self.limit - min(answer or _ANSWER_RESERVE, self.limit // 2)
        size = fixed + sum(turns)
        for count, turn in enumerate(turns):
            if size * self._rate * _MARGIN <= room:
                return count
            size -= turn
        return len(turns)

    def left_out_next(self, tried: int, turns: Sequence[int], *, fixed: int, answer: int | None, attempt: int) -> int:
        """Return how many turns to drop after a refusal showed that ``tried`` were too few.

        ``attempt`` is the number of the refused attempt, counted from 1.
        """
        if attempt >= MOST_TRIES - 1:
            return len(turns)
        half = tried + max(1, (len(turns) - tried) // 2)
        estimated = self.left_out(turns, fixed=fixed, answer=answer)
        return max(tried + 1, estimated) if self.limit is not None and estimated > tried else half
