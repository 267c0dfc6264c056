"""StreamResampler: changes the sample rate of a stream piece by piece."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

from omni_ws.audio.samples import Samples

#: Presets of soxr. LQ delays speech by less than 7 ms and suffices for it; HQ, for files, delays by 20 to 30 ms.
ResampleQuality: TypeAlias = Literal["QQ", "LQ", "MQ", "HQ", "VHQ"]

#: An empty array, read-only because it is shared.
NO_SAMPLES: Samples = np.zeros(0, dtype=np.float32)
NO_SAMPLES.setflags(write=False)


class StreamResampler:
    """A stateful resampler: the output does not depend on how the stream is cut into pieces.

    After ``flush`` it has returned exactly ``floor(n * target_rate / source_rate + 0.5)`` samples for ``n`` samples. As
    with any band-limited resampling, values may slightly overshoot ±1.0. With equal rates it passes samples through.
    """

    def __init__(self, source_rate: int, target_rate: int, quality: ResampleQuality = "LQ") -> None:
        self.source_rate = source_rate
        self.target_rate = target_rate
        self._flushed = False
        #: None when the rates are equal; soxr is not imported then.
        self._stream: Any = None
        if source_rate != target_rate:
            import soxr

            self._stream = soxr.ResampleStream(source_rate, target_rate, 1, dtype="float32", quality=quality)

    def process(self, samples: Samples) -> Samples:
        """Return the resampled audio that is complete, which may be empty. Raises ValueError after ``flush``."""
        if self._flushed:
            raise ValueError("the resampler is already flushed")
        if self._stream is None:
            return samples
        resampled: Samples = self._stream.resample_chunk(np.ascontiguousarray(samples, dtype=np.float32))
        return resampled

    def flush(self) -> Samples:
        """End the stream; returns the samples still held. A second call returns none."""
        if self._flushed or self._stream is None:
            self._flushed = True
            return NO_SAMPLES
        self._flushed = True
        rest: Samples = self._stream.resample_chunk(NO_SAMPLES, last=True)
        return rest
