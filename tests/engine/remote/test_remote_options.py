"""Tools, log-probabilities, schemas and several answers, asked for through a second server that can give them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.live_server import LiveServer, live_server
from support.raw_http import RawResponse, post
from support.scripted_engines import CapableEngine, finished, said, token, tool_call
from support.scripted_upstream import says, upstream

from omni_ws.client import connect
from omni_ws.config import load
from omni_ws.config.model import RemoteConfig
from omni_ws.core.chunks import FinishReason, ToolCall
from omni_ws.core.history import Message
from omni_ws.engine.base import StructuredOutput, TextOutput
from omni_ws.engine.remote.answer_stream import UpstreamToolCallReader, logprobs_of
from omni_ws.engine.remote.engine import RemoteEngine
from omni_ws.engine_choice import create_engine

pytestmark = pytest.mark.usefixtures("no_task_left")

OPTIONS = ("tools", "logprobs", "response_format", "n", "priority")
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello"}]


def front_of(back: LiveServer, *options: Any) -> Any:
    config = RemoteConfig(upstreams=(f"http://127.0.0.1:{back.port}",), start_timeout_sec=0, options=options)
    return live_server(RemoteEngine(config), remote=config)


async def chat(server: LiveServer, **fields: Any) -> RawResponse:
    return await post(server.port, "/v1/chat/completions", {"messages": HELLO, **fields})


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tools", {"tools": [CLOCK]}),
        ("logprobs", {"logprobs": True}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("n", {"n": 2}),
        ("priority", {"priority": 1}),
        ("video_max_frames", {"video_max_frames": 8}),
        ("image_max_pixels", {"image_max_pixels": 1000}),
    ],
)
async def test_what_the_upstreams_are_not_said_to_honour_is_refused(name: str, fields: dict[str, Any]) -> None:
    engine = CapableEngine([said("Hi"), finished()])
    async with live_server(engine) as back:
        async with front_of(back, *(option for option in OPTIONS if option != name)) as front:
            answer = await chat(front, **fields)
            assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported_parameter", name)
        async with front_of(back, name) as front:
            assert (await chat(front, **fields)).status == 200
    assert len(engine.requests) == 1


async def test_fields_that_are_for_the_upstream_are_passed_on() -> None:
    fields = {"reasoning_effort": "low", "verbosity": "medium", "service_tier": "default"}
    async with upstream(says("hi")) as scripted:
        for options in ((), tuple(fields)):
            config = RemoteConfig(upstreams=(scripted.url,), start_timeout_sec=0, options=options)
            async with live_server(RemoteEngine(config), remote=config) as front:
                for name, value in fields.items():
                    taken = bool(options) or name != "reasoning_effort"
                    assert (await chat(front, **{name: value})).status == (200 if taken else 400)
                    passed = scripted.requests[-1].get(name) if taken else None
                    assert passed == (value if options else None)
        assert len(scripted.requests) == 5


async def test_what_the_operator_says_of_thinking_is_told_to_the_server() -> None:
    """A client that says something else itself is followed, where the server is said to understand it."""
    flags = ("--llm.reasoning-effort", "none", "--llm.chat-template-kwargs.enable_thinking", "false")
    async with upstream(says("hi")) as scripted:
        options = ("--remote.options", "reasoning_effort", "--asr", "none", "--tts", "none")
        config = load(("--llm", scripted.url, *flags, *options)).config
        async with live_server(create_engine(config)) as front:
            for fields, effort in (({}, "none"), ({"reasoning_effort": "high"}, "high")):
                assert (await chat(front, **fields)).status == 200
                asked = scripted.requests[-1]
                assert (asked["reasoning_effort"], asked["chat_template_kwargs"]) == (
                    effort,
                    {"enable_thinking": False},
                )


async def test_a_conversation_with_a_tool() -> None:
    script = [*tool_call("clock", '{"zone":', ' "CET"}'), finished(FinishReason.TOOL_CALLS)]
    engine = CapableEngine(script)
    async with (
        live_server(engine) as back,
        front_of(back, "tools") as front,
        connect(front.websocket_url) as session,
    ):
        await session.configure(tools=[CLOCK], tool_choice="required")
        called = await session.ask_text("What time is it?")
        assert called.finish_reason is FinishReason.TOOL_CALLS
        assert called.tool_calls == (ToolCall("call_clock_0", "clock", '{"zone": "CET"}'),)
        engine.script = (said("Noon."), finished())
        await session.configure(tool_choice=None)
        await session.send_tool_result("call_clock_0", "12:00", end=True)
        assert (await session.answer()).text == "Noon."
        engine.script = (*tool_call("bell", "{}"), finished(FinishReason.TOOL_CALLS))
        await session.ask_text("Ring.")
        engine.script = (said("Done."), finished())
        await session.send_tool_result("call_bell_0", "", end=True)
        assert (await session.answer()).text == "Done."
    first, second, *_ = engine.requests
    assert (list(first.tools), first.tool_choice) == ([CLOCK], "required")
    assert second.history == (Message("user", "What time is it?"), Message("assistant", "", called.tool_calls))
    assert [(chunk.tool_call_id, chunk.payload) for chunk in engine.inputs[1]] == [("call_clock_0", b"12:00")]
    assert [(chunk.tool_call_id, chunk.payload) for chunk in engine.inputs[3]] == [("call_bell_0", b"")]


async def test_several_answers_with_their_log_probabilities() -> None:
    script = [
        TextOutput("Hi", (token("Hi", -0.25, "Ho"),), 0),
        TextOutput("Yo", (token("Yo", -1.5, "Ya"),), 1),
        finished(FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH),
    ]
    engine = CapableEngine(script)
    async with live_server(engine) as back, front_of(back, *OPTIONS) as front:
        choices = (await chat(front, n=2, logprobs=True, top_logprobs=2, priority=3)).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["Hi", "Yo"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
    (told,) = choices[1]["logprobs"]["content"]
    assert (told["token"], told["logprob"], bytes(told["bytes"])) == ("Yo", -1.5, b"Yo")
    assert [other["token"] for other in told["top_logprobs"]] == ["Yo", "Ya"]
    (request,) = engine.requests
    assert (request.options.choices, request.options.logprobs, request.options.priority) == (2, 2, 3)


@pytest.mark.parametrize("schema", [None, {"type": "object", "properties": {"a": {"type": "integer"}}}])
async def test_the_form_of_an_answer(schema: dict[str, Any] | None) -> None:
    engine = CapableEngine([said(json.dumps({"a": 1})), finished()])
    form = {"type": "json_object"}
    if schema is not None:
        form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}  # type: ignore[dict-item]
    async with live_server(engine) as back, front_of(back, *OPTIONS) as front:
        assert (await chat(front, response_format=form)).status == 200
    assert engine.requests[0].options.structure == StructuredOutput(schema=schema)


def test_pieces_of_calls_that_say_who_they_are_every_time() -> None:
    reader = UpstreamToolCallReader()
    piece: dict[str, Any] = {"index": 0, "id": "call_a", "function": {"name": "clock", "arguments": "{"}}
    first = list(reader.read([piece]))
    second = list(reader.read([{**piece, "function": {"name": "clock", "arguments": "}"}}]))
    assert [(one.id, one.name, one.arguments) for one in first + second] == [
        ("call_a", "clock", "{"),
        (None, None, "}"),
    ]


@pytest.mark.parametrize(
    "garbage",
    [None, 3, [3], [{"index": 0}], [{"index": -1, "function": {"name": "f"}}], [{"index": 0, "function": {"name": 3}}]],
)
def test_what_is_no_call_is_left_out(garbage: object) -> None:
    assert list(UpstreamToolCallReader().read(garbage)) == []


def test_a_call_without_an_id_gets_one() -> None:
    reader = UpstreamToolCallReader()
    (call,) = (*reader.read([{"function": {"name": "f"}}]), *reader.finish())
    assert call.id is not None
    assert call.id.startswith("call_")


@pytest.mark.parametrize(
    "garbage",
    [None, 3, {"content": 3}, {"content": [3]}, {"content": [{"token": "a"}]}, {"content": [{"logprob": -1}]}],
)
def test_what_is_no_log_probability_is_left_out(garbage: object) -> None:
    assert logprobs_of({"logprobs": garbage}) == ()


def test_bytes_that_are_not_told_are_those_of_the_text() -> None:
    (one,) = logprobs_of({"logprobs": {"content": [{"token": "é", "logprob": -1, "bytes": None}]}})
    assert (one.data, one.logprob) == ("é".encode(), -1.0)


async def test_limits_of_videos_are_passed_on() -> None:
    engine = CapableEngine([said("Hi"), finished()])
    limits = {"video_max_frames": 8, "video_total_pixels": 1000}
    async with live_server(engine) as back, front_of(back, *limits) as front:
        assert (await chat(front, **limits)).status == 200
    assert engine.requests[0].options.media_limits == limits
