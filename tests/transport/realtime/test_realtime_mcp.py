"""MCP over ``/v1/realtime``, with the reference server of the package ``mcp``: events, items, approvals, failures."""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.inline_workers import inline, loud, quiet
from support.live_server import live_server
from support.mcp_server import SECRET, CallingEngine, McpUnderTest, mcp_server
from support.native_client import native_client
from support.raw_http import post
from support.realtime_client import TEXT_RESPONSE, RealtimeClient, failed, realtime_client, text_of

from omni_ws.service.process import QUIETED_LOGGERS
from omni_ws.transport.realtime.realtime import RealtimeDialect
from omni_ws.transport.realtime.session import RealtimeConnection


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


async def retrieved(client: RealtimeClient, item_id: str) -> dict[str, Any]:
    await client.send("conversation.item.retrieve", item_id=item_id)
    found = await client.until("conversation.item.retrieved", "error")
    assert found["type"] == "conversation.item.retrieved"
    item: dict[str, Any] = found["item"]
    return item


def fields(event: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: event[name] for name in names}


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
        add = listed["tools"][0]
        assert add["annotations"]["readOnlyHint"] is True
        assert add["description"] == "Add two numbers."
        assert add["input_schema"]["required"] == ["a", "b"]
        for step in ("in_progress", "completed"):
            assert client.seen(f"mcp_list_tools.{step}")[0]["item_id"] == listed["id"]
        assert await retrieved(client, listed["id"]) == listed
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
        place = {"response_id": first["id"], "item_id": call["id"], "output_index": 0}
        for step, name in (("delta", "delta"), ("done", "arguments")):
            (event,) = client.seen(f"response.mcp_call_arguments.{step}")
            assert fields(event, *place, name) == {**place, name: call["arguments"]}
        begin = len(client.received)
        assert text_of(await client.response()) == "5"
        assert client.kinds(since=begin) == list(TEXT_RESPONSE)
        assert await retrieved(client, call["id"]) == call
        await client.say("thanks")
        assert text_of(await client.respond()) == "thanks"
        assert [one.role for one in engine.requests[-1].history] == ["user", "assistant", "tool", "assistant"]


async def called(client: RealtimeClient, *lines: str) -> dict[str, Any]:
    """The first item of a response that makes these calls."""
    await client.say("\n".join(f"call {line}" for line in lines))
    item: dict[str, Any] = (await client.respond())["output"][0]
    return item


async def test_several_calls_of_one_answer_are_told_together(reference: McpUnderTest) -> None:
    async with session(reference, reference.tool()) as (client, _):
        await client.say('call add {"a": 1, "b": 1}\ncall fail\ncall add {"a": 2, "b": 2}')
        first = await client.respond()
        outputs = [(one["output"], one["error"] and one["error"]["type"]) for one in first["output"]]
        assert outputs == [("2", None), (None, "tool_execution_error"), ("4", None)]
        ids = [one["id"] for one in first["output"]]
        for step, indices in (("in_progress", [0, 1, 2]), ("completed", [0, 2]), ("failed", [1])):
            events = client.seen(f"response.mcp_call.{step}")
            assert sorted((one["output_index"], one["item_id"]) for one in events) == [(n, ids[n]) for n in indices]
        told = text_of(await client.response())
        assert told == '2; {"error":"Error executing tool fail"}; 4'


async def test_a_call_waits_for_its_approval(reference: McpUnderTest) -> None:
    asking = reference.tool(require_approval="always")
    async with session(reference, asking) as (client, _):
        before = len(reference.calls)
        asked = await called(client, 'add {"a": 2, "b": 3}')
        assert (asked["type"], asked["name"], asked["arguments"]) == ("mcp_approval_request", "add", '{"a": 2, "b": 3}')
        assert asked["server_label"] == "sums"
        assert len(reference.calls) == before
        begin = len(client.received)
        answer = {"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": True}
        await client.send("conversation.item.create", item=answer)
        assert text_of(await client.response()) == "5"
        assert client.kinds(since=begin)[:6] == [
            "conversation.item.added",
            "conversation.item.done",
            "conversation.item.added",
            "response.mcp_call.in_progress",
            "response.mcp_call.completed",
            "conversation.item.done",
        ]
        call = client.received[begin + 5]["item"]
        assert (call["type"], call["output"], call["approval_request_id"]) == ("mcp_call", "5", asked["id"])
        error = await failed(client, "conversation.item.create", item=answer)  # a second time
        assert error["param"] == "item.approval_request_id"


