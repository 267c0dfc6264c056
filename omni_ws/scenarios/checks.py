"""What an answer is compared with: words, tools and sounds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from omni_ws.caller.word_errors import spoken_words, word_errors
from omni_ws.scenarios.form import HeardWords, ToolCalled, pattern_of

#: The characters of a text that a failure shows.
_SHOWN: Final = 160
_NOT_WORD: Final = re.compile(r"[^\w']+|_")


def plain(text: str) -> str:
    """The words of a text in small letters, with spaces around them and between them."""
    return f" {' '.join(_NOT_WORD.sub(' ', text.casefold().replace('’', chr(39))).split())} "


def says(text: str, phrase: str) -> bool:
    """Whether a text has a phrase, in whole words, or matches one in slashes.

    Case and punctuation do not count, and neither does whether numbers are in digits or English words.
    """
    if (pattern := pattern_of(phrase)) is not None:
        return pattern.search(text) is not None
    if plain(phrase) in plain(text):
        return True
    wanted = spoken_words(phrase) if phrase.isascii() else []
    return bool(wanted) and f" {' '.join(wanted)} " in f" {' '.join(spoken_words(text))} "


def shown(text: str) -> str:
    """A text as a failure shows it."""
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= _SHOWN else f"{flat[:_SHOWN]}…")


def heard_problem(wanted: str | HeardWords, heard: str, language: str) -> str | None:
    """Return how the transcript of the user differs from what it should be; None if it is near enough."""
    bound = wanted if isinstance(wanted, HeardWords) else HeardWords(text=wanted)
    errors = word_errors(bound.text, heard, language=language)
    if errors.rate <= bound.wrong:
        return None
    differences = ", ".join(errors.differences[:5])
    return f"heard {shown(heard)}, which has {errors.rate:.0%} of the words wrong ({differences})"


def tool_problem(wanted: ToolCalled, name: str | None, arguments: str) -> str | None:
    """Return how a call differs from the one that is expected; None if it does not."""
    if name != wanted.name:
        return f"called {name}"
    try:
        found = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return f"called {name} with arguments that are not JSON: {shown(arguments)}"
    if not isinstance(found, Mapping):
        return f"called {name} with {shown(arguments)}"
    for key, value in wanted.arguments.items():
        if key not in found:
            return f"called {name} without the argument {key}: {shown(arguments)}"
        if not _same(found[key], value):
            return f"called {name} with {key} = {shown(str(found[key]))} instead of {shown(str(value))}"
    return None


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, str) and isinstance(wanted, str):
        return plain(found) == plain(wanted)
    return bool(found == wanted)
