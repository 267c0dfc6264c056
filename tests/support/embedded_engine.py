"""The embedded engine as the tests start it: rules, a voice, and ears that know the recordings of the tests alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from support.speech_clips import SAMPLE_RATE, WORDS, clip_pcm

from omni_ws.audio.pcm import Pcm16
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import Word
from omni_ws.engine.asr.recogniser import ListenerSlots, Recognised, Utterance, UtteranceLimits, asr_capabilities
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.base import EngineState, GenerationRequest
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.llm.computed import UNKNOWN
from omni_ws.engine.llm.rules_engine import RulesEngine
from omni_ws.engine.threads import cores
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.engine_choice import EMBEDDED_MODEL

#: Loudness is compared in steps of so many milliseconds.
_STEP_MS: Final = 40
_STEP: Final = _STEP_MS * SAMPLE_RATE // 1000
#: How many steps before a recording an utterance may begin, and how many after.
_MOST_BEFORE: Final = 25
_MOST_AFTER: Final = 30
#: The least likeness of what was said to a recording, as a correlation, and the least that is compared.
_ALIKE: Final = 0.75
_LEAST_STEPS: Final = 10


class KnownRecordings:
    """A Recogniser that tells the recordings of the tests by how loud they are from moment to moment."""

    name = "recordings"
    model = "tests"
    hosts: tuple[str, ...] = ()
    state = EngineState.OK
    capabilities = asr_capabilities(
        sampling=("max_tokens", "stop"),
        sampling_no_ops=("temperature", "top_p", "seed"),
        languages={"en"},
        word_times=True,
    )
    speculates = True
    readings = 0
    limits = UtteranceLimits(cut_after=12 * SAMPLE_RATE, longest=15 * SAMPLE_RATE)

    def __init__(self, max_recognisers: int | None) -> None:
        self.slots = ListenerSlots(max_recognisers or 4 * cores())
        self._thread: ThreadPoolExecutor | None = None

    def describe(self) -> tuple[str, ...]:
        return ()

    async def start(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="known recordings")

    async def stop(self) -> None:
        if self._thread is not None:
            await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def transcriber(self, request: GenerationRequest) -> KnownRecordings:
        return self

    def live_text(self) -> KnownRecordings:
        return self

    def read(self, utterance: Utterance) -> str | None:
        return _recognised(utterance.pcm()).text

    def end(self) -> None:
        pass

    def transcribe(self, pcm: Pcm16, **_: Any) -> Future[Recognised]:
        assert self._thread is not None
        return self._thread.submit(_recognised, pcm)


def _recognised(pcm: Pcm16) -> Recognised:
    heard = _loudness(pcm)
    if len(heard) < _LEAST_STEPS or not heard.std():
        return Recognised()
    likeness, name, shift = max(_alike(heard, name) for name in WORDS)
    if likeness < _ALIKE:
        return Recognised()
    placed = (Word(text, max(0, start - shift), end - shift) for text, start, end in _placed(name))
    words = tuple(word for word in placed if word.end_ms <= (len(heard) + 2) * _STEP_MS)
    return Recognised(" ".join(word.text for word in words), words)


def _alike(heard: NDArray[np.float64], name: str) -> tuple[float, str, int]:
    """How much what was heard is like a recording in silence, and at which of its milliseconds it begins."""
    known = np.concatenate((np.zeros(_MOST_BEFORE), _known(name), np.zeros(len(heard))))
    windows = sliding_window_view(known, len(heard))[: _MOST_BEFORE + _MOST_AFTER]
    windows = windows - windows.mean(axis=1, keepdims=True)
    ours = heard - heard.mean()
    lengths = np.linalg.norm(windows, axis=1) * np.linalg.norm(ours)
    likeness = windows @ ours / np.maximum(lengths, 1e-9)
    best = int(likeness.argmax())
    return float(likeness[best]), name, (best - _MOST_BEFORE) * _STEP_MS


def _loudness(pcm: Pcm16) -> NDArray[np.float64]:
    """Decibels above what nobody hears beside the loudest, for each step."""
    steps = pcm[: len(pcm) // _STEP * _STEP].astype(np.float64).reshape(-1, _STEP)
    level = 10 * np.log10((steps**2).mean(axis=1) + 1)
    above: NDArray[np.float64] = np.maximum(level - (level.max(initial=0.0) - 35), 0.0)
    return above


@cache
def _known(name: str) -> NDArray[np.float64]:
    return _loudness(clip_pcm(name))


def _placed(name: str) -> Iterator[tuple[str, int, int]]:
    """The words of a recording with the milliseconds that they take if all letters take as long."""
    loud = np.flatnonzero(_known(name) > 10)
    begin, length = int(loud[0]) * _STEP_MS, int(loud[-1] - loud[0]) * _STEP_MS
    done, text = 0, WORDS[name]
    for word in text.split():
        yield word, begin + done * length // len(text), begin + (done + len(word)) * length // len(text)
        done += len(word) + 1


def ears(max_recognisers: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> RecogniserEngine:
    """An ASR that knows the recordings of the tests."""
    return RecogniserEngine(KnownRecordings(max_recognisers), clock=clock)


class EmbeddedEngine(ComposedEngine):
    """Deterministic: the same input gives the same text. ``default_voice`` is a name of the voice's list."""

    def __init__(
        self,
        *,
        voice: VoiceChoice = VoiceChoice.AUTO,
        default_voice: str | None = None,
        max_recognisers: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.asr = ears(max_recognisers, clock=clock)
        self.voice = VoiceProcess(voice, default_voice=default_voice)
        self.tts = SpeechEngine(self.voice)
        self.llm = RulesEngine(now=now)
        super().__init__(self.llm, asr=self.asr, tts=self.tts, name="embedded", model=EMBEDDED_MODEL)


def is_unknown(said: str) -> bool:
    """Whether it is all of an answer to what no rule fits."""
    return any(said in wordings for wordings in UNKNOWN.values())
