"""An engine that gives each client what it asks for: a tool call for tools, JSON for a schema, an echo otherwise."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from support.capable_engine import finished, token, tool_call
from support.part_engines import ActingEngine, ToneEngine

from omni_ws.core.chunks import FinishReason, Modality, Task, Usage, Word
from omni_ws.engine.base import (
    EngineOutput,
    Finished,
    GenerationRequest,
    TextOutput,
    TranscriptOutput,
)
from omni_ws.errors import EngineFailed

PERSON = {"name": "Ann", "age": 30}
HEARD = "go forward"


class ObligingEngine(ActingEngine):
    """A text with "break" in it makes it fail after its first word, whatever it was asked for."""

    def __init__(self) -> None:
        super().__init__(
            "obliging",
            tools=True,
            logprobs=True,
            structured_output=True,
            choices=True,
            languages=frozenset({"en"}),
            word_times=True,
        )
        self._speaker = ToneEngine()

    def act(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        if request.task is Task.SPEECH or "audio" in request.modalities:
            return self._speaker.generate(request)
        return self._write_down(request) if request.task is Task.TRANSCRIBE else self._answer(request)

    async def _answer(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        chunks = [chunk async for chunk in request.input]
        text = "".join(chunk.payload.decode() for chunk in chunks if chunk.modality is Modality.TEXT)
        options = request.options
        if request.tools and chunks[-1].tool_call_id is None:
            for output in tool_call("get_weather", '{"', "city", '":"Tokyo"}'):
                yield output
            yield finished(FinishReason.TOOL_CALLS)
            return
        if options.structure is not None:
            text = json.dumps(PERSON)
        words = text.split(" ")[: request.sampling.get("max_tokens")]
        for index, word in enumerate(words):
            if index and "break" in text:
                raise EngineFailed("the engine broke, as it was told to")
            piece = word if index == 0 else f" {word}"
            logprobs = (token(piece, -0.5, "other"),) if options.logprobs is not None else ()
            for choice in range(options.choices):
                yield TextOutput(piece, logprobs=logprobs, choice=choice)
        reasons = (FinishReason.STOP,) * options.choices
        yield Finished(FinishReason.STOP, Usage(input_tokens=1, output_tokens=len(words)), reasons)

    async def _write_down(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        async for _ in request.input:
            pass
        yield TranscriptOutput(HEARD, start_ms=0, words=(Word("go", 0, 200), Word("forward", 200, 700)))
        for piece in ("go", " forward"):
            yield TextOutput(piece)
        yield Finished(FinishReason.STOP, Usage(output_tokens=2, input_audio_ms=700))
