"""Changing the sample rate of a stream, piece by piece, as if it had come in one."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

from omni_ws.audio.samples import Samples

#: Of soxr. LQ holds back less than 7 ms at speech rates and is enough for a voice; HQ (20 to 30 ms) is for files.
ResampleQuality: TypeAlias = Literal["QQ", "LQ", "MQ", "HQ", "VHQ"]

#: Shared, therefore read-only.
NO_SAMPLES: Samples = np.zeros(0, dtype=np.float32)
NO_SAMPLES.setflags(write=False)


class StreamResampler:
    """After ``flush`` exactly ``floor(n * target_rate / source_rate + 0.5)`` samples have come out for ``n`` in.

    Values may overshoot ±1.0 a little, as every band-limited resampling does. Equal rates are the identity.
    """

    def __init__(self, source_rate: int, target_rate: int, quality: ResampleQuality = "LQ") -> None:
        self.source_rate = source_rate
        self.target_rate = target_rate
        self._flushed = False
        #: None where there is nothing to do; soxr is not even imported then.
        self._stream: Any = None
        if source_rate != target_rate:
            import soxr

            self._stream = soxr.ResampleStream(source_rate, target_rate, 1, dtype="float32", quality=quality)

    def process(self, samples: Samples) -> Samples:
        if self._flushed:
            raise ValueError("the resampler has been flushed")
        if self._stream is None:
            return samples
        resampled: Samples = self._stream.resample_chunk(np.ascontiguousarray(samples, dtype=np.float32))
        return resampled

    def flush(self) -> Samples:
        """What was held back; the stream ends here. A second call gives nothing."""
        if self._flushed or self._stream is None:
            self._flushed = True
            return NO_SAMPLES
        self._flushed = True
        rest: Samples = self._stream.resample_chunk(NO_SAMPLES, last=True)
        return rest
