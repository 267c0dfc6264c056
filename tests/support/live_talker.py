"""An engine for Live sessions: it hears one text after the other, answers what a test says, and speaks word by word."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from support.capable_engine import HEARS, PlayingEngine

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, ToolCallFragment, Usage, Word
from omni_ws.engine.base import AudioOutput, Finished, GenerationRequest, TextOutput, ToolCallOutput, TranscriptOutput

RATE = 24_000
#: How long each word sounds.
WORD_MS = 200


def spoken(text: str, *, timed: bool = True) -> Iterator[Any]:
    """The steps of an answer of these words; unless ``timed`` each sentence is a clause without times of words."""
    yield TextOutput(text)
    samples = np.full(RATE * WORD_MS // 1000, 0.25, np.float32)
    end = 0
    for index, word in enumerate(text.split()):
        end = text.index(word, end) + len(word)
        start_ms = index * WORD_MS
        if timed:
            words = (Word(word, start_ms, start_ms + WORD_MS, text_end=end),)
            yield AudioOutput(samples, RATE, words)
        else:
            stops = [at + 1 for at, mark in enumerate(text) if mark == "." and at + 1 >= end]
            yield AudioOutput(samples, RATE, text_end=stops[0] if stops else len(text))


def delegates(said: str, task: str = "find it", *, number: int = 1) -> list[Any]:
    """The steps of an answer that hands over work."""
    call = ToolCallFragment(0, id=f"call_{number}", name="delegate", arguments=f'{{"task": "{task}"}}')
    return [*spoken(said), ToolCallOutput(call), Finished(FinishReason.TOOL_CALLS, Usage())]


class Talker(PlayingEngine):
    """Hears ``turns`` one after the other, and answers each with the steps of ``reply``.

    ``reply`` gets what was said or typed; None: it is repeated.
    """

    def __init__(self, *turns: str, reply: Callable[[str], Iterable[Any]] | None = None, **changes: Any) -> None:
        super().__init__(**{**HEARS, "transcribes_first": True, "tools": True, "word_times": True, **changes})
        self.turns = iter(turns)
        self.reply = reply or (lambda said: spoken(f"You said {said}"))
        #: What each request said, in order.
        self.asked: list[str] = []

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
        said = b"".join(one.payload for one in taken if one.modality is Modality.TEXT).decode()
        if any(one.modality is Modality.AUDIO for one in taken):
            said = next(self.turns, "")
            yield TranscriptOutput(said)
        self.asked.append(said)
        yield from self.reply(said)
