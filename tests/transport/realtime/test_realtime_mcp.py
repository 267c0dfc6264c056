"""MCP over ``/v1/realtime``, with the reference server of the package ``mcp``: events, items, approvals, failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.live_server import LiveServer, live_server
from support.mcp_server import CallingEngine, McpUnderTest, mcp_server
from support.patience import PATIENCE_SEC
from support.realtime_client import RealtimeClient, failed, realtime_client, text_of


@pytest.fixture(scope="module")
def reference() -> Iterator[McpUnderTest]:
    with mcp_server() as server:
        yield server


@asynccontextmanager
async def session(
    reference: McpUnderTest, *tools: dict[str, Any], engine: CallingEngine | None = None, **settings: Any
) -> AsyncIterator[tuple[RealtimeClient, CallingEngine]]:
    """A session whose MCP servers have been listed."""
    engine = engine or CallingEngine()
    allowed = {"mcp_servers": (reference.host,), **settings}
    async with live_server(engine, realtime=allowed) as server, realtime_client(server) as client:
        await client.update(output_modalities=["text"], tools=list(tools))
        for one in tools:
            if one["type"] == "mcp":
                await client.until("mcp_list_tools.completed", "mcp_list_tools.failed")
        yield client, engine


CALLED = [
    "response.created",
    "rate_limits.updated",
    "response.output_item.added",
    "conversation.item.added",
    "response.mcp_call_arguments.delta",
    "response.mcp_call_arguments.done",
    "response.mcp_call.in_progress",
    "response.mcp_call.completed",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]
ANSWERED = [
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


async def test_tools_are_listed_called_and_told(reference: McpUnderTest) -> None:
    async with session(reference, reference.tool()) as (client, engine):
        assert client.kinds(since=1) == [
            "session.updated",
            "mcp_list_tools.in_progress",
            "conversation.item.added",
            "conversation.item.done",
            "mcp_list_tools.completed",
        ]
        listed = client.seen("conversation.item.done")[0]["item"]
        assert (listed["type"], listed["server_label"]) == ("mcp_list_tools", "sums")
        assert [one["name"] for one in listed["tools"]] == ["add", "fail", "hang", "long"]
        assert listed["tools"][0]["annotations"]["readOnlyHint"] is True
        await client.say('call add {"a": 2, "b": 3}')
        begin = len(client.received)
        first = await client.respond()
        assert client.kinds(since=begin) == CALLED
        call = first["output"][0]
        assert {**call, "id": ""} == {
            "id": "",
            "type": "mcp_call",
            "server_label": "sums",
            "name": "add",
            "arguments": '{"a": 2, "b": 3}',
            "output": "5",
            "error": None,
        }
        begin = len(client.received)
        assert text_of(await client.response()) == "5"
        assert client.kinds(since=begin) == ANSWERED
        await client.say("thanks")
        assert text_of(await client.respond()) == "thanks"
        assert [one.role for one in engine.requests[-1].history] == ["user", "assistant", "tool", "assistant"]
