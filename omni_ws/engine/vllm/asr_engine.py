"""VllmAsrEngine: speech recognition by a model on vLLM (``Task.TRANSCRIBE``)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from omni_ws.audio.samples import Pcm16
from omni_ws.engine.asr.listener import Listening
from omni_ws.engine.asr.recogniser import SAMPLE_RATE, LiveText, Recognised, StretchedText
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.base import EngineCapabilities, EngineState, GenerationRequest
from omni_ws.engine.vllm.transcription import TranscriptionModel

#: Requests that are listened to at once, unless ``max_num_seqs`` is less.
MAX_TALKERS: Final = 64
#: The first interim text of an utterance is of so much speech.
FIRST_INTERIM_SAMPLES: Final = SAMPLE_RATE // 2
#: Each further one is of a so much longer utterance, as the model reads it from its beginning every time.
INTERIM_GROWTH: Final = 1.3
#: And it has to have taken at most half of the time since the one before.
INTERIM_SHARE: Final = 0.5
#: In vLLM's queue, where settled texts go first.
INTERIM_PRIORITY: Final = 1


def interim_gap_sec(read_sec: float, took_sec: float) -> float:
    """How much more speech the next interim text needs, after one of ``read_sec`` that took ``took_sec``."""
    return max((INTERIM_GROWTH - 1) * read_sec, took_sec / INTERIM_SHARE)


class VllmAsrEngine(RecogniserEngine):
    """Writes utterances down with Whisper, Voxtral, and whatever else vLLM transcribes with.

    ``args`` are vLLM's engine arguments; ``setting`` is the configuration key that holds them, for messages. Interim
    texts come at stretching intervals: the model reads an utterance from its beginning for each. Texts have no times of
    words.
    """

    def __init__(self, model: str, args: Mapping[str, Any], *, setting: str = "asr.args") -> None:
        super().__init__(
            "vllm",
            self._recogniser,
            model=Path(model).name if Path(model).is_dir() else model,
            languages=frozenset(),
            max_talkers=min(MAX_TALKERS, args.get("max_num_seqs", MAX_TALKERS)),
        )
        self._model = TranscriptionModel({**args, "model": model}, setting=setting)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def state(self) -> EngineState:
        state = super().state
        return self._model.state if state is EngineState.OK else state

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(
            super().capabilities, languages=self._model.languages, translates=self._model.translates, word_times=False
        )

    async def start(self) -> None:
        """Load the model, then what listens. Idempotent."""
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        try:
            await self._model.start()
            await super().start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            self._loop = None
            await self._model.stop()

    def listening_for(self, request: GenerationRequest, listening: Listening) -> Listening:
        return replace(listening, recogniser=self._recogniser(request.language, translate=request.options.translate))

    def _recogniser(self, language: str | None = None, *, translate: bool = False) -> VllmRecogniser:
        assert self._loop is not None
        return VllmRecogniser(self._model, self._loop, language=language, translate=translate)


class VllmRecogniser:
    """Writes the utterances of one request down. Its language is that of its first utterance unless it was given."""

    def __init__(
        self,
        model: TranscriptionModel,
        loop: asyncio.AbstractEventLoop,
        *,
        language: str | None = None,
        translate: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = model.limits
        self._model = model
        self._loop = loop
        self._language = language
        self._translate = translate
        self._clock = clock

    def start(self) -> None:
        """Do nothing: the model was loaded on the event loop."""

    def close(self) -> None:
        """Do nothing: what is under way ends with the model."""

    def expect(self, talkers: int) -> None:
        """Do nothing: vLLM takes requests as they come."""

    def live_text(self) -> LiveText:
        return StretchedText(self._interim, self._clock, first=FIRST_INTERIM_SAMPLES, gap=interim_gap_sec)

    def transcribe(self, pcm: Pcm16, *, waited_for: bool = True) -> Future[Recognised]:
        return self._run(self._settled(pcm))

    async def _settled(self, pcm: Pcm16) -> Recognised:
        if self._language is None and self._model.detects_language:
            self._language = await self._model.language_of(pcm)
        return Recognised(await self._model.transcribe(pcm, language=self._language, translate=self._translate))

    def _interim(self, pcm: Pcm16) -> Future[str]:
        work = self._model.transcribe(
            pcm, language=self._language, translate=self._translate, priority=INTERIM_PRIORITY
        )
        return self._run(work)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
