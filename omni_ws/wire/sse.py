"""Server-sent events as the OpenAI streaming contract has them."""

from __future__ import annotations

from typing import Any, Final

import orjson

DONE: Final = b"data: [DONE]\n\n"
#: A comment line: what clients skip and proxies count as traffic.
HEARTBEAT: Final = b": keep-alive\n\n"


def event(data: Any, *, name: str | None = None) -> bytes:
    """One JSON object on one ``data:`` line. Only errors have a ``name``."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
