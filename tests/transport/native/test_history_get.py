"""history_get: the history as requests see it, in the form in which a new session takes it."""

from __future__ import annotations

from typing import Any

import pytest
from support.live_server import live_server
from support.native_client import NativeClient, native_client
from support.scripted_engines import ActingEngine

from omni_ws.core.chunks import FinishReason, ToolCall, ToolCallFragment, Usage
from omni_ws.core.history import NOTES_END, NOTES_HEAD, Message
from omni_ws.engine.base import Finished, GenerationRequest, OutputWriter, TextOutput, ToolCallOutput
from omni_ws.wire.openai_requests import (
    MAX_HISTORY_BYTES,
    MAX_HISTORY_ITEMS,
    read_history_items,
    told_items,
)


class Caller(ActingEngine):
    """Calls a tool where it is asked to."""

    def __init__(self) -> None:
        super().__init__("caller", tools=True)

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        asked = "".join([chunk.payload.decode() async for chunk in request.input])
        if asked.startswith("call"):
            out.write(ToolCallOutput(ToolCallFragment(0, "call_1", "weather", "{}")))
            out.write(Finished(FinishReason.TOOL_CALLS, Usage()))
            return
        out.write(TextOutput("Yes."))
        out.write(Finished(FinishReason.STOP, Usage()))


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


async def history(client: NativeClient, **fields: Any) -> list[dict[str, Any]]:
    await client.send("history_get", **fields)
    items: list[dict[str, Any]] = (await client.until("history_items"))["items"]
    return items


async def test_a_new_session_takes_what_another_has_told() -> None:
    engine = Caller()
    async with live_server(engine) as server:
        async with native_client(server) as client:
            await client.configure(modalities=["text"], tools=TOOLS)
            assert await history(client) == []
            await client.say("hello")
            await client.answer()
            await client.say("call it")
            await client.answer()
            await client.chunk("18 degrees", role="tool", tool_call_id="call_1", end=True)
            await client.answer()
            told = await history(client)
        assert told == [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "call it"},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "content": "18 degrees", "tool_call_id": "call_1"},
            {"role": "assistant", "content": "Yes."},
        ]
        async with native_client(server) as client:
            await client.configure(modalities=["text"], tools=TOOLS, history_items=told)
            assert await history(client) == told
            await client.say("and now?")
            await client.answer()
    before, after = engine.requests[-2:]
    assert after.history[:4] == before.history


async def test_a_summary_is_told_and_taken_as_the_first_item() -> None:
    engine = Caller()
    summary = {"role": "summary", "content": "- The user is Ada."}
    rest = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hi."}]
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(modalities=["text"], history_items=[summary, *rest])
        assert await history(client) == [summary, *rest]
        assert await history(client, original=True) == rest
        await client.say("Who am I?")
        await client.answer()
    first, second = engine.requests[0].history
    assert first.text == f"{NOTES_HEAD}- The user is Ada.{NOTES_END} hello"
    assert second.text == "Hi."


async def test_the_originals_are_told_as_long_as_they_are_kept() -> None:
    async with live_server(Caller()) as server, native_client(server) as client:
        await client.configure(modalities=["text"])
        for number in range(3):
            await client.say(f"question {number}")
            await client.answer()
        (conversation,) = server.app.sessions.conversations
        items = conversation.ledger.history.older(behind=0, keep=1, most=100)
        assert conversation.ledger.history.sum_up(items, "- Two questions")
        told = await history(client)
        assert [one["content"] for one in told] == ["- Two questions", "question 2", "Yes."]
        assert len(await history(client, original=True)) == 6


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"role": "summary"}], "[0].content"),
        ([{"role": "summary", "content": "  "}], "[0].content"),
        ([{"role": "summary", "content": [{"type": "text", "text": "a"}]}], "[0].content"),
        ([{"role": "summary", "content": "a", "name": "b"}], "[0].name"),
        ([{"role": "user", "content": "a"}, {"role": "summary", "content": "a"}], "[1].role"),
        ([{"role": "summary", "content": "a " * 2049}], "[0].content"),
        ([{"role": "summary", "content": "a"}, {"role": "user"}], "[1].content"),
        (
            [{"role": "summary", "content": "a"}, {"role": "tool", "tool_call_id": "x", "content": "a"}],
            "[1].tool",
        ),
    ],
)
async def test_a_wrong_summary_is_refused(items: Any, param: str) -> None:
    async with live_server(Caller()) as server, native_client(server) as client:
        await client.send("session_config", history_items=items)
        error = await client.error()
        assert error["code"] == "invalid_value"
        assert error["param"].startswith(f"history_items{param}")
        await client.configure(history_items=[{"role": "summary", "content": "a " * 2048}])


async def test_wrong_fields_are_refused() -> None:
    async with live_server(Caller()) as server, native_client(server) as client:
        await client.send("history_get", original="yes")
        assert (await client.error())["param"] == "original"


def test_no_more_is_told_than_a_session_takes() -> None:
    many = [Message("user", str(number)) for number in range(MAX_HISTORY_ITEMS + 1)]
    assert len(told_items(many[1:], "").items) == MAX_HISTORY_ITEMS
    told = told_items(many, "notes").items
    assert (len(told), told[1].content, told[-1].content) == (MAX_HISTORY_ITEMS, "2", str(MAX_HISTORY_ITEMS))
    around = len('[{"role":"user","content":""},{"role":"user","content":""}]')
    fits = [Message("user", "a"), Message("user", "b" * (MAX_HISTORY_BYTES - around - 1))]
    items = told_items(fits, "").items
    assert len(items) == 2
    read_history_items([{"role": one.role, "content": one.content} for one in items])
    assert len(told_items([Message("user", "ab"), fits[1]], "").items) == 1
    calls = [Message("assistant", "x" * MAX_HISTORY_BYTES, tool_calls=(ToolCall("c", "n", "{}"),))]
    result = Message("tool", "1", tool_call_id="c")
    assert told_items([*calls, result, Message("user", "a")], "").items[0].role == "user"
