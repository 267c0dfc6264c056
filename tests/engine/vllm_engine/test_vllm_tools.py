"""Tools with the real AsyncLLM: described in the prompt, called in the format of a real parser, answered by results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.engine_answers import Answer, Input, final, said, streamed
from support.patience import until
from support.raw_http import post
from support.vllm_engine import GREEDY, answer, plain_answer, request, unfinished

from omni_ws.client import connect
from omni_ws.config.model import ServerConfig, VllmConfig
from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import FinishReason, InputChunk, InputMode, Modality, ToolCall
from omni_ws.core.history import Message
from omni_ws.engine.base import AnswerOptions, EngineOutput, StructuredOutput, TextOutput, ToolCallOutput
from omni_ws.engine.channel import Channel
from omni_ws.engine.decoding import decode_input
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.prompt import PromptContext
from omni_ws.engine.vllm.sampling import ParserUse, parser_use
from omni_ws.engine.vllm.thinker import Thinker
from omni_ws.errors import InvalidValue, SessionConflict
from omni_ws.server import create_app, listen

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

SNAPSHOT = InputMode.SNAPSHOT
LONG_ENOUGH = {"temperature": 0.0, "max_tokens": 400}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Oslo", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
TOOLS = (WEATHER, CLOCK)
#: Random weights would call for ever.
ONE_CALL = AnswerOptions(parallel_tool_calls=False)
NAMED = {"type": "function", "function": {"name": "clock"}}
CALLED = (
    Message("user", "Is it wet?"),
    Message("assistant", "", tool_calls=(ToolCall("call_1", "weather", '{"city": "Oslo", "days": 2}'),)),
)
#: Text that random weights would never generate by themselves.
TWO_CALLS = (
    r"Let me see\. "
    r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "(Oslo|Rome)", "days": 3\}\}\n</tool_call>\n'
    r'<tool_call>\n\{"name": "clock", "arguments": \{"zone": "CET"\}\}\n</tool_call>'
)


@pytest.fixture
def engine(text_engine: VllmEngine) -> VllmEngine:
    return text_engine


@pytest.fixture
def writes_two_calls() -> Iterator[None]:
    """The model is forced to generate two calls where it is free to choose."""
    from vllm.sampling_params import StructuredOutputsParams

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParserUse, "constraint", property(lambda _: StructuredOutputsParams(regex=TWO_CALLS)))
        yield


async def outputs_of(engine: VllmEngine, source: Input, **changes: Any) -> list[EngineOutput]:
    changes = {"sampling": LONG_ENOUGH, "tools": TOOLS, **changes}
    return [output async for output in streamed(engine, request(source, **changes))]


def calls_of(outputs: list[EngineOutput], choice: int = 0) -> list[tuple[str, Any]]:
    """Return name and arguments of each call, after checking the order of the fragments."""
    names: dict[int, str] = {}
    identifiers: set[str] = set()
    arguments: dict[int, str] = {}
    for output in outputs:
        if isinstance(output, ToolCallOutput) and output.choice == choice:
            call = output.call
            if call.index not in names:
                assert call.id is not None
                assert call.name is not None
                assert call.index == len(names), "calls begin in order"
                names[call.index] = call.name
                identifiers.add(call.id)
            else:
                assert (call.id, call.name) == (None, None), "id and name come once"
                assert call.arguments, "an empty piece says nothing"
            arguments[call.index] = arguments.get(call.index, "") + call.arguments
    assert len(identifiers) == len(names)
    return [(name, json.loads(arguments[index])) for index, name in names.items()]


def result(call_id: str, text: str) -> InputChunk:
    return InputChunk(Modality.TEXT, text.encode(), tool_call_id=call_id)


def told(engine: VllmEngine, *, tools: tuple[Any, ...] = TOOLS) -> str:
    """Return the description of the tools in the prompt."""
    assert engine._shared is not None
    head, _ = engine._shared.form.frame(PromptContext(tools=tools))
    assert head.startswith("tools: [")
    return head.removesuffix("user: ")


async def test_a_parser_that_vllm_does_not_have_is_an_error_at_start() -> None:
    engine = VllmEngine(VllmConfig(model="nowhere", tool_parser="herpes"))
    with pytest.raises(ConfigurationError) as refused:
        await engine.start()
    assert "hermes" in str(refused.value)


async def test_the_model_reads_which_tools_there_are(engine: VllmEngine) -> None:
    text, final = await answer(engine, Input("Hello"), tools=TOOLS, tool_choice="none")
    assert text == await plain_answer(engine, told(engine) + "user: Hello\nassistant:")
    assert json.dumps(WEATHER["function"]["description"]) in told(engine)
    assert final.reason is FinishReason.LENGTH


async def test_a_description_of_a_tool_holds_no_control_token(engine: VllmEngine) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "<|eos|>", "parameters": {"<|bos|>": ["<|pad|>"]}},
    }
    assert not {"<|eos|>", "<|bos|>", "<|pad|>"} & set(told(engine, tools=(tool,)).split('"'))


@pytest.mark.parametrize("early", [False, True], ids=["at once", "in pieces"])
async def test_a_call_that_is_required_is_made(engine: VllmEngine, early: bool, early_steps: Callable[[], int]) -> None:
    source = Input(open_end=True)
    answering = asyncio.create_task(outputs_of(engine, source, tool_choice="required", options=ONE_CALL))
    source.send("How is it? " * 20)
    if early:
        await until(lambda: early_steps() > 0)
    source.close()
    outputs = await answering
    ((name, arguments),) = calls_of(outputs)
    if name == "weather":
        assert arguments["city"] in ("Oslo", "Rome")
        assert 1 <= arguments["days"] <= 9
    else:
        assert (name, arguments) == ("clock", {"zone": "CET"})
    assert not said(outputs).strip()
    assert final(outputs).reason is FinishReason.TOOL_CALLS


async def test_the_function_that_is_named_is_called(engine: VllmEngine) -> None:
    outputs = await outputs_of(engine, Input("Hello"), tool_choice=NAMED, options=ONE_CALL)
    assert calls_of(outputs) == [("clock", {"zone": "CET"})]
    assert final(outputs).reason is FinishReason.TOOL_CALLS


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_forced_call_ends_where_a_model_prefers_blanks(engine: VllmEngine, choice: Any) -> None:
    assert engine._shared is not None
    tokenizer = engine._shared.form.tokenizer
    blanks = [token for token in range(len(tokenizer)) if tokenizer.decode([token]).isspace()]
    assert blanks
    sampling = {**LONG_ENOUGH, "logit_bias": {str(token): 100.0 for token in blanks}}
    outputs = await outputs_of(engine, Input("Hello"), tool_choice=choice, sampling=sampling, options=ONE_CALL)
    assert final(outputs).reason is FinishReason.TOOL_CALLS
    assert len(calls_of(outputs)) == 1


async def test_only_one_call_where_only_one_is_wanted(engine: VllmEngine) -> None:
    for seed in range(3):
        sampling = {"temperature": 1.0, "seed": seed, "max_tokens": 400}
        outputs = await outputs_of(engine, Input("Hello"), tool_choice="required", sampling=sampling, options=ONE_CALL)
        assert len(calls_of(outputs)) == 1


@pytest.mark.usefixtures("writes_two_calls")
async def test_calls_that_the_model_makes_by_itself(engine: VllmEngine) -> None:
    outputs = await outputs_of(engine, Input("Hello"), options=AnswerOptions(logprobs=0))
    (name, arguments), clock = calls_of(outputs)
    assert name == "weather"
    assert arguments["days"] == 3
    assert clock == ("clock", {"zone": "CET"})
    assert said(outputs).strip() == "Let me see."
    assert final(outputs).reason is FinishReason.TOOL_CALLS
    # The tokens of a call are not text.
    tokens = [one for output in outputs if isinstance(output, TextOutput) for one in output.logprobs]
    assert said(outputs).startswith("".join(one.token for one in tokens))
    assert len(tokens) >= len("Let me see.")


async def test_arguments_come_while_they_are_written(engine: VllmEngine) -> None:
    assert engine._shared is not None
    use = parser_use(
        engine._shared.parser,
        engine._thinker,
        request(Input("Hello"), tools=TOOLS),
        arguments={},
        tokenizer=engine._shared.form.tokenizer,
    )
    assert use is not None
    reader = use.splitter()
    written = 'Wait. <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
    read = [reader.read(letter, [0], [0], finished=False) for letter in written]
    read.append(reader.read("", [], [0], finished=True))
    assert "".join(text for text, _, _ in read).strip() == "Wait."
    pieces = [call for _, _, calls in read for call in calls]
    assert len(pieces) > 10
    assert calls_of([ToolCallOutput(piece) for piece in pieces]) == [("weather", {"city": "Oslo", "days": 2})]


@pytest.mark.usefixtures("writes_two_calls")
async def test_a_second_call_that_is_not_wanted_is_left_out(engine: VllmEngine) -> None:
    outputs = await outputs_of(engine, Input("Hello"), options=ONE_CALL)
    assert [name for name, _ in calls_of(outputs)] == ["weather"]


@pytest.mark.usefixtures("writes_two_calls")
async def test_calls_are_not_spoken(engine: VllmEngine) -> None:
    assert engine._shared is not None
    assert engine._decoding is not None
    asked = request(Input("Hello"), tools=TOOLS, sampling=LONG_ENOUGH, input_mode=SNAPSHOT)
    share = asked.media_room.share()
    thinker = Thinker(engine._shared, asked, writes=False, share=share)
    spoken: Channel[str] = Channel(1 << 16, cost=len)
    answer = Answer()
    decoded = decode_input(
        asked.input, audio=asked.input_audio, sample_rate=16_000, executor=engine._decoding, share=share
    )
    await thinker.run(decoded, spoken, answer)
    spoken.close()
    assert "".join([text async for text in spoken]).strip() == "Let me see."
    assert len(calls_of(answer.outputs)) == 2


async def test_a_call_that_the_limit_cuts_off(engine: VllmEngine) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 60}
    outputs = await outputs_of(engine, Input("Hello"), tool_choice="required", sampling=sampling)
    assert final(outputs).reason in (FinishReason.LENGTH, FinishReason.TOOL_CALLS)
    short = {"temperature": 0.0, "max_tokens": 12}
    outputs = await outputs_of(engine, Input("Hello"), tool_choice="required", sampling=short)
    assert final(outputs).reason is FinishReason.LENGTH


async def test_each_of_several_answers_has_calls_of_its_own(engine: VllmEngine) -> None:
    sampling = {"temperature": 1.0, "seed": 1, "max_tokens": 400}
    options = AnswerOptions(choices=2, parallel_tool_calls=False)
    outputs = await outputs_of(engine, Input("Hello"), tool_choice="required", sampling=sampling, options=options)
    assert calls_of(outputs, 0)
    assert calls_of(outputs, 1)
    assert final(outputs).reasons == (FinishReason.TOOL_CALLS,) * 2


async def test_a_schema_beside_tools(engine: VllmEngine) -> None:
    """Where the model is free to choose, it calls a tool or follows the schema."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    strict = tuple({**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS)
    options = AnswerOptions(structure=StructuredOutput(schema=schema), parallel_tool_calls=False)
    outputs = await outputs_of(engine, Input("Hello"), tools=strict, options=options)
    if not calls_of(outputs):
        assert json.loads(said(outputs))["a"] in (1, 2)


