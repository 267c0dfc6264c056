"""RequestStages: the stages of one request to a VllmEngine."""

from __future__ import annotations

from typing import Any

from omni_ws.core.chunks import AnswerWarning, FinishReason, OutputModality, Task, Usage
from omni_ws.engine.base import GenerationRequest
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.omni.stages import OmniTalker, SpeechPart, VocoderStage
from omni_ws.engine.pipeline import Stage, StageLink
from omni_ws.engine.vllm.code2wav import Code2Wav
from omni_ws.engine.vllm.omni_voice import OmniVoice
from omni_ws.engine.vllm.speaker import Speaker
from omni_ws.engine.vllm.thinker import Thinker, ThinkerParts
from omni_ws.errors import UnsupportedParameter


class RequestStages:
    """The stages of one request, and the results that they collect.

    ``voice`` speaks the answer: a Talker that reads text, or the omni model's own. Raises UnsupportedParameter for what
    the engine cannot do.
    """

    def __init__(
        self, shared: ThinkerParts, voice: Speaker | OmniVoice | None, request: GenerationRequest, share: MediaShare
    ) -> None:
        speaks = OutputModality.AUDIO in request.modalities
        if request.task is not Task.CHAT:
            raise UnsupportedParameter(f"task {request.task} is not supported by this engine", param="task")
        if speaks and voice is None:
            raise UnsupportedParameter(
                "audio output requires a Talker, which this server does not have", param="modalities"
            )
        if speaks and request.options.choices > 1:
            raise UnsupportedParameter("n must be 1 for audio output", param="n")
        writes = OutputModality.TEXT in request.modalities
        rows = voice.rows if speaks and isinstance(voice, OmniVoice) else None
        self._thinker = Thinker(shared, request, writes=request.tells_text, share=share, rows=rows)
        self._talker: OmniTalker | None = None
        self._vocoder: Code2Wav | VocoderStage | None = None
        self.stages: list[Stage[Any]] = [self._thinker]
        self.links: tuple[StageLink, ...] = ()
        if speaks and voice is not None:
            self.links = voice.links
            self.stages += self._speaking(voice, request, goes_on=writes)

    def _speaking(
        self, voice: Speaker | OmniVoice, request: GenerationRequest, *, goes_on: bool
    ) -> tuple[Stage[Any], Stage[Any]]:
        """Return the stages that speak. An answer ``goes_on`` without the voice of an omni model if it is written."""
        sampling, parameters = request.stage_sampling.get("talker"), request.stage_params
        if isinstance(voice, Speaker):
            talker, self._vocoder = voice.stages(
                request.request_id,
                voice=request.voice,
                sampling=sampling,
                parameters=parameters,
                priority=request.options.priority if voice.model.by_priority else 0,
            )
            return talker, self._vocoder
        self._talker, self._vocoder = voice.stages(voice=request.voice, sampling=sampling, parameters=parameters)
        return (SpeechPart(self._talker), SpeechPart(self._vocoder)) if goes_on else (self._talker, self._vocoder)

    @property
    def finish_reason(self) -> FinishReason:
        return self._thinker.finish_reasons[0]

    @property
    def finish_reasons(self) -> tuple[FinishReason, ...]:
        """The finish reason of each answer, if there are several."""
        reasons = self._thinker.finish_reasons
        return reasons if len(reasons) > 1 else ()

    @property
    def warnings(self) -> tuple[AnswerWarning, ...]:
        """What the client is told beside the finish reasons."""
        return self._thinker.warnings

    @property
    def usage(self) -> Usage:
        audio_ms = round(self._vocoder.audio_ms) if self._vocoder is not None else 0
        return Usage(
            input_tokens=self._thinker.prompt_tokens,
            output_tokens=self._thinker.answer_tokens,
            input_audio_ms=self._thinker.input_audio_ms,
            output_audio_ms=audio_ms,
            cached_tokens=self._thinker.cached_tokens,
        )
