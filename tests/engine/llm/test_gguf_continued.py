"""A real model in a file goes on with an answer that another server has begun, as it would have gone on itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.engine_answers import Answer, collect, request_of
from support.engine_answers import Input as GivenInput
from support.moving_session import final_of, text_told, told
from support.real_models import TOOLS_TEMPLATE, smollm2_file

from omni_ws.core.chunks import FinishReason, InputChunk, Modality
from omni_ws.core.history import Message
from omni_ws.engine.answer_limit import go_on
from omni_ws.engine.base import TextOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.llm.gguf_engine import GgufEngine, GgufSettings

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

STORY = "Tell a story about a fox."
LIMIT = 20
GREEDY = {"temperature": 0, "max_tokens": LIMIT}
HISTORY = (Message("user", "Hello."), Message("assistant", "Hi! What shall I tell?"))
TOOLS = ({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[None, TOOLS_TEMPLATE], ids=["own", "with tools"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[GgufEngine]:
    settings = GgufSettings(
        file=smollm2_file(), name="SmolLM2", context=512, parallel=1, threads=1, chat_template=request.param
    )
    engine = GgufEngine(settings)
    await engine.start()
    yield engine
    await engine.stop()


async def test_text_goes_on_behind_each_token(engine: GgufEngine) -> None:
    fields: dict[str, Any] = {
        "sampling": GREEDY,
        "history": HISTORY,
        "tools": TOOLS if engine.capabilities.tools else (),
    }
    whole = await collect(engine, GivenInput(STORY), **fields)
    pieces = [one.text for one in whole.outputs if isinstance(one, TextOutput)]
    assert len(pieces) > LIMIT / 2
    for place in (1, len(pieces) // 2):
        begun = "".join(pieces[:place])
        rest = Answer()
        await go_on(engine, request_of(GivenInput(STORY), begun=begun, **fields), rest)
        # The limit counts words of what was begun, so it may allow a little more.
        assert rest.text.startswith(whole.text[len(begun) :])
        assert rest.finished.reason is FinishReason.LENGTH


async def test_a_session_goes_on_in_the_middle_of_an_answer(engine: GgufEngine) -> None:
    composed = ComposedEngine(engine)
    await composed.start()
    config = {"modalities": ["text"], "sampling": GREEDY}
    chunk = InputChunk(Modality.TEXT, STORY.encode(), 0, end_of_input=True)
    stays = await told(composed, chunk, config=config)
    moved = await told(composed, chunk, config=config, moves=lambda received: len(text_told(received)) > 30)
    assert text_told(moved).startswith(text_told(stays))
    assert final_of(moved).finish_reason is final_of(stays).finish_reason is FinishReason.LENGTH
    assert final_of(moved).usage.output_tokens >= LIMIT
