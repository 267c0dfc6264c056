"""JSON request bodies: read whole, and parsed in a worker thread where they are large."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from omni_ws.core.json_values import MAX_BODY_VALUES
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import InvalidFrame, UnsupportedFormat
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.wire.frames import loads_object

#: Larger bodies are parsed, and their base64 decoded, in a worker thread; on the event loop that would delay the audio
#: of every other session.
INLINE_BYTES: Final = 256 * 1024

#: Content types of JSON bodies besides those that end in ``+json``: JSON, and the defaults of clients that name none.
_JSON_TYPES: Final = frozenset({"", "application/json", "application/x-www-form-urlencoded", "text/plain", "text/json"})

Result = TypeVar("Result")


async def to_thread_if_large(size: int, work: Callable[[], Result]) -> Result:
    """Run ``work`` on ``size`` bytes: on the event loop where they are few, else in a worker thread."""
    return await run_work(Work.BODIES, work) if size > INLINE_BYTES else work()


async def read_json_object(
    exchange: HttpExchange, limit: int, *, hint: str = "", may_be_empty: bool = False
) -> tuple[dict[str, Any], int]:
    """Read a body of at most ``limit`` bytes that is one JSON object. Returns the object and the size of the body.

    ``hint`` ends the message to clients that send another type. Raises as ``HttpExchange.read_body`` does, and
    UnsupportedFormat for another type, InvalidFrame for anything but a JSON object.
    """
    kind = exchange.request.content_type
    if kind not in _JSON_TYPES and not kind.endswith("+json"):
        raise UnsupportedFormat(f"the body must be JSON, got {kind[:64]!r}{hint}", param="Content-Type")
    data = await exchange.read_body(limit)
    if may_be_empty and not data:
        return {}, 0
    try:
        return await to_thread_if_large(len(data), partial(loads_object, data, most=MAX_BODY_VALUES)), len(data)
    except UnicodeDecodeError:
        raise InvalidFrame("the body is not valid UTF-8") from None