async def test_a_call_that_is_not_approved_is_not_made(reference: McpUnderTest) -> None:
    asking = reference.tool(require_approval={"never": {"tool_names": ["long"]}})
    async with session(reference, asking) as (client, _):
        before = len(reference.calls)
        asked = await called(client, 'add {"a": 2, "b": 3}')
        answer = {"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": False}
        error = await failed(client, "conversation.item.create", item={**answer, "approval_request_id": "mcpr_no"})
        assert error["param"] == "item.approval_request_id"
        error = await failed(client, "conversation.item.create", item={**answer, "id": asked["id"]})
        assert (error["code"], error["param"]) == ("item_create_duplicate_item_id", "item.id")
        await client.send("conversation.item.create", item={**answer, "id": "mine", "reason": "too dear"})
        assert (await client.until("conversation.item.done"))["item"]["id"] == "mine"
        assert "did not approve the call: too dear" in text_of(await client.response())
        assert len(reference.calls) == before
        assert (await called(client, 'long {"size": 3}'))["output"] == "xxx"  # which needs none
        assert text_of(await client.response()) == "xxx"
        shown = {**answer, "id": "mine", "reason": "too dear"}
        assert await retrieved(client, "mine") == shown


async def test_a_hung_tool_is_an_error_and_the_talk_goes_on(reference: McpUnderTest) -> None:
    async with session(reference, reference.tool(), mcp_timeout_sec=1) as (client, _):
        call = await called(client, "hang")
        error = {"type": "protocol_error", "code": 0, "message": "the server did not answer within 1 s"}
        assert (call["output"], call["error"]) == (None, error)
        assert "did not answer within 1 s" in text_of(await client.response())
        assert (await called(client, 'add {"a": 2, "b": 3}'))["output"] == "5"
        await client.response()


async def test_while_a_tool_hangs_other_things_are_answered(reference: McpUnderTest) -> None:
    async with session(reference, reference.tool()) as (client, _):
        await client.say("call hang")
        await client.send("response.create")
        await client.until("response.mcp_call.in_progress")
        error = await failed(client, "response.create")
        assert error["code"] == "conversation_already_has_active_response"
        await client.send("response.cancel")
        response = await client.response()
        assert (response["status"], response["output"][0]["error"]["message"]) == (
            "cancelled",
            "the call was cancelled",
        )
        await client.say("hello")
        assert text_of(await client.respond()) == "hello"


async def test_speech_is_answered_while_a_tool_hangs(reference: McpUnderTest) -> None:
    """The response with the call is done as another one begins, and the call goes on."""
    allowed = {"mcp_servers": (reference.host,)}
    async with live_server(CallingEngine(), realtime=allowed) as server, realtime_client(inline(server)) as client:
        await client.update(output_modalities=["text"], tools=[reference.tool()])
        await client.until("mcp_list_tools.completed")
        await client.say("call hang")
        await client.send("response.create")
        await client.until("response.mcp_call.in_progress")
        await client.append(quiet(96, khz=24) + loud(320, khz=24) + quiet(640, khz=24))
        held = await client.response()
        assert (held["status"], held["output"][0]["type"]) == ("completed", "mcp_call")
        assert not client.seen("response.mcp_call.failed")
        assert (await client.response())["status"] == "completed"  # to the speech
        assert not client.seen("response.mcp_call.failed")


