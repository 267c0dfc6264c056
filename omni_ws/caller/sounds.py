"""What a microphone hears beside speech, the formats in which it is sent, and what a loudspeaker plays."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.pcm import Pcm16, Samples, encode_mu_law, pcm16_from_samples
from omni_ws.caller.script import PIECE_MS, frame_levels

#: Of a microphone, in Hz, and its samples in a tick.
MIC_RATE: Final = 16_000
MIC_TICK: Final = MIC_RATE * PIECE_MS // 1000


def pink_noise(length: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Noise at 16 kHz with equal power in every octave from 50 Hz on."""
    spectrum = np.fft.rfft(random.normal(0, 1, length))
    frequencies = np.fft.rfftfreq(length, 1 / MIC_RATE)
    noise: NDArray[np.float64] = np.fft.irfft(spectrum / np.sqrt(np.maximum(frequencies, 50.0)), length)
    return noise


def room_noise(seconds: float, level_db: float, *, seed: int) -> Samples:
    """Pink noise at a level in dBFS; equal arguments give equal noise."""
    noise = pink_noise(int(seconds * MIC_RATE), np.random.default_rng(seed))
    return np.asarray(noise * 10 ** (level_db / 20) / np.sqrt(np.mean(noise**2)), np.float32)


def levelled(samples: Samples, dbfs: float) -> Samples:
    """Speech with its loud frames at this mean power."""
    levels = frame_levels(samples, MIC_TICK)
    loud = levels[levels > 0.05 * levels.max()]
    return np.asarray(samples * (10 ** (dbfs / 20) / np.sqrt(np.mean(loud**2))), np.float32)


def mixed(sound: Samples, other: Samples, begin: int = 0) -> Samples:
    """Two sounds at once, the second from sample ``begin`` of the first on."""
    end = begin + len(other)
    sound = np.pad(sound, (0, end - len(sound))) if end > len(sound) else sound.copy()
    sound[begin:end] += other
    return sound


class TickResampler:
    """From one rate to ``up / down`` of it, a tick in and a tick out, about two milliseconds late."""

    def __init__(self, up: int, down: int) -> None:
        self._up, self._down = up, down
        kept = 62 // up
        taps = up * kept + 1
        cutoff = 0.9 / max(up, down)
        places = np.arange(taps) - taps // 2
        # At ``up`` times the rate, below nine tenths of the lower of the two bands.
        self._filter = np.sinc(places * cutoff) * cutoff * np.hamming(taps) * up
        self._last = np.zeros(kept, np.float32)

    def resample(self, tick: Samples) -> Samples:
        block = np.concatenate([self._last, tick])
        self._last = block[-len(self._last) :]
        spread = np.zeros(self._up * len(block))
        spread[:: self._up] = block
        return np.convolve(spread, self._filter, "valid")[:: self._down].astype(np.float32)


class MicrophoneFormat:
    """A microphone's ticks as they are sent: pcm16 at 8, 16 or 24 kHz, or G.711 µ-law, as a telephone has it."""

    def __init__(self, rate: int, *, is_mu_law: bool = False) -> None:
        self.rate, self.is_mu_law = rate, is_mu_law
        ratio = {8000: (1, 2), 24_000: (3, 2)}.get(rate)
        self._resampler = None if ratio is None else TickResampler(*ratio)

    def encode(self, tick: Samples) -> bytes:
        if self._resampler is not None:
            tick = np.clip(self._resampler.resample(tick), -1, 1)
        pcm16 = pcm16_from_samples(tick)
        return encode_mu_law(pcm16) if self.is_mu_law else pcm16.tobytes()


