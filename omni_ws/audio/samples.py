"""The in-memory form of audio that decoders, engines and encoders share."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

#: Mono audio: float32 of shape (samples,), from -1.0 to 1.0. The sample rate is known from the context.
Samples: TypeAlias = NDArray[np.float32]
#: The same as 16-bit integers, of which 32768 would be 1.0: what many voices make, and most clients ask for.
Pcm16: TypeAlias = NDArray[np.int16]


class SourceBlock(NamedTuple):
    """Decoded mono audio with its sample rate in Hz."""

    samples: Samples
    sample_rate: int
