"""history_items of the first session_config: earlier turns that the client gives."""

from __future__ import annotations

from typing import Any

import pytest
from support.live_server import live_server
from support.native_client import native_client
from support.scripted_engines import ActingEngine

from omni_ws.core.chunks import FinishReason, ToolCall, Usage
from omni_ws.engine.base import Finished, GenerationRequest, OutputWriter, TextOutput
from omni_ws.wire.openai_requests import (
    MAX_HISTORY_BYTES,
    MAX_HISTORY_ITEMS,
)


class Attentive(ActingEngine):
    def __init__(self, **changes: Any) -> None:
        super().__init__("attentive", **changes)

        self.asked: list[str] = []

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.asked.append("".join([chunk.payload.decode() async for chunk in request.input]))
        out.write(TextOutput("Yes."))
        out.write(Finished(FinishReason.STOP, Usage()))


KEPT = [{"role": "user", "content": "kept"}, {"role": "assistant", "content": "Yes."}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
TALK = [
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello Ada."},
    {"role": "user", "content": [{"type": "text", "text": "And the "}, {"type": "text", "text": "weather?"}]},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"},
    {"role": "assistant", "content": "18 degrees."},
]


async def test_the_model_sees_the_earlier_turns_in_each_request() -> None:
    engine = Attentive(tools=True)
    async with live_server(engine) as server:
        async with native_client(server) as client:
            updated = await client.configure(history_items=TALK, instructions="Be kind.", modalities=["text"])
            assert "history_items" not in updated
            for text in ("one", "two"):
                await client.say(text)
                await client.answer()
        await server.check_empty()
    first, second = engine.requests
    assert [(one.role, one.text) for one in first.history] == [
        ("user", "My name is Ada."),
        ("assistant", "Hello Ada."),
        ("user", "And the weather?"),
        ("assistant", ""),
        ("tool", "18 degrees"),
        ("assistant", "18 degrees."),
    ]
    assert first.history[3].tool_calls == (ToolCall("call_1", "weather", '{"city": "Paris"}'),)
    assert [(one.role, one.text) for one in second.history[6:]] == [("user", "one"), ("assistant", "Yes.")]


async def test_a_result_may_come_for_a_call_of_the_earlier_turns() -> None:
    engine = Attentive(tools=True)
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(history_items=TALK[:4], modalities=["text"])
        await client.chunk("20 degrees", role="tool", tool_call_id="call_1", end=True)
        await client.answer()
    [request] = engine.requests
    assert [one.role for one in request.history] == ["user", "assistant", "user", "assistant"]
    assert request.history[-1].tool_calls[0].id == "call_1"


async def test_what_was_not_answered_is_asked_with_what_comes_next() -> None:
    engine = Attentive()
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(history_items=[*KEPT, user("Book a table")], modalities=["text"])
        await client.say("for two")
        await client.answer()
    assert [one.text for one in engine.requests[0].history] == ["kept", "Yes."]
    assert engine.asked == ["Book a table for two"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+M8AAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
#: The bytes of JSON around the texts of two items.
_AROUND = len('[{"role":"user","content":""},{"role":"user","content":""}]')


@pytest.mark.parametrize(
    ("items", "code", "param"),
    [
        ("hello", "invalid_value", ""),
        ([user("a")] * (MAX_HISTORY_ITEMS + 1), "invalid_value", ""),
        ([user("a"), user("b" * (MAX_HISTORY_BYTES - _AROUND))], "invalid_value", ""),
        (["hello"], "invalid_value", "[0]"),
        ([user("a"), {"content": "b"}], "invalid_value", "[1].role"),
        ([{"role": "system", "content": "b"}], "invalid_value", "[0].role"),
        ([{"role": ["user"], "content": "b"}], "invalid_value", "[0].role"),
        ([{"role": "user"}], "invalid_value", "[0].content"),
        ([{"role": "user", "content": 7}], "invalid_value", "[0].content"),
        ([{"role": "user", "content": "a", "name": "b"}], "invalid_value", "[0].name"),
        ([{"role": "user", "content": "a", "tool_calls": [CALL]}], "invalid_value", "[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": "x"}], "invalid_value", "[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "invalid_value", "[0].tool_calls[0]"),
        ([{"role": "tool", "tool_call_id": "call_9", "content": "x"}], "invalid_value", "[0].tool_call_id"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": PICTURE}]}],
            "unsupported_parameter",
            "[0]",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)
async def test_what_is_no_history_is_refused_and_changes_nothing(items: Any, code: str, param: str) -> None:
    engine = Attentive(tools=True)
    async with live_server(engine, streaming_input={"max_chunk_bytes": 4 << 20}) as server:
        async with native_client(server) as client:
            await client.send("session_config", history_items=items, instructions="changed")
            error = (await client.until("error"))["error"]
            assert (error["code"], error["param"]) == (code, f"history_items{param}"), error
            # The session goes on, and may still get a history.
            await client.configure(history_items=KEPT, modalities=["text"])
            await client.say("one")
            await client.answer()
        await server.check_empty()
    [request] = engine.requests
    assert ([one.text for one in request.history], request.instructions) == (["kept", "Yes."], "")


async def test_as_many_items_and_bytes_as_may_be() -> None:
    async with live_server(Attentive(), streaming_input={"max_chunk_bytes": 4 << 20}) as server:
        for items in (
            [user("a")] * MAX_HISTORY_ITEMS,
            [user("a"), user("b" * (MAX_HISTORY_BYTES - _AROUND - 1))],
        ):
            async with native_client(server) as client:
                await client.configure(history_items=items)
            await server.check_empty()


async def test_memory_of_it_is_charged_to_the_session() -> None:
    async with live_server(Attentive(), limits={"max_history_tokens": 100_000}) as server:
        async with native_client(server) as client:
            before = server.held_bytes
            await client.configure(history_items=[user("word " * 20_000)])
            assert server.held_bytes - before > 90_000
        await server.check_empty()


async def test_calls_need_an_engine_with_tools() -> None:
    async with live_server(Attentive(tools=False)) as server, native_client(server) as client:
        await client.send("session_config", history_items=TALK)
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "history_items[3].tool_calls")


async def test_it_comes_before_all_else_and_once() -> None:
    async with live_server(Attentive()) as server:
        async with native_client(server) as client:
            await client.configure(history_items=None)
            await client.configure(history_items=[])
            await client.configure(history_items=[user("a")])
            await client.send("session_config", history_items=[user("b")])
            assert (await client.until("error"))["error"]["param"] == "history_items"
        async with native_client(server) as client:
            await client.chunk("begun")
            await client.send("session_config", history_items=[user("b")])
            assert (await client.until("error"))["error"]["param"] == "history_items"
