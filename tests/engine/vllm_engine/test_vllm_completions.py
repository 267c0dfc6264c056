"""Token prompts, echo and logit bias over HTTP with the real AsyncLLM, compared with transformers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.live_server import LiveServer, live_server
from support.raw_http import DONE, RawResponse, events_of, post
from support.vllm_engine import Reference

from omni_ws.engine.vllm.engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 1}
#: Of two and of three tokens.
ODD = "Naïve – once"
EOS, VOCABULARY = 257, 512


@pytest.fixture(scope="module")
def reference(text_model: VllmEngine) -> Reference:
    return Reference(Path(str(text_model.config.model)))


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def shared_server(text_model: VllmEngine) -> AsyncIterator[LiveServer]:
    async with live_server(text_model, stops_engine=False) as server:
        yield server


@pytest.fixture
def server(shared_server: LiveServer, text_engine: VllmEngine) -> LiveServer:
    return shared_server


async def asked(server: LiveServer, prompt: Any, path: str = "/v1/completions", **body: Any) -> RawResponse:
    return await post(server.port, path, {"prompt": prompt, **GREEDY, **body})


async def choices(server: LiveServer, prompt: Any, **body: Any) -> list[Any]:
    answer = await asked(server, prompt, **body)
    assert answer.status == 200, answer.error
    return list(answer.json()["choices"])


def expected(reference: Reference, tokens: Sequence[int]) -> list[Any]:
    """Return the log-probability of each token but the first."""
    scores = reference.run(tokens)
    return [pytest.approx(float(scores[at - 1][tokens[at]]), rel=1e-3, abs=1e-4) for at in range(1, len(tokens))]


def bytewise(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text))


@pytest.fixture(scope="module")
def tokenizer(text_model: VllmEngine) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(text_model.config.model)


async def test_evaluation_tools_score_continuations(server: LiveServer, reference: Reference, tokenizer: Any) -> None:
    """As lm-evaluation-harness does: log-probabilities of continuations, and whether they are greedy."""
    requests = [("Once upon", " a time"), ("The sky", " is blue"), ("é", "\n")]
    prompts = [bytewise(tokenizer, context + continuation) for context, continuation in requests]
    found = await choices(server, prompts, echo=True, logprobs=1, seed=1234)
    for choice, (context, _), prompt in zip(found, requests, prompts, strict=True):
        count = len(bytewise(tokenizer, context))
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(prompt) + 1
        assert told["token_logprobs"][count:-1] == expected(reference, prompt)[count - 1 :]
        scores = reference.run(prompt)
        for place in range(count, len(prompt)):
            top = told["top_logprobs"][place]
            greedy = told["tokens"][place] == max(top, key=top.__getitem__)
            assert greedy == (int(scores[place - 1].argmax()) == prompt[place])


@pytest.mark.parametrize("text", ["Once upon a time", ODD, "word " * 120])
@pytest.mark.parametrize("as_tokens", [False, True])
async def test_an_echo_alone_scores_the_prompt(
    server: LiveServer, reference: Reference, tokenizer: Any, text: str, as_tokens: bool
) -> None:
    tokens = bytewise(tokenizer, text)
    answer = await asked(server, tokens if as_tokens else text, echo=True, max_tokens=0, logprobs=2)
    (choice,) = answer.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    assert answer.json()["usage"] == {
        **answer.json()["usage"],
        "prompt_tokens": len(tokens),
        "completion_tokens": 0,
        "total_tokens": len(tokens),
    }
    told = choice["logprobs"]
    assert told["token_logprobs"] == [None, *expected(reference, tokens)]
    assert told["top_logprobs"][0] is None
    assert all(2 <= len(top) <= 3 for top in told["top_logprobs"][1:] if "�" not in top)
    data = text.encode()
    assert len(told["tokens"]) == len(data)
    for offset, token in zip(told["text_offset"], told["tokens"], strict=True):
        if token != "�":
            assert text[offset] == token


async def test_a_mark_of_the_beginning_takes_no_place(server: LiveServer, tokenizer: Any) -> None:
    """A BOS token is part of the echo if the client sent it, not if the tokenizer added it."""
    from omni_ws.engine.vllm.sampling import (
        PromptEcho,
        TokenBytes,
    )

    class Marks:
        is_fast = True

        def __call__(self, text: str, **_: Any) -> dict[str, Any]:
            return {"offset_mapping": [(0, 0), *((place, place + 1) for place in range(len(text)))]}

    tokens = [256, *bytewise(tokenizer, "ab")]
    data = TokenBytes(tokenizer)
    ((text, named),) = PromptEcho(Marks(), data, tokens, text="ab", top=0).pieces([None] * 3)
    assert (text, [one.data for one in named]) == ("ab", [b"", b"a", b"b"])
    (choice,) = await choices(server, tokens, echo=True, max_tokens=0, logprobs=0)
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("<|bos|>ab", [0, 7, 8])


@pytest.mark.parametrize("prompt", [ODD, [79, 110, 99, 101]])
async def test_the_answer_follows_its_echo(server: LiveServer, prompt: Any) -> None:
    (plain,) = await choices(server, prompt, max_tokens=12, logprobs=1)
    (echoed,) = await choices(server, prompt, max_tokens=12, logprobs=1, echo=True)
    (unscored,) = await choices(server, prompt, max_tokens=12, echo=True)
    said = prompt if isinstance(prompt, str) else "pond"
    assert plain["text"]
    assert echoed["text"].endswith(plain["text"])
    assert echoed["text"] == unscored["text"]
    assert unscored["logprobs"] is None
    if isinstance(prompt, str):
        assert echoed["text"] == said + plain["text"]
    assert echoed["logprobs"]["tokens"][-12:] == plain["logprobs"]["tokens"]
    assert [place - len(echoed["text"]) for place in echoed["logprobs"]["text_offset"][-12:]] == [
        place - len(plain["text"]) for place in plain["logprobs"]["text_offset"]
    ]
    streamed = events_of(await asked(server, prompt, max_tokens=12, logprobs=1, echo=True, stream=True))
    assert streamed[-1] == DONE
    parts = [event.json()["choices"][0] for event in streamed[:-1]]
    assert "".join(part["text"] for part in parts) == echoed["text"]
    for name, value in echoed["logprobs"].items():
        assert [one for part in parts for one in part["logprobs"][name]] == value


async def test_the_end_of_an_answer_is_scored_after_an_echo(server: LiveServer) -> None:
    """Tools assume that all entries but the last belong to the prompt."""
    prompt = [79, 110]
    (choice,) = await choices(server, prompt, echo=True, logprobs=1, logit_bias={str(EOS): 100})
    assert (choice["logprobs"]["tokens"][-1], len(choice["logprobs"]["tokens"])) == ("<|eos|>", len(prompt) + 1)
    assert choice["finish_reason"] == "stop"


async def test_each_of_several_answers_has_the_echo(server: LiveServer) -> None:
    found = await choices(server, "Once", n=2, temperature=1, seed=3, echo=True, logprobs=0, max_tokens=4)
    assert [choice["text"][:4] for choice in found] == ["Once", "Once"]
    assert [len(choice["logprobs"]["tokens"]) for choice in found] == [8, 8]


async def test_token_ids_are_the_text_that_they_stand_for(server: LiveServer, tokenizer: Any) -> None:
    found = await choices(server, [ODD, bytewise(tokenizer, ODD)], max_tokens=8)
    assert found[0]["text"] == found[1]["text"]


@pytest.mark.parametrize("bias", [{"65": 100}, {"65": 60, "66": 100.0}])
async def test_biased_logits(server: LiveServer, bias: dict[str, float]) -> None:
    letter = chr(int(max(bias, key=bias.__getitem__)))
    vocabulary = bytewise_letters(server)
    wanted = {str(vocabulary[chr(int(token))]): value for token, value in bias.items()}
    (choice,) = await choices(server, "Once", max_tokens=5, logit_bias=wanted)
    assert choice["text"] == letter * 5
    messages = [{"role": "user", "content": "Hello"}]
    answer = await post(
        server.port, "/v1/chat/completions", {"messages": messages, **GREEDY, "max_tokens": 5, "logit_bias": wanted}
    )
    assert answer.json()["choices"][0]["message"]["content"] == letter * 5


def bytewise_letters(server: LiveServer) -> dict[str, int]:
    engine: Any = server.engine
    return dict(engine._thinker.llm.get_tokenizer().get_vocab())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "body", "code", "param"),
    [
        ([VOCABULARY], {}, "invalid_value", "prompt"),
        (["a", [5, VOCABULARY]], {}, "invalid_value", "prompt[1]"),
        ([[5], [2**31 - 1]], {"echo": True, "max_tokens": 0}, "invalid_value", "prompt[1]"),
        ([5] * 2048, {}, "context_length_exceeded", None),
        ("a", {"logit_bias": {str(VOCABULARY): 1}}, "invalid_value", "logit_bias"),
        ("a", {"sampling": {"logit_bias": {"9999999999": 1}}}, "invalid_value", "sampling.logit_bias"),
    ],
)
async def test_ids_are_those_of_the_vocabulary(
    server: LiveServer, prompt: Any, body: dict[str, Any], code: str, param: str | None, stream: bool
) -> None:
    answer = await post(
        server.port,
        "/v1/completions",
        {"prompt": prompt, **GREEDY, "stream": stream, **body},
        "Accept: application/json",
    )
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, code, param), answer.error
    if code == "invalid_value":
        assert f"less than {VOCABULARY}" in answer.error["message"]


async def test_the_last_id_of_the_vocabulary(server: LiveServer) -> None:
    await choices(server, [VOCABULARY - 1], logit_bias={str(VOCABULARY - 1): -100})
    await choices(server, [5] * 2047)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"seed": 1 << 63}, "seed"),
        ({"sampling": {"seed": 1 << 63}}, "sampling.seed"),
        ({"max_completion_tokens": 1 << 31}, "max_completion_tokens"),
        ({"top_k": 1 << 31}, "top_k"),
        ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias"),
        ({"stage_sampling": {"thinker": {"logit_bias": {"512": 1}}}}, "stage_sampling.thinker.logit_bias"),
        ({"stage_sampling": {"thinker": {"logit_bias": 5}}}, "stage_sampling.thinker.logit_bias"),
        ({"stage_sampling": {"thinker": {"temperature": "hot"}}}, "stage_sampling.thinker.temperature"),
        ({"stage_sampling": {"thinker": {"min_tokens": 5}}}, "stage_sampling.thinker.min_tokens"),
    ],
)
async def test_refused_fields_are_named_as_they_were_written(
    server: LiveServer, body: dict[str, Any], param: str
) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    answer = await post(server.port, "/v1/chat/completions", {"messages": messages, **GREEDY, **body})
    assert (answer.status, answer.error["param"]) == (400, param), answer.error


async def test_numbers_at_their_limits(server: LiveServer) -> None:
    limits: list[dict[str, Any]] = [
        {"seed": (1 << 63) - 1},
        {"seed": -(1 << 63)},
        {"top_k": (1 << 31) - 1},
        {"top_k": -1},
    ]
    for body in limits:
        assert (await asked(server, "Once", temperature=1, **body)).status == 200
    assert (await asked(server, "Once", max_tokens=(1 << 31) - 1, stop="e")).status == 200