@pytest.mark.parametrize(("size", "fits"), [(256 * 1024, True), (256 * 1024 + 1, False)])
async def test_a_result_may_have_256_kib(reference: McpUnderTest, size: int, fits: bool) -> None:
    async with session(reference, reference.tool()) as (client, engine):
        call = await called(client, f'long {{"size": {size}}}')
        await client.response()
        assert (call["output"] is not None) == fits
        assert (len(engine.inputs[-1][0].payload) == size) == fits
        if not fits:
            assert call["error"]["message"] == "the result exceeds 262144 bytes"


async def test_eight_calls_are_made_in_a_turn(reference: McpUnderTest) -> None:
    async with session(reference, reference.tool()) as (client, _):
        before = len(reference.calls)
        await client.say("\n".join(f'call add {{"a": {number}, "b": 0}}' for number in range(9)))
        first = await client.respond()
        errors = [one["error"] for one in first["output"]]
        assert errors[:8] == [None] * 8
        assert errors[8]["message"].startswith("at most 8 calls")
        await client.response()
        assert len(reference.calls) == before + 8
        assert (await called(client, 'add {"a": 2, "b": 3}'))["output"] == "5"  # in the next turn
        await client.response()


class Insisting(CallingEngine):
    """Calls a tool whatever it is told, as long as it has one."""

    def lines(self, told: list[str]) -> list[str]:
        return ['call add {"a": 1, "b": 1}']


async def test_a_model_that_calls_without_end_is_stopped(reference: McpUnderTest) -> None:
    engine = Insisting()
    async with session(reference, reference.tool(), engine=engine) as (client, _):
        await client.say("go")
        await client.send("response.create")
        for _ in range(11):
            await client.response()
        await client.say("stop", id="mine")
        assert len(engine.requests) == 11  # eight calls, two that are refused, and one that nobody answers


async def test_functions_of_the_client_are_awaited(reference: McpUnderTest) -> None:
    look = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    async with session(reference, look, reference.tool()) as (client, engine):
        await client.say('call look\ncall add {"a": 2, "b": 3}')
        first = await client.respond()
        assert [one["type"] for one in first["output"]] == ["function_call", "mcp_call"]
        output = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "seen"}
        await client.send("conversation.item.create", item=output)
        await client.until("conversation.item.done")
        assert sorted(text_of(await client.respond()).split("; ")) == ["5", "seen"]
        assert len(engine.requests) == 2


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"server_url": None}, "session.tools[0].server_url"),
        ({"connector_id": "connector_gmail"}, "session.tools[0].connector_id"),
        ({"server_url": None, "connector_id": "connector_gmail"}, "session.tools[0].connector_id"),
        ({"tunnel_id": "t"}, "session.tools[0].tunnel_id"),
        ({"allowed_callers": ["direct"]}, "session.tools[0].allowed_callers"),
        ({"defer_loading": True}, "session.tools[0].defer_loading"),
        ({"authorization": "a", "headers": {"authorization": "b"}}, "session.tools[0].authorization"),
        ({"headers": {"Host": "elsewhere"}}, "session.tools[0].headers"),
        ({"headers": {"X": "a\nb"}}, "session.tools[0].headers"),
        ({"server_label": "no label"}, "session.tools[0].server_label"),
        ({"require_approval": "sometimes"}, "session.tools[0].require_approval"),
        ({"server_url": "http://user:word@127.0.0.1/mcp"}, "session.tools[0].server_url"),
        ({"server_url": "http://10.0.0.1/mcp"}, "session.tools[0].server_url"),
        ({"server_url": "http://[::1/mcp"}, "session.tools[0].server_url"),
        ({"server_url": "ftp://127.0.0.1/mcp"}, "session.tools[0].server_url"),
    ],
)
async def test_refusals_name_the_field(reference: McpUnderTest, changes: dict[str, Any], param: str) -> None:
    async with session(reference) as (client, _):
        tool = reference.tool(**changes)
        error = await failed(client, "session.update", session={"type": "realtime", "tools": [tool]})
        assert error["param"] == param


