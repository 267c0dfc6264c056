"""Ends of turns: how often each kind of turn detection cuts a speaker off, and how late it is when one has finished.

Recorded sentences are cut where they are quietest, and pauses put in: a turn that ends in one of these has ended too
early. So has one that ends before a sentence does without a pause of ours: as it was recorded, and as a browser sends
it whose automatic gain settles: 8 dB more for 0.6 s, which are gone 1 s later. An end is timed from the last 20 ms
within 26 dB of the loudest. All in time of the audio: what the machine needs to judge comes on top only where it
takes more than the 96 ms between the question and its use.
"""

from __future__ import annotations

import argparse
import sys
import time
import wave
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.embedded import SAMPLE_RATE
from benchmarks.speech.corpus import recordings
from benchmarks.turn_words import table
from omni_ws.audio.pcm import SampleLayout, Samples, pcm16_from_samples, samples_from_bytes
from omni_ws.audio.smart_turn import SmartTurn
from omni_ws.audio.speech_watch import ORDINARY_BAR, SpeechOffset, SpeechWatch
from omni_ws.audio.vad import SpeechDetector
from omni_ws.caller.script import frame_levels, loud_part
from omni_ws.core.chunks import AudioFormat
from omni_ws.weights import (
    WeightsCache,
    pinned_weights,
    weights_cache,
)
from omni_ws.wire.session_config import TurnDetectionConfig

KINDS: Final = {
    "server_vad": TurnDetectionConfig(type="server_vad"),
    **{
        f"semantic_vad {each}": TurnDetectionConfig(type="semantic_vad", eagerness=each)
        for each in ("low", "medium", "high")
    },
}
PAUSES_MS: Final = (300, 500, 800, 1200, 2000)
_FRAME: Final = SAMPLE_RATE // 50
#: A cut is this far from the ends of the speech, and from another cut, in frames.
_APART: Final = 35
_MOST_CUTS: Final = 4
#: Of the recordings, those that are a sentence, and of these one in so many.
MAX_SEC: Final = 15
EVERY: Final = 8
#: An end is early that is so long before that of the speech.
_BEFORE_SEC: Final = 0.06
#: After the speech: enough for the most patient kind.
_AFTER_SEC: Final = 5


class Judge:
    """Answers at once, looks at each turn once, and counts."""

    def __init__(self, model: SmartTurn) -> None:
        self._model = model
        self._known: dict[bytes, float] = {}
        self.seconds: list[float] = []

    def ask(self, turn: Samples) -> Future[float]:
        asked = turn.tobytes()
        if asked not in self._known:
            begun = time.thread_time()
            self._known[asked] = self._model.finished(turn)
            self.seconds.append(time.thread_time() - begun)
        answer: Future[float] = Future()
        answer.set_result(self._known[asked])
        return answer

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Sentence:
    """A recording from its first to its last sound of speech, and the frames of 20 ms where it may be cut."""

    name: str
    samples: Samples
    cuts: tuple[int, ...]

    @classmethod
    def of(cls, name: str, samples: Samples) -> Sentence:
        levels = frame_levels(samples, _FRAME)
        first, last = loud_part(levels)
        samples, levels = samples[first * _FRAME : last * _FRAME], levels[first:last]
        cuts: list[int] = []
        # Between words it is quiet for 60 ms.
        smooth = np.convolve(levels, np.ones(3) / 3, "same")
        for frame in map(int, np.argsort(smooth)):
            inside = _APART <= frame <= len(levels) - _APART
            if inside and len(cuts) < _MOST_CUTS and all(abs(frame - cut) >= _APART for cut in cuts):
                cuts.append(frame)
        return cls(name, samples, tuple(sorted(cuts)))

    def whole(self) -> Samples:
        return _in_silence(self.samples)

    def settling(self) -> Samples:
        """The sentence by a gain that settles."""
        later_sec = np.clip(np.arange(len(self.samples)) / SAMPLE_RATE - 0.6, 0, None)
        samples = self.samples * 10 ** (8 / 20 * np.exp(-later_sec / 0.4))
        return _in_silence((samples / max(1.0, abs(samples).max())).astype(np.float32))

    @property
    def seconds(self) -> float:
        """When the speech is over in ``whole`` and ``settling``."""
        return 0.5 + len(self.samples) / SAMPLE_RATE

    def paused(self, pause_ms: int) -> Iterator[Samples]:
        """The sentence with one pause in it, for each cut."""
        for cut in self.cuts:
            before, after = np.split(self.samples, [cut * _FRAME])
            yield _in_silence(np.concatenate([before, _silence(pause_ms), after]))


def _silence(ms: float) -> Samples:
    """Not digital: a room, at -70 dBFS."""
    room: Samples = np.random.default_rng(1).normal(0, 3e-4, int(ms * SAMPLE_RATE / 1000)).astype(np.float32)
    return room


