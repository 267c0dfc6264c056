"""SpeechWatch: detects speech in one audio stream of any format.

Blocking; called from worker threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from omni_ws.audio.decoder import AudioDecoder
from omni_ws.audio.samples import Samples
from omni_ws.audio.turn_rule import StartBar, TurnDetector, TurnEvent
from omni_ws.audio.vad import SAMPLE_RATE, WINDOW_MS, SpeechDetector
from omni_ws.core.audio_format import AudioFormat

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


class SpeechWatch:
    """Decodes a stream, runs voice activity detection on it and reports starts and ends of speech.

    ``detector`` is borrowed until ``close``. A turn ends after ``silence_duration_ms`` of silence. For use by one
    thread at a time.
    """

    def __init__(self, detector: SpeechDetector, *, threshold: float, silence_duration_ms: float) -> None:
        self._detector = detector
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
        events: list[TurnEvent] = []
        if self._decoder is None or source != self._source:
            if self._decoder is not None:
                events += self._judge(self._decoder.flush(), bar)
            self._decoder, self._source = AudioDecoder(source, sample_rate=SAMPLE_RATE), source
        start_ms = self._samples * 1000 / SAMPLE_RATE
        samples = self._decoder.decode(data)
        events += self._judge(samples, bar)
        return Watched(tuple(events), start_ms, self._turns.audio_ms, samples, self._turns.silent_windows > 0)

    def close(self) -> SpeechDetector:
        """End the stream; returns the detector, reset for another one."""
        if self._decoder is not None:
            self._decoder.close()
        self._detector.reset()
        return self._detector

    def _judge(self, samples: Samples, bar: StartBar) -> list[TurnEvent]:
        self._turns.bar = bar
        self._samples += len(samples)
        return [
            event
            for probability in self._detector.process(samples)
            if (event := self._turns.feed(probability)) is not None
        ]
