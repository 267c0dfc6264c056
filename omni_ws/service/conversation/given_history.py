"""Earlier turns that the client gives: they come before all requests of the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omni_ws.core.history import Message
from omni_ws.errors import InvalidRequest, InvalidValue, UnsupportedParameter
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.openai_requests import earlier_texts
from omni_ws.wire.history_items import FIELD, placed, read_history_items


def check_history(conversation: Conversation, items: Any) -> list[Message]:
    """Return ``history_items`` as messages for ``give_history``.

    Raises InvalidValue if anything came before, and what reading raises; UnsupportedParameter for media, and for tool
    calls that the engine does not know.
    """
    ledger, stream = conversation.ledger, conversation.stream
    if stream.reorder.next_sequence_id or conversation.queue.opened or conversation.given or ledger.history.items:
        raise InvalidValue("history_items must come before all else in a session, and once", param=FIELD)
    found = read_history_items(items)
    if found.tools_at is not None and not conversation.engine.capabilities.tools:
        raise UnsupportedParameter("tools are not supported by this engine", param=placed(found.tools_at))
    try:
        return earlier_texts(found.history)
    except InvalidRequest as error:
        error.param = placed(error.param)
        raise


def give_history(conversation: Conversation, messages: Sequence[Message]) -> None:
    """Put checked messages before all requests, and charge their memory to the session."""
    conversation.ledger.place(messages)
    conversation.ledger.weigh()