SPEAKER_RATE: Final = 24_000
SPEAKER_TICK: Final = SPEAKER_RATE * PIECE_MS // 1000
#: PROTOCOL, "Uncertain onsets": the sound is lowered by 15 dB.
DUCKED: Final = 10 ** (-15 / 20)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Samples ``begin`` to ``end`` of an answer, played in a tick, and whether they were ducked."""

    tick: int
    answer: str
    begin: int
    end: int
    ducked: bool


@dataclass(slots=True)
class _Piece:
    answer: str
    begin: int
    samples: Pcm16

    def take(self, most: int) -> Pcm16:
        """Remove and return the next samples, so many at most."""
        taken, self.samples = self.samples[:most], self.samples[most:]
        self.begin += len(taken)
        return taken


@dataclass(slots=True)
class Loudspeaker:
    """Plays a tick of 20 ms at a time. All times are ticks since the start."""

    ticks: int = 0
    played: list[Stretch] = field(default_factory=list)
    ducked: bool = False
    _waiting: deque[_Piece] = field(default_factory=deque)
    #: Up to where each answer was played, in samples.
    _places: dict[str, int] = field(default_factory=dict)
    _playing: str | None = None

    def put(self, answer: str, samples: Pcm16, start_ms: float | None) -> None:
        """Queue received sound. ``start_ms`` is its place in the answer; None: behind the sound received before."""
        last = next((piece for piece in reversed(self._waiting) if piece.answer == answer), None)
        follows = self._places.get(answer, 0) if last is None else last.begin + len(last.samples)
        begin = follows if start_ms is None else round(start_ms * SPEAKER_RATE / 1000)
        # The server rounds places to whole milliseconds.
        begin = follows if abs(begin - follows) <= SPEAKER_RATE // 1000 else begin
        self._waiting.append(_Piece(answer, begin, samples))

    def tick(self) -> Pcm16:
        """Play on for 20 ms, and return that sound."""
        sound, place = np.zeros(SPEAKER_TICK, np.int16), 0
        while self._waiting and place < SPEAKER_TICK:
            piece = self._waiting[0]
            begin, taken = piece.begin, piece.take(SPEAKER_TICK - place)
            sound[place : place + len(taken)] = taken
            self.played.append(Stretch(self.ticks, piece.answer, begin, piece.begin, self.ducked))
            self._playing = piece.answer
            place += len(taken)
            self._places[piece.answer] = piece.begin
            if not len(piece.samples):
                self._waiting.popleft()
        self.ticks += 1
        return (sound * DUCKED).astype(np.int16) if self.ducked else sound

    def duck(self, lowered: bool) -> None:
        """Lower what is played from now on, or raise it to its full level."""
        self.ducked = lowered

    def stop(self) -> None:
        """Drop the sound that was received and not yet played."""
        self._waiting.clear()

    @property
    def idle(self) -> bool:
        return not self._waiting

    def holds(self, answer: str) -> bool:
        """Whether sound of an answer is still to be played."""
        return any(piece.answer == answer for piece in self._waiting)

    def place(self, answer: str) -> float:
        """Up to where an answer was played, in milliseconds."""
        return self._places.get(answer, 0) * 1000 / SPEAKER_RATE

    @property
    def next_answer(self) -> str | None:
        """The answer whose sound comes next; None where nothing does."""
        return self._waiting[0].answer if self._waiting else None

    @property
    def position(self) -> tuple[str, float] | None:
        """The answer that plays or played last, and up to where, in milliseconds."""
        return None if self._playing is None else (self._playing, self._places[self._playing] * 1000 / SPEAKER_RATE)

    # What it recorded

    def sounding(self, begin: int, end: int) -> list[bool]:
        """For each tick of [begin, end) whether anything was played in it."""
        heard = {stretch.tick for stretch in self._since(begin) if stretch.tick < end}
        return [tick in heard for tick in range(begin, end)]

    def longest_gap_ms(self, begin: int, end: int) -> int:
        """The longest time without anything to play in [begin, end)."""
        longest = run = 0
        for sounds in self.sounding(begin, end):
            run = 0 if sounds else run + 1
            longest = max(longest, run)
        return longest * PIECE_MS

    def heard_ms(self, begin: int, end: int, answers: Iterable[str] | None = None) -> float:
        """How much of these answers, or of any, was played in [begin, end)."""
        wanted = None if answers is None else set(answers)
        return sum(
            (one.end - one.begin) * 1000 / SPEAKER_RATE
            for one in self._since(begin)
            if one.tick < end and (wanted is None or one.answer in wanted)
        )

    def ducked_ms(self, begin: int, end: int) -> int:
        """How long it played lowered in [begin, end)."""
        return PIECE_MS * len({one.tick for one in self._since(begin) if one.tick < end and one.ducked})

    def lost_and_repeated_ms(self, answer: str) -> tuple[float, float]:
        """How much of an answer was skipped between its first and its last sound, and how much was played twice."""
        place, lost, repeated = 0, 0, 0
        for one in self.played:
            if one.answer == answer:
                lost += max(0, one.begin - place)
                repeated += max(0, min(place, one.end) - one.begin)
                place = max(place, one.end)
        return lost * 1000 / SPEAKER_RATE, repeated * 1000 / SPEAKER_RATE

    def _since(self, tick: int) -> list[Stretch]:
        return self.played[bisect_left(self.played, tick, key=lambda stretch: stretch.tick) :]
