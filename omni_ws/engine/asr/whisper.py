"""WhisperRecogniser: speech recognition with Whisper on the CPU."""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from omni_ws.audio.pcm import Pcm16, samples_from_pcm16
from omni_ws.audio.vad import SAMPLE_RATE
from omni_ws.core.chunks import HeardSegment, Hearing
from omni_ws.core.json_values import language_name
from omni_ws.engine.asr.recogniser import (
    ListenerSlots,
    Recognised,
    StretchedText,
    UtteranceLimits,
    asr_capabilities,
)
from omni_ws.engine.asr.whisper_model import (
    DEFAULT_MODEL,
    PINNED,
    WhisperModel,
    WhisperTranscript,
    whisper_folder,
    whisper_problem,
    without_repeats,
)
from omni_ws.engine.base import EngineCapabilities, EngineState, GenerationRequest, HeardLanguage
from omni_ws.engine.threads import cores, run_in_thread
from omni_ws.errors import EngineFailed

T = TypeVar("T")


# One Whisper on the CPU for all requests, with a worker for each core.

#: More speakers than any core can serve.
_MOST_PER_CORE: Final = 32
#: Urgencies: a speaker waits for the final text; interim texts are less urgent, as the next one follows soon;
#: recordings can wait.
_SETTLED: Final = 0
_INTERIM: Final = 1
_RECORDING: Final = 2
_BEAM: Final = 5
#: How much speech the first interim text needs: with less it is mostly wrong.
_FIRST_SAMPLES: Final = 350 * SAMPLE_RATE // 1000
#: How text that the model made of noise is recognised: a high probability of no speech, and a low probability of the
#: words. With greedy decoding the model may repeat itself on noise with high probability.
_NO_SPEECH: Final = 0.6
_UNSURE: Final = -1.0
#: The length of the audio with which the start measures the speed.
_TRIAL_SAMPLES: Final = 4 * SAMPLE_RATE


