"""MCP tools in a native session: the server calls them, and the model tells the results."""

from __future__ import annotations

import socket
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


async def test_functions_of_the_client_are_awaited(reference: McpUnderTest) -> None:
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    engine = CallingEngine()
    allowed = {"mcp_servers": (reference.host,)}
    async with live_server(engine, realtime=allowed) as server, native_client(server) as client:
        await have_tools(client, look, reference.tool(allowed_tools=["add"]))
        await client.say('call look\ncall add {"a": 2, "b": 3}')
        made = await client.answer()
        calls = [chunk["id"] for chunk in made.chunks if "id" in chunk]
        assert len(calls) == 2
        await client.chunk("seen", role="tool", tool_call_id=calls[0])
        told = (await client.answer()).text
        assert told == "seen"
        assert ("tool", "5") in [(one.role, one.text) for one in engine.requests[-1].history]
        assert len(engine.requests) == 2
        await client.send("history_truncate", request_id=made.final["request_id"])
        assert (await client.until("history_truncated"))["dropped_requests"] == 2  # what the server called is none


async def test_a_client_does_not_give_the_result_of_the_servers_call(reference: McpUnderTest) -> None:
    allowed = {"mcp_servers": (reference.host,)}
    async with live_server(CallingEngine(), realtime=allowed) as server, native_client(server) as client:
        await have_tools(client, reference.tool())
        await client.say("call hang")
        call = next(chunk["id"] for chunk in (await client.answer()).chunks if "id" in chunk)
        await client.chunk("mine", role="tool", tool_call_id=call)
        assert (await client.error())["code"] == "session_conflict"
        await client.say("hello")  # the talk goes on
        assert (await client.answer()).text == "hello"


async def test_a_server_that_is_not_reached_is_an_error_of_the_session(reference: McpUnderTest) -> None:
    allowed = {"mcp_servers": (reference.host,)}
    async with live_server(CallingEngine(), realtime=allowed) as server, native_client(server) as client:
        told = await have_tools(client, reference.tool(server_url=f"{reference.host}/nowhere"))
        assert told["error"]["param"] == "tools"
        await client.say("hello")
        assert (await client.answer()).text == "hello"


async def test_a_server_that_was_not_reached_is_asked_again_when_it_is_named_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        later = McpUnderTest(free.getsockname()[1], "/mcp")
    engine, allowed = CallingEngine(), {"mcp_servers": (later.host,)}
    async with live_server(engine, realtime=allowed) as server, native_client(server) as client:
        assert (await have_tools(client, later.tool()))["error"]["param"] == "tools"
        with mcp_server(port=later.port):
            await client.configure(tools=[later.tool()])
            while not (await client.until("session_updated"))["tools"]:
                pass
            await client.say('call add {"a": 2, "b": 3}')
            assert (await client.answer()).reason == "tool_calls"
            assert (await client.answer()).text == "5"


async def test_calls_cannot_be_approved_natively(reference: McpUnderTest) -> None:
    allowed = {"mcp_servers": (reference.host,)}
    async with live_server(CallingEngine(), realtime=allowed) as server, native_client(server) as client:
        await client.send("session_config", tools=[reference.tool(require_approval="always")])
        assert (await client.error())["param"] == "tools[0].require_approval"
