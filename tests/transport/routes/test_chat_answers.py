"""Chat completions beyond text: tools, several choices, log-probabilities, structured output."""

from __future__ import annotations

from typing import Any

import pytest
from support.live_server import LiveServer, live_server
from support.raw_http import DONE, Event, RawResponse, call, events_of, post
from support.scripted_engines import CapableEngine, finished, said, token, tool_call

from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import FinishReason, InputChunk, Modality, TokenLogprob, ToolCall
from omni_ws.core.history import Message
from omni_ws.engine.base import AnswerOptions, StructuredOutput, TextOutput, ThoughtOutput
from omni_ws.errors import ContextLengthExceeded, EngineFailed, UnsupportedParameter

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Weather in Tokyo?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get weather for a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Tokyo"}'}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return schema


async def ask(server: LiveServer, **body: Any) -> RawResponse:
    return await post(server.port, PATH, {"messages": [USER], **body}, "Accept: application/json")


async def whole(script: list[Any], **body: Any) -> dict[str, Any]:
    async with live_server(CapableEngine(script)) as server:
        response = await ask(server, **body)
    assert response.status == 200, response.body
    completion: dict[str, Any] = response.json()
    return completion


async def streamed(script: list[Any], **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that was completed."""
    async with live_server(CapableEngine(script)) as server:
        events = events_of(await ask(server, stream=True, **body))
    assert events[-1] == DONE
    return [event.json() for event in events[:-1]]


def choices(chunks: list[dict[str, Any]]) -> list[Any]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


# --- tools

TOOL_SCRIPT = [*tool_call("get_weather", '{"', "city", '":"Tokyo"}'), finished(FinishReason.TOOL_CALLS)]


async def test_a_tool_call_is_streamed_head_first_and_then_its_arguments() -> None:
    chunks = await streamed(TOOL_SCRIPT, tools=[WEATHER], tool_choice="auto")
    head = {"index": 0, "id": "call_get_weather_0", "type": "function"}
    assert [(choice["delta"], choice["finish_reason"]) for choice in choices(chunks)] == [
        ({"role": "assistant"}, None),
        ({"tool_calls": [{**head, "function": {"name": "get_weather", "arguments": ""}}]}, None),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '{"'}}]}, None),
        ({"tool_calls": [{"index": 0, "function": {"arguments": "city"}}]}, None),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '":"Tokyo"}'}}]}, None),
        ({}, "tool_calls"),
    ]


async def test_a_whole_answer_has_the_same_calls() -> None:
    script = [
        *tool_call("get_weather", '{"city":', '"Tokyo"}'),
        *tool_call("get_time", index=1),
        finished(FinishReason.TOOL_CALLS),
    ]
    (choice,) = (await whole(script, tools=[WEATHER]))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {
            "id": "call_get_weather_0",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city":"Tokyo"}'},
        },
        {"id": "call_get_time_1", "type": "function", "function": {"name": "get_time", "arguments": ""}},
    ]


async def test_a_call_that_comes_in_one_piece_is_streamed_as_two() -> None:
    chunks = await streamed(tool_call("f", '{"a":1}'), tools=[WEATHER])
    calls = [choice["delta"]["tool_calls"][0] for choice in choices(chunks) if "tool_calls" in choice["delta"]]
    assert [call["function"]["arguments"] for call in calls] == ["", '{"a":1}']
    assert "id" not in calls[1]


async def test_text_beside_a_call_is_kept() -> None:
    (choice,) = (await whole([said("One moment."), *TOOL_SCRIPT], tools=[WEATHER]))["choices"]
    assert choice["message"]["content"] == "One moment."
    assert len(choice["message"]["tool_calls"]) == 1


async def test_tools_reach_the_engine() -> None:
    engine = CapableEngine([said("sunny")])
    named = {"type": "function", "function": {"name": "get_weather"}}
    async with live_server(engine) as server:
        await ask(server, tools=[WEATHER], tool_choice=named, parallel_tool_calls=False)
        await ask(server, tools=[WEATHER], tool_choice="required")
    first, second = engine.requests
    assert (first.tools, first.tool_choice) == ((WEATHER,), named)
    assert first.options.parallel_tool_calls is False
    assert (second.tool_choice, second.options.parallel_tool_calls) == ("required", True)


async def test_arguments_of_the_template_reach_the_engine() -> None:
    engine = CapableEngine([said("sunny")])
    async with live_server(engine) as server:
        await ask(server, chat_template_kwargs={"enable_thinking": False})
        await ask(server, chat_template_kwargs=None)
    first, second = engine.requests
    assert first.options.template_arguments == {"enable_thinking": False}
    assert second.options.template_arguments == {}


async def test_thought_is_beside_the_content() -> None:
    script = [ThoughtOutput("Hm, "), ThoughtOutput("rain?"), said("sunny")]
    (choice,) = (await whole(script))["choices"]
    assert choice["message"]["reasoning_content"] == "Hm, rain?"
    assert choice["message"]["content"] == "sunny"
    assert [choice["delta"] for choice in choices(await streamed(script))] == [
        {"role": "assistant"},
        {"reasoning_content": "Hm, "},
        {"reasoning_content": "rain?"},
        {"content": "sunny"},
        {},
    ]
    (choice,) = (await whole([said("sunny")]))["choices"]
    assert "reasoning_content" not in choice["message"]


async def test_results_of_tools_at_the_end_are_the_input() -> None:
    engine = CapableEngine([said("sunny")])
    other = {**CALL, "id": "call_2"}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL, other]},
        {"role": "tool", "tool_call_id": "call_1", "content": "20 degrees"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": ""}]},
    ]
    async with live_server(engine) as server:
        assert (await ask(server, messages=messages, tools=[WEATHER])).status == 200
    (request,) = engine.requests
    calls = tuple(ToolCall(id, "get_weather", '{"city":"Tokyo"}') for id in ("call_1", "call_2"))
    assert request.history == (Message("user", "Weather in Tokyo?"), Message("assistant", "", tool_calls=calls))
    assert engine.inputs == [
        [
            InputChunk(Modality.TEXT, b"20 degrees", tool_call_id="call_1"),
            InputChunk(Modality.TEXT, b"", tool_call_id="call_2"),
        ]
    ]


async def test_results_of_tools_before_the_users_message_are_history() -> None:
    engine = CapableEngine([said("sunny")])
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": ""},
        {"role": "assistant", "content": "Nothing is known."},
        {"role": "user", "content": "Try again."},
    ]
    async with live_server(engine) as server:
        assert (await ask(server, messages=messages)).status == 200
    assert [message.role for message in engine.requests[0].history] == ["user", "assistant", "tool", "assistant"]
    assert engine.requests[0].history[2] == Message("tool", "", tool_call_id="call_1")


NO_TOOLS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function"}]}, "invalid_value", "tools[0].function"),
    ({"tools": [{"type": "retrieval"}]}, "invalid_value", "tools[0].type"),
    ({"tools": [{**WEATHER, "function": {"name": "a b"}}]}, "invalid_value", "tools[0].function.name"),
    ({"tools": [WEATHER, WEATHER]}, "invalid_value", "tools[1].function.name"),
    ({"tools": [WEATHER] * 129}, "invalid_value", "tools"),
    ({"tools": "all"}, "invalid_value", "tools"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "fly"}}},
        "invalid_value",
        "tool_choice.function.name",
    ),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "invalid_value", "tool_choice.function"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "invalid_value", "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "unsupported_parameter", "tool_choice.type"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"parallel_tool_calls": 1}, "invalid_value", "parallel_tool_calls"),
    ({"chat_template_kwargs": 1}, "invalid_value", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"a": nested(32)}}, "invalid_value", "chat_template_kwargs"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_value", "messages[0].tool_call_id"),
    (
        {"messages": [USER, {"role": "tool", "tool_call_id": "call_9", "content": "x"}]},
        "invalid_value",
        "messages[1].tool_call_id",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": 5}]}, USER]},
        "invalid_value",
        "messages[0].tool_calls[0].id",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, USER]},
        "invalid_value",
        "messages[0].tool_calls[0]",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": {}}, USER]}, "invalid_value", "messages[0].tool_calls"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "invalid_value", "messages[1].role"),
]


async def test_tools_that_are_none() -> None:
    async with live_server(CapableEngine()) as server:
        for body, code, param in NO_TOOLS:
            response = await ask(server, **body)
            assert (response.status, response.error["code"], response.error["param"]) == (400, code, param), body


# --- several choices

CHOICES = [
    said("Hi", choice=1),
    said("Hello", choice=0),
    said(" you", choice=1),
    finished(FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH),
]


async def test_choices_have_their_roles_and_ends_in_order() -> None:
    chunks = await streamed(CHOICES, n=2, stream_options={"include_usage": True})
    assert [(choice["index"], choice["delta"], choice["finish_reason"]) for choice in choices(chunks)] == [
        (0, {"role": "assistant"}, None),
        (1, {"role": "assistant"}, None),
        (1, {"content": "Hi"}, None),
        (0, {"content": "Hello"}, None),
        (1, {"content": " you"}, None),
        (0, {}, "stop"),
        (1, {}, "length"),
    ]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 5)


async def test_usage_on_the_final_chunk_comes_with_the_last_choice() -> None:
    chunks = await streamed(CHOICES, n=2, usage_on_final_chunk=True)
    assert ["usage" in chunk for chunk in chunks[-2:]] == [False, True]


async def test_whole_choices() -> None:
    engine = CapableEngine([*CHOICES[:-1], *tool_call("f", choice=1), CHOICES[-1]])
    async with live_server(engine) as server:
        first, second = (await ask(server, n=2)).json()["choices"]
    assert engine.requests[0].options == AnswerOptions(choices=2, thought=True, read_whole=True)
    assert (first["index"], first["message"]["content"], first["finish_reason"]) == (0, "Hello", "stop")
    assert (second["index"], second["message"]["content"], second["finish_reason"]) == (1, "Hi you", "length")
    assert [call["function"]["name"] for call in second["message"]["tool_calls"]] == ["f"]
    assert "tool_calls" not in first["message"]


CHOICE_COUNTS: list[tuple[Any, int]] = [(1, 200), (128, 200), (0, 400), (129, 400), (-1, 400), ("2", 400), (1.5, 400)]


async def test_how_many_choices() -> None:
    async with live_server(CapableEngine([])) as server:
        for n, status in CHOICE_COUNTS:
            response = await ask(server, n=n)
            assert response.status == status, n
            if status == 400:
                assert (response.error["code"], response.error["param"]) == ("invalid_value", "n"), n


async def test_there_is_one_spoken_answer() -> None:
    async with live_server(CapableEngine([])) as server:
        response = await ask(server, n=2, modalities=["text", "audio"])
    assert (response.status, response.error["code"], response.error["param"]) == (400, "unsupported_parameter", "n")


# --- log-probabilities


async def test_logprobs_stand_beside_the_text() -> None:
    engine = CapableEngine([TextOutput("Hé", logprobs=(token("Hé", -0.25, "Ho"),)), TextOutput("!")])
    entry = {
        "token": "Hé",
        "bytes": [72, 195, 169],
        "logprob": -0.25,
        "top_logprobs": [
            {"token": "Hé", "bytes": [72, 195, 169], "logprob": -0.25},
            {"token": "Ho", "bytes": [72, 111], "logprob": -1.25},
        ],
    }
    async with live_server(engine) as server:
        events = events_of(await ask(server, stream=True, logprobs=True, top_logprobs=2))
        completion = (await ask(server, logprobs=True, top_logprobs=2)).json()
    assert engine.requests[0].options == AnswerOptions(logprobs=2, thought=True)
    role, first, second, terminal = choices([event.json() for event in events[:-1]])
    assert "logprobs" not in role
    assert "logprobs" not in terminal
    assert first["logprobs"] == {"content": [entry], "refusal": None}
    assert second["logprobs"] == {"content": [], "refusal": None}
    assert completion["choices"][0]["logprobs"] == {"content": [entry], "refusal": None}


async def test_a_token_without_text_yet_keeps_its_place() -> None:
    half = TokenLogprob("�", b"\xc3", -1.0)
    chunks = await streamed([TextOutput("", logprobs=(half,)), said("é", logprobs=True)], logprobs=True)
    content = [choice["logprobs"]["content"] for choice in choices(chunks) if "logprobs" in choice]
    assert [[entry["bytes"] for entry in entries] for entries in content] == [[[195]], [[195, 169]]]


async def test_minus_infinity_is_a_number_on_the_wire() -> None:
    completion = await whole([TextOutput("a", logprobs=(TokenLogprob("a", b"a", float("-inf")),))], logprobs=True)
    assert completion["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ],
)
async def test_how_many_logprobs(body: dict[str, Any], asked: int | None) -> None:
    engine = CapableEngine([])
    async with live_server(engine) as server:
        assert (await ask(server, **body)).status == 200
    assert engine.requests[0].options.logprobs == asked


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
async def test_logprobs_out_of_range(body: dict[str, Any], param: str) -> None:
    async with live_server(CapableEngine([])) as server:
        response = await ask(server, **body)
        assert (response.status, response.error["code"], response.error["param"]) == (400, "invalid_value", param)


# --- structured output

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("wanted", "structure"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutput()),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
            StructuredOutput(schema=SCHEMA),
        ),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, StructuredOutput()),
    ],
)
async def test_forms(wanted: dict[str, Any], structure: StructuredOutput | None) -> None:
    engine = CapableEngine([said("{}")])
    async with live_server(engine) as server:
        assert (await ask(server, response_format=wanted)).status == 200
    assert engine.requests[0].options.structure == structure


NO_FORMS: list[tuple[Any, str]] = [
    ({"type": "xml"}, "response_format.type"),
    ({}, "response_format.type"),
    ("json", "response_format"),
    ({"type": "json_schema"}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "response_format.json_schema.name"),
    ({"type": "json_schema", "json_schema": {"name": "a b"}}, "response_format.json_schema.name"),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}, "response_format.json_schema.schema"),
    (
        {"type": "json_schema", "json_schema": {"name": "a", "schema": nested(32)}},
        "response_format.json_schema.schema",
    ),
]


async def test_forms_that_are_none() -> None:
    async with live_server(CapableEngine([])) as server:
        for wanted, param in NO_FORMS:
            response = await ask(server, response_format=wanted)
            assert (response.status, response.error["code"], response.error["param"]) == (
                400,
                "invalid_value",
                param,
            ), wanted


async def test_a_schema_does_not_stand_elsewhere() -> None:
    place = "response_format.json_schema.schema.$ref"
    async with live_server(CapableEngine([])) as server:
        for reference, status in (("#/$defs/a", 200), ("https://example.org/a", 400), ("a.json", 400)):
            schema = {"anyOf": [{"$ref": reference}], "$defs": {"a": {"type": "string"}}}
            wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            response = await ask(server, response_format=wanted)
            assert response.status == status
            assert status == 200 or (response.error["code"], response.error["param"]) == (
                "unsupported_parameter",
                place,
            )


async def test_a_schema_just_deep_enough_is_taken() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": nested(31)}}
    async with live_server(CapableEngine([])) as server:
        assert (await ask(server, response_format=wanted)).status == 200


async def test_a_keyword_that_the_engine_does_not_know_is_named_before_any_role() -> None:
    place = "response_format.json_schema.schema.unevaluatedItems"
    refusal = UnsupportedParameter("this engine does not know the keyword", param=place)
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"unevaluatedItems": False}}}
    async with live_server(CapableEngine([refusal])) as server:
        for body in ({}, {"stream": True}):
            response = await ask(server, response_format=wanted, **body)
            assert (response.status, response.error["param"]) == (400, place)


# --- streams and whole responses are equal


async def test_streams_and_whole_answers_have_the_same_text_and_usage() -> None:
    script = [said("One "), said("two"), finished(FinishReason.LENGTH)]
    chunks = await streamed(script, stream_options={"include_usage": True})
    completion = await whole(script)
    text = "".join(choice["delta"].get("content", "") for choice in choices(chunks))
    (choice,) = completion["choices"]
    assert text == choice["message"]["content"] == "One two"
    assert choices(chunks)[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert chunks[-1]["usage"] == completion["usage"]


@pytest.mark.parametrize(
    ("token", "wanted", "counted"),
    [(None, -1, 0), ("common", -1, 0), ("common", 7, 7), ("preferred", -1, -1), ("preferred", 7, 7)],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/streaming_input/sessions", {"chunk": {"sequence_id": 0, "text": "Hello", "end_of_input": True}}),
    ],
)
async def test_a_priority_before_all_others_is_for_keys_that_may(
    path: str, body: dict[str, Any], token: str | None, wanted: int, counted: int
) -> None:
    keys = (
        ApiKey(name="common", key_sha256=digest("common")),
        ApiKey(name="preferred", key_sha256=digest("preferred"), priority=True),
    )
    headers = () if token is None else (f"Authorization: Bearer {token}",)
    engine = CapableEngine([finished()])
    async with live_server(engine, keys=keys if token else ()) as server:
        answered = await post(server.port, path, {**body, "priority": wanted}, *headers)
        await server.until(lambda: bool(engine.requests))
        if (session := answered.json().get("session_id")) is not None:
            await call(server.port, "DELETE", f"{path}/{session}", None, *headers)
    assert engine.requests[0].options.priority == counted


CONTINUES: dict[str, Any] = {"input_roles": frozenset({"user", "system", "assistant"})}


@pytest.mark.parametrize(
    ("messages", "role", "instructions"),
    [
        ([USER, {"role": "assistant", "content": "It is"}], "assistant", ""),
        ([{"role": "system", "content": "One."}, USER, {"role": "assistant", "content": "It is"}], "assistant", "One."),
        ([{"role": "developer", "content": "It is"}], "system", ""),
    ],
)
async def test_a_last_message_that_is_not_the_users_reaches_an_engine_that_can(
    messages: list[Any], role: str, instructions: str
) -> None:
    engine = CapableEngine([said(" sunny"), finished()], **CONTINUES)
    async with live_server(engine) as server:
        response = await ask(server, messages=messages)
        assert response.json()["choices"][0]["message"]["content"] == " sunny"
    (seen,), (inputs,) = engine.requests, engine.inputs
    assert (seen.options.input_role, seen.instructions) == (role, instructions)
    assert b"".join(chunk.payload for chunk in inputs) == b"It is"
    assert [message.role for message in seen.history] == [one["role"] for one in messages[:-1] if one is USER]


@pytest.mark.parametrize(
    ("last", "param", "code"),
    [
        ({"role": "assistant", "content": ""}, None, "empty_input"),
        ({"role": "assistant", "tool_calls": [CALL]}, "messages[1].role", "invalid_value"),
        ({"role": "assistant", "content": [{"type": "image_url"}]}, "messages[1].content[0]", "unsupported_parameter"),
        ({"role": "assistant", "content": 5}, "messages[1].content", "invalid_value"),
    ],
)
async def test_a_last_message_that_nothing_can_go_on_with(last: Any, param: str | None, code: str) -> None:
    async with live_server(CapableEngine([finished()], **CONTINUES)) as server:
        response = await ask(server, messages=[USER, last])
        assert (response.status, response.error["param"], response.error["code"]) == (400, param, code)
        images = await ask(
            server,
            messages=[USER, {"role": "assistant", "content": "a"}],
            images=["data:image/png;base64,iVBORw0KGgo="],
        )
        assert (images.status, images.error["param"]) == (400, "images")


@pytest.mark.parametrize(("path", "body"), [(PATH, {"messages": [USER]}), ("/v1/completions", {"prompt": "Hello"})])
async def test_a_priority_that_counts_as_0_is_no_option(path: str, body: dict[str, Any]) -> None:
    async with live_server() as server:
        assert (await post(server.port, path, {**body, "priority": -5})).status == 200
        refused = await post(server.port, path, {**body, "priority": 1})
        assert (refused.status, refused.error["param"]) == (400, "priority")


async def test_priority_reaches_the_engine() -> None:
    engine = CapableEngine([])
    async with live_server(engine) as server:
        assert (await ask(server, priority=3)).status == 200
        response = await ask(server, priority="high")
        assert (response.status, response.error["param"]) == (400, "priority")
    assert engine.requests[0].options.priority == 3


# --- bad input: the same error with and without events

MALFORMED: list[tuple[bytes, int, str, str | None]] = [
    (b'{"messages": [{"role": "user", "content": "a"}]', 400, "invalid_frame", None),
    (b"[1]", 400, "invalid_frame", None),
    (b"\xff\xfe", 400, "invalid_frame", None),
    (b"", 400, "invalid_frame", None),
]
REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"messages": "hello"}, 400, "invalid_value", "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, 400, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_value", "messages[0].content"),
    ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "invalid_value", "top_logprobs"),
    ({"tools": [WEATHER], "tool_choice": "fly"}, 400, "invalid_value", "tool_choice"),
    ({"images": ["/etc/passwd"]}, 400, "unsupported_parameter", "images[0]"),
    ({"images": ["data:image/png;base64,YQ=="]}, 415, "unsupported_format", "images[0]"),
    ({"logit_bias": {"5": 1}}, 400, "unsupported_parameter", "logit_bias"),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), MALFORMED)
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream", "*/*"])
async def test_bodies_that_cannot_be_read(body: bytes, status: int, code: str, param: str | None, accept: str) -> None:
    async with live_server(CapableEngine([])) as server:
        response = await post(server.port, PATH, body, f"Accept: {accept}", "Content-Type: application/json")
    assert (response.status, response.error["code"], response.error["param"]) == (status, code, param)


@pytest.mark.parametrize(("body", "status", "code", "param"), REFUSED)
async def test_refusals_are_the_same_in_every_form(body: dict[str, Any], status: int, code: str, param: str) -> None:
    errors: list[dict[str, Any]] = []
    async with live_server(CapableEngine([])) as server:
        for streams in (False, True):
            for accept in ("application/json", "text/event-stream"):
                response = await post(
                    server.port, PATH, {"messages": [USER], "stream": streams, **body}, f"Accept: {accept}"
                )
                if streams and accept == "text/event-stream":
                    (event,) = events_of(response)
                    errors.append(_error(event))
                else:
                    assert response.status == status
                    errors.append(response.error)
    assert (errors[0]["code"], errors[0]["param"]) == (code, param)
    assert errors == errors[:1] * 4


def _error(event: Event) -> dict[str, Any]:
    assert event.name == "error"
    error: dict[str, Any] = event.json()["error"]
    return error


async def test_a_prompt_over_the_context_is_refused_before_any_role() -> None:
    async with live_server(CapableEngine([ContextLengthExceeded("5,000 tokens are more than 4,096")])) as server:
        for body in ({}, {"stream": True}):
            response = await ask(server, **body)
            assert (response.status, response.error["code"]) == (400, "context_length_exceeded")


async def test_a_choice_that_broke_ends_the_stream_with_an_error() -> None:
    async with live_server(CapableEngine([said("Hi", choice=1), EngineFailed("broken")])) as server:
        events = events_of(await ask(server, stream=True, n=2))
    assert [event.name for event in events] == [None, None, None, "error"]
