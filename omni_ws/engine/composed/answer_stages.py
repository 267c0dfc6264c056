"""The stages that answer one request: the LLM, and the TTS if the answer is spoken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from omni_ws.engine.base import Engine, Finished, GenerationRequest
from omni_ws.engine.channel import Stage, StageLink
from omni_ws.engine.composed.llm_stage import SPEECH_LINK, LlmStage
from omni_ws.engine.composed.tts_stage import TtsStage


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweringParts:
    """What answers. ``words_only`` and those behind it are those of LlmStage."""

    llm: Engine
    tts: Engine | None
    words_only: bool
    transcribed: bool
    first_byte_timeout_sec: float | None
    tool_filler: str = ""
    max_spoken_tokens: int | None = None

    def stages(self, request: GenerationRequest) -> AnswerStages:
        """Return the stages for a request."""
        return AnswerStages(self, request)


class AnswerStages:
    """The stages of one answer, and the links between them."""

    def __init__(self, parts: AnsweringParts, request: GenerationRequest) -> None:
        self._llm = LlmStage(
            parts.llm,
            request,
            words_only=parts.words_only,
            transcribed=parts.transcribed,
            spoken=parts.tts is not None,
            first_byte_timeout_sec=parts.first_byte_timeout_sec,
            tool_filler=parts.tool_filler,
            max_spoken_tokens=parts.max_spoken_tokens,
        )
        self._tts = None if parts.tts is None else TtsStage(parts.tts, request)
        self.stages: list[Stage[Any]] = [self._llm, *([self._tts] if self._tts is not None else [])]
        self.links: list[StageLink] = [SPEECH_LINK] * (len(self.stages) - 1)

    @property
    def finished(self) -> Finished:
        """How the answer ended, once its stages have."""
        finished = self._llm.finished
        assert finished is not None
        spoken_ms = 0 if self._tts is None else self._tts.audio_ms
        usage = replace(finished.usage, output_audio_ms=finished.usage.output_audio_ms + spoken_ms)
        return replace(finished, usage=usage)