class WhisperRecogniser:
    """A Recogniser that runs Whisper, and the Transcriber of its requests.

    ``model`` is ``tiny.en``, ``base``, or a folder with a model for CTranslate2; ``load`` replaces the function that
    loads it. Final texts go before interim ones, and live speech before recordings. Equal samples give equal words,
    whatever the load. The number of requests that are listened to at once follows from the measured time of
    recognition, and is at most ``max_recognisers``. Without ``input_audio.language``, a multilingual model detects the
    language of each utterance, among ``languages`` (of RFC 5646) unless that is empty, and keeps it for the next one
    (``possible_languages``).
    """

    name = "whisper"
    hosts: tuple[str, ...] = ()
    state = EngineState.OK
    speculates = True
    #: The model transcribes up to 29 s at once.
    limits = UtteranceLimits(cut_after=20 * SAMPLE_RATE, longest=28 * SAMPLE_RATE)

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        max_recognisers: int | None = None,
        workers: int | None = None,
        languages: Collection[str] = (),
        load: Callable[[], WhisperModel] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        #: How many utterances are transcribed at the same time.
        self.workers = workers or cores()
        self.model = model if model in PINNED else Path(model).resolve().name
        self.cost = RecognitionCost(self.workers)
        self.slots = ListenerSlots(max_recognisers or _MOST_PER_CORE * self.workers, self.cost.talkers)
        self._load = load or partial(_load_model, model, self.workers)
        self._clock = clock
        self._whisper: WhisperModel | None = None
        self._languages = frozenset(languages)
        self._threads: UrgentFirst | None = None
        self._expect("", None, frozenset(), None)

    @property
    def capabilities(self) -> EngineCapabilities:
        return asr_capabilities(
            sampling=("max_tokens", "stop"),
            sampling_no_ops=("temperature", "top_p", "seed"),
            languages=self._known_languages,
            word_times=True,
            keywords=True,
            transcript_guesses=self.speculates,
        )

    @property
    def _known_languages(self) -> frozenset[str]:
        known = frozenset({"en"}) if self._whisper is None else self._whisper.languages
        return known & self._languages or known

    def describe(self) -> tuple[str, ...]:
        if not self._languages - {"en"}:
            return ()
        heard = ", ".join(sorted(language_name(code).title() for code in self._languages))
        return (f"languages: {heard}; {self.model} takes twice the CPU time of tiny.en, which hears English",)

    async def start(self) -> None:
        with ThreadPoolExecutor(1) as thread:
            await run_in_thread(thread, self.load)

    async def stop(self) -> None:
        await asyncio.to_thread(self.close)

    def load(self) -> None:
        """Load the model, and measure its speed on this machine: half a second. Blocks. Raises EngineFailed."""
        self._threads = UrgentFirst(self.workers, name="whisper", patient=_RECORDING)
        self._whisper = self._load()
        if unknown := sorted(self._languages - self._whisper.languages):
            raise EngineFailed(
                f"Whisper {self.model} does not hear {', '.join(map(language_name, unknown))}; name others in languages"
                + (", or a multilingual model: --asr whisper:base" if not self._whisper.multilingual else "")
            )
        noise = np.random.default_rng(0).normal(0, 1000, _TRIAL_SAMPLES).astype(np.int16)
        self._heard(noise, beam=_BEAM, words=True)  # the first time takes longer
        self._settled(noise)
        self._interim(noise)

    def close(self) -> None:
        """Drop the waiting transcriptions, and wait for the running ones, at most 0.5 s. Blocks. Idempotent."""
        if self._threads is not None:
            self._threads.close()
        self._whisper = None

    def transcriber(self, request: GenerationRequest) -> WhisperRecogniser:
        if self._whisper is not None and not self._whisper.multilingual and not request.expected:
            return self
        return self.expecting(
            request.expected, language=request.language, among=request.languages, heard=request.heard_language
        )

    def expecting(
        self,
        expected: str = "",
        *,
        language: str | None = None,
        among: frozenset[str] = frozenset(),
        heard: HeardLanguage | None = None,
    ) -> WhisperRecogniser:
        """Return a copy for ``language``, one of the capabilities' ``languages``, with the same model and threads.

        ``expected`` is a text with the names and terms to expect. ``among`` are the languages to detect, empty for all
        of them; ``heard`` is what earlier utterances were spoken in.
        """
        other = copy(self)
        other._expect(expected, language, among, heard)
        return other

    def _expect(self, expected: str, language: str | None, among: frozenset[str], heard: HeardLanguage | None) -> None:
        """Set what only the requests of this copy expect, see ``expecting``."""
        self._expected = expected
        self._expected_tokens: list[int] | None = None
        self._language = language
        self._among = among or self._languages
        self._heard_language = heard or HeardLanguage()

    def live_text(self) -> StretchedText:
        return StretchedText(
            lambda pcm: self._submit(_INTERIM, partial(self._interim, pcm, self._heard_language.now)),
            self._clock,
            first=_FIRST_SAMPLES,
            gap=lambda read_sec, took_sec: interim_gap_sec(took_sec),
        )

    def transcribe(
        self,
        pcm: Pcm16,
        *,
        waited_for: bool = True,
        tell: Callable[[str], None] | None = None,
        tell_untimed: Callable[[Recognised], None] | None = None,
    ) -> Future[Recognised]:
        settled = partial(self._settled, pcm, self._heard_language.now, tell_untimed)
        return self._submit(_SETTLED if waited_for else _RECORDING, settled)

    def _submit(self, urgency: int, call: Callable[[], T]) -> Future[T]:
        assert self._threads is not None
        return self._threads.submit(urgency, call)

    def _settled(
        self, pcm: Pcm16, before: str | None = None, tell_untimed: Callable[[Recognised], None] | None = None
    ) -> Recognised:
        def recognised(heard: WhisperTranscript | None) -> Recognised:
            if heard is None:
                return Recognised()
            return Recognised(heard.text, heard.words, _hearing(heard, len(pcm) * 1000 // SAMPLE_RATE))

        def tell(untimed: WhisperTranscript) -> None:
            if tell_untimed is not None and not _is_noise(untimed, beam=_BEAM):
                tell_untimed(recognised(untimed))

        began = self._clock()
        heard = self._heard(pcm, beam=_BEAM, words=True, before=before, tell=tell)
        self.cost.note_settled(self._clock() - began, len(pcm) / SAMPLE_RATE)
        return recognised(heard)

    def _interim(self, pcm: Pcm16, before: str | None = None) -> str:
        began = self._clock()
        heard = self._heard(pcm, beam=1, words=False, before=before)
        self.cost.note_interim(self._clock() - began)
        return "" if heard is None else heard.text

    def _heard(
        self,
        pcm: Pcm16,
        *,
        beam: int,
        words: bool,
        before: str | None = None,
        tell: Callable[[WhisperTranscript], None] | None = None,
    ) -> WhisperTranscript | None:
        """Return the transcript of ``pcm`` without repeated words; None if nobody spoke."""
        assert self._whisper is not None
        if self._expected_tokens is None:
            self._expected_tokens = self._whisper.expected_tokens(self._expected) if self._expected else []
        heard = self._whisper.transcribe(
            samples_from_pcm16(pcm),
            beam=beam,
            words=words,
            language=self._language,
            among=self._among,
            before=before,
            expected=self._expected_tokens,
            tell=tell,
        )
        if _is_noise(heard, beam=beam):
            return None
        once = without_repeats(heard.words)
        if len(once) == len(heard.words):
            return heard
        return replace(heard, text=" ".join(word.text for word in once), words=tuple(once))


def _is_noise(heard: WhisperTranscript, *, beam: int) -> bool:
    """Whether the model made a text of noise, or one without words."""
    noise = heard.no_speech > _NO_SPEECH and (beam == 1 or heard.score < _UNSURE)
    return noise or not any(map(str.isalnum, heard.text))


def _load_model(model: str, workers: int) -> WhisperModel:
    if (problem := whisper_problem(model)) is not None:
        raise EngineFailed(problem)
    return WhisperModel(whisper_folder(model), workers=workers)


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
    return Hearing(None if heard.language is None else language_name(heard.language), (segment,), heard.others)


# How long recognition takes on this machine, and so how many speakers it can serve.

#: The shortest and the longest interval between interim texts of a speaker, in seconds.
SHORTEST_GAP_SEC: Final = 0.5
LONGEST_GAP_SEC: Final = 1.5
#: The share of time for which a request's interim texts may occupy a worker, including the wait for it.
_INTERIM_SHARE: Final = 0.3
#: How many final texts are computed for an utterance on average: one at its end, others at earlier pauses.
_SETTLED_TIMES: Final = 1.5
#: The share of the workers' time that speakers may take.
_BUSY: Final = 0.9
#: The factor by which the weight of earlier measurements decreases with each new one.
_KEPT: Final = 0.9


class RecognitionCost:
    """An estimate of how many speakers this machine can serve, from the times of about ten texts. Thread-safe.

    On a machine that is busy with other work recognition takes longer, and the estimate decreases.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._lock = threading.Lock()
        self._settled_sec = 0.0
        self._settled_audio_sec = 0.0
        self._interim_sec = 0.0
        self._interims = 0.0

    def note_settled(self, took_sec: float, audio_sec: float) -> None:
        """Note that the final text of ``audio_sec`` seconds of audio took ``took_sec`` seconds."""
        with self._lock:
            self._settled_sec = _KEPT * self._settled_sec + took_sec
            self._settled_audio_sec = _KEPT * self._settled_audio_sec + audio_sec

    def note_interim(self, took_sec: float) -> None:
        """Note that an interim text took ``took_sec`` seconds."""
        with self._lock:
            self._interim_sec = _KEPT * self._interim_sec + took_sec
            self._interims = _KEPT * self._interims + 1

    def talkers(self, interims: bool = True) -> int:
        """Return how many may speak without a pause at the same time: at least one for each worker.

        With ``interims``, each of them gets interim texts at the longest interval.
        """
        with self._lock:
            settled = self._settled_sec / self._settled_audio_sec if self._settled_audio_sec else 0.0
            interim = self._interim_sec / self._interims if interims and self._interims else 0.0
        share = _SETTLED_TIMES * settled + interim / LONGEST_GAP_SEC
        return max(self._workers, int(_BUSY * self._workers / share)) if share else self._workers


def interim_gap_sec(took_sec: float) -> float:
    """Return the interval, in seconds, after an interim text that took ``took_sec``, with its time in the queue."""
    return min(max(SHORTEST_GAP_SEC, took_sec / _INTERIM_SHARE), LONGEST_GAP_SEC)


# Threads that do the most urgent work first.


class UrgentFirst:
    """An executor that does the most urgent call first (the lowest number), of equal ones the oldest. Thread-safe.

    A running call is not interrupted. Therefore calls of urgency ``patient`` or less urgent ones always leave one
    thread free for more urgent calls, unless there is only one thread.
    """

    def __init__(self, threads: int, *, name: str, patient: int) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._numbers = count()
        self._closed = False
        self._patient = patient
        self._patient_running = 0
        self._most_patient = max(1, threads - 1)
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, urgency: int, call: Callable[[], T]) -> Future[T]:
        """Queue ``call``; its Future can be cancelled until the call begins. Raises RuntimeError after ``close``."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the threads have ended")
            heappush(self._waiting, (urgency, next(self._numbers), future, call))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Cancel the waiting calls, and wait for the running ones. Blocks. Idempotent."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, []
            self._changed.notify_all()
        for _, _, future, _ in waiting:
            future.cancel()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (next_one := self._take()) is not None:
            urgency, future, call = next_one
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # told by the future
                    future.set_exception(error)
            del next_one, future, call  # not kept until there is more to do
            if urgency >= self._patient:
                with self._changed:
                    self._patient_running -= 1
                    self._changed.notify()

    def _take(self) -> tuple[int, Future[Any], Callable[[], Any]] | None:
        with self._changed:
            while not self._may_begin() and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            urgency, _, future, call = heappop(self._waiting)
            self._patient_running += urgency >= self._patient
            return urgency, future, call

    def _may_begin(self) -> bool:
        if not self._waiting:
            return False
        return self._waiting[0][0] < self._patient or self._patient_running < self._most_patient
