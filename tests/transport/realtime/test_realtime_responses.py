"""Responses of ``/v1/realtime`` over real sockets: their events, in their order."""

from __future__ import annotations

import pytest
from support.live_server import live_server
from support.realtime_client import realtime_client, text_of

MESSAGE_IN_ORDER = [
    "response.created",
    "rate_limits.updated",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]


@pytest.mark.virtual_clock
async def test_a_text_is_answered() -> None:
    async with live_server() as server, realtime_client(server) as client:
        item = await client.say("one two three", id="mine")
        assert (item["id"], item["role"], item["status"]) == ("mine", "user", "completed")
        begin = len(client.received)
        response = await client.respond(output_modalities=["text"], metadata={"client_event_id": "7"})
        assert text_of(response) == "one two three"
        assert client.kinds(since=begin) == MESSAGE_IN_ORDER
        assert (response["status"], response["metadata"]) == ("completed", {"client_event_id": "7"})
        assert client.seen("response.created")[0]["response"]["metadata"] == {"client_event_id": "7"}
        assert response["usage"]["output_tokens"] == 3
