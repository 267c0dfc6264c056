"""How servers say that a prompt is too long for the model, and the numbers that they name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

#: Codes and types that say it.
_KINDS: Final = frozenset({"context_length_exceeded", "exceed_context_size_error"})
#: What messages say where there is no such code: vLLM, OpenAI; llama.cpp; LM Studio; Ollama.
_MESSAGES: Final = (
    *("maximum context length", "maximum model length", "model's context length", "max_model_len"),
    "available context size",
    *("greater than the context length", "context the overflows"),
    "exceeds the context length",
)
#: Messages are not searched further than this.
_MOST_READ: Final = 1000
_LIMIT: Final = re.compile(
    r"(?:context length (?:is|of)(?: only)?|context size \(|model length(?: of)?|max_model_len(?: of|=)?) ?\(?(\d{1,9})"
)
#: The prompt alone, in tokens. "at least" is no count.
_PROMPT: Final = (
    re.compile(r"prompt contains (\d{1,9}) input tokens"),
    re.compile(r"messages resulted in (\d{1,9}) tokens"),
    re.compile(r"\((\d{1,9}) in the messages"),
    re.compile(r"passed (\d{1,9}) input tokens"),
    re.compile(r"request \((\d{1,9}) tokens\)"),
    re.compile(r"prompt \((\d{1,9}) tokens?\)"),
)


def says_too_long(message: str, *, code: str, kind: str) -> bool:
    """Whether an error means that the prompt is too long."""
    if code in _KINDS or kind in _KINDS:
        return True
    read = message[:_MOST_READ].lower()
    return any(phrase in read for phrase in _MESSAGES)


def context_limit(message: str, fields: Mapping[str, Any]) -> int | None:
    """The context in tokens, from llama.cpp's ``n_ctx`` or the message."""
    return _number(fields.get("n_ctx")) or _first(message, (_LIMIT,))


def prompt_tokens(message: str, fields: Mapping[str, Any]) -> int | None:
    """The tokens of the prompt, from llama.cpp's ``n_prompt_tokens`` or the message."""
    return _number(fields.get("n_prompt_tokens")) or _first(message, _PROMPT)


def _first(message: str, patterns: tuple[re.Pattern[str], ...]) -> int | None:
    for pattern in patterns:
        if (found := pattern.search(message[:_MOST_READ])) is not None:
            return int(found.group(1)) or None
    return None


def _number(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
