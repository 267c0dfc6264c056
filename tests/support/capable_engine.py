"""Engines that play a script: one that can do all that few engines can, one that hears."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any

from support.engine_answers import Input
from support.part_engines import ActingEngine

from omni_ws.core.chunks import (
    FinishReason,
    InputChunk,
    Modality,
    OutputModality,
    TokenLogprob,
    ToolCallFragment,
    Usage,
)
from omni_ws.engine.base import (
    EngineCapabilities,
    EngineOutput,
    Finished,
    GenerationRequest,
    TextOutput,
    ToolCallOutput,
)
from omni_ws.engine.fake import CAPABILITIES, ScriptedEngine
from omni_ws.media.limits import MediaLimits


class CapableEngine(ScriptedEngine):
    """A ScriptedEngine with every capability; ``inputs`` has what each request brought."""

    def __init__(self, script: Sequence[Any] = ()) -> None:
        super().__init__(script)
        self.inputs: list[list[InputChunk]] = []

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(
            CAPABILITIES,
            tools=True,
            logprobs=True,
            structured_output=True,
            choices=True,
            priority=True,
            raw_prompts=True,
            template_arguments=True,
            translates=True,
            languages=frozenset({"en", "de"}),
            word_times=True,
            media_limits=frozenset(field.name for field in fields(MediaLimits)),
        )

    async def generate(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        taken = [chunk async for chunk in request.input]
        self.inputs.append(taken)
        played = super().generate(replace(request, input=Input()))
        async with aclosing(played) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                yield output


class HearingEngine(ActingEngine):
    """Answers typed input by its script, and speech by ``heard``, in the same notation.

    ``heard_in_turn``, where it is set, has what is heard in one turn after the other.
    """

    def __init__(self, script: Sequence[Any] = (), *, heard: Sequence[Any] = (), **changes: Any) -> None:
        self.typed = tuple(script)
        self.heard = tuple(heard)
        self.heard_in_turn: Iterator[Sequence[Any]] | None = None
        modalities = CAPABILITIES.output_modalities | {OutputModality.TRANSCRIPT}
        super().__init__("scripted", **{"output_modalities": modalities, "transcribes_first": True, **changes})

    async def act(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        speech = [chunk.modality is Modality.AUDIO async for chunk in request.input]
        heard = self.heard if self.heard_in_turn is None else next(self.heard_in_turn)
        for step in heard if any(speech) else self.typed:
            if isinstance(step, Exception):
                raise step
            if callable(step):
                await step()
            elif not request.sink.offer(step):
                yield step
        yield Finished(FinishReason.STOP, Usage())


def tool_call(name: str, *arguments: str, index: int = 0, choice: int = 0) -> list[ToolCallOutput]:
    """A call as engines give it: its head, then its arguments in pieces."""
    head = ToolCallFragment(index, id=f"call_{name}_{index}", name=name)
    pieces = [ToolCallFragment(index, arguments=piece) for piece in arguments]
    return [ToolCallOutput(one, choice=choice) for one in (head, *pieces)]


def token(text: str, logprob: float = -0.5, *others: str) -> TokenLogprob:
    """A token with itself and ``others`` as the likeliest."""
    top = tuple(TokenLogprob(one, one.encode(), logprob - rank) for rank, one in enumerate((text, *others)))
    return TokenLogprob(text, text.encode(), logprob, top if others else ())


def said(text: str, *, choice: int = 0, logprobs: bool = False) -> TextOutput:
    return TextOutput(text, logprobs=(token(text),) if logprobs else (), choice=choice)


def finished(reason: FinishReason = FinishReason.STOP, *reasons: FinishReason) -> Finished:
    return Finished(reason, Usage(input_tokens=3, output_tokens=5), reasons)