def _in_silence(samples: Samples) -> Samples:
    return np.concatenate([_silence(500), samples, _silence(_AFTER_SEC * 1000)])


def ends(turns: TurnDetectionConfig, judge: Judge, samples: Samples) -> list[float]:
    """When turns are ended, in seconds."""
    watch = SpeechWatch(
        SpeechDetector(),
        threshold=turns.threshold,
        silence_duration_ms=turns.silence_ms,
        judge=judge.ask if turns.type == "semantic_vad" else None,
        sure=turns.sure,
        whole_silence_ms=turns.whole_silence_ms,
    )
    data = pcm16_from_samples(samples).tobytes()
    found = watch.hear(data, AudioFormat(), ORDINARY_BAR).events
    return [event.detected_ms / 1000 for event in found if isinstance(event, SpeechOffset)]


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks turn_ends", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two pauses only")
    parser.add_argument("--folder", type=Path, help="WAV files at 16 kHz, mono, instead: a sentence each")
    parser.add_argument(
        "--words", type=Path, help="by the words as well, of speech by Kokoro that is kept in this folder"
    )
    parser.add_argument("--eagerness", nargs="+", default=["low", "auto", "high"], help="for --words: only these")
    options = parser.parse_args(arguments)
    judge = Judge(SmartTurn(smart_turn_file(weights_cache())))
    if options.words is not None:
        table(judge.ask, weights_cache(), options.words, options.eagerness)
        return True
    sentences = list(_sentences(options.folder))
    pauses = PAUSES_MS[1::2] if options.quick else PAUSES_MS
    cuts = sum(len(sentence.cuts) for sentence in sentences)
    print(f"### Ends of turns: {len(sentences)} sentences, {cuts} places within them\n")
    kinds_of_end = [f"ended early, {pause} ms" for pause in pauses] + ["as recorded", "by a gain that settles"]
    print("| | " + " | ".join(kinds_of_end) + " | late, median | p90 | longest |")
    print("|---" * (len(kinds_of_end) + 4) + "|")
    for name, turns in KINDS.items():
        early = [_early(turns, judge, sentences, pause) for pause in pauses]
        late = [_late(turns, judge, sentence) for sentence in sentences]
        within = [
            sum(
                ends(turns, judge, samples)[0] < one.seconds - _BEFORE_SEC
                for one, samples in zip(sentences, said, strict=True)
            )
            for said in (map(Sentence.whole, sentences), map(Sentence.settling, sentences))
        ]
        rates = " | ".join([f"{count} of {cuts}" for count in early] + [f"{n} of {len(sentences)}" for n in within])
        figures = " | ".join(f"{value * 1000:.0f} ms" for value in (*np.quantile(late, [0.5, 0.9]), max(late)))
        print(f"| {name} | {rates} | {figures} |", flush=True)
    spent = np.quantile(judge.seconds, [0.5, 0.9]) * 1000
    print(f"\n{len(judge.seconds)} questions, {spent[0]:.0f} ms of CPU time each (median; p90 {spent[1]:.0f})")
    return True


def _early(turns: TurnDetectionConfig, judge: Judge, sentences: Sequence[Sentence], pause_ms: int) -> int:
    """In how many places a turn ends in the pause, before the speaker goes on."""
    early = 0
    for sentence in sentences:
        for cut, samples in zip(sentence.cuts, sentence.paused(pause_ms), strict=True):
            begins = 0.5 + cut * _FRAME / SAMPLE_RATE
            early += any(begins < end <= begins + pause_ms / 1000 for end in ends(turns, judge, samples))
    return early


def _late(turns: TurnDetectionConfig, judge: Judge, sentence: Sentence) -> float:
    """Seconds from the end of the speech to the end of the last turn."""
    return ends(turns, judge, sentence.whole())[-1] - sentence.seconds


def _sentences(folder: Path | None) -> Iterator[Sentence]:
    if folder is None:
        for clip in [clip for clip in recordings() if clip.is_sentence and clip.seconds <= MAX_SEC][::EVERY]:
            yield Sentence.of(clip.name, clip.samples)
        return
    for path in sorted(folder.glob("*.wav")):
        with wave.open(str(path), "rb") as file:
            if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (SAMPLE_RATE, 1, 2):
                raise ValueError(f"{path} is not 16 kHz, mono, 16 bits")
            yield Sentence.of(path.stem, _samples(file.readframes(file.getnframes())))


def _samples(data: bytes) -> Samples:
    return samples_from_bytes(data, SampleLayout.S16)


def smart_turn_file(cache: WeightsCache) -> Path:
    weights = pinned_weights()["smart-turn"]
    return cache.fetch(weights) / weights.files[0].name


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
