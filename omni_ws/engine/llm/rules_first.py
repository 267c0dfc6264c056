"""RulesFirst: an LLM in front of which rules answer what they know exactly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, Usage
from omni_ws.engine.answer_limit import AnswerText, count_words
from omni_ws.engine.base import (
    Engine,
    EngineCapabilities,
    EngineOutput,
    EngineState,
    Finished,
    GenerationRequest,
    TextOutput,
)
from omni_ws.engine.continued_input import unanswered
from omni_ws.engine.decoding import Chunks
from omni_ws.engine.llm.rules import exact_answer, prepare


class RulesFirst:
    """The engine ``llm``, but for the time, dates, sums, units, spelling and the like, which small models get wrong.

    Rules answer a request that is all text, in a conversation that nobody gave instructions: ``own_instructions`` are
    those of the operator. Where a client wants tools, JSON or anything else of the model, it gets the model.
    """

    def __init__(self, llm: Engine, *, own_instructions: str = "", now: Callable[[], datetime] = datetime.now) -> None:
        self.name = llm.name
        self.model = llm.model
        self.llm = llm
        self._own_instructions = own_instructions
        self._now = now

    @property
    def active_requests(self) -> int:
        return self.llm.active_requests

    @property
    def capabilities(self) -> EngineCapabilities:
        return self.llm.capabilities

    @property
    def state(self) -> EngineState:
        return self.llm.state

    def describe(self) -> tuple[str, ...]:
        return self.llm.describe()

    async def start(self) -> None:
        await asyncio.to_thread(prepare)
        await self.llm.start()
        self.model = self.llm.model

    async def stop(self) -> None:
        await self.llm.stop()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        if self._may_answer(request):
            taken = [chunk async for chunk in request.input]
            request = replace(request, input=Chunks(tuple(taken)))
            if (sentences := self._exact(request, taken)) is not None:
                text = AnswerText(request.sampling)
                async for piece in text.add(" ".join(sentences)):
                    yield TextOutput(piece)
                if rest := text.finish():
                    yield TextOutput(rest)
                words = sum(count_words(message.text) for message in request.history)
                words += sum(count_words(chunk.payload.decode()) for chunk in taken)
                yield Finished(text.reached or FinishReason.STOP, Usage(input_tokens=words, output_tokens=text.words))
                return
        async with aclosing(self.llm.generate(request)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                yield output

    def _may_answer(self, request: GenerationRequest) -> bool:
        wanted = request.options
        plain = wanted.structure is None and wanted.logprobs is None and wanted.choices == 1
        plain = plain and not wanted.raw_prompt and wanted.input_role == "user" and not request.tools
        return plain and request.instructions in ("", self._own_instructions)

    def _exact(self, request: GenerationRequest, taken: list[InputChunk]) -> list[str] | None:
        if not taken or any(chunk.modality is not Modality.TEXT or chunk.tool_call_id is not None for chunk in taken):
            return None
        if any(message.role == "system" for message in request.history):
            return None
        said = b"".join(chunk.payload for chunk in taken).decode()
        before = unanswered(request.history)
        sentences = exact_answer(
            f"{before} {said}".strip(), request.history, self._now(), seed=request.sampling.get("seed")
        )
        return None if sentences is None else list(sentences)
