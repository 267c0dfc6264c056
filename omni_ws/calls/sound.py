"""The stereo WAV of a call: left what the user said, when it was said, and right what was played, when it was played.

It is written second by second, in order, so that it takes the memory of a few seconds whatever the length of the call.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import BinaryIO, Final

import numpy as np

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.container import wav_header
from omni_ws.audio.ducking import DUCKED, RAMP_SEC
from omni_ws.audio.pcm import NO_SAMPLES, Samples, pcm16_from_samples
from omni_ws.calls.lines import read_sound
from omni_ws.calls.played_sound import SoundPiece
from omni_ws.calls.reading import CallReading, CompressedStreams
from omni_ws.core.chunks import AudioFormat

#: The longest sound of a call: what is behind it is left out.
MAX_SOUND_SEC: Final = 4 * 3600
#: Two pieces with less between them are one stretch of sound.
_JOINED_MS: Final = 1.0
_BLOCK_SEC: Final = 1
_CHANNELS: Final = 2
_SAMPLE_BYTES: Final = 2


def sample_rate(reading: CallReading) -> int:
    """Return the sample rate of a call's WAV: the highest of its sounds, of 8, 16 and 24 kHz."""
    highest = max((one.sample_rate if one.is_raw else 24_000 for one in reading.formats), default=8000)
    return next((rate for rate in (8000, 16_000) if highest <= rate), 24_000)


def duration_ms(reading: CallReading, played: Sequence[SoundPiece]) -> float:
    """Return how long the sound of a call is: until the end of the recording, or of the last sound."""
    ends = [reading.duration_ms]
    ends += [pieces[-1].end_ms for pieces in (reading.microphone.pieces(), played) if pieces]
    return min(max(ends), MAX_SOUND_SEC * 1000.0)


def write_wav(reading: CallReading, target: BinaryIO) -> None:
    """Write the WAV of a call to ``target``. Blocks."""
    rate = sample_rate(reading)
    played = reading.loudspeaker.pieces()
    total = math.ceil(duration_ms(reading, played) * rate / 1000)
    target.write(wav_header(sample_rate=rate, channels=_CHANNELS, data_bytes=total * _CHANNELS * _SAMPLE_BYTES))
    with reading.lines.path.open("rb") as file:
        left = _Track(_stretches(reading.microphone.pieces()), reading, file, rate)
        right = _Track(_stretches(played), reading, file, rate)
        beside = _Track(([one] for one in reading.loudspeaker.beside), reading, file, rate)
        ducking = _Ducking(reading.ducked, rate)
        for start in range(0, total, rate * _BLOCK_SEC):
            count = min(rate * _BLOCK_SEC, total - start)
            block = np.zeros((count, _CHANNELS), dtype=np.float32)
            block[:, 0] = left.read(start, count)
            block[:, 1] = ducking.apply(right.read(start, count), start) + beside.read(start, count)
            target.write(pcm16_from_samples(block.reshape(-1)).tobytes())


def part_of_side(
    reading: CallReading, pieces: Sequence[SoundPiece], start_ms: float, end_ms: float, *, rate: int
) -> bytes:
    """Return what one side of a call sounded like from ``start_ms`` to ``end_ms``, as pcm16 at ``rate``. Blocks."""
    if all(audio.is_raw for audio in reading.formats):  # else a decoder goes on from piece to piece
        pieces = [piece for piece in pieces if piece.end_ms > start_ms and piece.start_ms < end_ms]
    first, last = (round(at * rate / 1000) for at in (start_ms, end_ms))
    with reading.lines.path.open("rb") as file:
        samples = _Track(_stretches(pieces), reading, file, rate).read(first, max(0, last - first))
    return pcm16_from_samples(samples).tobytes()


def _stretches(pieces: Iterable[SoundPiece]) -> Iterator[list[SoundPiece]]:
    """Yield pieces that follow one another without a pause together."""
    stretch: list[SoundPiece] = []
    for piece in pieces:
        if stretch and piece.start_ms - stretch[-1].end_ms > _JOINED_MS:
            yield stretch
            stretch = []
        stretch.append(piece)
    if stretch:
        yield stretch


