"""Computes a prompt while its input is still arriving, so that little is left to do at its end.

As soon as a part of the prompt can no longer change (``PromptDraft.stable``), the model computes it, in one of two
ways. A *streamed prompt* is an open request to which vLLM appends input: the fastest way, but it occupies a slot and
cache blocks while the client speaks, and does not support all sampling parameters. A *warmed prefix* is computed by
separate requests whose results stay in vLLM's prefix cache: it occupies nothing, and works for every request. Either
way the answer is the same as to the complete prompt, up to rounding.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from omni_ws.engine.vllm.excerpt import Excerpt, Given, StableExcerpt
from omni_ws.engine.vllm.language_model import LanguageModel
from omni_ws.engine.vllm.media_sizes import MediaSizes
from omni_ws.engine.vllm.model_outputs import ModelOutputs
from omni_ws.engine.vllm.sampling import prefill_parameters
from omni_ws.engine.vllm.talker_feed import TalkerFeed
from omni_ws.errors import ContextLengthExceeded

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

#: The share of vLLM's request slots and cache that streamed prompts may occupy while their input is open, which may
#: take a minute. The rest is left to requests that are being answered.
_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyOrigin:
    """What all prompts that are submitted to vLLM for one request have in common.

    Prompts with the same ``cache_salt`` share cached prefixes. Requests with a lower ``priority`` are scheduled first.
    ``feed`` is told of every prompt, and decides on the salt itself; None if the model does not speak the answer.
    """

    model: LanguageModel
    request_id: str
    cache_salt: str | None = None
    priority: int = 0
    media_sizes: MediaSizes = field(default_factory=MediaSizes)
    feed: TalkerFeed | None = None

    def generate(self, prompt: Any, parameters: SamplingParams, suffix: str = "") -> ModelOutputs:
        """Return vLLM's outputs for a prompt; ``suffix`` makes the request ID unique."""
        return self.model.generate(prompt, parameters, self.request_id + suffix, priority=self.priority)

    async def at_once(self, whole: Excerpt, parameters: SamplingParams, suffix: str = "") -> ModelOutputs:
        """Return vLLM's outputs for a complete prompt. Raises ContextLengthExceeded."""
        prompt = await self.render(whole)
        try:
            self.check_length(len(prompt["prompt_token_ids"]))
        except ContextLengthExceeded:
            if whole.media:
                await self.model.forget_media()
            raise
        if self.feed is not None:
            self.feed.replace(prompt)
        return self.generate(prompt, self.asking(parameters), suffix)

    def asking(self, parameters: SamplingParams) -> SamplingParams:
        """Return ``parameters`` with what the feed asks for the prompt that it was told."""
        return parameters if self.feed is None else self.feed.asking(parameters)

    async def fed(self, first: RequestOutput) -> bool:
        """Wait until the feed has what it needs of a prompt, given vLLM's ``first`` output for it.

        Returns False if the prompt has to be submitted again.
        """
        return self.feed is None or await self.feed.computed(first.num_cached_tokens)

    async def render(self, excerpt: Excerpt) -> Any:
        """Convert the excerpt to vLLM's form, with its media processed."""
        salt = self.cache_salt if self.feed is None else self.feed.salt(media=bool(excerpt.media))
        prompt = await self.model.render(excerpt.for_vllm(salt))
        if excerpt.media:
            self.media_sizes.learn(excerpt.media, prompt.get("mm_placeholders", {}))
        return prompt

    def check_length(self, tokens: int) -> None:
        """Raise ContextLengthExceeded if a prompt of ``tokens``, so far, leaves no room for an answer."""
        context = self.model.llm.model_config.max_model_len
        if tokens >= context:
            raise ContextLengthExceeded(
                f"the input has {tokens} tokens, but input and answer must fit into {context} tokens"
            )


class EarlyWork(Protocol):
    """The early computation of one prompt. ``aclose`` releases what it holds."""

    #: The part of the prompt that was accepted. The rest remains in the draft.
    given: Given
    #: How many tokens the answer may find in the cache because of this work itself, not of earlier requests.
    own_tokens: int

    async def extend(self, excerpt: StableExcerpt) -> bool:
        """Compute the part of the prompt that follows ``given``; returns when that is done.

        Returns False if no more parts are accepted before the end.
        """
        ...

    async def answer(self, whole: Excerpt, parameters: SamplingParams) -> ModelOutputs:
        """Return vLLM's outputs for the complete prompt, of which only the rest is computed."""
        ...

    async def aclose(self) -> None:
        """Release slot and cache. Idempotent."""
        ...