async def test_labels_are_unique(reference: McpUnderTest) -> None:
    async with session(reference) as (client, _):
        tools = [reference.tool(), reference.tool()]
        error = await failed(client, "session.update", session={"type": "realtime", "tools": tools})
        assert error["param"] == "session.tools[1].server_label"
        tools = [reference.tool(f"label{number}") for number in range(9)]
        error = await failed(client, "session.update", session={"type": "realtime", "tools": tools})
        assert error["param"] == "session.tools"


async def test_a_label_alone_keeps_a_server(reference: McpUnderTest) -> None:
    async with session(reference, reference.tool()) as (client, engine):
        label = {"type": "mcp", "server_label": "sums", "require_approval": "never", "allowed_tools": ["add"]}
        shown = await client.update(tools=[label])
        assert shown["tools"][0]["server_url"] == reference.url
        await client.say("hello")
        await client.respond()
        assert engine.offered == ["sums__add"]
        await client.say("hello")
        await client.respond(tools=[])
        assert engine.requests[-1].tools == ()
        await client.say("hello")
        await client.respond(tools=[{"type": "mcp", "server_label": "sums"}])
        assert engine.offered == ["sums__add"]
        error = await failed(client, "response.create", response={"tools": [reference.tool("other")]})
        assert error["param"] == "response.tools[0]"
        assert (await client.update(tools=[]))["tools"] == []
        await client.say("hello")
        await client.respond()
        assert engine.requests[-1].tools == ()


async def test_a_label_that_is_no_text_is_refused(reference: McpUnderTest) -> None:
    async with session(reference, reference.tool()) as (client, _):
        for label in (["sums"], {"sums": 1}):
            tools = [{"type": "mcp", "server_label": label}]
            error = await failed(client, "response.create", response={"tools": tools})
            assert (error["code"], error["param"]) == ("unsupported_parameter", "response.tools[0]")


async def test_rules_decide_which_tools_are_offered_and_which_calls_are_asked_about(reference: McpUnderTest) -> None:
    """By the names of tools, and by whether a tool changes nothing, which the server says of ``add`` alone."""
    label = {"type": "mcp", "server_label": "sums", "require_approval": "never"}
    async with session(reference, reference.tool()) as (client, engine):
        for allowed, offered in (
            ({"tool_names": ["long", "add"]}, ["add", "long"]),
            ({"read_only": True}, ["add"]),
            ({"read_only": False, "tool_names": ["add", "fail"]}, ["fail"]),
        ):
            await client.update(tools=[{**label, "allowed_tools": allowed}])
            await client.say("hello")
            await client.respond()
            assert engine.offered == [f"sums__{name}" for name in offered]
        for rule, asks in (
            ({"never": {"tool_names": ["add"]}}, [False, True]),
            ({"never": {"read_only": True}}, [False, True]),
            ({"never": {"read_only": False}}, [True, False]),
            ({"always": {"tool_names": ["long"]}, "never": {}}, [False, True]),
            ({"always": {"read_only": True}, "never": {"tool_names": ["add", "long"]}}, [True, False]),
        ):
            await client.update(tools=[{**label, "require_approval": rule}])
            await client.say('call add {"a": 2, "b": 3}\ncall long {"size": 3}')
            first = await client.respond()
            assert [one["type"] == "mcp_approval_request" for one in first["output"]] == asks


async def test_a_server_given_as_it_is_shown_is_kept(reference: McpUnderTest) -> None:
    """Its URL is shown without the query, which the client need not repeat with the authorization."""
    tool = reference.tool(server_url=f"{reference.url}?key=1", authorization=SECRET)
    async with session(reference, tool) as (client, _):
        shown = (await client.update(instructions="Be brief."))["tools"][0]
        assert shown["server_url"] == reference.url
        await client.update(tools=[{**shown, "authorization": SECRET}])
        assert (await called(client, 'add {"a": 2, "b": 3}'))["output"] == "5"
        listed = [event["type"] for event in client.received if event["type"].startswith("mcp_list_tools.")]
        assert listed == ["mcp_list_tools.in_progress", "mcp_list_tools.completed"]