class _Track:
    """One side of a call as samples, which are read in order."""

    def __init__(self, stretches: Iterable[list[SoundPiece]], reading: CallReading, file: BinaryIO, rate: int) -> None:
        self._reading = reading
        self._file = file
        self._rate = rate
        self._compressed = CompressedStreams(rate)
        self._blocks = chain.from_iterable(map(self._decoded, stretches))
        #: Samples that were decoded and not read, and where they begin.
        self._held: Samples = NO_SAMPLES
        self._at = 0

    def read(self, start: int, count: int) -> Samples:
        """Return ``count`` samples from ``start`` on, with silence where there is none."""
        found = np.zeros(count, dtype=np.float32)
        end = start + count
        while True:
            if not len(self._held):
                following = next(self._blocks, None)
                if following is None:
                    return found
                self._at, self._held = following
                continue
            if self._at >= end:
                return found
            skipped = max(0, start - self._at)  # it begins before what was read already
            self._at += skipped
            self._held = self._held[skipped:]
            taken = self._held[: max(0, end - self._at)]
            found[self._at - start : self._at - start + len(taken)] = taken
            self._at += len(taken)
            self._held = self._held[len(taken) :]

    def _decoded(self, stretch: list[SoundPiece]) -> Iterator[tuple[int, Samples]]:
        """Yield the samples of a stretch, with the place of each block."""
        at = round(stretch[0].start_ms * self._rate / 1000)
        decoder, audio = None, None
        for piece in stretch:
            source = self._reading.source(piece.ref)
            if not source.audio.is_raw:
                yield from self._unpacked(piece)
                continue
            if audio != source.audio:
                if decoder is not None:
                    rest = decoder.flush()
                    yield at, rest
                    at += len(rest)
                decoder, audio = AudioDecoder(source.audio, sample_rate=self._rate), source.audio
            assert decoder is not None
            samples = decoder.decode(_part(read_sound(self._file, source.offset, source.size), piece, source.audio))
            yield at, samples
            at += len(samples)
        if decoder is not None:
            yield at, decoder.flush()

    def _unpacked(self, piece: SoundPiece) -> Iterator[tuple[int, Samples]]:
        """Yield a piece of compressed sound. What its codec holds back comes with the next piece of the stream."""
        source = self._reading.source(piece.ref)
        data = read_sound(self._file, source.offset, source.size)
        samples = self._compressed.decode(source.stream, source.audio, data)
        first = round(piece.skip_ms * self._rate / 1000)
        count = round((piece.end_ms - piece.start_ms) * self._rate / 1000)
        yield round(piece.start_ms * self._rate / 1000), samples[first : first + count]


def _part(data: bytes, piece: SoundPiece, audio: AudioFormat) -> bytes:
    """Return the part of raw sound that a piece consists of, in whole samples."""
    frame = audio.bytes_per_second // audio.sample_rate
    first = round(piece.skip_ms * audio.sample_rate / 1000) * frame
    count = round((piece.end_ms - piece.start_ms) * audio.sample_rate / 1000) * frame
    return data[first : first + count]


class _Ducking:
    """Lowers what was played while it was lowered, with ramps as the client has them."""

    def __init__(self, intervals: Sequence[tuple[float, float]], rate: int) -> None:
        self._rate = rate
        self._edges = [
            (round(at * rate / 1000), level)
            for begin, end in intervals
            for at, level in ((begin, DUCKED), (end, 1.0))
            if at < math.inf
        ]
        self._places = [place for place, _ in self._edges]

    def apply(self, samples: Samples, start: int) -> Samples:
        if not self._edges:
            return samples
        ramp = int(RAMP_SEC * self._rate)
        index = bisect_left(self._places, start - ramp)
        level = self._edges[index - 1][1] if index else 1.0
        if level == 1.0 and (index == len(self._edges) or self._places[index] >= start + len(samples)):
            return samples
        points, levels = [start - ramp - 1], [level]
        for place, wanted in self._edges[index : bisect_left(self._places, start + len(samples))]:
            points += [place, place + ramp]
            levels += [level, wanted]
            level = wanted
        places = np.arange(start, start + len(samples))
        return samples * np.interp(places, points, levels).astype(np.float32)
