"""Tools, response formats, log-probabilities and choices over HTTP, with the openai package and the real AsyncLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
import pytest_asyncio
from pydantic import BaseModel, ConfigDict
from support.live_server import LiveServer, live_server
from support.vllm_engine import plain_answer

from omni_ws.engine.vllm.engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"model": "local-model", "temperature": 0, "max_tokens": 16}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    sunny: bool


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def shared_server(text_model: VllmEngine) -> AsyncIterator[LiveServer]:
    async with live_server(text_model, stops_engine=False) as server:
        yield server


@pytest.fixture
def server(shared_server: LiveServer, text_engine: VllmEngine) -> LiveServer:
    return shared_server


@pytest_asyncio.fixture(loop_scope="session")
async def client(server: LiveServer) -> AsyncIterator[Any]:
    import openai

    base_url = f"http://127.0.0.1:{server.port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


async def test_streams_and_whole_answers_are_those_of_the_model(server: LiveServer, client: Any) -> None:
    assert isinstance(server.engine, VllmEngine)
    expected = await plain_answer(server.engine, "user: Hello\nassistant:", temperature=0, max_tokens=16)
    whole = await client.chat.completions.create(messages=HELLO, **GREEDY)
    stream = await client.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == expected
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage == whole.usage
    assert whole.choices[0].finish_reason == "length"


async def test_a_prompt_stands_alone(server: LiveServer, client: Any) -> None:
    assert isinstance(server.engine, VllmEngine)
    expected = await plain_answer(server.engine, "Once upon a time", temperature=0, max_tokens=16)
    whole = await client.completions.create(prompt="Once upon a time", logprobs=2, **GREEDY)
    (choice,) = whole.choices
    assert choice.text == expected
    assert len(choice.logprobs.tokens) == 16
    assert all(len(top) >= 2 for top in choice.logprobs.top_logprobs)
    stream = await client.completions.create(prompt="Once upon a time", logprobs=2, stream=True, **GREEDY)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert [place for chunk in chunks for place in chunk.choices[0].logprobs.text_offset] == choice.logprobs.text_offset
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_several_answers_with_log_probabilities(client: Any) -> None:
    asked = {**GREEDY, "temperature": 1, "seed": 5, "n": 2, "logprobs": True, "top_logprobs": 3}
    whole = await client.chat.completions.create(messages=HELLO, **asked)
    texts = ["", ""]
    tokens: list[list[str]] = [[], []]
    async for chunk in await client.chat.completions.create(messages=HELLO, stream=True, **asked):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.logprobs is not None:
            tokens[choice.index] += [entry.token for entry in choice.logprobs.content]
    assert [choice.message.content for choice in whole.choices] == texts
    assert [[entry.token for entry in choice.logprobs.content] for choice in whole.choices] == tokens
    assert all(len(entry.top_logprobs) == 3 for choice in whole.choices for entry in choice.logprobs.content)


async def test_a_form_is_parsed(client: Any) -> None:
    asked = {**GREEDY, "max_tokens": 80, "response_format": Place}
    parsed = await client.chat.completions.parse(messages=HELLO, **asked)
    assert parsed.choices[0].message.parsed.city in ("Oslo", "Rome")
    async with client.chat.completions.stream(messages=HELLO, **asked) as stream:
        streamed = await stream.get_final_completion()
    assert streamed.choices[0].message.parsed == parsed.choices[0].message.parsed


async def test_a_tool_is_called_and_its_result_is_read(client: Any) -> None:
    asked = {**GREEDY, "max_tokens": 120, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    async with client.chat.completions.stream(messages=HELLO, **asked) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    (call,) = streamed.message.tool_calls
    assert call.function.name == "weather"
    assert call.function.parsed_arguments["city"] in ("Oslo", "Rome")
    assert streamed.finish_reason == "tool_calls"
    whole = (await client.chat.completions.create(messages=HELLO, **asked)).choices[0]
    assert whole.message.tool_calls[0].function.arguments == call.function.arguments
    for result in ("20 degrees", ""):
        messages = [
            *HELLO,
            whole.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": result},
        ]
        answered = await client.chat.completions.create(messages=messages, tools=[WEATHER], **GREEDY)
        assert answered.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_done_is_named_before_any_output(client: Any, stream: bool) -> None:
    import openai

    schema = {"name": "a", "schema": {"type": "integer", "multipleOf": 7}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "json_schema", "json_schema": schema}}, "response_format"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
    ]
    for fields, param in cases:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(messages=HELLO, stream=stream, extra_body=fields, **GREEDY)
        assert (refused.value.param or "").startswith(param)
    long: list[Any] = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(messages=long, stream=stream, **GREEDY)
    assert refused.value.code == "context_length_exceeded"


async def test_an_answer_goes_on_with_the_assistants_last_message(server: LiveServer, client: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, I"}]
    completion = await client.chat.completions.create(messages=messages, **GREEDY)
    prompt = "user: Hello\nassistant: Well, I"
    assert isinstance(server.engine, VllmEngine)
    assert completion.choices[0].message.content == await plain_answer(server.engine, prompt, max_tokens=16)
    assert completion.usage.prompt_tokens == len(prompt)


async def test_what_was_computed_before_is_told(client: Any) -> None:
    long: list[Any] = [{"role": "user", "content": "the same again " * 20}]
    cached = []
    for _ in range(2):
        completion = await client.chat.completions.create(
            messages=long, extra_body={"after_start": "snapshot"}, **GREEDY
        )
        cached.append(completion.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert 200 < cached[1] <= completion.usage.prompt_tokens
