"""JSON bodies of requests: read whole, parsed where it holds up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from omni_ws.errors import InvalidFrame, UnsupportedFormat
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.wire.frames import loads_object

#: Larger bodies are parsed, and their base64 decoded, in a worker thread: it would hold up every other session.
INLINE_BYTES: Final = 256 * 1024

#: Content types of JSON bodies besides those that end in ``+json``: JSON, and what clients say that say nothing.
_JSON_TYPES: Final = frozenset({"", "application/json", "application/x-www-form-urlencoded", "text/plain", "text/json"})

Result = TypeVar("Result")


async def beside(size: int, work: Callable[[], Result]) -> Result:
    """Work on so many bytes: on the event loop where they are few, else in a worker thread."""
    return await asyncio.to_thread(work) if size > INLINE_BYTES else work()


async def read_json_object(
    exchange: HttpExchange, limit: int, *, otherwise: str = "", may_be_empty: bool = False
) -> tuple[dict[str, Any], int]:
    """The object that a body is, and the body's size in bytes.

    ``otherwise`` tells those who send something else what they may have meant. Raises UnsupportedFormat,
    PayloadTooLarge, EngineOverloaded, InvalidFrame.
    """
    kind = exchange.request.content_type
    if kind not in _JSON_TYPES and not kind.endswith("+json"):
        raise UnsupportedFormat(f"a body here is JSON, not {kind[:64]!r}{otherwise}", param="Content-Type")
    data = await exchange.read_body(limit)
    if may_be_empty and not data:
        return {}, 0
    try:
        return await beside(len(data), partial(loads_object, data)), len(data)
    except UnicodeDecodeError:
        raise InvalidFrame("the body is not UTF-8") from None
