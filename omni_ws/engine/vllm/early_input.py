"""Work on a prompt while it is still coming in, so that its end finds little left to compute.

What cannot change any more is given to the model as it comes, in one of two ways. A streamed prompt holds its place in
the engine and its part of the cache, and is the quicker one. Warming the prefix cache holds nothing and works for every
request. Either way the answer is that to the whole prompt, up to rounding.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from omni_ws.engine.vllm.language_model import LanguageModel
from omni_ws.engine.vllm.prompt import Excerpt, Given, StableExcerpt
from omni_ws.engine.vllm.sampling import prefill_parameters
from omni_ws.errors import ContextLengthExceeded

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

#: The part of the engine's places and of its cache that prompts may hold whose input is still open. The rest is for
#: those that are answered: a speaker may take a minute.
_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyOrigin:
    """What stands for a request in vLLM.

    Prompts of the same ``cache_salt`` share what was computed of them; smaller priorities are worked on first.
    """

    model: LanguageModel
    request_id: str
    cache_salt: str | None = None
    priority: int = 0

    def generate(
        self, prompt: Any, parameters: SamplingParams, suffix: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        return self.model.generate(prompt, parameters, self.request_id + suffix, priority=self.priority)

    async def at_once(
        self, whole: Excerpt, parameters: SamplingParams, suffix: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer to a prompt that is there as a whole."""
        prompt = await self.render(whole)
        async with aclosing(self.generate(prompt, parameters, suffix)) as outputs:
            async for output in outputs:
                yield output

    async def render(self, excerpt: Excerpt) -> Any:
        return await self.model.render(excerpt.for_vllm(self.cache_salt))


class EarlyWork(Protocol):
    """One prompt that is on its way. ``aclose`` frees what it holds."""

    #: What of the prompt was taken here. What was not stays in the draft.
    given: Given

    async def extend(self, excerpt: StableExcerpt) -> bool:
        """Takes the part of the prompt that follows on what was given, and returns when it is computed.

        False: it takes no more before the end.
        """
        ...

    def answer(self, whole: Excerpt, parameters: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        """The answer to the finished prompt."""
        ...

    async def aclose(self) -> None: ...


@dataclass(slots=True)
class EarlyBudget:
    """What streamed prompts may hold together: places in the engine, and tokens in its cache."""

    places: int
    tokens: int

    @classmethod
    def of(cls, model: LanguageModel) -> EarlyBudget:
        config = model.llm.vllm_config
        cache = config.cache_config
        capacity = (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
        return cls(int(config.scheduler_config.max_num_seqs * _SHARE), int(capacity * _SHARE))

    def take_place(self) -> bool:
        if self.places <= 0:
            return False
        self.places -= 1
        return True

    def take_tokens(self, count: int) -> bool:
        if self.tokens < count:
            return False
        self.tokens -= count
        return True

    def give_back(self, tokens: int) -> None:
        self.places += 1
        self.tokens += tokens


class StreamedPrompt:
    """A request that vLLM holds open for more input. Made by ``begin``."""

    def __init__(self, origin: EarlyOrigin, budget: EarlyBudget) -> None:
        self.given = Given()
        self._origin = origin
        self._budget = budget
        self._context: int = origin.model.llm.model_config.max_model_len
        self._next: asyncio.Queue[tuple[Any, SamplingParams, bool]] = asyncio.Queue(1)
        self._outputs = origin.generate(self._feed(), prefill_parameters(), "-early")
        #: Tokens that were given, placeholders expanded.
        self._tokens = 0
        self._holding = True
        #: Whether media were processed of which it is not known that they reached the model.
        self._media_under_way = False

    @classmethod
    def begin(cls, origin: EarlyOrigin, budget: EarlyBudget) -> StreamedPrompt | None:
        """None where streamed prompts hold all that they may."""
        return cls(origin, budget) if budget.take_place() else None

    async def extend(self, excerpt: StableExcerpt) -> bool:
        prompt = await self._render(excerpt)
        count = len(prompt["prompt_token_ids"])
        if not self._budget.take_tokens(count):
            # Others need the room: the answer will start from the whole prompt.
            await self.aclose()
            return False
        self._tokens += count
        if not await self._computed(prompt):
            await self.aclose()
            return False
        self.given.add(excerpt)
        return True

    async def _computed(self, prompt: Any) -> bool:
        """Whether the model has it. Where this is cut short that is not known, and the place is given back."""
        try:
            await self._next.put((prompt, prefill_parameters(), False))
            async for output in self._outputs:
                self._media_under_way = False
                if (reason := output.outputs[0].finish_reason) is not None:
                    return reason in ("length", "stop")
        except BaseException:
            self._let_go()
            raise
        return False

    async def answer(self, whole: Excerpt, parameters: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        rest = whole.after(self.given)
        if rest is None or not self._holding:
            await self.aclose()
            async with aclosing(self._origin.at_once(whole, parameters)) as answer:
                async for output in answer:
                    yield output
            return
        prompt = await self._render(rest)
        room = self._context - self._tokens - len(prompt["prompt_token_ids"])
        parameters = parameters.clone()
        parameters.max_tokens = room if parameters.max_tokens is None else min(parameters.max_tokens, room)
        self._let_go()
        await self._next.put((prompt, parameters, True))
        async for output in self._outputs:
            self._media_under_way = False
            yield output

    async def aclose(self) -> None:
        self._let_go()
        await self._outputs.aclose()
        if self._media_under_way:
            self._media_under_way = False
            await self._origin.model.forget_media()

    def _let_go(self) -> None:
        if self._holding:
            self._holding = False
            self._budget.give_back(self._tokens)

    async def _render(self, excerpt: Excerpt) -> Any:
        prompt = await self._origin.render(excerpt)
        self._media_under_way = bool(excerpt.media)
        total = self._tokens + len(prompt["prompt_token_ids"])
        if total >= self._context:
            raise ContextLengthExceeded(
                f"the input has {total} tokens so far, and the model reads {self._context}, its answer included"
            )
        return prompt

    async def _feed(self) -> AsyncIterator[Any]:
        from vllm.engine.protocol import StreamingInput

        last = False
        while not last:
            prompt, parameters, last = await self._next.get()
            yield StreamingInput(prompt=prompt, sampling_params=parameters)


class WarmedPrefix:
    """Leaves what was computed in the prefix cache, where the whole prompt finds it, unless others needed the room."""

    def __init__(self, origin: EarlyOrigin) -> None:
        self.given = Given()
        self._origin = origin
        self._steps = 0
        block = origin.model.llm.vllm_config.cache_config.block_size or 1
        #: Only whole blocks are found again.
        self._block: int = block
        self._warmed = 0

    async def extend(self, excerpt: StableExcerpt) -> bool:
        self.given.add(excerpt)
        so_far = self.given.whole
        if not excerpt.media and len(so_far.tokens) - self._warmed < self._block:
            return True
        self._warmed = len(so_far.tokens)
        self._steps += 1
        warming = self._origin.at_once(so_far, prefill_parameters(), f"-early-{self._steps}")
        async with aclosing(warming) as outputs:
            async for _ in outputs:
                pass
        return True

    def answer(self, whole: Excerpt, parameters: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        return self._origin.at_once(whole, parameters)

    async def aclose(self) -> None:
        """Nothing is held between two steps."""
