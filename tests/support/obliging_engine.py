"""An engine that gives each client what it asks for: a tool call for tools, JSON for a schema, an echo otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from support.capable_engine import PlayingEngine, finished, token, tool_call
from support.part_engines import ToneEngine

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, Task, Usage, Word
from omni_ws.engine.base import EngineOutput, Finished, GenerationRequest, OutputWriter, TextOutput, TranscriptOutput
from omni_ws.errors import EngineFailed

PERSON = {"name": "Ann", "age": 30}
HEARD = "go forward"


class ObligingEngine(PlayingEngine):
    """A text with "break" in it makes it fail after its first word, whatever it was asked for."""

    def __init__(self) -> None:
        able: dict[str, Any] = dict.fromkeys(("tools", "logprobs", "structured_output", "choices", "word_times"), True)
        super().__init__(**able, languages=frozenset({"en"}))
        self._speaker = ToneEngine()

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        speaks = request.task is Task.SPEECH or "audio" in request.modalities
        await (self._speaker.generate(request, out) if speaks else super().act(request, out))

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
        if request.task is Task.TRANSCRIBE:
            heard = TranscriptOutput(HEARD, start_ms=0, words=(Word("go", 0, 200), Word("forward", 200, 700)))
            ended = Finished(FinishReason.STOP, Usage(output_tokens=2, input_audio_ms=700))
            return [heard, TextOutput("go"), TextOutput(" forward"), ended]
        if request.tools and taken[-1].tool_call_id is None:
            return [*tool_call("get_weather", '{"', "city", '":"Tokyo"}'), finished(FinishReason.TOOL_CALLS)]
        return self._answer(request, "".join(one.payload.decode() for one in taken if one.modality is Modality.TEXT))

    def _answer(self, request: GenerationRequest, text: str) -> Iterator[EngineOutput | Exception]:
        options = request.options
        if options.structure is not None:
            text = json.dumps(PERSON)
        words = text.split(" ")[: request.sampling.get("max_tokens")]
        for index, word in enumerate(words):
            if index and "break" in text:
                yield EngineFailed("the engine broke, as it was told to")
            piece = word if index == 0 else f" {word}"
            logprobs = (token(piece, -0.5, "other"),) if options.logprobs is not None else ()
            for choice in range(options.choices):
                yield TextOutput(piece, logprobs=logprobs, choice=choice)
        reasons = (FinishReason.STOP,) * options.choices
        yield Finished(FinishReason.STOP, Usage(input_tokens=1, output_tokens=len(words)), reasons)
