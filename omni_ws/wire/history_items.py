"""The earlier turns that a client gives a new session: ``history_items`` of its first ``session_config``."""

from __future__ import annotations

from typing import Any, Final

import orjson

from omni_ws.errors import InvalidRequest, InvalidValue
from omni_ws.wire.openai_requests import Messages

#: The most items, and the most bytes of their JSON.
MAX_HISTORY_ITEMS: Final = 1024
MAX_HISTORY_BYTES: Final = 1 << 20
FIELD: Final = "history_items"
#: The fields of an item by its role: those of a message in a chat body, with text as the content.
FIELDS_OF_ROLE: Final = {
    "user": frozenset({"role", "content"}),
    "assistant": frozenset({"role", "content", "tool_calls"}),
    "tool": frozenset({"role", "content", "tool_call_id"}),
}


def read_history_items(items: Any) -> Messages:
    """Return the items as messages. Raises InvalidValue and UnsupportedParameter, which name the place of the error."""
    if not isinstance(items, list):
        raise InvalidValue("history_items must be a list of messages", param=FIELD)
    if len(items) > MAX_HISTORY_ITEMS:
        raise InvalidValue(f"at most {MAX_HISTORY_ITEMS} history_items, got {len(items)}", param=FIELD)
    for index, item in enumerate(items):
        _check(item, f"{FIELD}[{index}]")
    if len(orjson.dumps(items)) > MAX_HISTORY_BYTES:
        raise InvalidValue(f"history_items must not exceed {MAX_HISTORY_BYTES} bytes", param=FIELD)
    try:
        return Messages(items, input_follows=True)
    except InvalidRequest as error:
        error.param = placed(error.param)
        raise


def placed(param: str | None) -> str | None:
    """Return the place of an error in ``history_items`` for one in the ``messages`` of a chat body."""
    return None if param is None else FIELD + param.removeprefix("messages")


def _check(item: Any, place: str) -> None:
    if not isinstance(item, dict):
        raise InvalidValue("an item of the history must be an object", param=place)
    role = item.get("role")
    known = FIELDS_OF_ROLE.get(role) if isinstance(role, str) else None
    if known is None:
        raise InvalidValue("role must be user, assistant or tool; rules belong in instructions", param=f"{place}.role")
    if unknown := sorted(item.keys() - known):
        raise InvalidValue(f"an item with role {role} has no such field", param=f"{place}.{unknown[0][:64]}")
    if item.get("content") is None and not item.get("tool_calls"):
        raise InvalidValue("content must be a string or a list of parts", param=f"{place}.content")
