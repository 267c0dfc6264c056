"""WhisperEngine: speech recognition with Whisper on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from omni_ws.engine.asr.listener import Listening
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.asr.recognition_cost import RecognitionCost
from omni_ws.engine.asr.whisper_model import WhisperModel
from omni_ws.engine.asr.whisper_recogniser import WhisperRecogniser
from omni_ws.engine.asr.whisper_weights import DEFAULT_MODEL, PINNED, whisper_folder, whisper_problem
from omni_ws.engine.base import EngineCapabilities, GenerationRequest
from omni_ws.engine.cores import cores
from omni_ws.errors import EngineFailed

#: More than any core carries.
_MOST_PER_CORE: Final = 32


class WhisperEngine(RecogniserEngine):
    """``model`` is ``tiny.en``, ``base``, or a folder with a Whisper for CTranslate2.

    As many requests are listened to at once as this machine carries, by what recognition takes on it, and no more than
    ``max_recognisers``. Without ``input_audio.language``, a model of many languages finds the language of each
    utterance out.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        max_recognisers: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        #: Utterances that are read at the same time.
        self.workers = cores()
        self._model = model
        self._recogniser: WhisperRecogniser | None = None
        self._cost = RecognitionCost(self.workers)
        super().__init__(
            "whisper",
            self._new_recogniser,
            model=model if model in PINNED else Path(model).resolve().name,
            languages=frozenset({"en"}),
            max_talkers=max_recognisers or _MOST_PER_CORE * self.workers,
            carried=self._cost.talkers,
            clock=clock,
        )

    @property
    def capabilities(self) -> EngineCapabilities:
        known = self._recogniser.languages if self._recogniser is not None else frozenset()
        return replace(super().capabilities, languages=known or frozenset({"en"}))

    def listening_for(self, request: GenerationRequest, listening: Listening) -> Listening:
        if request.language is None or self._recogniser is None:
            return listening
        return replace(listening, recogniser=self._recogniser.in_language(request.language))

    def _new_recogniser(self) -> WhisperRecogniser:
        self._recogniser = WhisperRecogniser(self._load_model, self._cost, workers=self.workers)
        return self._recogniser

    def _load_model(self) -> WhisperModel:
        if (problem := whisper_problem(self._model)) is not None:
            raise EngineFailed(problem)
        return WhisperModel(whisper_folder(self._model), workers=self.workers)
