"""Ends of turns where the recogniser's words count as well: pauses within sentences, dictated groups, whole sentences.

Kokoro reads the turns of speech/turns.toml, each part by itself, so that each sounds finished; gaps are put between
them, and a room's noise behind them. All in time of the audio: what the recogniser finds in a pause is known
``TEXT_DELAY_MS`` after it was asked, as on a machine that is not busy.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.speech.rendered import Rendering, keep
from omni_ws.audio.pcm import Pcm16, Samples, pcm16_from_samples, resampled
from omni_ws.audio.speech_watch import (
    BARGE_IN_BAR,
    ORDINARY_BAR,
    AskJudge,
    SpeechOffset,
    SpeechOnset,
    SpeechWatch,
    StartBar,
    TurnEvent,
)
from omni_ws.audio.vad import WINDOW_MS, WINDOW_SAMPLES, SpeechDetector
from omni_ws.core.chunks import AudioFormat
from omni_ws.engine.asr.recogniser import (
    SAMPLE_RATE,
    Recognised,
    StretchedText,
    UtteranceLimits,
    asr_capabilities,
)
from omni_ws.engine.asr.recogniser_engine import UtteranceEnded, UtterancePaused, UtteranceResumed, UtteranceSplitter
from omni_ws.engine.asr.whisper import WhisperRecogniser
from omni_ws.engine.base import TranscriptGuess, TranscriptOutput
from omni_ws.engine.tts.neural import Kokoro
from omni_ws.engine.tts.synthesiser import Speak
from omni_ws.service.conversation.turn_words import TurnWords
from omni_ws.weights import WeightsCache, pinned_weights
from omni_ws.wire.session_config import TurnDetectionConfig

#: From when a pause is told to the recogniser to when its text is known.
TEXT_DELAY_MS: Final = 190
#: The pauses, one after the other.
GAPS_MS: Final = (600, 900, 1200)
VOICES: Final = ("af_bella", "am_michael", "bf_emma", "bm_george")
TURNS: Final = Path(__file__).with_name("speech") / "turns.toml"
_BEFORE_MS: Final = 500
_AFTER_MS: Final = 5000
#: What a recogniser can do that tells words in pauses.
ABLE: Final = asr_capabilities(sampling=(), languages={"en"}, word_times=False, transcript_guesses=True)
_QUIET: Final = 0.02
#: The level of a television, and of a voice near the microphone; and how soon a turn has to end before one.
TELEVISION: Final = 10 ** (-35 / 20)
VOICE: Final = 0.1
_SOON_MS: Final = 2000


@dataclass(frozen=True, slots=True)
class Turn:
    """A spoken turn: its samples, and the milliseconds between which it pauses, the last of which is its end."""

    text: str
    samples: Samples
    gaps_ms: tuple[tuple[float, float], ...]
    end_ms: float


@dataclass(frozen=True, slots=True)
class Judged:
    """In how many gaps a turn ended, and how many milliseconds after its end; None: it did not end."""

    cut: int
    late_ms: float | None


class Reader:
    """Kokoro, which keeps what it has read in ``folder``."""

    def __init__(self, cache: WeightsCache, folder: Path) -> None:
        self._folder = folder
        self._weights = cache.fetch(pinned_weights()["kokoro"])
        folder.mkdir(parents=True, exist_ok=True)

    @cache  # noqa: B019 - there is one reader
    def _kokoro(self) -> Kokoro:
        return Kokoro(self._weights)

    def read(self, voice: str, text: str) -> Samples:
        file = self._folder / f"{hashlib.sha1(f'{voice}{text}'.encode()).hexdigest()[:16]}.npy"
        keep(file, lambda: self._rendered(voice, text))
        samples: Samples = np.load(file)
        loud = np.flatnonzero(np.abs(samples) > _QUIET * np.abs(samples).max())
        return samples[loud[0] : loud[-1] + 1]

    def _rendered(self, voice: str, text: str) -> Samples:
        rendering = Rendering()
        self._kokoro().speak(Speak(0, voice, 1.0, text), rendering)
        return resampled(rendering.samples, rendering.rate, SAMPLE_RATE, "HQ")


def spoken_turns(reader: Reader, kind: str) -> Iterator[Turn]:
    """The turns of ``kind``, each by one of VOICES, at the level of a voice near the microphone (-20 dBFS)."""
    for number, item in enumerate(tomllib.loads(TURNS.read_text())[kind]):
        parts = [reader.read(VOICES[number % len(VOICES)], part.strip()) for part in item.split("|")]
        speech: list[Samples] = [_room(_BEFORE_MS)]
        gaps: list[tuple[float, float]] = []
        level = np.sqrt(np.mean(np.concatenate(parts) ** 2))
        for place, part in enumerate(parts):
            if place:
                begins = sum(map(len, speech)) * 1000 / SAMPLE_RATE
                gap = GAPS_MS[(number + place) % len(GAPS_MS)]
                gaps.append((begins, begins + gap))
                speech.append(_room(gap))
            speech.append(part * np.float32(VOICE / level))
        end = sum(map(len, speech)) * 1000 / SAMPLE_RATE
        yield Turn(item, np.concatenate([*speech, _room(_AFTER_MS)]), tuple(gaps), end)


def television(reader: Reader, *, seconds: float, begin: int = 0) -> Samples:
    """Speech without a pause, 15 dB below the turns."""
    texts = [part.strip() for item in tomllib.loads(TURNS.read_text())["whole"] for part in item.split("|")]
    parts = [reader.read(VOICES[number % len(VOICES)], text) for number, text in enumerate(texts)]
    speech = np.concatenate([*parts[begin:], *parts[:begin]])
    speech = np.resize(speech, int(seconds * SAMPLE_RATE))
    quiet: Samples = (speech * (TELEVISION / np.sqrt(np.mean(speech**2)))).astype(np.float32)
    return quiet


def with_television(reader: Reader, ask: AskJudge) -> None:
    """Print what a television at -35 dBFS does: over an answer that follows a turn, and behind a question."""
    turns = TurnDetectionConfig(type="semantic_vad")
    spoken = list(spoken_turns(reader, "whole"))[:8]
    begun, late = 0, []
    for number, turn in enumerate(spoken):
        watch = _watch(turns, ask, _words(told=False))
        events_in(watch, turn.samples, ORDINARY_BAR)
        over = events_in(watch, television(reader, seconds=24, begin=number), BARGE_IN_BAR)
        begun += any(isinstance(event, SpeechOnset) for event in over)
        behind = television(reader, seconds=4 + len(turn.samples) / SAMPLE_RATE, begin=number)
        front = np.concatenate([np.zeros(4 * SAMPLE_RATE, np.float32), turn.samples])
        # The recogniser hears the television go on, and tells no words in a pause.
        heard = behind[: len(front)] + front
        both = events_in(_watch(turns, ask, _words(told=True)), heard, ORDINARY_BAR)
        end = turn.end_ms + 4000
        ends = [event.detected_ms - end for event in both if isinstance(event, SpeechOffset)]
        late.append(min((one for one in ends if one > 0), default=np.inf))
    within = sum(one < _SOON_MS for one in late)
    level = 20 * np.log10(TELEVISION)
    print(f"\nA television at {level:.0f} dBFS: a turn begun over {begun} of {len(spoken)} answers of 24 s;")
    print(f"behind a question, the turn ended within {_SOON_MS} ms of its end in {within} of {len(spoken)}: ")
    print(", ".join(f"{one:.0f}" for one in sorted(late)), "ms")


def events_in(watch: SpeechWatch, samples: Samples, bar: StartBar) -> list[TurnEvent]:
    """What happens in the samples, a window at a time."""
    data, size = pcm16_from_samples(samples).tobytes(), 2 * WINDOW_SAMPLES
    pieces = (data[start : start + size] for start in range(0, len(data), size))
    return [event for piece in pieces for event in watch.hear(piece, AudioFormat(), bar).events]


def _room(ms: float) -> Samples:
    room: Samples = np.random.default_rng(1).normal(0, 3e-4, int(ms * SAMPLE_RATE / 1000)).astype(np.float32)
    return room


@dataclass(frozen=True, slots=True)
class Told:
    """A text of the recogniser, and the millisecond at which it is known."""

    at_ms: float
    words: Recognised
    settled: bool

    @property
    def output(self) -> TranscriptOutput | TranscriptGuess:
        if self.settled:
            return TranscriptOutput(self.words.text, hearing=self.words.hearing)
        return TranscriptGuess(self.words.text, self.words.hearing)


class TextsOf:
    """What the recogniser tells in the pauses of a turn, in the time of its audio; each text after ``delay_ms``.

    With ``one_reading`` it tells no others that are almost as likely.
    """

    def __init__(
        self, recogniser: WhisperRecogniser, *, delay_ms: float = TEXT_DELAY_MS, one_reading: bool = False
    ) -> None:
        self._recogniser = recogniser
        self._delay_ms = delay_ms
        self._one_reading = one_reading
        self._known: dict[bytes, Recognised] = {}

    def __call__(self, samples: Samples, limits: UtteranceLimits) -> list[Told]:
        splitter = UtteranceSplitter(no_interim_texts(), limits)
        told: list[Told] = []
        guess: Told | None = None
        for start in range(0, len(samples), WINDOW_SAMPLES):
            now = (start + WINDOW_SAMPLES) * 1000 / SAMPLE_RATE
            splitter.feed(samples[start : start + WINDOW_SAMPLES])
            while splitter.ready and (event := splitter.advance()) is not None:
                match event:
                    case UtterancePaused(pcm=pcm):
                        guess = Told(now + self._delay_ms, self._recognised(pcm), settled=False)
                        told.append(guess)
                    case UtteranceResumed() if guess is not None and guess.at_ms > now:
                        told.remove(guess)
                    case UtteranceEnded(pcm=pcm):
                        told.append(Told(now, self._recognised(pcm), settled=True))
        return told

    def _recognised(self, pcm: Pcm16) -> Recognised:
        key = pcm.tobytes()
        if key not in self._known:
            found = self._recogniser.transcribe(pcm).result()
            if self._one_reading and found.hearing is not None:
                found = replace(found, hearing=replace(found.hearing, others=()))
            self._known[key] = found
        return self._known[key]


def no_interim_texts() -> StretchedText:
    """What asks for no text before a pause."""

    def never(pcm: Pcm16) -> Any:
        raise AssertionError("no interim text is asked for")

    return StretchedText(never, lambda: 0, first=1 << 40, gap=lambda *_: 0)


def judged(
    turns: TurnDetectionConfig, ask: AskJudge, turn: Turn, told: Sequence[Told] | None, *, asked: str = ""
) -> Judged:
    """Where a turn ends. ``told`` are the recogniser's texts; None: it is not asked."""
    now = 0.0
    words = TurnWords(lambda: ABLE, heard=lambda: told is not None, asked=lambda: asked, now=lambda: now)
    watch = _watch(turns, ask, words)
    data, waiting = pcm16_from_samples(turn.samples).tobytes(), deque(sorted(told or (), key=lambda one: one.at_ms))
    ends: list[float] = []
    for window in range(len(turn.samples) // WINDOW_SAMPLES):
        now = (window + 1) * WINDOW_MS / 1000
        while waiting and waiting[0].at_ms <= now * 1000:
            words.hear(waiting.popleft().output, language="en")
        piece = data[2 * window * WINDOW_SAMPLES : 2 * (window + 1) * WINDOW_SAMPLES]
        for event in watch.hear(piece, AudioFormat(), ORDINARY_BAR).events:
            match event:
                case SpeechOnset():
                    words.begin()
                case SpeechOffset(detected_ms=detected_ms):
                    ends.append(detected_ms)
    cut = sum(any(begins < end <= over for end in ends) for begins, over in turn.gaps_ms)
    late = [end - turn.end_ms for end in ends if end > turn.end_ms - 200]
    return Judged(cut, late[-1] if late else None)


def _words(*, told: bool) -> TurnWords:
    return TurnWords(lambda: ABLE, heard=lambda: told, now=lambda: 0.0)


def _watch(turns: TurnDetectionConfig, ask: AskJudge, words: TurnWords) -> SpeechWatch:
    return SpeechWatch(
        SpeechDetector(),
        threshold=turns.threshold,
        silence_duration_ms=turns.silence_ms,
        judge=ask,
        sure=turns.sure,
        words=words,
        whole_silence_ms=turns.whole_silence_ms,
    )


def table(ask: AskJudge, cache: WeightsCache, folder: Path, eagerness: Sequence[Any]) -> None:
    """Print how many turns were cut, and how late the others ended, without the words and with them."""
    reader, recogniser = Reader(cache, folder), WhisperRecogniser(workers=1)
    recogniser.load()
    texts = TextsOf(recogniser)
    requested = tomllib.loads(TURNS.read_text())["asked"]
    print(f"### Ends of turns by the words as well: Kokoro, {len(VOICES)} voices, gaps of {GAPS_MS} ms\n")
    print("| | | cut | gaps | late, median | p90 |\n|---|---|---|---|---|---|")
    try:
        for kind in ("pauses", "dictated", "whole"):
            spoken = list(spoken_turns(reader, kind))
            told = [texts(turn.samples, recogniser.limits) for turn in spoken]
            for each in eagerness:
                turns = TurnDetectionConfig(type="semantic_vad", eagerness=each)
                for name, known in (("sound", [None] * len(told)), ("words as well", told)):
                    asked = requested if kind == "dictated" else ""
                    found = [judged(turns, ask, *pair, asked=asked) for pair in zip(spoken, known, strict=True)]
                    late = [one.late_ms for one in found if one.late_ms is not None]
                    figures = " | ".join(f"{value:.0f} ms" for value in np.quantile(late, [0.5, 0.9]))
                    cut, gaps = sum(one.cut > 0 for one in found), sum(one.cut for one in found)
                    of = f"{cut} of {len(spoken)} | {gaps} of {sum(len(turn.gaps_ms) for turn in spoken)}"
                    print(f"| {kind} | {each}, {name} | {of} | {figures} |", flush=True)
                    if each == "auto" and known[0] is not None:
                        _explain(spoken, told, found)
    finally:
        recogniser.close()
    with_television(reader, ask)


def _explain(spoken: Sequence[Turn], told: Sequence[Sequence[Told]], found: Sequence[Judged]) -> None:
    for turn, texts, one in zip(spoken, told, found, strict=True):
        if one.cut or one.late_ms is None or one.late_ms > 1000:
            print(f"<!-- {turn.text} {one} {[text.words.text for text in texts]} -->")
