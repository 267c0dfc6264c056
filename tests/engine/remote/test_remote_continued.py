"""Answers that another server has begun, by upstreams of each kind: gone on with, or asked for again."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine_answers import BOTH, Answer, asking
from support.scripted_upstream import (
    LlamaCppServer,
    LmStudioServer,
    OllamaServer,
    ScriptedUpstream,
    delta,
    finish,
    refuses,
    remote_llm,
    says,
    streams,
    usage,
)

from omni_ws.core.chunks import FinishReason
from omni_ws.engine.answer_limit import go_on
from omni_ws.engine.base import AnswerOptions, OutputWriter, StructuredOutput
from omni_ws.engine.remote.engine import RemoteLlmEngine
from omni_ws.errors import ContextLengthExceeded, EngineFailed, InvalidRequest

pytestmark = pytest.mark.usefixtures("no_task_left")

BEGUN = "Once upon a time"
MESSAGES = [{"role": "user", "content": "A tale."}]
PREFILLED = [*MESSAGES, {"role": "assistant", "content": BEGUN}]
WHOLE = says("Once upon", " a time", " there was.")
THE_REST = says(" there was.")
#: What llama.cpp says if the model thinks first.
MESSAGE = "Assistant response prefill is incompatible with enable_thinking."
THINKS = {"error": {"code": 400, "message": MESSAGE, "type": "invalid_request_error"}}
FIELDS = ("add_generation_prompt", "continue_final_message")


def owned(owner: str, *chat: Any) -> ScriptedUpstream:
    return ScriptedUpstream(chat=list(chat), owner=owner)


async def continued(engine: RemoteLlmEngine, out: OutputWriter | None = None, **fields: Any) -> Answer:
    answer = Answer()
    await go_on(engine, asking("A tale.", begun=BEGUN, **fields), out or answer)
    return answer


@pytest.mark.parametrize(
    ("server", "fields"),
    [
        (owned("vllm", THE_REST), (False, True)),
        (LlamaCppServer(replies=[THE_REST]), (None, None)),
        (owned("omni_ws", THE_REST), (None, None)),
    ],
    ids=["vllm", "llama.cpp", "omni_ws"],
)
async def test_servers_that_go_on_with_the_last_message(server: Any, fields: tuple[bool | None, ...]) -> None:
    async with server.serve(), remote_llm(server) as engine:
        assert (await continued(engine)).text == " there was."
        (asked,) = server.requests
        assert asked["messages"] == PREFILLED
        assert tuple(asked.get(name) for name in FIELDS) == fields


@pytest.mark.parametrize(
    "server",
    [
        OllamaServer(replies=[WHOLE]),
        LmStudioServer(context=4096, replies=[WHOLE]),
        owned("openai", WHOLE),
    ],
    ids=["ollama", "lm studio", "any"],
)
async def test_servers_that_are_asked_for_all_of_it_again(server: Any) -> None:
    async with server.serve(), remote_llm(server) as engine:
        assert (await continued(engine)).text == " there was."
        (asked,) = server.requests
        assert asked["messages"] == MESSAGES
        assert not set(FIELDS) & asked.keys()


async def test_another_answer_ends_with_an_error() -> None:
    async with owned("openai", says("Once there", " was.")).serve() as server, remote_llm(server) as engine:
        answer = Answer()
        with pytest.raises(EngineFailed, match="the model answers otherwise"):
            await continued(engine, answer)
        assert answer.outputs == []


async def test_upstreams_of_two_kinds_are_asked_again() -> None:
    one, other = owned("vllm", WHOLE), owned("llamacpp", WHOLE)
    async with one.serve(), other.serve(), remote_llm(one, other) as engine:
        assert (await continued(engine)).text == " there was."
        (asked,) = [*one.requests, *other.requests]
        assert asked["messages"] == MESSAGES


@pytest.mark.parametrize("owner", ["llamacpp", "omni_ws", "vllm"])
async def test_a_server_that_refuses_to_go_on_is_asked_again(owner: str) -> None:
    async with owned(owner, refuses(400, THINKS), WHOLE).serve() as server, remote_llm(server) as engine:
        assert (await continued(engine)).text == " there was."
        assert [one["messages"] for one in server.requests] == [PREFILLED, MESSAGES]
        assert not set(FIELDS) & server.requests[-1].keys()


async def test_a_refusal_of_something_else_is_told() -> None:
    refusal = refuses(400, {"error": {"message": "no such thing", "type": "invalid_request_error"}})
    async with owned("vllm", refusal).serve() as server, remote_llm(server) as engine:
        with pytest.raises(InvalidRequest, match="no such thing"):
            await continued(engine)
        assert len(server.requests) == 2


async def test_what_does_not_fit_the_context_is_told_at_once() -> None:
    async with LlamaCppServer(context=8, replies=[WHOLE]).serve() as server, remote_llm(server) as engine:
        with pytest.raises(ContextLengthExceeded):
            await continued(engine)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "fields",
    [{"options": AnswerOptions(structure=StructuredOutput())}, {"tool_choice": "required"}, {"modalities": BOTH}],
    ids=["form", "a call", "voice"],
)
async def test_what_a_model_cannot_go_on_with_is_asked_for_again(fields: dict[str, Any]) -> None:
    settings = {"modalities": ("text", "audio")}
    async with owned("vllm", WHOLE).serve() as server, remote_llm(server, **settings) as engine:
        assert (await continued(engine, **fields)).text == " there was."
        assert server.requests[0]["messages"] == MESSAGES


@pytest.mark.parametrize(("limit", "left"), [(None, None), (100, 96), (4, 1), (2, 1)])
async def test_limit_and_usage_are_of_the_whole_answer(limit: int | None, left: int | None) -> None:
    counted = streams(delta(content=" there was."), finish("length"), usage(20, 7))
    sampling = {} if limit is None else {"max_tokens": limit}
    async with owned("vllm", counted).serve() as server, remote_llm(server) as engine:
        finished = (await continued(engine, sampling=sampling)).finished
        assert server.requests[0].get("max_tokens") == left
    words = len(BEGUN.split())
    assert (finished.usage.input_tokens, finished.usage.output_tokens) == (20 - words, 7 + words)
    assert finished.reason is FinishReason.LENGTH


async def test_a_model_that_has_nothing_to_add_ends_the_answer() -> None:
    async with owned("vllm", streams(delta(content=""), finish())).serve() as server, remote_llm(server) as engine:
        answer = await continued(engine)
        assert (answer.text, answer.finished.reason) == ("", FinishReason.STOP)
