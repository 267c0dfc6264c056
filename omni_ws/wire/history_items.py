"""The history on the wire: ``history_items`` of a client's first ``session_config``, and of the reply to a
``history_get``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, cast

import msgspec
import orjson
from msgspec import UNSET

from omni_ws.core.history import Message
from omni_ws.errors import InvalidRequest, InvalidValue
from omni_ws.wire.openai_requests import Messages
from omni_ws.wire.server_frames import CallFunction, HistoryCall, HistoryItemFields, HistoryItemsFrame

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
#: The role of the first item if it stands in place of older messages.
SUMMARY: Final = "summary"


def read_history_items(items: Any) -> tuple[Messages, str]:
    """Return the messages of a client, and its summary of what was said before them; empty if there is none.

    Raises InvalidValue and UnsupportedParameter, which name the place of the error.
    """
    if not isinstance(items, list):
        raise InvalidValue("history_items must be a list of messages", param=FIELD)
    if len(items) > MAX_HISTORY_ITEMS:
        raise InvalidValue(f"at most {MAX_HISTORY_ITEMS} history_items, got {len(items)}", param=FIELD)
    summary = _summary(items[0]) if items else ""
    for index, item in enumerate(items):
        if index or not summary:
            _check(item, f"{FIELD}[{index}]")
    if len(orjson.dumps(items)) > MAX_HISTORY_BYTES:
        raise InvalidValue(f"history_items must not exceed {MAX_HISTORY_BYTES} bytes", param=FIELD)
    if summary:  # its place stays, for the places in errors
        items = [{"role": "system", "content": summary}, *items[1:]]
    try:
        return Messages(items, input_follows=True), summary
    except InvalidRequest as error:
        error.about(param=placed(error.param))
        raise


def placed(param: str | None) -> str | None:
    """Return the place of an error in ``history_items`` for one in the ``messages`` of a chat body."""
    return None if param is None else FIELD + param.removeprefix("messages")


def told_items(messages: Iterable[Message], summary: str) -> HistoryItemsFrame:
    """Return the reply to a ``history_get``. The oldest messages are left out if a session would not take them all."""
    items = [HistoryItemFields(role=SUMMARY, content=summary)] if summary else []
    found: list[HistoryItemFields] = []
    size = sum(map(_size, items)) + 1
    left = list(messages)
    while left and len(items) + len(found) < MAX_HISTORY_ITEMS:
        item = _item(left[-1])
        size += _size(item)
        if size > MAX_HISTORY_BYTES:
            break
        found.append(item)
        left.pop()
    found.reverse()
    calls = {call.id for item in found for call in item.tool_calls or ()}
    # A result whose call was left out would be refused.
    items += (item for item in found if item.tool_call_id is UNSET or item.tool_call_id in calls)
    return HistoryItemsFrame(items=items)


def _item(message: Message) -> HistoryItemFields:
    calls = [HistoryCall(id=call.id, function=CallFunction(call.name, call.arguments)) for call in message.tool_calls]
    return HistoryItemFields(
        role=cast("Any", message.role),
        content=UNSET if calls and not message.text else message.text,
        tool_calls=calls or UNSET,
        tool_call_id=UNSET if message.tool_call_id is None else message.tool_call_id,
    )


def _size(item: HistoryItemFields) -> int:
    return len(msgspec.json.encode(item)) + 1


def _summary(item: Any) -> str:
    """Return the text of the first item if it is a summary; else an empty one. Raises InvalidValue."""
    if not isinstance(item, dict) or item.get("role") != SUMMARY:
        return ""
    if unknown := sorted(item.keys() - {"role", "content"}):
        raise InvalidValue(f"an item with role {SUMMARY} has no such field", param=f"{FIELD}[0].{unknown[0][:64]}")
    text = item.get("content")
    if not isinstance(text, str) or not text.strip():
        raise InvalidValue("the content of a summary must be a text", param=f"{FIELD}[0].content")
    return text


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
