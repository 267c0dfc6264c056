"""Tool calls of a GGUF model: what is read of its JSON and its text, and SmolLM2's real weights in a real process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import orjson
import pytest
import pytest_asyncio
from support.engine_answers import Answer, Input, answered, request_of, text
from support.live_server import LiveServer, live_server
from support.patience import PATIENCE_SEC
from support.real_models import smollm2_file

from omni_ws.core.chunks import FinishReason, ToolCallFragment, Usage
from omni_ws.engine.base import AnswerOptions, EngineOutput, Finished, TextOutput, ThoughtOutput, ToolCallOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.llm.gguf_engine import (
    QWEN_CODER_TEMPLATE,
    CallsInJson,
    CallWatch,
    CallWritten,
    GgufEngine,
    GgufSettings,
    schema_of_calls,
)
from omni_ws.errors import InvalidValue

#: Of the tests that share a model.
of_the_model = pytest.mark.asyncio(loop_scope="module")

ROOM = {"enum": ["kitchen", "bath"]}
LIGHT: dict[str, Any] = {
    "type": "object",
    "properties": {"where": {"type": "object", "properties": {"room": ROOM}, "required": ["room"]}},
    "required": ["where"],
    "additionalProperties": False,
}
TIME: dict[str, Any] = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"]}
TIME |= {"additionalProperties": False, "$defs": {"City": {"enum": ["Paris", "Tokyo"]}}}
SCHEMAS: dict[str, dict[str, Any]] = {"set_light": LIGHT, "local_time": TIME}
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
)
NAMED = {"type": "function", "function": {"name": "local_time"}}
GREEDY = {"temperature": 0, "max_tokens": 120}


class Written(Answer):
    """An answer with its calls."""

    @property
    def calls(self) -> list[tuple[str | None, str]]:
        return calls_in(self.outputs)


def calls_in(outputs: list[EngineOutput]) -> list[tuple[str | None, str]]:
    """The names and arguments of calls, put together from their pieces."""
    calls: list[tuple[str | None, str]] = []
    for one in outputs:
        if isinstance(one, ToolCallOutput):
            if one.call.id is not None:
                assert one.call.index == len(calls)
                calls.append((one.call.name, ""))
            name, arguments = calls[one.call.index]
            calls[one.call.index] = (name, arguments + one.call.arguments)
    return calls


def pieces(whole: str, size: int) -> list[str]:
    return [whole[start : start + size] for start in range(0, len(whole), size)]


def finished(reason: FinishReason) -> Finished:
    return Finished(reason, Usage())


# Calls in JSON

TWO = r'[ {"name": "a\"b", "arguments": {"x": ["}\\", {"y": "\""}]}},{"name":"c","arguments":{}} ]'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_are_read_in_pieces_of_any_size(size: int) -> None:
    written = Written()
    out = CallsInJson(written)
    for piece in pieces(TWO, size):
        out.write(TextOutput(piece))
    out.write(finished(FinishReason.STOP))
    assert written.calls == [('a"b', r'{"x": ["}\\", {"y": "\""}]}'), ("c", "{}")]
    assert not written.text
    assert isinstance(written.outputs[-1], Finished)
    assert written.outputs[-1].reason is FinishReason.TOOL_CALLS


def test_arguments_are_passed_on_as_they_come() -> None:
    written = Written()
    out = CallsInJson(written)
    out.write(TextOutput('[{"name": "a", "arguments": {"x'))
    assert written.calls == [("a", '{"x')]
    out.write(TextOutput('": 1'))
    out.write(finished(FinishReason.LENGTH))
    assert written.calls == [("a", '{"x": 1')]
    assert written.outputs[-1] == finished(FinishReason.LENGTH)


def test_no_call_is_no_reason() -> None:
    written = Written()
    CallsInJson(written).write(finished(FinishReason.STOP))
    assert written.outputs == [finished(FinishReason.STOP)]


@pytest.mark.parametrize("before", [None, 7])
def test_an_answer_that_is_begun_again(before: int | None) -> None:
    """Both count, and the thought is written once."""
    written, thought = Written(), ThoughtOutput("Hm.")
    out = CallsInJson(written, before=before)
    usage = Usage(input_tokens=10, output_tokens=5, cached_tokens=9)
    for output in (thought, TextOutput(TWO), Finished(FinishReason.STOP, usage)):
        out.write(output)
    if before is not None:
        usage = replace(usage, input_tokens=20, output_tokens=12)
    assert written.outputs[-1] == Finished(FinishReason.TOOL_CALLS, usage)
    assert (thought in written.outputs) is (before is None)


@pytest.mark.parametrize("one", [True, False])
def test_the_schema_of_calls(one: bool) -> None:
    schema = schema_of_calls([tool["function"] for tool in TOOLS], one=one)
    jsonschema.Draft202012Validator.check_schema(schema)
    valid = jsonschema.Draft202012Validator(schema).is_valid
    tokyo = {"name": "local_time", "arguments": {"city": "Tokyo"}}
    assert valid([tokyo])
    assert valid([tokyo, {"name": "set_light", "arguments": {"where": {"room": "bath"}}}]) is not one
    for wrong in (
        [],
        [{"name": "local_time", "arguments": {"city": "Rome"}}],
        [{"name": "set_light", "arguments": {"city": "Tokyo"}}],
        [{"name": "other", "arguments": {}}],
        [{**tokyo, "more": 1}],
    ):
        assert not valid(wrong)


def test_a_tool_without_parameters() -> None:
    schema = schema_of_calls([{"name": "stop"}], one=True)
    assert jsonschema.Draft202012Validator(schema).is_valid([{"name": "stop", "arguments": {}}])


CITY = {"enum": ["Paris", "Tokyo"]}
A = {"a": {"$ref": "#/definitions/City"}}
REFERENCES: tuple[tuple[dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    ({"properties": {"a": {"$ref": "#/$defs/City"}}, "$defs": {"City": CITY}}, {"a": "Tokyo"}, {"a": "Rome"}),
    (
        {"properties": {"a": {"$ref": "#/definitions/City"}}, "definitions": {"City": CITY}},
        {"a": "Tokyo"},
        {"a": "Rome"},
    ),
    ({"properties": {"a": CITY, "b": {"$ref": "#/properties/a"}}}, {"b": "Tokyo"}, {"b": "Rome"}),
    ({"properties": {"a": CITY, "b": {"$ref": "#"}}}, {"b": {"b": {"a": "Tokyo"}}}, {"b": {"b": {"a": "Rome"}}}),
    # These only look like references.
    ({"properties": {"a": {"const": "#/$defs/City"}}}, {"a": "#/$defs/City"}, {"a": "#/$defs/0/$defs/City"}),
    ({"properties": {"$ref": {"const": "#"}}}, {"$ref": "#"}, {"$ref": "#/$defs/0"}),
)


@pytest.mark.parametrize(("schema", "right", "wrong"), REFERENCES)
def test_references_of_a_schema(schema: dict[str, Any], right: Any, wrong: Any) -> None:
    functions = [{"name": name, "parameters": schema} for name in ("f", "g")]
    valid = jsonschema.Draft202012Validator(schema_of_calls(functions, one=True)).is_valid
    for name in ("f", "g"):
        assert valid([{"name": name, "arguments": right}])
        assert not valid([{"name": name, "arguments": wrong}])


# Calls as text


def watch(*, parallel: bool = True) -> tuple[CallWatch, Written]:
    written = Written()
    options = AnswerOptions(parallel_tool_calls=parallel)
    return CallWatch(written, request_of(Input(), tools=TOOLS, options=options)), written


@pytest.mark.parametrize(
    "head",
    ["", "{", "[", " \n", "```json\n", "```\n", "<tools>\n", "<tools>\n[", "<tool_call>\n", "```xml\n<tools>\n"],
)
def test_a_call_as_text_is_noticed(head: str) -> None:
    out, written = watch()
    *before, last = list(f'{head}{{"name": "set_light", "arguments":')
    for letter in before:
        out.write(TextOutput(letter))
    with pytest.raises(CallWritten):
        out.write(TextOutput(last))
    assert not written.outputs


@pytest.mark.parametrize(
    "said",
    [
        "Hello there.",
        'Write {"name": "set_light", "arguments": {}}',
        '{"name": "another", "arguments": {}}',
        '{"name": "set_light"}',
        "```python\nprint()\n```",
        "<b>",
        "",
    ],
)
def test_other_text_is_passed_on(said: str) -> None:
    out, written = watch()
    for letter in said:
        out.write(TextOutput(letter))
    out.write(finished(FinishReason.STOP))
    assert written.text == said
    assert written.outputs[-1] == finished(FinishReason.STOP)


def test_text_is_held_back_so_far() -> None:
    out, written = watch()
    out.write(TextOutput("{" + " " * 199))
    assert not written.outputs
    out.write(TextOutput("x"))
    assert len(written.text) == 201
    out.write(TextOutput("y"))
    assert written.text.endswith("xy")


def test_words_are_not_held_back() -> None:
    out, written = watch()
    out.write(TextOutput("H"))
    assert written.text == "H"
    out.write(TextOutput('{"name": "set_light", "arguments": {}}'))
    assert written.text.startswith("H{")


def test_one_call_alone() -> None:
    for parallel in (True, False):
        out, written = watch(parallel=parallel)
        for index in range(2):
            out.write(ToolCallOutput(ToolCallFragment(index, f"id{index}", "set_light", "{}")))
        assert len(written.calls) == (2 if parallel else 1)


# A model


@pytest.fixture(scope="module")
def engine() -> GgufEngine:
    """SmolLM2 with the template of Qwen2.5-Coder: it never learnt to call, but it can repeat."""
    settings = GgufSettings(
        file=smollm2_file(), name="SmolLM2", context=1024, parallel=1, threads=1, chat_template=QWEN_CODER_TEMPLATE
    )
    return GgufEngine(settings)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(engine: GgufEngine) -> AsyncIterator[LiveServer]:
    async with live_server(ComposedEngine(engine), expect_errors=True) as server:
        yield server


def check(answer: Answer, *, names: set[str]) -> None:
    """There are calls alone, of these tools, with arguments that their schemas allow."""
    calls = calls_in(answer.outputs)
    assert calls
    assert not answer.text
    for name, arguments in calls:
        assert name in names
        jsonschema.validate(orjson.loads(arguments), SCHEMAS[name])
    assert answer.finished.reason is FinishReason.TOOL_CALLS


@pytest.mark.slow
@of_the_model
@pytest.mark.parametrize(("choice", "names"), [("required", {*SCHEMAS}), (NAMED, {"local_time"})])
async def test_a_call_that_is_required(engine: GgufEngine, server: LiveServer, choice: Any, names: set[str]) -> None:
    """Also where nothing in the words asks for one."""
    options = AnswerOptions(parallel_tool_calls=False, logprobs=1)
    answer = await answered(engine, text("Hello."), tools=TOOLS, tool_choice=choice, sampling=GREEDY, options=options)
    check(answer, names=names)
    assert len(calls_in(answer.outputs)) == 1


REPEAT = "Repeat: "
CALL = '{"name": "local_time", "arguments": {"city": "Tokyo"}}'
TAGGED = f"<call>\n{CALL}\n</call>"


@pytest.mark.slow
@of_the_model
@pytest.mark.parametrize(("form", "answers"), [(TAGGED, 1), (f"```json\n{CALL}\n```", 2)])
async def test_a_call_in_the_form_of_the_template_and_in_another(
    engine: GgufEngine, server: LiveServer, form: str, answers: int
) -> None:
    said = text(f"{REPEAT}{form}")
    answer = await answered(engine, said, tools=TOOLS, sampling=GREEDY)
    check(answer, names={*SCHEMAS})
    one = await answered(engine, said, tools=TOOLS, tool_choice="required", sampling={**GREEDY, "max_tokens": 1})
    assert answer.finished.usage.input_tokens == answers * one.finished.usage.input_tokens


@pytest.mark.slow
@of_the_model
async def test_no_call_where_the_client_wants_none(engine: GgufEngine, server: LiveServer) -> None:
    answer = await answered(engine, text(f"{REPEAT}{TAGGED}"), tools=TOOLS, tool_choice="none", sampling=GREEDY)
    assert not calls_in(answer.outputs)
    assert answer.text
    without = await answered(engine, text(f"{REPEAT}{TAGGED}"), sampling=GREEDY)
    assert answer.finished.usage.input_tokens == without.finished.usage.input_tokens


@pytest.mark.slow
@of_the_model
async def test_a_call_and_its_result_over_http(server: LiveServer) -> None:
    async with httpx.AsyncClient(timeout=PATIENCE_SEC) as client:
        url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
        messages: list[dict[str, Any]] = [{"role": "user", "content": "What time is it in Tokyo?"}]
        body = {"model": "m", "messages": messages, "tools": TOOLS, "tool_choice": NAMED, "max_tokens": 60}
        choice = (await client.post(url, json={**body, "temperature": 0})).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        jsonschema.validate(orjson.loads(call["function"]["arguments"]), TIME)
        messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "12:30"}]
        choice = (await client.post(url, json={**body, "tool_choice": "none"})).json()["choices"][0]
        assert choice["message"]["content"].strip()


@pytest.mark.slow
@of_the_model
@pytest.mark.parametrize("schema", [schema for schema, *_ in REFERENCES[:2]])
async def test_llama_cpp_holds_to_references(engine: GgufEngine, server: LiveServer, schema: dict[str, Any]) -> None:
    wanted = [*schema["properties"]]
    schema = {**schema, "type": "object", "required": wanted, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    answer = await answered(engine, text("Hello."), tools=(tool,), tool_choice="required", sampling=GREEDY)
    assert calls_in(answer.outputs)
    for _, arguments in calls_in(answer.outputs):
        assert set(orjson.loads(arguments).values()) <= {*CITY["enum"]}


@pytest.mark.slow
@of_the_model
async def test_a_schema_that_llama_cpp_cannot_hold_to(engine: GgufEngine, server: LiveServer) -> None:
    """It is the client's fault, and the model goes on."""
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "nothing"}}}}}
    with pytest.raises(InvalidValue, match="unrecognized type nothing"):
        await answered(engine, text("Hello."), tools=(wrong,), tool_choice="required", sampling=GREEDY)
    assert (await answered(engine, text("Hello."), sampling={**GREEDY, "max_tokens": 4})).text
