"""SpeechWatch: detects speech in one audio stream of any format.

Blocking; called from worker threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from omni_ws.audio.decoder import AudioDecoder
from omni_ws.audio.samples import Samples
from omni_ws.audio.turn_rule import StartBar, TurnDetector, TurnEvent
from omni_ws.audio.vad import SAMPLE_RATE, WINDOW_MS, SpeechDetector, process_together
from omni_ws.core.audio_format import AudioFormat

T = TypeVar("T")

#: The delay with which the detector notices the end of speech. It is counted as silence, so that turns end after the
#: configured silence. Measured on the recorded speech of the tests: 0 to 4 windows, about 2 on average.
DETECTOR_LAG_MS: Final = 2 * WINDOW_MS


@dataclass(frozen=True, slots=True)
class Watched:
    """The result for one piece of the stream.

    ``samples`` is the piece at 16 kHz, which begins at ``start_ms``. The detector has judged the stream up to
    ``judged_ms``; the rest is less than a window. ``pausing`` says that a turn is open but silent at the end of the
    piece.
    """

    events: tuple[TurnEvent, ...]
    start_ms: float
    judged_ms: int
    samples: Samples
    pausing: bool

    @property
    def rest_ms(self) -> float:
        """The length of the stream's end that does not fill a window yet, in milliseconds."""
        return self.start_ms + len(self.samples) * 1000 / SAMPLE_RATE - self.judged_ms


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A piece at 16 kHz, which begins at ``start_ms``, and what the detector has to process for it.

    The latter also has the end of the file before, which its decoder held back.
    """

    start_ms: float
    samples: Samples
    unjudged: Samples


class SpeechWatch:
    """Decodes a stream, runs voice activity detection on it and reports starts and ends of speech.

    A turn ends after ``silence_duration_ms`` of silence. For use by one thread at a time.
    """

    def __init__(self, detector: SpeechDetector, *, threshold: float, silence_duration_ms: float) -> None:
        self.detector = detector
        self._turns = TurnDetector(threshold, max(0, silence_duration_ms - DETECTOR_LAG_MS))
        self._source: AudioFormat | None = None
        self._decoder: AudioDecoder | None = None
        #: The length of the stream so far, in samples at 16 kHz.
        self._samples = 0

    def hear(self, data: bytes, source: AudioFormat, bar: StartBar) -> Watched:
        """Process the next piece of the stream. ``bar`` applies to it from its first window.

        A ``source`` different from the last one is decoded as a new file that continues the stream. Raises
        UnsupportedFormat for input that cannot be decoded.
        """
        decoded = self._decode(data, source)
        return self._judge(decoded, self.detector.process(decoded.unjudged), bar)

    def close(self) -> None:
        """End the stream."""
        if self._decoder is not None:
            self._decoder.close()

    def _decode(self, data: bytes, source: AudioFormat) -> _Decoded:
        held: Samples | None = None
        if self._decoder is None or source != self._source:
            if self._decoder is not None:
                held = self._decoder.flush()
                self._samples += len(held)
            self._decoder, self._source = AudioDecoder(source, sample_rate=SAMPLE_RATE), source
        start_ms = self._samples * 1000 / SAMPLE_RATE
        samples = self._decoder.decode(data)
        self._samples += len(samples)
        return _Decoded(start_ms, samples, samples if held is None else np.concatenate((held, samples)))

    def _judge(self, decoded: _Decoded, probabilities: Sequence[float], bar: StartBar) -> Watched:
        turns = self._turns
        turns.bar = bar
        events = tuple(event for each in probabilities if (event := turns.feed(each)) is not None)
        return Watched(events, decoded.start_ms, turns.audio_ms, decoded.samples, turns.silent_windows > 0)


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """The next piece of a stream, with the arguments of ``SpeechWatch.hear``."""

    watch: SpeechWatch
    data: bytes
    source: AudioFormat
    bar: StartBar

    def hear(self) -> Watched:
        return self.watch.hear(self.data, self.source, self.bar)


def hear_together(pieces: Sequence[StreamPiece]) -> list[Watched | Exception]:
    """Return what ``hear`` returns or raises for each piece; each is of another stream.

    The detectors of all streams work at once (``process_together``).
    """
    decoded = [_outcome(piece.watch._decode, piece.data, piece.source) for piece in pieces]
    heard = [(piece, each) for piece, each in zip(pieces, decoded, strict=True) if isinstance(each, _Decoded)]
    probabilities: Sequence[list[float] | Exception]
    try:
        probabilities = process_together([(piece.watch.detector, each.unjudged) for piece, each in heard])
    except Exception:  # each stream gets an exception of its own, or none if it was not at fault
        probabilities = [_outcome(piece.watch.detector.process, each.unjudged) for piece, each in heard]
    judged = iter(
        found if isinstance(found, Exception) else piece.watch._judge(each, found, piece.bar)
        for (piece, each), found in zip(heard, probabilities, strict=True)
    )
    return [each if isinstance(each, Exception) else next(judged) for each in decoded]


def _outcome(call: Callable[..., T], *arguments: object) -> T | Exception:
    try:
        return call(*arguments)
    except Exception as error:
        return error
