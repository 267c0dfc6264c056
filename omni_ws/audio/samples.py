"""The one in-memory form of audio."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

#: One channel of audio, shape (samples,), float32, -1.0 … 1.0.
Samples: TypeAlias = NDArray[np.float32]


class SourceBlock(NamedTuple):
    """Decoded audio at the rate of its source, in Hz."""

    samples: Samples
    sample_rate: int
