"""However input is cut, and whenever its pieces and its end arrive, the model gets the same prompt."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from itertools import chain, repeat
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.engine_answers import Answer, Input
from support.patience import PATIENCE_SEC
from support.vllm_engine import request
from support.word_prompts import WordTokenizer, form

from omni_ws.core.chunks import InputMode
from omni_ws.engine.channel import Channel
from omni_ws.engine.decoding import DecodedPart, ImagePart, TextPart
from omni_ws.engine.threads import MediaRoom
from omni_ws.engine.vllm.early_input import EarlyBudget
from omni_ws.engine.vllm.thinker import Thinker, ThinkerParts
from omni_ws.errors import EngineFailed

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


@dataclass
class ScriptedModel:
    """A LanguageModel without a model: it keeps what it reads, and goes on when a test lets it.

    It sends media once, as vLLM does: a prompt whose media were processed before for one that never arrived fails,
    unless they were forgotten. ``broken_step`` is the number of a step before the end of the input that vLLM gives up.
    """

    context: int = 10_000
    block: int = 4
    broken_step: int | None = None
    #: The prompt that was answered: its tokens, and the media in it.
    read: tuple[list[int], list[Any]] | None = None
    open_requests: int = 0
    #: Steps that wait until the test lets them be computed.
    steps: deque[asyncio.Future[None]] = field(default_factory=deque)
    _early_steps: int = 0
    #: Media that the sending half of vLLM believes to be there, and those that are.
    _sent: list[Any] = field(default_factory=list)
    _arrived: list[Any] = field(default_factory=list)

    @property
    def llm(self) -> Any:
        return SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=self.context, get_vocab_size=lambda: 1 << 20),
            vllm_config=SimpleNamespace(cache_config=SimpleNamespace(block_size=self.block)),
        )

    async def render(self, prompt: Mapping[str, Any]) -> Any:
        items = [value for values in prompt.get("multi_modal_data", {}).values() for value in values]
        known = [any(item is other for other in self._sent) for item in items]
        self._sent += items
        return {"prompt_token_ids": prompt["prompt_token_ids"], "media": list(zip(items, known, strict=True))}

    async def forget_media(self) -> None:
        self._sent.clear()

    def generate(self, prompt: Any, params: Any, request_id: str, *, priority: int = 0) -> ScriptedOutputs:
        return ScriptedOutputs(self._generate(prompt, params, request_id))

    async def _generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        tokens: list[int] = []
        media: list[Any] = []
        self.open_requests += 1
        try:
            async for piece, wanted in _pieces(prompt, params):
                self._take(piece, media)
                tokens += piece["prompt_token_ids"]
                computed = asyncio.get_running_loop().create_future()
                self.steps.append(computed)
                await computed
                reason = "length"
                if wanted.max_tokens == 1:
                    self._early_steps += 1
                    reason = "abort" if self._early_steps == self.broken_step else "length"
                else:
                    self.read = (list(tokens), list(media))
                yield _output(request_id, tokens, reason)
                if reason == "abort":
                    return
        finally:
            self.open_requests -= 1

    def _take(self, piece: Mapping[str, Any], media: list[Any]) -> None:
        for item, known in piece["media"]:
            if known and not any(item is other for other in self._arrived):
                raise EngineFailed("an image was left out because it was sent before, and it never arrived")
            self._arrived.append(item)
            media.append(item)


class ScriptedOutputs(AsyncIterator["RequestOutput"]):
    """Outputs that all pass through the iteration."""

    def __init__(self, outputs: AsyncGenerator[RequestOutput, None]) -> None:
        self.arrived = False
        self._outputs = outputs

    def hand_to(self, consume: object) -> None:
        pass

    def expect_output(self) -> None:
        self.arrived = False

    async def __anext__(self) -> RequestOutput:
        output = await anext(self._outputs)
        self.arrived = True
        return output

    async def aclose(self) -> None:
        await self._outputs.aclose()


async def _pieces(prompt: Any, params: Any) -> AsyncGenerator[tuple[Mapping[str, Any], Any], None]:
    if isinstance(prompt, Mapping):
        yield prompt, params
        return
    async for piece in prompt:
        yield piece.prompt, piece.sampling_params


def _output(request_id: str, tokens: list[int], reason: str) -> RequestOutput:
    from vllm.outputs import CompletionOutput, RequestOutput

    said = CompletionOutput(0, "x", [0], None, None, finish_reason=reason)
    return RequestOutput(request_id, None, list(tokens), None, [said], finished=False)


class SteppedExecutor(Executor):
    """One thread that a test moves on: calls wait in ``calls`` until they are let run, in their order."""

    idle = False

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*arguments, **keywords))
            except Exception as error:
                future.set_exception(error)

        self.calls.append(run)
        return future


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
        running = asyncio.create_task(self.thinker.run(aiter_of(self._source), None, Answer()))
        # After the order of the case, every event in turn.
        order: Iterator[int] = chain(self.case.order, (turn for _ in repeat(None) for turn in range(4)))
        async with asyncio.timeout(PATIENCE_SEC):
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
