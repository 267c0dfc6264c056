"""Histories that do not fit an upstream: what is left out, what is refused, what is learnt."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine_answers import answer, final, said, text
from support.scripted_upstream import (
    LlamaCppServer,
    LmStudioServer,
    OllamaServer,
    SilentLlamaCppServer,
    delta,
    finish,
    ollama_says,
    refuses,
    remote_llm,
    says,
    streams,
    tokens_of,
    upstream,
    usage,
    words_for,
)

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, ToolCall
from omni_ws.core.history import Message
from omni_ws.engine.clauses import whole_turns
from omni_ws.engine.remote.event_stream import (
    context_limit,
    prompt_tokens,
    says_too_long,
)
from omni_ws.engine.remote.upstream import MOST_TRIES, ContextWindow
from omni_ws.errors import ContextLengthExceeded, EngineFailed

pytestmark = pytest.mark.usefixtures("no_task_left")


def conversation(turns: int, words: int = 8) -> tuple[Message, ...]:
    """Turns of ``words`` tokens a message, which say who they are."""
    return tuple(
        Message(role, f"{role}{number} {words_for(words - 1)}")
        for number in range(turns)
        for role in ("user", "assistant")
    )


def first_words(messages: list[dict[str, Any]]) -> list[str]:
    return [str(message["content"]).split()[0] for message in messages]


# turns


def test_whole_turns() -> None:
    greeting = Message("assistant", "Hello!")
    call = Message("assistant", "", (ToolCall("call_1", "clock", "{}"),))
    result, told = Message("tool", "noon", tool_call_id="call_1"), Message("assistant", "It is noon.")
    turns = [
        (greeting,),
        (Message("user", "time?"), call, result, told),
        (Message("user", "no answer"),),
        (Message("user", "again"), Message("assistant", "Yes.")),
    ]
    assert whole_turns([message for turn in turns for message in turn]) == turns
    assert whole_turns([]) == []


# what servers say


@pytest.mark.parametrize(
    ("message", "fields", "limit", "tokens"),
    [
        (
            "This model's maximum context length is 1024 tokens. However, your prompt contains 1300 input tokens, "
            "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
            {},
            1024,
            1300,
        ),
        (
            "This model's maximum context length is 1024 tokens. However, your prompt contains at least 1025 input "
            "tokens, which exceeds this limit.",
            {},
            1024,
            None,
        ),
        (
            "This model's maximum context length is 4097 tokens. However, you requested 5360 tokens (1360 in the "
            "messages, 4000 in the completion). Please reduce the length of the messages or completion.",
            {},
            4097,
            1360,
        ),
        (
            "This model's maximum context length is 128000 tokens. However, your messages resulted in 130000 tokens.",
            {"code": "context_length_exceeded"},
            128_000,
            130_000,
        ),
        (
            "You passed 1033 input tokens and requested 0 output tokens. However, the model's context length is only "
            "512 tokens.",
            {},
            512,
            1033,
        ),
        (
            "request (9412 tokens) exceeds the available context size (8192 tokens), try increasing it",
            {"type": "exceed_context_size_error"},
            8192,
            9412,
        ),
        ("try increasing it", {"type": "exceed_context_size_error", "n_ctx": 64, "n_prompt_tokens": 99}, 64, 99),
        ("The number of tokens to keep from the initial prompt is greater than the context length.", {}, None, None),
        (
            "Trying to keep the first 5000 tokens when context the overflows. However, the model is loaded with "
            "context length of only 4096 tokens, which is not enough.",
            {},
            4096,
            None,
        ),
        ("the input length exceeds the context length", {}, None, None),
    ],
)
def test_what_a_refusal_tells(message: str, fields: dict[str, Any], limit: int | None, tokens: int | None) -> None:
    assert says_too_long(message, code=fields.get("code", ""), kind=fields.get("type", ""))
    assert (context_limit(message, fields), prompt_tokens(message, fields)) == (limit, tokens)


def test_other_refusals_are_not_about_the_length() -> None:
    assert not says_too_long("temperature is too high for this context", code="invalid_value", kind="bad")


# the window


def test_without_a_limit_nothing_is_left_out() -> None:
    assert ContextWindow().left_out([1 << 20] * 9, fixed=1 << 20, answer=None) == 0


def test_as_many_turns_stay_as_fit() -> None:
    window = ContextWindow()
    window.tell(1000)
    window.count(100, 400)  # a token has four bytes
    # 1000 tokens less 200 for the answer are 3200 bytes, less the margin 3047.
    assert window.left_out([1000, 1000, 1000], fixed=47, answer=200) == 0
    assert window.left_out([1000, 1000, 1000], fixed=48, answer=200) == 1
    assert window.left_out([1000, 1000, 1000], fixed=1048, answer=200) == 2
    assert window.left_out([1000, 1000, 1000], fixed=9000, answer=200) == 3
    # An answer may not claim more than half.
    assert window.left_out([1000], fixed=900, answer=10_000) == 0
    assert window.left_out([1000], fixed=910, answer=10_000) == 1


def test_what_was_learnt_is_void_when_the_server_tells_something_new() -> None:
    window = ContextWindow()
    window.refuse(500, None, 4000)
    window.tell(None)
    assert window.limit == 500
    window.tell(1000)
    assert window.limit == 1000
    window.refuse(500, None, 4000)
    window.tell(1000)
    assert window.limit == 500


def test_counts_of_a_prompt_that_was_cut_are_not_believed() -> None:
    window = ContextWindow()
    window.tell(1000)
    window.count(950, 40_000)
    assert window.left_out([4000], fixed=0, answer=100) == 1  # still three bytes a token, and not forty


@pytest.mark.parametrize("turns", [1, 2, 7, 100])
def test_tries_are_few_and_the_last_has_no_history(turns: int) -> None:
    window = ContextWindow()
    tried, tries = 0, 1
    while tried < turns:
        after = window.left_out_next(tried, [10] * turns, fixed=10, answer=None, attempt=tries)
        assert after > tried
        tried, tries = after, tries + 1
    assert tries <= MOST_TRIES


# engine and servers


async def test_the_context_that_a_server_tells_is_kept_to() -> None:
    server = LlamaCppServer(context=128, replies=[says("ok")])
    async with server.serve(), remote_llm(server) as engine:
        assert said(await answer(engine, "now", history=conversation(20), sampling={"max_tokens": 16})) == "ok"
    assert len(server.requests) == 1
    (read,) = server.read
    assert first_words(read)[-1] == "now"
    assert first_words(read)[0].startswith("user")
    assert read[:-1] == [{"role": one.role, "content": one.text} for one in conversation(20)[-len(read) + 1 :]]
    assert 30 < tokens_of(read) < 128


@pytest.mark.parametrize("kind", [SilentLlamaCppServer, LmStudioServer])
async def test_a_refusal_leaves_the_oldest_turns_out(kind: Any) -> None:
    server = kind(context=128, replies=[says("ok")])
    async with server.serve(), remote_llm(server) as engine:
        outputs = await answer(engine, "now", history=conversation(20), instructions="Be brief.")
        assert said(outputs) == "ok"
        tries = len(server.requests)
        assert 1 < tries <= MOST_TRIES
        assert first_words(server.read[-1])[0] == "Be"
        assert len(server.read[-1]) > 3
        # What is known now needs no refusal, where the server said how much fits.
        await answer(engine, "now", history=conversation(20), instructions="Be brief.")
        if kind is SilentLlamaCppServer:
            assert len(server.requests) == tries + 1


@pytest.mark.parametrize("kind", [LlamaCppServer, SilentLlamaCppServer, LmStudioServer])
async def test_what_does_not_fit_alone_is_refused(kind: Any) -> None:
    server = kind(context=64, replies=[says("ok")])
    async with server.serve(), remote_llm(server) as engine:
        with pytest.raises(ContextLengthExceeded):
            await answer(engine, words_for(80), history=conversation(20))
        assert len(server.requests) <= MOST_TRIES
        assert len(server.requests[-1]["messages"]) == 1
        assert said(await answer(engine, words_for(40), history=conversation(20))) == "ok"


async def test_sixty_turns() -> None:
    """A conversation that is far longer than the context goes on for ever, and remembers what was last."""
    server = SilentLlamaCppServer(context=256, replies=[says("fine, go on with it please")])
    history: tuple[Message, ...] = ()
    async with server.serve(), remote_llm(server) as engine:
        for number in range(60):
            said_now = f"turn{number} {words_for(12)}"
            told = said(await answer(engine, said_now, history=history, sampling={"max_tokens": 16}))
            assert told == "fine, go on with it please"
            history = (*history, Message("user", said_now), Message("assistant", told))
            if number:
                assert f"turn{number - 1}" in first_words(server.read[-1])
        assert len(server.requests) < 60 + MOST_TRIES


async def test_a_result_keeps_the_call_that_it_answers() -> None:
    server = SilentLlamaCppServer(context=64, replies=[says("ok")])
    called = (Message("user", "time?"), Message("assistant", "", (ToolCall("call_1", "clock", "{}"),)))
    result = InputChunk(Modality.TEXT, b"noon", tool_call_id="call_1")
    async with server.serve(), remote_llm(server) as engine:
        assert said(await answer(engine, result, history=(*conversation(10), *called))) == "ok"
    assert [message["role"] for message in server.read[-1]][-3:] == ["user", "assistant", "tool"]


async def test_an_answer_that_has_begun_is_not_begun_again() -> None:
    too_long = {"error": {"message": "context", "type": "exceed_context_size_error"}}
    async with (
        upstream(streams({"choices": [{"delta": {"content": "a"}}]}, too_long)) as there,
        remote_llm(there) as engine,
    ):
        with pytest.raises(ContextLengthExceeded):
            await answer(engine, history=conversation(3))
        assert len(there.requests) == 1


async def test_other_refusals_are_final() -> None:
    async with upstream(refuses(400, {"error": {"message": "no"}})) as there, remote_llm(there) as engine:
        with pytest.raises(Exception, match="no"):
            await answer(engine, history=conversation(3))
        assert len(there.requests) == 1
    async with upstream(refuses(500, {"error": {"message": "no"}})) as there, remote_llm(there) as engine:
        with pytest.raises(EngineFailed):
            await answer(engine, history=conversation(3))


# Ollama


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({"num_ctx": 128}, 128), ({"context": 128, "loaded": True, "num_ctx": 64}, 128), ({}, 4096)],
    ids=["of the model's file", "of the loaded model", "the documented one"],
)
async def test_ollama_is_not_left_to_cut(fields: dict[str, Any], limit: int) -> None:
    server = OllamaServer(models=("llama3.2:latest",), replies=[ollama_says("ok", usage=(7, 1))], **fields)
    server.context = limit
    async with server.serve(), remote_llm(server, model="llama3.2") as engine:
        outputs = await answer(engine, "now", history=conversation(600), instructions="Be brief.")
        assert said(outputs) == "ok"
    # What was sent is what was read, and it begins with a whole turn.
    assert server.read == [one["messages"] for one in server.requests]
    assert first_words(server.read[0])[:1] == ["Be"]
    assert first_words(server.read[0])[1].startswith("user")
    assert tokens_of(server.read[0]) < limit


async def test_contexts_that_are_garbage_change_nothing() -> None:
    class Garbage(LlamaCppServer):
        async def _props(self, exchange: Any) -> None:
            await exchange.respond_json(200, ["n_ctx"])

    server = Garbage(context=128, replies=[says("ok")])
    async with server.serve(), remote_llm(server) as engine:
        assert said(await answer(engine, text("now"))) == "ok"


@pytest.mark.parametrize(
    ("tokens", "sampling", "told"),
    [
        ((20, 108), {}, True),
        ((20, 108), {"max_tokens": 200}, True),
        ((20, 16), {"max_tokens": 16}, False),
        ((112, 16), {"max_tokens": 16}, False),
        ((20, 50), {}, False),
    ],
)
async def test_an_answer_that_fills_the_context_is_told(
    tokens: tuple[int, int], sampling: dict[str, Any], told: bool
) -> None:
    server = LlamaCppServer(context=128, replies=[streams(delta(content="ok"), finish("length"), usage(*tokens))])
    async with server.serve(), remote_llm(server) as engine:
        finished = final(await answer(engine, "now", sampling=sampling))
        assert finished.reason is FinishReason.LENGTH
        assert [warning.code for warning in finished.warnings] == ["context_length_exceeded"] * told