async def test_the_model_is_told_what_a_server_is_for(reference: McpUnderTest) -> None:
    async with session(reference, reference.tool(server_description="for sums")) as (client, engine):
        await client.say("hello")
        await client.respond()
        assert engine.requests[-1].tools[0]["function"]["description"] == "Add two numbers.\n(for sums)"


async def test_names_do_not_collide_with_functions(reference: McpUnderTest) -> None:
    own = {"type": "function", "name": "sums__add", "parameters": {"type": "object", "properties": {}}}
    async with session(reference, own, reference.tool(allowed_tools={"read_only": True})) as (client, engine):
        await client.say("hello")
        await client.respond()
        names = engine.offered
        assert names[0] == "sums__add"
        assert len(names) == len(set(names)) == 2


async def test_a_server_that_cannot_be_reached_is_told(reference: McpUnderTest) -> None:
    async with session(reference) as (client, _):
        await client.update(tools=[reference.tool(server_url=f"{reference.host}/nowhere")])
        begun, told = await client.until("mcp_list_tools.in_progress"), await client.until("mcp_list_tools.failed")
        assert told["error"]["type"] in ("http_error", "protocol_error")
        assert told["item_id"] == begun["item_id"]
        await client.say("hello")
        assert text_of(await client.respond()) == "hello"


async def test_over_server_sent_events() -> None:
    with mcp_server(sse=True) as reference:
        async with session(reference, reference.tool()) as (client, _):
            assert (await called(client, 'add {"a": 2, "b": 3}'))["output"] == "5"
            await client.response()


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


async def test_credentials_are_found_nowhere(
    reference: McpUnderTest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in the log, nor in recordings, events, errors or the saved state; the MCP server has them."""
    caplog.set_level(logging.DEBUG)
    for name, level in QUIETED_LOGGERS.items():
        caplog.set_level(level, logger=name)
    secret: dict[str, Any] = {
        "authorization": SECRET,
        "headers": {"X-Key": SECRET},
        "server_url": f"{reference.url}?key={SECRET}",
    }
    tool = reference.tool(**secret)
    settings: dict[str, Any] = {"realtime": {"mcp_servers": (reference.host,)}, "record": tmp_path, "log_content": True}
    async with live_server(CallingEngine(), **settings) as server:
        async with realtime_client(server) as client:
            await client.update(output_modalities=["text"], tools=[tool])
            await client.until("mcp_list_tools.completed")
            assert (await called(client, 'add {"a": 2, "b": 3}'))["output"] == "5"
            await client.response()
            await client.update(instructions="Be brief.")
            assert (await called(client, 'add {"a": 2, "b": 4}'))["output"] == "6"  # the credentials are still there
            await client.response()
            await failed(client, "session.update", session={"type": "realtime", "tools": [{**tool, "headers": 5}]})
            conversation = next(iter(server.app.sessions.conversations))
            attached = conversation._attached
            assert isinstance(attached, RealtimeConnection)
            assert isinstance(attached._dialect, RealtimeDialect)
            kept = attached._dialect.kept()
            saved = msgspec.msgpack.encode(conversation.saved()) + msgspec.msgpack.encode(kept)
            seen = str(client.received)
        async with native_client(server) as native:
            await native.configure(modalities=["text"], tools=[tool])
            await native.until("session_updated")
            seen += str(native.frames)
        body = {"messages": [{"role": "user", "content": "hello"}], "tools": [tool]}
        response = await post(server.port, "/v1/chat/completions", body, "Accept: application/json")
        assert response.status == 200
    assert reference.headers[-1]["authorization"] == f"Bearer {SECRET}"
    assert reference.headers[-1]["x-key"] == SECRET
    recorded = contents(tmp_path)
    assert len(recorded) == 3
    assert b"sums" in b"".join(recorded)
    assert b"sums" in saved
    for found in (caplog.text.encode(), saved, seen.encode(), response.body, *recorded):
        assert SECRET.encode() not in found
        assert base64.b64encode(SECRET.encode())[:-4] not in found