@pytest.mark.parametrize("mode", list(InputMode))
async def test_results_alone_are_an_input(engine: VllmEngine, mode: InputMode) -> None:
    source = Input(result("call_1", "It ra"), result("call_1", "ins."))
    text, final = await answer(engine, source, history=CALLED, input_mode=mode)
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}</tool_call>'
    prompt = f"user: Is it wet?\nassistant: {call}\ntool call_1: It rains.\nassistant:"
    assert text == await plain_answer(engine, prompt)
    assert final.usage.input_tokens == len(prompt)


async def test_an_empty_result_is_a_result(engine: VllmEngine) -> None:
    text, _ = await answer(engine, Input(result("call_1", "")), history=CALLED)
    assert engine._shared is not None
    head, tail = engine._shared.form.frame(
        PromptContext(history=(*CALLED, Message("tool", "", tool_call_id="call_1"))), user=False
    )
    assert head.endswith("tool call_1: \nassistant:")
    assert tail == ""
    assert text == await plain_answer(engine, head)


async def test_results_and_what_the_user_says_to_them(engine: VllmEngine) -> None:
    """Whatever the order of arrival, results precede the user's text."""
    calls = (*CALLED[1].tool_calls, ToolCall("call_2", "clock", "{}"))
    history = (CALLED[0], Message("assistant", "Wait.", tool_calls=calls))
    assert engine._shared is not None
    results = (Message("tool", "Rain", tool_call_id="call_1"), Message("tool", "Noon", tool_call_id="call_2"))
    head, tail = engine._shared.form.frame(PromptContext(history=(*history, *results)))
    expected = await plain_answer(engine, f"{head}And now?{tail}")
    source = Input(result("call_1", "Rain"), result("call_2", "Noon"), "And now?")
    assert (await answer(engine, source, history=history))[0] == expected
    source = Input("And now?", open_end=True)
    answering = asyncio.create_task(answer(engine, source, history=history))
    await until(lambda: unfinished(engine) > 0)
    source.send(result("call_1", "Rain"))
    source.send(result("call_2", "Noon"))
    source.close()
    assert (await answering)[0] == expected


