"""The Thinker: what comes in becomes a prompt while it comes, and the model's answer goes out while it is written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from omni_ws.core.chunks import FinishReason, InputMode
from omni_ws.engine.base import EngineOutput, GenerationRequest, TextOutput
from omni_ws.engine.channel import Channel
from omni_ws.engine.decoding import DecodedPart
from omni_ws.engine.threads import run_in_thread
from omni_ws.engine.vllm.early_input import EarlyBudget, EarlyWork, StreamedPrompt, WarmedPrefix
from omni_ws.engine.vllm.input_parts import InputParts
from omni_ws.engine.vllm.language_model import LanguageModel
from omni_ws.engine.vllm.prompt import PromptDraft, PromptForm
from omni_ws.engine.vllm.sampling import answer_parameters, survives_streaming
from omni_ws.errors import ContextLengthExceeded, EngineFailed

if TYPE_CHECKING:
    from vllm import SamplingParams

#: Input that is complete within this time is answered at once, without early work.
EARLY_AFTER_SEC: Final = 0.02
#: Text that is worth a step of the model before its end has come, in tokens.
LEAST_EARLY_TOKENS: Final = 16

_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.STOP}


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkerParts:
    """What all requests to one Thinker share. ``thread`` is the one thread that the tokenizer works in."""

    model: LanguageModel
    form: PromptForm
    budget: EarlyBudget
    thread: Executor
    #: The checkpoint's own sampling parameters.
    sampling: Mapping[str, Any]
    #: Of the audio that the model hears, in Hz.
    sample_rate: int
    shortest_segment_ms: int
    longest_segment_ms: int
    #: Whom a request may share cached prefixes with; None: with everybody.
    cache_salt: Callable[[GenerationRequest], str | None]


class Thinker:
    """A Stage: decoded input in, the answer's text out to the client (``writes``) and to the sink.

    There is one for each request. Making one raises InvalidValue for sampling that vLLM refuses.
    """

    name = "thinker"

    def __init__(self, parts: ThinkerParts, request: GenerationRequest, *, writes: bool) -> None:
        self.finish_reason: FinishReason | None = None
        self.prompt_tokens = 0
        self.answer_tokens = 0
        self.cached_tokens = 0
        #: How many parts of the prompt were computed before the input ended.
        self.early_steps = 0
        self._shared = parts
        self._request = request
        self._writes = writes
        asked = {**request.sampling, **request.stage_sampling.get(self.name, {})}
        self._parameters: SamplingParams = answer_parameters(asked, parts.sampling)
        self._input: InputParts | None = None
        self._changed = asyncio.Event()
        self._input_ended = asyncio.Event()

    @property
    def input_audio_ms(self) -> int:
        return round(self._input.audio_ms) if self._input is not None else 0

    async def run(
        self, source: AsyncIterator[DecodedPart], sink: Channel[Any] | None, outputs: Channel[EngineOutput]
    ) -> None:
        shared, request = self._shared, self._request
        head, tail = await self._in_thread(shared.form.frame, request.instructions, request.history)
        draft = PromptDraft(shared.form, head, tail)
        self._input = InputParts(
            draft,
            sample_rate=shared.sample_rate,
            shortest_segment_ms=shared.shortest_segment_ms,
            longest_segment_ms=shared.longest_segment_ms,
        )
        collecting = asyncio.create_task(self._collect(source, self._input), name="thinker input")
        early: EarlyWork | None = None
        try:
            if request.input_mode is InputMode.EXTEND and not await self._ends_within(EARLY_AFTER_SEC):
                early = self._begin_early(draft)
                await self._work_early(early, draft)
            await collecting
            work = early or WarmedPrefix(shared.model, draft, request.request_id, self._salt)
            await self._answer(work, draft, sink, outputs)
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
            if early is not None:
                await early.aclose()

    @property
    def _salt(self) -> str | None:
        return self._shared.cache_salt(self._request)

    async def _collect(self, source: AsyncIterator[DecodedPart], parts: InputParts) -> None:
        try:
            async for decoded in source:
                await self._in_thread(parts.add, decoded)
                self._changed.set()
            await self._in_thread(parts.close_part)
        finally:
            self._input_ended.set()
            self._changed.set()

    async def _ends_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while not self._input_ended.is_set():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._changed.set()
        return self._input_ended.is_set()

    def _begin_early(self, draft: PromptDraft) -> EarlyWork:
        model, request_id = self._shared.model, self._request.request_id
        if survives_streaming(self._parameters):
            streamed = StreamedPrompt.begin(model, draft, request_id, self._shared.budget, self._salt)
            if streamed is not None:
                return streamed
        return WarmedPrefix(model, draft, request_id, self._salt)

    async def _work_early(self, early: EarlyWork, draft: PromptDraft) -> None:
        """Gives the model what is sure, until the input ends. While it computes, more comes together."""
        least = 1  # the head of the prompt is worth it at any length
        while not self._input_ended.is_set():
            await self._changed.wait()
            self._changed.clear()
            if self._input_ended.is_set():
                return
            excerpt = await self._in_thread(draft.take_stable, least)
            if excerpt is not None and not self._input_ended.is_set():
                await early.extend(excerpt)
                self.early_steps += 1
                least = LEAST_EARLY_TOKENS

    async def _answer(
        self, work: EarlyWork, draft: PromptDraft, sink: Channel[Any] | None, outputs: Channel[EngineOutput]
    ) -> None:
        whole = await self._in_thread(draft.whole)
        context = self._shared.model.llm.model_config.max_model_len
        if len(whole.tokens) >= context:
            raise ContextLengthExceeded(
                f"the input has {len(whole.tokens)} tokens, and the model reads {context}, its answer included"
            )
        async with aclosing(work.answer(whole, self._parameters)) as answer:
            async for output in answer:
                self.prompt_tokens = max(self.prompt_tokens, len(output.prompt_token_ids or ()))
                self.cached_tokens = output.num_cached_tokens or 0
                completion = output.outputs[0] if output.outputs else None
                if completion is None:
                    continue
                self.answer_tokens += len(completion.token_ids)
                if completion.finish_reason is not None:
                    self._finish(completion.finish_reason)
                if completion.text:
                    await self._pass_on(completion.text, sink, outputs)
        if self.finish_reason is None:
            raise EngineFailed("the Thinker ended its answer without a reason")

    def _finish(self, reason: str) -> None:
        if reason not in _REASONS:
            raise EngineFailed(f"the Thinker's engine ended the answer with {reason!r}")
        self.finish_reason = _REASONS[reason]

    async def _pass_on(self, text: str, sink: Channel[Any] | None, outputs: Channel[EngineOutput]) -> None:
        if self._writes:
            await outputs.put(TextOutput(text))
        if sink is not None and not sink.closed:
            await sink.put(text)

    async def _in_thread(self, call: Callable[..., Any], *arguments: object) -> Any:
        return await run_in_thread(self._shared.thread, call, *arguments)
