"""The catalogue: all intents, read from the files beside this module."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

from omni_ws.engine.llm.intents import clock, letters, sums, told
from omni_ws.engine.llm.intents.matcher import Intent, Value
from omni_ws.engine.llm.plain_words import inserted, read

#: Their order counts: where two intents fit a request equally well, the first one is meant.
_FILES: Final = ("greetings", "controls", "about_me", "feelings", "told", "fun", "clock", "letters", "sums", "limits")
_MODULES: Final = {"clock": clock, "letters": letters, "sums": sums, "told": told}
_VALUES: Final = clock.VALUES | told.VALUES
_PATTERNS: Final = ("phrases", "keys", "slots", "written")
_NAME: Final = re.compile(r"{([a-z_]+)}")


@cache
def catalogue() -> tuple[Intent, ...]:
    """All intents. The first call reads the files."""
    return tuple(intent for file in _FILES for intent in _intents(read(file)))


def _intents(tables: dict[str, Any]) -> list[Intent]:
    """The intents of a file. Names in braces stand for its ``words``; ``all`` has what is true of each of them."""
    words = tables.get("words", {}) | {"unit": "|".join(sorted(sums.units(), key=len, reverse=True))}
    found = []
    for name, table in tables["intents"].items():
        fields: dict[str, Any] = tables.get("all", {}) | table
        for key, given in fields.items():
            if key in _PATTERNS:
                fields[key] = tuple(inserted(text, words) for text in given)
            elif isinstance(given, list):
                fields[key] = tuple(given)
        if "reply" in fields:
            module, function = fields["reply"].split(".")
            fields["reply"] = getattr(_MODULES[module], function)
        fields["unless"] = inserted(fields.get("unless", ""), words)
        names = {name for wording in fields.get("says", ()) for name in _NAME.findall(wording)}
        values: dict[str, Value] = {name: _VALUES[name] for name in names}
        found.append(Intent(name=name, values=values, **fields))
    return found