async def test_a_result_of_no_call_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(InvalidValue) as refused:
        await answer(engine, Input(result("call_7", "Rain")), history=CALLED)
    assert refused.value.param == "tool_call_id"


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        (TOOLS, {"type": "function", "function": {"name": "wether"}}, "tool_choice.function.name"),
        (TOOLS, "always", "tool_choice"),
        (TOOLS, {"type": "function"}, "tool_choice.function"),
        ((), "required", "tool_choice"),
        ((), NAMED, "tool_choice.function.name"),
        (({"type": "function", "function": {}},), None, "tools[0].function.name"),
        (({"type": "search", "function": {"name": "f"}},), None, "tools[0].type"),
        (({"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}},), "required", "tools"),
    ],
)
async def test_what_no_tool_is_and_no_choice_is_refused(
    engine: VllmEngine, tools: tuple[Any, ...], choice: Any, param: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        await outputs_of(engine, Input("Hello"), tools=tools, tool_choice=choice)
    assert refused.value.param == param


@pytest.mark.parametrize("prompt", ["Once upon a time", "user: x\nassistant:<|eos|>Hm"])
async def test_a_prompt_as_it_stands(engine: VllmEngine, prompt: str) -> None:
    from support.tiny_models import EOS

    source = Input(*[prompt[start : start + 4] for start in range(0, len(prompt), 4)])
    options = AnswerOptions(raw_prompt=True)
    text, final = await answer(engine, source, options=options, instructions="ignored", history=CALLED)
    assert text == await plain_answer(engine, prompt)
    tokens = engine._thinker.llm.get_tokenizer().encode(prompt)
    assert (EOS in tokens) == ("<|eos|>" in prompt)
    assert final.usage.input_tokens == len(tokens)


async def test_without_tools_calls_are_only_text(engine: VllmEngine) -> None:
    text, _ = await answer(engine, Input("Hello"))
    assert text == await plain_answer(engine, "user: Hello\nassistant:", **GREEDY)


async def test_a_conversation_with_a_tool_over_the_websocket(engine: VllmEngine) -> None:
    """The client library sends the result of a call, and the model answers it."""
    app = create_app(engine, ServerConfig(port=0))
    async with listen(app) as server, connect(f"ws://127.0.0.1:{server.port}/v1/streaming_input") as session:
        assert session.created.capabilities.tools
        # Random weights would call for ever.
        once = {**LONG_ENOUGH, "stop": "</tool_call>"}
        await session.configure(tools=list(TOOLS), tool_choice=NAMED, sampling=once)
        called = await session.ask_text("What time is it?")
        assert called.finish_reason is FinishReason.TOOL_CALLS
        call = called.tool_calls[0]
        assert (call.name, json.loads(call.arguments)) == ("clock", {"zone": "CET"})
        await session.configure(tool_choice="none", sampling={**GREEDY, "stop": None})
        for one in called.tool_calls:
            await session.send_tool_result(one.id, "", end=one is called.tool_calls[-1])
        said = await session.answer()
        assert engine._shared is not None
        results = tuple(Message("tool", "", tool_call_id=one.id) for one in called.tool_calls)
        asked = Message("user", "What time is it?")
        made = Message("assistant", called.text, tool_calls=called.tool_calls)
        context = PromptContext(history=(asked, made, *results), tools=TOOLS)
        assert said.text == await plain_answer(engine, engine._shared.form.frame(context, user=False)[0])
        # The result of the call is context of later requests.
        thanks = await session.ask_text("Thanks.")
        context = PromptContext(history=(*context.history, Message("assistant", said.text)), tools=TOOLS)
        head, tail = engine._shared.form.frame(context)
        assert thanks.text == await plain_answer(engine, f"{head}Thanks.{tail}")
        await session.send_tool_result("call_unknown", "42", end=True)
        with pytest.raises(SessionConflict) as refused:
            await session.answer()
        assert refused.value.param == "tool_call_id"


async def test_calls_in_a_chat_body(engine: VllmEngine) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "How is it?"}],
        "tools": list(TOOLS),
        "tool_choice": NAMED,
        "parallel_tool_calls": False,
        **LONG_ENOUGH,
    }
    app = create_app(engine, ServerConfig(port=0))
    async with listen(app) as server:
        choice = (await post(server.port, "/v1/chat/completions", body)).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"zone": "CET"}
        body["messages"] += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "Noon."}]
        body |= {"tool_choice": "none", **GREEDY, "logprobs": True, "top_logprobs": 2}
        (choice,) = (await post(server.port, "/v1/chat/completions", body)).json()["choices"]
        several = (await post(server.port, "/v1/chat/completions", body | {"n": 2, "temperature": 0.5})).json()
    tokens = choice["logprobs"]["content"]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == choice["message"]["content"]
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)
    assert [choice["index"] for choice in several["choices"]] == [0, 1]
    # One may end early, by a token of which nothing is told.
    told = sum(len(one["logprobs"]["content"]) + (one["finish_reason"] == "stop") for one in several["choices"])
    assert told == several["usage"]["completion_tokens"]


async def test_of_a_template_that_describes_tools_nothing_is_told(text_engine: VllmEngine) -> None:
    assert not any("ignores tools" in line for line in text_engine.describe())
