"""Encodes server-sent events as OpenAI streams use them."""

from __future__ import annotations

from typing import Any, Final

import orjson

DONE: Final = b"data: [DONE]\n\n"
#: A comment, which clients ignore while it keeps proxies from timing out. Between events with ids it stands before the
#: next one, as a line: readers that take an id for a part of every later event take an empty line for one without data.
HEARTBEAT: Final = b": keep-alive\n"
#: The same by itself, for readers that look at what is between empty lines.
HEARTBEAT_BLOCK: Final = HEARTBEAT + b"\n"


def event(data: Any, *, name: str | None = None) -> bytes:
    """Encode an event with a JSON object as its data, given as an object or as its JSON.

    Only errors have a ``name``.
    """
    line = b"data: %b\n\n" % (data if type(data) is bytes else orjson.dumps(data))
    return line if name is None else b"event: %b\n%b" % (name.encode(), line)
