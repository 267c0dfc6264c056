"""SavedRealtime: the state of a RealtimeDialect as a value."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from omni_ws.service.conversation.messages import SavedError
from omni_ws.transport.realtime.dictation import SavedDictation
from omni_ws.transport.realtime.items import SavedItems, SavedResponse, SavedTurn
from omni_ws.wire.realtime_events import Item
from omni_ws.wire.realtime_session import SessionFields


class SavedRealtime(Struct, kw_only=True, tag="realtime"):
    """The state of a RealtimeDialect, besides its conversation, in a form that can be written to bytes."""

    conversation_id: str
    session: SessionFields
    #: All items and all turns; other fields refer to them by their indices here.
    items: list[Item]
    turns: list[SavedTurn]
    conversation: SavedItems
    #: Audio that is not committed.
    audio: bytes
    #: The turns that are the input of open requests, and those of ended requests whose transcript is incomplete, by
    #: request id; and the turn that is being spoken.
    input_of: dict[str, int]
    late: dict[str, int]
    speaking: int | None
    responses: list[SavedResponse]
    errors: dict[str, SavedError]
    deferred: list[tuple[dict[str, Any], str | None]]
    #: Events that wait for images.
    waiting: list[dict[str, Any]] = []
    dictation: SavedDictation | None = None
    after_audio: list[tuple[str, str | None]] = []
