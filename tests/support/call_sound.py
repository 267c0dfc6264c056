"""What was heard in a call, as a scripted client knows it, to be compared with the sound of its recording."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.scripted_engines import PlayingEngine

from omni_ws.audio.pcm import Samples, resampled, samples_from_pcm16
from omni_ws.calls.files import describe, write_wav
from omni_ws.calls.lines import CallFolder, CallLines
from omni_ws.calls.reading import CallReading
from omni_ws.core.chunks import InputChunk
from omni_ws.engine.base import AudioOutput, GenerationRequest, TextOutput

RATE = 24_000


def noise(seed: int, seconds: float, rate: int = RATE) -> Samples:
    """Noise below 3 kHz that is like no other: where it is found again, it is the same."""
    samples = np.random.default_rng(seed).normal(0, 0.2, int(seconds * 8000)).astype(np.float32)
    return resampled(samples, 8000, rate, "HQ").clip(-0.9, 0.9)


class NoiseEngine(PlayingEngine):
    """Answers each request with ``seconds`` of noise of its own, in pieces of 100 ms."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterator[Any]:
        number = len(self.requests)
        yield TextOutput(f"This is noise {number}.")
        samples = noise(number, self._seconds)
        for start in range(0, len(samples), RATE // 10):
            yield AudioOutput(samples[start : start + RATE // 10], RATE)


def only_call(folder: Path) -> CallLines:
    (lines,) = CallFolder(folder).newest(10)
    return lines


def told(folder: Path) -> dict[str, Any]:
    """``call.json`` of the only call in a folder."""
    return describe(CallReading(only_call(folder)))


def tracks(lines: CallLines) -> tuple[Samples, Samples, int]:
    """Both sides of the sound of a call, and its sample rate."""
    target = io.BytesIO()
    write_wav(CallReading(lines), target)
    target.seek(0)
    with wave.open(target) as file:
        rate = file.getframerate()
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2)
        assert (file.getnchannels(), file.getnframes()) == (2, len(samples))
    left, right = (samples_from_pcm16(samples[:, side]) for side in (0, 1))
    return left, right, rate


class Truth:
    """What sounded when, in seconds of the call."""

    def __init__(self) -> None:
        self.parts: list[tuple[float, Samples]] = []

    def add(self, at: float, samples: Samples, rate: int = RATE) -> None:
        """Note sound that began ``at``."""
        self.parts.append((at, samples if rate == RATE else resampled(samples, rate, RATE)))

    def offsets_ms(self, track: Samples, rate: int) -> list[float]:
        """By how much later each half second of sound is in a track than it was heard. All of it has to be there."""
        whole = track if rate == RATE else resampled(track, rate, RATE)
        found = []
        for at, samples in joined(self.parts):
            for start in range(0, len(samples) - RATE // 2 + 1, RATE // 2):
                found.append(_lag(whole, at + start / RATE, samples[start : start + RATE // 2]))
        return found

    def strays(self, track: Samples, rate: int, *, margin_sec: float = 0.02) -> list[float]:
        """The seconds in which a track sounds where nothing was heard, further than ``margin_sec`` from what was."""
        silent = np.ones(len(track), dtype=bool)
        for at, samples in self.parts:
            begin = int((at - margin_sec) * rate)
            silent[max(0, begin) : int((at + len(samples) / RATE + margin_sec) * rate)] = False
        stray = silent & (np.abs(track) > 0.002)
        return sorted({round(float(place), 2) for place in np.flatnonzero(stray) / rate})[:20]


def joined(parts: Iterable[tuple[float, Samples]]) -> list[tuple[float, Samples]]:
    """Parts that follow one another at once, as one."""
    found: list[tuple[float, list[Samples]]] = []
    end = -1.0
    for at, samples in sorted(parts, key=lambda part: part[0]):
        if found and abs(at - end) < 0.0005:
            found[-1][1].append(samples)
        else:
            found.append((at, [samples]))
        end = at + len(samples) / RATE
    return [(at, np.concatenate(pieces)) for at, pieces in found]


def _lag(track: Samples, at: float, wanted: Samples) -> float:
    """Where ``wanted``, expected at ``at`` seconds, is in a track: the lag in ms. It has to be within 200 ms."""
    around = RATE // 5
    begin = max(0, int(at * RATE) - around)
    place = track[begin : begin + len(wanted) + 2 * around].astype(np.float64)
    assert len(place) >= len(wanted) / 2, "the sound ends before"
    size = len(place) + len(wanted)
    product: NDArray[np.float64] = np.fft.irfft(np.fft.rfft(place, size) * np.conj(np.fft.rfft(wanted, size)), size)
    index = int(np.argmax(product))
    assert product[index] > 0.5 * float(np.square(wanted, dtype=np.float64).sum()), f"nothing like it at {at:.3f} s"
    index = index if index < len(place) else index - size
    return (begin + index) * 1000 / RATE - at * 1000
