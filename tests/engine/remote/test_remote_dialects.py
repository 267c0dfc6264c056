"""Servers that speak OpenAI's API in their own way, written from what they publish: Ollama, LM Studio, llama.cpp."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from support.engine_answers import answer, final, said
from support.scripted_upstream import (
    LlamaCppServer,
    LmStudioServer,
    OllamaServer,
    delta,
    finish,
    hang,
    ollama_calls,
    ollama_says,
    remote_llm,
    says,
    streams,
    upstream,
)

from benchmarks.server_process import free_port
from omni_ws.core.chunks import FinishReason, ToolCallFragment
from omni_ws.engine.base import EngineOutput, ToolCallOutput
from omni_ws.engine.remote.engine import RemoteLlmEngine
from omni_ws.engine.remote.settings import (
    Dialect,
    RemoteLlmSettings,
    context_in_ps,
    context_in_show,
    context_listed,
    listed_models,
)
from omni_ws.errors import EngineFailed

pytestmark = pytest.mark.usefixtures("no_task_left")

CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


def calls(outputs: list[EngineOutput]) -> list[ToolCallFragment]:
    return [output.call for output in outputs if isinstance(output, ToolCallOutput)]


# who is there


@pytest.mark.parametrize(
    ("server", "dialect"),
    [
        (OllamaServer(replies=[says("x")]), Dialect.OLLAMA),
        (LmStudioServer(replies=[says("x")]), Dialect.LM_STUDIO),
        (LlamaCppServer(replies=[says("x")]), Dialect.LLAMA_CPP),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_server_is_known_by_what_it_says(server: Any, dialect: Dialect) -> None:
    async with server.serve(), remote_llm(server) as engine:
        assert [one.dialect for one in engine.upstreams] == [dialect]
        assert engine.model == "tiny"
        assert said(await answer(engine)) == "x"


@pytest.mark.parametrize(
    ("listed", "model"),
    [
        (("nomic-embed-text:latest", "all-minilm", "bge-m3", "llama3.2:latest", "tiny"), "llama3.2:latest"),
        (("embedded-systems-chat",), "embedded-systems-chat"),  # the only one
        (("text-embedding-nomic", "tiny"), "tiny"),
    ],
)
async def test_a_model_for_embeddings_is_not_taken_for_one_that_chats(listed: tuple[str, ...], model: str) -> None:
    async with (there := OllamaServer(models=listed, replies=[says("x")])).serve(), remote_llm(there) as engine:
        assert engine.model == model
        assert said(await answer(engine)) == "x"
        assert there.requests[-1]["model"] == model


@pytest.mark.parametrize(
    ("owner", "dialect"), [("vllm", Dialect.VLLM), ("omni_ws", Dialect.OMNI_WS), ("me", Dialect.OPENAI)]
)
async def test_owners(owner: str, dialect: Dialect) -> None:
    async with upstream(says("x"), owner=owner) as there, remote_llm(there) as engine:
        assert [one.dialect for one in engine.upstreams] == [dialect]


async def test_ollama_lists_models_in_two_places() -> None:
    server = OllamaServer(models=("qwen3:0.6b", "llama3.2:latest"), lists="/api/tags", replies=[says("x")])
    async with server.serve():
        async with remote_llm(server) as engine:
            assert engine.model == "qwen3:0.6b"
            assert said(await answer(engine)) == "x"
        async with remote_llm(server, model="llama3.2") as engine:
            assert said(await answer(engine)) == "x"
            assert server.requests[-1]["model"] == "llama3.2"
        with pytest.raises(EngineFailed, match=r"does not serve mistral; it serves qwen3:0\.6b, llama3\.2:latest"):
            async with remote_llm(server, model="mistral"):
                pytest.fail("it is not there")


async def test_ollama_without_models_says_how_to_get_one() -> None:
    server = OllamaServer(models=())
    async with server.serve():
        with pytest.raises(EngineFailed, match=r"name one with llm\.model; Ollama gets one with: ollama pull NAME"):
            async with remote_llm(server, section="llm"):
                pytest.fail("there is no model")


def test_lists_that_are_none() -> None:
    lists: list[Any] = [None, 7, [], {}, {"data": 3}, {"models": {}}]
    for garbage in lists:
        assert listed_models(garbage) is None
    assert listed_models({"data": None}) == []
    assert listed_models({"data": [7, {"id": 3}, {"name": "a"}, {}]}) == [{"name": "a", "id": "a"}]


def test_contexts_that_are_none() -> None:
    running = [7, {"name": 3}, {"name": "a", "context_length": "x"}]
    contexts: list[Any] = [None, 7, [], {}, {"models": 3}, {"models": running}]
    for garbage in contexts:
        assert context_in_ps(garbage, "a") is None
    shown: list[Any] = [None, {}, {"parameters": 3}, {"parameters": "num_ctx\nnum_ctx x\nstop num_ctx 3"}]
    for garbage in shown:
        assert context_in_show(garbage) is None
    assert context_listed({"id": "x", "max_model_len": True, "meta": 3}) is None
    assert context_listed({"id": "x", "max_model_len": 2048}) == 2048


# what they take


async def test_sampling_by_their_names() -> None:
    sampling = {"temperature": 0.5, "repetition_penalty": 1.1}
    for server in (LlamaCppServer(replies=[says("x")]), LmStudioServer(replies=[says("x")])):
        async with server.serve(), remote_llm(server) as engine:
            await answer(engine, sampling=sampling)
            body = server.requests[0]
            assert (body["temperature"], body["repeat_penalty"]) == (0.5, 1.1)
            assert "repetition_penalty" not in body
            assert "repetition_penalty" in engine.capabilities.sampling


async def test_servers_for_one_person_are_not_asked_beside_answers() -> None:
    async with LlamaCppServer(replies=[]).serve() as server, remote_llm(server) as engine:
        able = engine.capabilities
        assert (able.sums_up, able.shares_cores, able.context) == (True, True, server.context)
    async with upstream() as other, remote_llm(other) as engine:
        able = engine.capabilities
        assert (able.sums_up, able.shares_cores, able.context) == (True, False, None)


async def test_what_a_server_ignores_is_not_offered() -> None:
    async with OllamaServer(replies=[says("x")]).serve() as server:
        async with remote_llm(server) as engine:
            assert {"temperature", "seed"} < engine.capabilities.sampling
            assert not {"top_k", "min_p", "repetition_penalty"} & engine.capabilities.sampling
        async with remote_llm(server, sampling=("top_k",)) as engine:
            assert engine.capabilities.sampling == {"top_k"}


# what they answer


async def test_what_ollama_thinks_is_not_its_answer() -> None:
    async with (
        OllamaServer(replies=[ollama_says("Four", ".", thinks="2 and 2")]).serve() as server,
        remote_llm(server) as engine,
    ):
        outputs = await answer(engine, "one two three")
        assert said(outputs) == "Four."
        # Without usage the words are counted: three here, and one there.
        assert (final(outputs).usage.input_tokens, final(outputs).usage.output_tokens) == (3, 1)


async def test_usage_that_is_told() -> None:
    counted = {"prompt_tokens": 20, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}}
    told = streams(delta(content="x"), finish(), {"choices": [], "usage": counted})
    async with upstream(told) as there, remote_llm(there) as engine:
        usage = final(await answer(engine)).usage
    assert (usage.input_tokens, usage.output_tokens, usage.cached_tokens) == (20, 5, 16)


async def test_calls_of_ollama_come_whole_and_with_one_index() -> None:
    asked = ollama_calls(("call_a", "clock", {"zone": "CET"}), ("call_b", "clock", {"zone": "UTC"}))
    async with OllamaServer(replies=[asked]).serve() as server, remote_llm(server) as engine:
        assert engine.capabilities.tools
        outputs = await answer(engine, tools=(CLOCK,))
    assert [(one.index, one.id, one.name, orjson.loads(one.arguments)) for one in calls(outputs)] == [
        (0, "call_a", "clock", {"zone": "CET"}),
        (1, "call_b", "clock", {"zone": "UTC"}),
    ]
    assert final(outputs).reason is FinishReason.TOOL_CALLS


async def test_a_call_that_ends_with_stop() -> None:
    call = {"index": 0, "id": "call_a", "function": {"name": "clock", "arguments": "{}"}}
    async with upstream(streams(delta(tool_calls=[call]), finish("stop"))) as there, remote_llm(there) as engine:
        assert final(await answer(engine, tools=(CLOCK,))).reason is FinishReason.TOOL_CALLS


# a model that does not begin


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    "silent",
    [hang, streams(delta(role="assistant"), hang), streams(b": here\n\n", hang)],
    ids=["nothing", "a role", "a comment"],
)
async def test_a_model_that_does_not_begin(silent: Any) -> None:
    async with upstream(silent) as there, remote_llm(there, first_byte_timeout=30, idle_timeout=300) as engine:
        began = asyncio.get_running_loop().time()
        with pytest.raises(EngineFailed) as caught:
            await answer(engine)
        assert not caught.value.fatal
        assert asyncio.get_running_loop().time() - began == pytest.approx(30, abs=1)
        await there.deserted.wait()


@pytest.mark.virtual_clock
async def test_signs_of_life_are_no_beginning() -> None:
    async def beats(exchange: Any) -> None:
        while True:
            await asyncio.sleep(5)
            await exchange.write(b": ping\n\n")

    async with upstream(streams(beats)) as there, remote_llm(there, first_byte_timeout=30, idle_timeout=10) as engine:
        began = asyncio.get_running_loop().time()
        with pytest.raises(EngineFailed, match="before its answer"):
            await answer(engine)
        assert asyncio.get_running_loop().time() - began == pytest.approx(30, abs=1)


@pytest.mark.virtual_clock
async def test_thinking_is_a_beginning() -> None:
    async def thinks(exchange: Any) -> None:
        for _ in range(20):
            await asyncio.sleep(5)
            await exchange.write(b"data: " + orjson.dumps(delta(reasoning="hm")) + b"\n\n")

    there = streams(thinks, delta(content="Yes."), finish())
    async with upstream(there) as server, remote_llm(server, first_byte_timeout=30, idle_timeout=10) as engine:
        assert said(await answer(engine)) == "Yes."


async def test_an_engine_that_is_not_running() -> None:
    engine = RemoteLlmEngine(RemoteLlmSettings(urls=(f"http://127.0.0.1:{free_port()}",)))
    assert engine.describe() == ()
    with pytest.raises(EngineFailed, match="not running") as caught:
        await answer(engine)
    assert caught.value.fatal
    await engine.stop()


def test_a_key_is_not_printed() -> None:
    assert "secret" not in repr(RemoteLlmSettings(urls=(), api_key="secret"))
