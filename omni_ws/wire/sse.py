"""Encodes server-sent events as OpenAI streams use them."""

from __future__ import annotations

from typing import Any, Final

import orjson

DONE: Final = b"data: [DONE]\n\n"
#: A comment, which clients ignore while it keeps proxies from timing out.
HEARTBEAT: Final = b": keep-alive\n\n"


def event(data: Any, *, name: str | None = None) -> bytes:
    """Encode an event with a JSON object as its data, given as an object or as its JSON.

    Only errors have a ``name``.
    """
    line = b"data: %b\n\n" % (data if type(data) is bytes else orjson.dumps(data))
    return line if name is None else b"event: %b\n%b" % (name.encode(), line)
