"""The one in-memory form of audio."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

#: One channel of audio, shape (samples,), float32, -1.0 … 1.0.
Samples: TypeAlias = NDArray[np.float32]
