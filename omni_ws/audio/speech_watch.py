"""SpeechWatch: one stream of audio, in whatever format it comes, watched for speech. For worker threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from omni_ws.audio.decoder import AudioDecoder
from omni_ws.audio.samples import Samples
from omni_ws.audio.vad import SAMPLE_RATE, WINDOW_MS, SpeechDetector, StartBar, TurnDetector, TurnEvent
from omni_ws.core.audio_format import AudioFormat

#: The detector goes on hearing a voice for about two windows after it has ended: that much of the silence is over when
#: it first says so. Measured on the recorded speech of the tests: 0 to 4 windows, by how a voice dies away.
DETECTOR_LAG_MS: Final = 2 * WINDOW_MS


@dataclass(frozen=True, slots=True)
class Watched:
    """What a piece of the stream brought: the piece begins at ``start_ms``, and all before ``judged_ms`` was judged.

    ``samples`` is the piece at 16 kHz. ``pausing`` says that a speaker was silent at its end, and perhaps is done.
    """

    events: tuple[TurnEvent, ...]
    start_ms: float
    judged_ms: int
    samples: Samples
    pausing: bool

    @property
    def rest_ms(self) -> float:
        """How much of the stream up to here completes no window yet."""
        return self.start_ms + len(self.samples) * 1000 / SAMPLE_RATE - self.judged_ms


class SpeechWatch:
    """``detector`` is lent: whoever gave it takes it back from ``close``. One thread at a time."""

    def __init__(self, detector: SpeechDetector, *, threshold: float, silence_duration_ms: float) -> None:
        self._detector = detector
        self._turns = TurnDetector(threshold, max(0, silence_duration_ms - DETECTOR_LAG_MS))
        self._source: AudioFormat | None = None
        self._decoder: AudioDecoder | None = None
        #: Samples of the stream so far, at the detector's rate.
        self._samples = 0

    def hear(self, data: bytes, source: AudioFormat, bar: StartBar) -> Watched:
        """The next piece. A ``source`` that differs from the last begins a stream of its own right after it.

        Raises UnsupportedFormat for what cannot be decoded.
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
        """The detector, fit for another stream."""
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
