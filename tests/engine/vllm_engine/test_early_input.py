"""However input is cut, and whenever its pieces and its end arrive, the model gets the same prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.engine_answers import Input
from support.vllm_engine import request
from support.word_prompts import WordTokenizer, form

from omni_ws.core.chunks import InputMode
from omni_ws.engine.base import EngineOutput
from omni_ws.engine.channel import Channel
from omni_ws.engine.decoding import DecodedPart, ImagePart, TextPart
from omni_ws.engine.media_room import MediaRoom
from omni_ws.engine.vllm.early_input import EarlyBudget
from omni_ws.engine.vllm.thinker import Thinker, ThinkerParts

if TYPE_CHECKING:
    from support.scripted_model import ScriptedModel

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SENTENCE = "one two three four five six seven eight nine ten eleven twelve "
LARGE = 10_000


@dataclass(frozen=True)
class Case:
    """An interleaving: ``order`` selects, step by step, which of the possible events happens next."""

    parts: Sequence[str | None]
    order: Sequence[int] = ()
    slots: int = 1
    tokens: int = LARGE
    stop: str | None = None
    broken_step: int | None = None


class Run:
    """One request whose input, tokenizer thread and model advance as the case says."""

    def __init__(self, case: Case, mode: InputMode) -> None:
        from support.scripted_model import ScriptedModel, SteppedExecutor

        self.case = case
        self.model: ScriptedModel = ScriptedModel(broken_step=case.broken_step)
        self.thread = SteppedExecutor()
        self.budget = EarlyBudget(case.slots, case.tokens)
        self._unsent = list(_decoded(case.parts))
        self._source: Channel[DecodedPart] = Channel(LARGE, cost=lambda _: 1)
        shared = ThinkerParts(
            model=self.model,  # type: ignore[arg-type]
            form=form(WordTokenizer()),
            budget=self.budget,
            thread=cast("Any", self.thread),
            decoding=self.thread,
            sampling={},
            sample_rate=16_000,
            shortest_segment_ms=1000,
            most_audio=0,
            token_bytes=lambda: None,  # type: ignore[arg-type, return-value]
            parser=None,
            template_arguments={},
            cache_salt=lambda _: None,
        )
        sampling = {"max_tokens": 5, "temperature": 0.0, **({} if case.stop is None else {"stop": case.stop})}
        asked = request(Input(), input_mode=mode, sampling=sampling)
        self.thinker = Thinker(shared, asked, writes=True, share=MediaRoom().share())

    async def to_end(self) -> None:
        outputs: Channel[EngineOutput] = Channel(LARGE, cost=lambda _: 1)
        running = asyncio.create_task(self.thinker.run(aiter_of(self._source), None, outputs))
        # After the order of the case, every event in turn.
        order: Iterator[int] = chain(self.case.order, (turn for _ in repeat(None) for turn in range(4)))
        async with asyncio.timeout(300):
            while not running.done():
                self._go_on(next(order))
                await asyncio.sleep(0)
        await running

    def _go_on(self, choice: int) -> None:
        match choice:
            case 0:
                pass  # only the event loop advances
            case 1 if not self._source.closed:
                if self._unsent:
                    self._source.put_nowait(self._unsent.pop(0))
                else:
                    self._source.close()
            case 2 if self.thread.calls:
                self.thread.calls.popleft()()
            case 3 if self.model.steps:
                step = self.model.steps.popleft()
                if not step.done():
                    step.set_result(None)


def _decoded(parts: Sequence[str | None]) -> Iterator[DecodedPart]:
    """Consecutive texts are pieces of one part; None is an image, each in a different colour."""
    number = 0
    for index, text in enumerate(parts):
        if text is None:
            number += 2
            yield ImagePart(np.full((1, 1, 3), index % 256, np.uint8), number - 1)
        else:
            yield TextPart(text, number)


async def aiter_of(source: Channel[DecodedPart]) -> AsyncIterator[DecodedPart]:
    async for part in source:
        yield part


def read(case: Case, mode: InputMode) -> tuple[list[int], list[int], int]:
    """Run a case; return what the model read: tokens, colours of images, and the length of the prompt as reported."""
    run = Run(case, mode)
    asyncio.run(run.to_end())
    assert run.model.read is not None
    assert run.model.open_requests == 0
    assert (run.budget.slots, run.budget.tokens) == (case.slots, case.tokens)
    tokens, images = run.model.read
    return tokens, [image.getpixel((0, 0))[0] for image in images], run.thinker.prompt_tokens


@pytest.fixture(scope="module", autouse=True)
def early_at_once() -> Iterator[None]:
    """Early work starts after one pass of the event loop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omni_ws.engine.vllm.thinker.EARLY_AFTER_SEC", 0.0)
        patch.setattr("omni_ws.engine.vllm.thinker.LEAST_EARLY_TOKENS", 3)
        yield


PARTS = st.lists(st.one_of(st.text(st.sampled_from("ab <|end>\n"), max_size=12), st.just(SENTENCE), st.none()))
CASES = st.builds(
    Case,
    parts=PARTS.map(lambda parts: parts or [SENTENCE]),
    order=st.lists(st.integers(0, 3), max_size=120),
    slots=st.integers(0, 1),
    tokens=st.sampled_from([0, 15, 30, LARGE]),
    stop=st.sampled_from([None, None, "~"]),
    broken_step=st.sampled_from([None, None, None, 1, 2, 3]),
)
#: The end arrives while the thread searches the stable part of a text that arrived after the first step.
END_DURING_THREAD_CALL = Case(parts=[SENTENCE], order=[2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 2, 0, 0, 1])
#: Each piece is computed before the next one arrives. A budget of 15 tokens suffices for the first, not for the image.
SLOW = [1, *[0, 2, 0, 3] * 8] * 4
ILLUSTRATED = [SENTENCE, None, SENTENCE]


@settings(max_examples=200)
@given(CASES)
@example(END_DURING_THREAD_CALL)
@example(Case(ILLUSTRATED, SLOW, tokens=15))
@example(Case(ILLUSTRATED, SLOW, broken_step=2))
def test_the_model_reads_what_it_would_read_at_once(case: Case) -> None:
    at_once = Case(case.parts, slots=0)
    expected = read(at_once, InputMode.SNAPSHOT)
    assert read(case, InputMode.EXTEND) == expected
    assert expected[2] == len(expected[0])
