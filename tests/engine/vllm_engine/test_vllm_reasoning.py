"""A model that thinks before it answers: its thought, its answer, and the arguments of its chat template."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.engine_answers import Answer, Input, final, said, streamed
from support.live_server import LiveServer, live_server
from support.native_client import native_client
from support.vllm_engine import plain_answer, request, running_engine

from omni_ws.config.model import VllmConfig
from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import FinishReason
from omni_ws.engine.base import AnswerOptions, StructuredOutput, TextOutput, ThoughtOutput
from omni_ws.engine.channel import Channel
from omni_ws.engine.decoding import DecodedPart, TextPart
from omni_ws.engine.omni.step_process import AnswerRows
from omni_ws.engine.threads import MediaRoom
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.sampling import ParserUse
from omni_ws.engine.vllm.thinker import Thinker
from omni_ws.engine.vllm.thinker_rows import ThinkerRows

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"model": "local-model", "temperature": 0, "max_tokens": 24}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
THINKING, ANSWERING = "user: Hello\nassistant:<think>", "user: Hello\nassistant:<think></think>"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.tiny_models import build_text_model

    return build_text_model(tmp_path_factory.mktemp("thinking") / "thinker", thinks=True)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(thinker: Path) -> AsyncIterator[VllmEngine]:
    from support.tiny_models import ENGINE_ARGS

    # The tests force the form of an answer by a grammar; with vLLM's own setting it would not apply to the thought.
    args = {**ENGINE_ARGS, "reasoning_parser": ""}
    async with running_engine(thinker, args, reasoning_parser="qwen3", tool_parser="hermes") as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(engine: VllmEngine) -> AsyncIterator[LiveServer]:
    async with live_server(engine, still_answers=False) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: LiveServer) -> AsyncIterator[Any]:
    import openai

    base_url = f"http://127.0.0.1:{server.port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


async def answered(client: Any, *, stream: bool, **fields: Any) -> tuple[str, str]:
    """The thought and the text of an answer."""
    asked = {"messages": HELLO, **GREEDY, **fields}
    if not stream:
        (choice,) = (await client.chat.completions.create(**asked)).choices
        return getattr(choice.message, "reasoning_content", ""), choice.message.content
    thought = text = ""
    async for chunk in await client.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            thought += getattr(choice.delta, "reasoning_content", "")
            text += choice.delta.content or ""
    return thought, text


@pytest.mark.parametrize("stream", [False, True])
async def test_thought_is_not_the_answer(engine: VllmEngine, client: Any, stream: bool) -> None:
    thought, text = await answered(client, stream=stream)
    assert thought == await plain_answer(engine, THINKING)
    assert text == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_turns_thought_off(engine: VllmEngine, client: Any, stream: bool) -> None:
    thought, text = await answered(client, stream=stream, extra_body=NO_THOUGHT)
    assert thought == ""
    assert text == await plain_answer(engine, ANSWERING)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, True])
async def test_the_answer_follows_the_thought(
    client: Any, monkeypatch: pytest.MonkeyPatch, stream: bool, logprobs: bool | None
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    form = StructuredOutputsParams(regex="[a-z]{9}</think>[A-Z]{5}")
    monkeypatch.setattr(ParserUse, "constraint", property(lambda _: form))
    thought, text = await answered(client, stream=stream, logprobs=logprobs)
    assert len(thought) == 9
    assert thought.islower()
    assert len(text) == 5
    assert text.isupper()


async def test_log_probabilities_are_those_of_the_answer(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    form = StructuredOutputsParams(regex="[a-z]{9}</think>[A-Z]{5}")
    monkeypatch.setattr(ParserUse, "constraint", property(lambda _: form))
    asked = request(Input("Hello"), options=AnswerOptions(logprobs=0, thought=True))
    outputs = [output async for output in streamed(engine, asked)]
    assert final(outputs).reason is FinishReason.STOP
    assert sum(len(output.text) for output in outputs if isinstance(output, ThoughtOutput)) == 9
    tokens = [token.token for output in outputs if isinstance(output, TextOutput) for token in output.logprobs]
    assert "".join(tokens) == said(outputs)
    assert len(tokens) == 5


async def test_thought_is_not_spoken(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the Talker of an omni model, which reads tokens; the Thinker is any model that thinks."""
    from vllm.sampling_params import StructuredOutputsParams

    form = StructuredOutputsParams(regex="[a-z]{9}</think>[A-Z]{5}")
    monkeypatch.setattr(ParserUse, "constraint", property(lambda _: form))
    assert engine._shared is not None
    config = {"thinker_config": {"text_config": {"hidden_size": 8}}, "talker_config": {"accept_hidden_layer": 1}}
    rows = ThinkerRows(config, kept_bytes=0)
    source: Channel[DecodedPart] = Channel(1, cost=lambda _: 1)
    source.put_nowait(TextPart("Hello", 0))
    source.close()
    items: Channel[Any] = Channel(1 << 16, cost=lambda _: 1)
    answer = Answer()
    with MediaRoom().share() as share:
        thinker = Thinker(engine._shared, request(Input()), writes=True, share=share, rows=rows)
        await thinker.run(source, items, answer)
    items.close()
    text = answer.text
    spoken = [int(token) async for item in items if isinstance(item, AnswerRows) for token in item.tokens]
    assert text.isupper()
    assert engine._thinker.llm.get_tokenizer().decode(spoken) == text


