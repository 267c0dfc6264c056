"""A conversation that is longer than the model's context, over the real server and the real AsyncLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.live_server import LiveServer, live_server
from support.native_client import native_client

from omni_ws.config.model import VllmConfig
from omni_ws.engine.vllm.engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CONTEXT = 1024
SAMPLING = {"temperature": 0, "max_tokens": 32}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveServer]:
    from support.tiny_models import ENGINE_ARGS, build_text_model

    folder = build_text_model(tmp_path_factory.mktemp("model") / "tiny-text")
    args = {**ENGINE_ARGS, "max_model_len": CONTEXT}
    async with live_server(VllmEngine(VllmConfig(model=str(folder), args=args))) as server:
        yield server


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int | None]]:
    """The prompts that were answered, a token a byte, and how much of each was found in the cache."""
    from omni_ws.engine.vllm.thinker import Thinker

    seen: list[tuple[list[int], int | None]] = []
    note = Thinker._note_prompt

    def noting(self: Thinker, output: Any) -> None:
        note(self, output)
        seen.append((list(output.prompt_token_ids), self.cached_tokens))

    monkeypatch.setattr(Thinker, "_note_prompt", noting)
    return seen


@pytest.mark.parametrize(("turns", "letters"), [(30, "word "), (24, "在")], ids=["words", "no blanks"])
async def test_many_turns_at_a_context_of_1024_tokens(
    server: LiveServer, prompts: list[tuple[list[int], int | None]], turns: int, letters: str
) -> None:
    """Before, the turns of a session failed for good once they were longer than the context."""
    from transformers import AutoTokenizer

    assert isinstance(server.engine, VllmEngine)
    tokenizer = AutoTokenizer.from_pretrained(server.engine.config.model)
    async with native_client(server) as client:
        await client.configure(sampling=SAMPLING, instructions="Be brief.")
        for number in range(turns):
            question = f"{number}: {letters * 12}"
            await client.say(question)
            answer = await client.answer()
            assert answer.reason == "length"
            assert answer.final["usage"]["output_tokens"] == SAMPLING["max_tokens"]
            tokens, _ = prompts[-1]
            text = tokenizer.decode(tokens)
            assert len(tokens) + SAMPLING["max_tokens"] <= CONTEXT
            assert text.startswith("system: Be brief.\nuser: ")
            assert text.endswith(f"\nuser: {question}\nassistant:")
            assert number < 2 or f"\nuser: {number - 1}: " in text  # the turn before
    assert len(prompts) == turns
    assert "user: 0: " in tokenizer.decode(prompts[1][0])
    assert "user: 0: " not in tokenizer.decode(prompts[-1][0])
    # Where no stride was cut, all of the turn before but its end was found in the cache: that is every second turn.
    helped = [cached or 0 for _, cached in prompts[10:]]
    assert sum(cached > CONTEXT // 4 for cached in helped) > len(helped) / 3


async def test_only_an_input_that_does_not_fit_alone_is_refused(server: LiveServer) -> None:
    async with native_client(server) as client:
        await client.configure(sampling=SAMPLING)
        await client.say("Hello")
        await client.answer()
        await client.say("x" * CONTEXT)
        refused = await client.answer()
        assert [error["code"] for error in refused.errors] == ["context_length_exceeded"]
        assert refused.final["usage"]["input_tokens"] == CONTEXT + len("user: \nassistant:")
        await client.say("x" * (CONTEXT - 20))
        assert (await client.answer()).final["usage"]["input_tokens"] == CONTEXT - 20 + len("user: \nassistant:")