@dataclass(slots=True)
class EarlyBudget:
    """The vLLM slots and cache tokens left for streamed prompts."""

    slots: int
    tokens: int

    @classmethod
    def of(cls, model: LanguageModel) -> EarlyBudget:
        """Return the budget for a running model."""
        config = model.llm.vllm_config
        cache = config.cache_config
        capacity = (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
        return cls(int(config.scheduler_config.max_num_seqs * _SHARE), int(capacity * _SHARE))

    def take_slot(self) -> bool:
        """Take a slot; returns False if there is none."""
        if self.slots <= 0:
            return False
        self.slots -= 1
        return True

    def take_tokens(self, count: int) -> bool:
        """Take ``count`` tokens of the cache; returns False if there are fewer."""
        if self.tokens < count:
            return False
        self.tokens -= count
        return True

    def give_back(self, tokens: int) -> None:
        """Return a slot and its tokens."""
        self.slots += 1
        self.tokens += tokens


class StreamedPrompt:
    """An open vLLM request that is extended with input. Created by ``begin``."""

    def __init__(self, origin: EarlyOrigin, budget: EarlyBudget) -> None:
        self.given = Given()
        self.own_tokens = 0  # unless the answer starts from the complete prompt
        self._origin = origin
        self._budget = budget
        self._context: int = origin.model.llm.model_config.max_model_len
        self._next: asyncio.Queue[tuple[Any, SamplingParams, bool]] = asyncio.Queue(1)
        self._outputs = origin.generate(self._feed(), prefill_parameters(), "-early")
        #: The tokens submitted, with placeholders expanded.
        self._tokens = 0
        self._holding = True
        #: Whether media were processed, which have not reached the model until an output arrives.
        self._media_in_flight = False

    @classmethod
    def begin(cls, origin: EarlyOrigin, budget: EarlyBudget) -> StreamedPrompt | None:
        """Return a new streamed prompt, or None if the budget has no slot left."""
        return cls(origin, budget) if budget.take_slot() else None

    async def extend(self, excerpt: StableExcerpt) -> bool:
        prompt = await self._render(excerpt)
        count = len(prompt["prompt_token_ids"])
        if not self._budget.take_tokens(count):
            # The cache is needed by others. The answer will start from the complete prompt.
            await self.aclose()
            return False
        self._tokens += count
        self._tell(prompt)
        if not await self._computed(prompt):
            await self.aclose()
            return False
        self.given.add(excerpt)
        return True

    async def _computed(self, prompt: Any) -> bool:
        """Wait until the model has computed ``prompt``; returns False if vLLM ended the request.

        When interrupted, the state of the request is unknown, and its slot is released.
        """
        try:
            await self._next.put((prompt, self._origin.asking(prefill_parameters()), False))
            async for output in self._outputs:
                if (reason := output.outputs[0].finish_reason) is not None:
                    return reason in ("length", "stop") and await self._origin.fed(output)
        except BaseException:
            self._release_slot()
            raise
        return False

    async def answer(self, whole: Excerpt, parameters: SamplingParams) -> ModelOutputs:
        rest = whole.after(self.given)
        if rest is None or not self._holding:
            self.own_tokens = self._tokens
            await self.aclose()
            return await self._origin.at_once(whole, parameters)
        prompt = await self._render(rest)
        self._tell(prompt)
        room = self._context - self._tokens - len(prompt["prompt_token_ids"])
        parameters = self._origin.asking(parameters).clone()
        parameters.max_tokens = room if parameters.max_tokens is None else min(parameters.max_tokens, room)
        self._release_slot()
        await self._next.put((prompt, parameters, True))
        return self._outputs

    async def aclose(self) -> None:
        self._release_slot()
        await self._outputs.aclose()
        if self._media_in_flight and not self._outputs.arrived:
            self._media_in_flight = False
            await self._origin.model.forget_media()

    def _tell(self, prompt: Any) -> None:
        """Tell the feed of the next piece."""
        if self._origin.feed is None:
            return
        if self.given.tokens:
            self._origin.feed.append(prompt)
        else:
            self._origin.feed.replace(prompt)

    def _release_slot(self) -> None:
        if self._holding:
            self._holding = False
            self._budget.give_back(self._tokens)

    async def _render(self, excerpt: Excerpt) -> Any:
        prompt = await self._origin.render(excerpt)
        self._media_in_flight = bool(excerpt.media)
        self._outputs.arrived = False
        self._origin.check_length(self._tokens + len(prompt["prompt_token_ids"]))
        return prompt

    async def _feed(self) -> AsyncIterator[Any]:
        """Yield the parts of the prompt to vLLM as they are submitted."""
        from vllm.engine.protocol import StreamingInput

        last = False
        while not last:
            prompt, parameters, last = await self._next.get()
            yield StreamingInput(prompt=prompt, sampling_params=parameters)


class WarmedPrefix:
    """Computes parts of the prompt ahead, so that the complete prompt finds them in the prefix cache.

    Parts that were evicted from the cache meanwhile are computed again.
    """

    def __init__(self, origin: EarlyOrigin) -> None:
        self.given = Given()
        self.own_tokens = 0
        self._origin = origin
        self._steps = 0
        #: The length of the prompt that was computed last.
        self._computed = 0
        block = origin.model.llm.vllm_config.cache_config.block_size or 1
        #: The block size of the cache, in tokens. Only whole blocks are reused.
        self._block: int = block
        self._warmed = 0

    async def extend(self, excerpt: StableExcerpt) -> bool:
        self.given.add(excerpt)
        so_far = self.given.whole
        if not excerpt.media and len(so_far.tokens) - self._warmed < self._block:
            return True
        self._warmed = len(so_far.tokens)
        self._steps += 1
        warming = await self._origin.at_once(so_far, prefill_parameters(), f"-early-{self._steps}")
        complete = True
        async with aclosing(warming) as outputs:
            async for output in outputs:
                length, cached = len(output.prompt_token_ids or ()), output.num_cached_tokens or 0
                # What is in the cache beyond the step before is of somebody else.
                self.own_tokens += length - max(self._computed, cached)
                self._computed = length
                complete = await self._origin.fed(output)
        return complete

    async def answer(self, whole: Excerpt, parameters: SamplingParams) -> ModelOutputs:
        return await self._origin.at_once(whole, parameters)

    async def aclose(self) -> None:
        """Do nothing: nothing is held between two steps."""
