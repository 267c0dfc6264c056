"""Server-sent events as the OpenAI streaming contract has them."""

from __future__ import annotations

from typing import Any, Final

import orjson

DONE: Final = b"data: [DONE]\n\n"
#: A comment line: what clients skip and proxies count as traffic.
HEARTBEAT: Final = b": keep-alive\n\n"


def event(data: Any, *, name: str | None = None) -> bytes:
    """One JSON object, or what is its JSON already, on one ``data:`` line. Only errors have a ``name``."""
    line = b"data: %b\n\n" % (data if type(data) is bytes else orjson.dumps(data))
    return line if name is None else b"event: %b\n%b" % (name.encode(), line)