async def test_a_session_gets_no_thought(server: LiveServer) -> None:
    async with native_client(server) as native:
        await native.configure(sampling={"temperature": 0, "max_tokens": 24})
        await native.say("Hello")
        answer = await native.answer()
        assert answer.reason == "length"
        assert answer.chunks == []
        assert answer.final["usage"]["output_tokens"] == 24


async def test_a_raw_prompt_is_not_read_for_thought(engine: VllmEngine, client: Any) -> None:
    completion = await client.completions.create(prompt="<think>Once", **GREEDY)
    assert completion.choices[0].text == await plain_answer(engine, "<think>Once")


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"tools": []}, "chat_template_kwargs.tools"),
        ({"chat_template": "{{ 1 }}"}, "chat_template_kwargs.chat_template"),
        ("thinking", "chat_template_kwargs"),
    ],
)
async def test_what_is_not_an_argument_is_refused(client: Any, arguments: Any, param: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        await answered(client, stream=False, extra_body={"chat_template_kwargs": arguments})
    assert refused.value.param == param


async def test_an_operator_turns_thought_off_and_a_grammar_applies_behind_it(thinker: Path) -> None:
    from support.tiny_models import ENGINE_ARGS

    settings: dict[str, Any] = {"reasoning_parser": "qwen3", "chat_template_kwargs": {"enable_thinking": False}}
    async with running_engine(thinker, ENGINE_ARGS, **settings) as engine:
        outputs = [output async for output in streamed(engine, request(Input("Hello")))]
        assert said(outputs) == await plain_answer(engine, ANSWERING)
        on = AnswerOptions(template_arguments={"enable_thinking": True}, thought=True)
        outputs = [output async for output in streamed(engine, request(Input("Hello"), options=on))]
        thought = "".join(output.text for output in outputs if isinstance(output, ThoughtOutput))
        assert thought == await plain_answer(engine, THINKING)
        assert said(outputs) == ""
        written = replace(on, structure=StructuredOutput())
        outputs = [output async for output in streamed(engine, request(Input("Hello"), options=written))]
        assert "".join(output.text for output in outputs if isinstance(output, ThoughtOutput)) == thought
        written = AnswerOptions(structure=StructuredOutput())
        outputs = [output async for output in streamed(engine, request(Input("Hello"), options=written))]
        assert said(outputs).startswith("{")


async def test_an_unknown_parser_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigurationError) as refused:
        await VllmEngine(VllmConfig(model="nowhere", reasoning_parser="socrates")).start()
    (problem,) = refused.value.problems
    assert problem.startswith("vllm.reasoning_parser: unknown parser 'socrates'; available: ")
    assert "qwen3" in problem
