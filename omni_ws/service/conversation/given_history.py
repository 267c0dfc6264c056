"""The history of a conversation as its client gives and gets it: earlier turns before all requests, and a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_ws.core.history import WORDS_UNKNOWN, Message, estimate_tokens
from omni_ws.errors import InvalidRequest, InvalidValue, UnsupportedParameter
from omni_ws.service.conversation.openai_requests import earlier_texts
from omni_ws.wire.history_items import FIELD, placed, read_history_items, told_items
from omni_ws.wire.server_frames import HistoryItemsFrame

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation

#: The part of the history that a given summary may take.
_SUMMARY_SHARE = 0.5


class GivenHistory(NamedTuple):
    """Checked messages of a client, and its summary of what was said before them; empty if there is none."""

    messages: Sequence[Message] = ()
    summary: str = ""


def check_history(conversation: Conversation, items: Any) -> GivenHistory:
    """Return ``history_items`` for ``give_history``.

    Raises InvalidValue if anything came before, and what reading raises; UnsupportedParameter for media, and for tool
    calls that the engine does not know.
    """
    ledger, stream = conversation.ledger, conversation.stream
    if stream.reorder.next_sequence_id or conversation.queue.opened or conversation.given or ledger.history.items:
        raise InvalidValue("history_items must come before all else in a session, and once", param=FIELD)
    found, summary = read_history_items(items)
    if found.tools_at is not None and not conversation.engine.capabilities.tools:
        raise UnsupportedParameter("tools are not supported by this engine", param=placed(found.tools_at))
    most = int(ledger.history.max_tokens * _SUMMARY_SHARE)
    if estimate_tokens(summary) > most:
        raise InvalidValue(f"the summary must not have more than {most} words", param=f"{FIELD}[0].content")
    try:
        return GivenHistory(earlier_texts(found.history), summary)
    except InvalidRequest as error:
        error.param = placed(error.param)
        raise


def give_history(conversation: Conversation, given: GivenHistory) -> None:
    """Put checked messages before all requests, and charge their memory to the session."""
    if given.summary:
        conversation.ledger.history.condense(given.summary)
    conversation.ledger.place(given.messages)
    conversation.ledger.weigh()
    if not conversation.busy:
        conversation.limits.summaries.note_quiet(conversation)


def told_history(conversation: Conversation, *, original: bool) -> HistoryItemsFrame:
    """Return the history: as requests see it or, if ``original``, all messages that are kept."""
    history = conversation.ledger.history
    first = 0 if original else max(history.summed, history.first_seen)
    messages = [_told(item.message) for item in history.items[first:] if item.role != "system"]
    return told_items(messages, "" if original else history.notes)


def _told(message: Message) -> Message:
    """Return a message as text."""
    text = " ".join(filter(None, (part.text or (WORDS_UNKNOWN if part.speech else "") for part in message.parts)))
    return Message(message.role, text, tool_calls=message.tool_calls, tool_call_id=message.tool_call_id)
