"""MCP tools in a native session: the server calls them, and the model tells the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.live_server import live_server
from support.mcp_server import CallingEngine, McpUnderTest, mcp_server
from support.native_client import NativeClient, native_client


@pytest.fixture(scope="module")
def reference() -> Iterator[McpUnderTest]:
    with mcp_server() as server:
        yield server


async def have_tools(client: NativeClient, *tools: dict[str, Any]) -> dict[str, Any]:
    """Configures the tools. Returns the configuration when they are listed."""
    await client.configure(modalities=["text"], tools=list(tools))
    updated: dict[str, Any] = await client.until("session_updated", "error")
    return updated


async def test_the_server_calls_a_tool_and_the_model_tells_the_result(reference: McpUnderTest) -> None:
    engine = CallingEngine()
    allowed = {"mcp_servers": (reference.host,)}
    async with live_server(engine, realtime=allowed) as server, native_client(server) as client:
        await have_tools(client, reference.tool())
        await client.say('call add {"a": 2, "b": 3}')
        call = await client.answer()
        assert call.reason == "tool_calls"
        assert (await client.answer()).text == "5"
        assert engine.offered == ["sums__add", "sums__fail", "sums__hang", "sums__long"]
        await client.say("thanks")
        assert (await client.answer()).text == "thanks"
        assert [one.role for one in engine.requests[-1].history] == ["user", "assistant", "tool", "assistant"]
