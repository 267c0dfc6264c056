"""WhisperRecogniser: one Whisper on the CPU for all requests, with a worker for each core."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

import numpy as np

from omni_ws.audio.samples import Pcm16, Samples
from omni_ws.core.chunks import HeardSegment, Hearing, Word
from omni_ws.core.json_values import language_name
from omni_ws.engine.asr.recogniser import Recognised
from omni_ws.engine.asr.recognition_cost import RecognitionCost, interim_gap_sec
from omni_ws.engine.asr.repeats import without_repeats
from omni_ws.engine.asr.stretched_text import StretchedText
from omni_ws.engine.asr.urgent_first import UrgentFirst
from omni_ws.engine.asr.utterance import SAMPLE_RATE, UtteranceLimits
from omni_ws.engine.asr.whisper_model import WhisperTranscript

#: Urgencies: a speaker waits for the settled text, and has the next interim one soon anyway. Recordings can wait.
_SETTLED: Final = 0
_INTERIM: Final = 1
_RECORDING: Final = 2
_BEAM: Final = 5
#: The first interim text is of so much speech: of less, it is mostly wrong.
_FIRST_SAMPLES: Final = 350 * SAMPLE_RATE // 1000
#: Text of noise: the model thinks that nothing was said, and is not sure of the words. Without a beam it may repeat
#: itself for noise, and is sure of that.
_NO_SPEECH: Final = 0.6
_UNSURE: Final = -1.0
#: What the start measures with.
_TRIAL_SAMPLES: Final = 4 * SAMPLE_RATE


class SpeechModel(Protocol):
    """What is asked of a WhisperModel."""

    @property
    def languages(self) -> frozenset[str]: ...

    def transcribe(self, audio: Samples, *, beam: int, words: bool, language: str | None) -> WhisperTranscript: ...


class WhisperRecogniser:
    """A Recogniser. Settled texts go before interim ones, and what is being spoken before recordings.

    Equal samples give equal words, whatever else is going on. ``load`` gives the model, which ``workers`` use at the
    same time; ``cost`` is told what each text took.
    """

    #: The model reads up to 29 s at once.
    limits = UtteranceLimits(cut_after=20 * SAMPLE_RATE, longest=28 * SAMPLE_RATE)

    def __init__(
        self,
        load: Callable[[], SpeechModel],
        cost: RecognitionCost,
        *,
        workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._cost = cost
        self._clock = clock
        self._model: SpeechModel | None = None
        self._language: str | None = None
        self._workers = UrgentFirst(workers, name="whisper", patient=_RECORDING)

    @property
    def languages(self) -> frozenset[str]:
        """Those that the model can be told to expect; none before ``start``."""
        return frozenset() if self._model is None else self._model.languages

    def start(self) -> None:
        """Load the model, and measure what it takes here: half a second. Blocks. Raises EngineFailed."""
        self._model = self._load()
        noise = np.random.default_rng(0).normal(0, 1000, _TRIAL_SAMPLES).astype(np.int16)
        self._heard(noise, beam=_BEAM, words=True)  # the first time takes longer
        self._settled(noise)
        self._interim(noise)

    def close(self) -> None:
        """Wait for the texts under way, half a second at most, and drop the waiting ones. Idempotent."""
        self._workers.close()
        self._model = None

    def expect(self, talkers: int) -> None:
        """Do nothing: all share one model."""

    def in_language(self, language: str) -> WhisperRecogniser:
        """Return this recogniser as one for requests in that language, one of ``languages``."""
        other = copy(self)
        other._language = language
        return other

    def live_text(self) -> StretchedText:
        return StretchedText(
            lambda pcm: self._workers.submit(_INTERIM, partial(self._interim, pcm)),
            self._clock,
            first=_FIRST_SAMPLES,
            gap=lambda read_sec, took_sec: interim_gap_sec(took_sec),
        )

    def transcribe(self, pcm: Pcm16, *, waited_for: bool = True) -> Future[Recognised]:
        return self._workers.submit(_SETTLED if waited_for else _RECORDING, partial(self._settled, pcm))

    def _settled(self, pcm: Pcm16) -> Recognised:
        began = self._clock()
        heard = self._heard(pcm, beam=_BEAM, words=True)
        self._cost.note_settled(self._clock() - began, len(pcm) / SAMPLE_RATE)
        if heard is None:
            return Recognised()
        words = tuple(Word(word.text, word.start_ms, word.end_ms) for word in heard.words)
        return Recognised(heard.text, words, _hearing(heard, len(pcm) * 1000 // SAMPLE_RATE))

    def _interim(self, pcm: Pcm16) -> str:
        began = self._clock()
        heard = self._heard(pcm, beam=1, words=False)
        self._cost.note_interim(self._clock() - began)
        return "" if heard is None else heard.text

    def _heard(self, pcm: Pcm16, *, beam: int, words: bool) -> WhisperTranscript | None:
        """What was read, once; None where nobody spoke."""
        assert self._model is not None
        audio = pcm.astype(np.float32) / np.float32(32768)
        heard = self._model.transcribe(audio, beam=beam, words=words, language=self._language)
        noise = heard.no_speech > _NO_SPEECH and (beam == 1 or heard.score < _UNSURE)
        if noise or not any(map(str.isalnum, heard.text)):
            return None
        once = without_repeats(heard.words)
        if len(once) == len(heard.words):
            return heard
        return replace(heard, text=" ".join(word.text for word in once), words=tuple(once))


def _hearing(heard: WhisperTranscript, length_ms: int) -> Hearing:
    data = heard.text.encode()
    segment = HeardSegment(
        heard.text,
        heard.words[0].start_ms if heard.words else 0,
        heard.words[-1].end_ms if heard.words else length_ms,
        tokens=heard.tokens,
        avg_logprob=heard.score,
        compression_ratio=len(data) / len(zlib.compress(data)),
        no_speech_prob=heard.no_speech,
    )
    return Hearing(None if heard.language is None else language_name(heard.language), (segment,))
