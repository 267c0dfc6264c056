"""Items of ``/v1/realtime``: what a client creates, and what of it the engine gets."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from support.live_server import live_server
from support.realtime_client import RealtimeClient, failed, realtime_client, text_of
from support.scripted_engines import CapableEngine, finished, said, tool_call

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, ToolCall
from omni_ws.errors import EngineFailed
from omni_ws.transport.realtime.items import MAX_ITEMS

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+M8AAAMBAQDJ/pLvAAAAAElFTkSuQmCC")


def text(chunks: list[InputChunk]) -> str:
    return b"".join(chunk.payload for chunk in chunks if chunk.modality is Modality.TEXT).decode()


def history(engine: CapableEngine) -> list[tuple[str, str]]:
    """What the newest request saw of the conversation."""
    return [(message.role, message.text) for message in engine.requests[-1].history]


async def create(client: RealtimeClient, **item: Any) -> dict[str, Any]:
    await client.send("conversation.item.create", item=item)
    return await client.until("conversation.item.done")


async def test_what_is_pending_is_the_input_of_the_response() -> None:
    engine = CapableEngine([said("yes")])
    async with live_server(engine) as server, realtime_client(server) as client:
        await client.say("You are a cook.", role="system")
        await client.say("Is it hot?")
        await client.say("Look.")
        await client.respond()
        assert text(engine.inputs[0]) == "Is it hot?\nLook."
        assert history(engine) == [("system", "You are a cook.")]
        await client.say("And now?")
        await client.respond()
        assert text(engine.inputs[1]) == "And now?"
        assert history(engine) == [("system", "You are a cook."), ("user", "Is it hot?\nLook."), ("assistant", "yes")]


async def test_a_conversation_of_before_is_history() -> None:
    engine = CapableEngine([said("yes")])
    async with live_server(engine) as server, realtime_client(server) as client:
        await client.say("Who are you?")
        await client.say("A cook.", role="assistant")
        call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at":"it"}'}
        for item in (call, {"type": "function_call_output", "call_id": "c1", "output": "hot"}):
            shown = (await create(client, **item))["item"]
            assert (shown["object"], shown["status"]) == ("realtime.item", "completed")
        await client.respond()
        (result,) = engine.inputs[0]
        assert (result.tool_call_id, result.payload) == ("c1", b"hot")
        assert history(engine) == [("user", "Who are you?"), ("assistant", "A cook.")]
        assert engine.requests[0].history[1].tool_calls == (ToolCall("c1", "look", '{"at":"it"}'),)


async def test_ids_and_names_may_have_512_characters() -> None:
    engine = CapableEngine([said("yes")])
    async with live_server(engine) as server, realtime_client(server) as client:
        await create(client, type="function_call", call_id="c" * 512, name="n" * 512, arguments="{}", id="i" * 512)
        await create(client, type="function_call_output", call_id="c" * 512, output="hot")
        await client.respond()
        (result,) = engine.inputs[0]
        assert result.tool_call_id == "c" * 512


async def test_a_tool_is_called_and_its_output_answered() -> None:
    engine = CapableEngine([*tool_call("look", '{"at":', '"it"}'), finished(FinishReason.TOOL_CALLS)])
    async with live_server(engine) as server, realtime_client(server) as client:
        await client.update(tools=[{"type": "function", "name": "look", "parameters": {"type": "object"}}])
        await client.say("Look at it.")
        begin = len(client.received)
        response = await client.respond()
        (call,) = response["output"]
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "look", '{"at":"it"}')
        assert client.kinds(since=begin) == [
            "response.created",
            "rate_limits.updated",
            "response.output_item.added",
            "conversation.item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        engine.script = (said("It is hot."),)
        await create(client, type="function_call_output", call_id=call["call_id"], output="hot")
        assert text_of(await client.respond()) == "It is hot."
        assert engine.requests[1].history[-1].tool_calls[0].id == call["call_id"]


@pytest.mark.parametrize("is_over", [True, False])
async def test_items_beside_a_deleted_one_stay_in_the_history(is_over: bool) -> None:
    deleted = asyncio.Event()
    engine = CapableEngine([said("yes"), lambda: deleted.wait()])
    async with live_server(engine) as server, realtime_client(server) as client:
        for name in ("one", "two", "three"):
            await client.say(name, id=name)
        await client.send("response.create", response={})
        if is_over:
            deleted.set()
            await client.response()
        else:
            await client.until("response.output_audio_transcript.delta", "response.output_text.delta")
        await client.send("conversation.item.delete", item_id="two")
        await client.until("conversation.item.deleted")
        if not is_over:
            deleted.set()
            await client.response()
        await client.say("And?")
        await client.respond()
        assert history(engine) == [("user", "one three"), ("assistant", "yes")]
        await client.send("conversation.item.delete", item_id="one")
        await client.say("And then?")
        await client.respond()
        assert history(engine)[:2] == [("user", "three"), ("assistant", "yes")]


async def test_an_image_goes_with_the_text() -> None:
    engine = CapableEngine([said("red")])
    async with live_server(engine) as server, realtime_client(server) as client:
        url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
        content = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": url}]
        await create(client, type="message", role="user", content=content)
        await client.respond()
        assert [chunk.modality for chunk in engine.inputs[0]] == ["text", "image"]
        assert engine.inputs[0][1].payload == PNG


async def test_items_are_retrieved_and_deleted() -> None:
    engine = CapableEngine([said("yes")])
    async with live_server(engine) as server, realtime_client(server) as client:
        first = await client.say("one", id="first")
        await client.say("other", id="other")
        await client.send("conversation.item.retrieve", item_id="first")
        retrieved = (await client.until("conversation.item.retrieved"))["item"]
        assert retrieved == first
        assert (retrieved["object"], retrieved["status"]) == ("realtime.item", "completed")
        await client.send("conversation.item.delete", item_id="first")
        assert (await client.until("conversation.item.deleted"))["item_id"] == "first"
        await client.send("conversation.item.delete", item_id="other")
        await client.until("conversation.item.deleted")
        await client.say("two")
        answer = (await client.respond())["output"][0]
        assert text(engine.inputs[0]) == "two"
        await client.send("conversation.item.delete", item_id=answer["id"])
        await client.until("conversation.item.deleted")
        await client.say("three")
        await client.respond()
        assert (history(engine), text(engine.inputs[1])) == ([], "two three")
        for kind, code in (
            ("retrieve", "item_retrieve_invalid_item_id"),
            ("delete", "item_delete_invalid_item_id"),
            ("truncate", "item_truncate_invalid_item_id"),
        ):
            error = await failed(client, f"conversation.item.{kind}", item_id="first", audio_end_ms=0)
            assert (error["code"], error["param"]) == (code, "item_id")


async def test_an_item_after_another_names_it() -> None:
    async with live_server(CapableEngine([said("yes")])) as server, realtime_client(server) as client:
        await client.say("one", id="first")
        (answer,) = (await client.respond(output_modalities=["text"]))["output"]
        added = client.seen("conversation.item.added")
        assert [one["previous_item_id"] for one in added] == [None, "first"]
        done = client.seen("conversation.item.done")
        assert [one["previous_item_id"] for one in done] == [None, "first"]
        assert done[1]["item"] == answer
        assert added[1]["item"] == {**answer, "status": "in_progress", "content": []}
        assert (done[0]["item"], done[0]["item"]["id"]) == (added[0]["item"], "first")
        assert added[0]["item"]["content"] == [{"type": "input_text", "text": "one"}]


async def test_an_id_is_given_once() -> None:
    async with live_server(CapableEngine()) as server, realtime_client(server) as client:
        items: list[dict[str, Any]] = [
            {"type": "message", "role": "user", "content": []},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "hot"},
        ]
        for item in items:
            item["id"] = f"mine_{item['type']}"
            assert (await create(client, **item))["item"]["id"] == item["id"]
            error = await failed(client, "conversation.item.create", item=item)
            assert error["code"] == "item_create_duplicate_item_id"


REFUSED_ITEMS: list[tuple[Any, str, str]] = [
    ({}, "invalid_value", "item.type"),
    ({"type": "mcp_call"}, "unsupported_parameter", "item.type"),
    ({"type": "message", "role": "nobody", "content": []}, "invalid_value", "item.role"),
    ({"type": "message", "role": "user"}, "invalid_value", "item.content"),
    ({"type": "message", "role": "user", "content": [5]}, "invalid_value", "item.content[0]"),
    (
        {"type": "message", "role": "user", "content": [{"type": "input_text"}]},
        "invalid_value",
        "item.content[0].text",
    ),
    (
        {"type": "message", "role": "system", "content": [{"type": "input_audio", "audio": ""}]},
        "invalid_value",
        "item.content[0].type",
    ),
    (
        {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": "?"}]},
        "invalid_value",
        "item.content[0].audio",
    ),
    (
        {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "https://a/b.png"}]},
        "unsupported_parameter",
        "item.content[0].image_url",
    ),
    ({"type": "function_call", "call_id": "c"}, "invalid_value", "item.name"),
    ({"type": "function_call_output", "output": "x"}, "invalid_value", "item.call_id"),
    ({"type": "message", "role": "user", "content": [], "id": "x" * 513}, "invalid_value", "item.id"),
    ({"type": "function_call_output", "output": "x", "call_id": "x" * 513}, "invalid_value", "item.call_id"),
    (
        {"type": "function_call", "call_id": "x" * 513, "name": "n", "arguments": ""},
        "invalid_value",
        "item.call_id",
    ),
    ({"type": "function_call", "call_id": "c", "name": "x" * 513, "arguments": ""}, "invalid_value", "item.name"),
]


async def test_a_refused_item_names_its_field() -> None:
    async with live_server() as server:
        for item, code, param in REFUSED_ITEMS:
            async with realtime_client(server) as client:
                error = await failed(client, "conversation.item.create", item=item)
                assert (error["code"], error["param"]) == (code, param), item


async def test_what_a_failed_response_was_asked_is_still_pending() -> None:
    engine = CapableEngine([EngineFailed("no")])
    async with live_server(engine, expect_errors=True) as server, realtime_client(server) as client:
        await client.say("Is it hot?")
        response = await client.respond()
        assert (response["status"], response["status_details"]["error"]["code"]) == ("failed", "engine_failed")
        assert not client.seen("error")
        engine.script = (said("yes"),)
        await client.respond()
        assert text(engine.inputs[1]) == "Is it hot?"
        assert history(engine) == []


async def test_the_oldest_items_make_room() -> None:
    async with live_server() as server, realtime_client(server) as client:
        for number in range(MAX_ITEMS + 1):
            await client.say("x", id=f"item_{number}")
        assert (await failed(client, "conversation.item.retrieve", item_id="item_0"))["code"].startswith(
            "item_retrieve"
        )
        await client.send("conversation.item.retrieve", item_id="item_1")
        await client.until("conversation.item.retrieved")
        first = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "behind what goes"}]}
        await client.send("conversation.item.create", item=first, previous_item_id="item_1")
        assert (await client.until("conversation.item.added"))["previous_item_id"] is None


async def test_items_beyond_the_size_of_a_session_end_it() -> None:
    limit = {"max_payload_per_session": 64 * 1024}
    async with live_server(streaming_input=limit) as server, realtime_client(server) as client:
        await client.say("x" * 30_000)
        message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x" * 3_000}]}
        await client.send("conversation.item.create", item=message)
        assert (await client.closed())[0] == 1009
        assert client.received[-1]["error"]["code"] == "payload_too_large"
