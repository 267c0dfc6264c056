"""Weights of models: which files they are, and where the same bytes are found (``requirements/weights.lock``).

Synchronous, and slow where something has to be fetched: for worker threads and for commands.
"""

from omni_ws.weights.cache import WeightsCache, fetched_file, weights_cache
from omni_ws.weights.lock import PinnedFile, PinnedWeights, PinnedWheel, WeightsError, pinned_weights, read_lock
from omni_ws.weights.sources import Fetching, InstalledSource, OfficialSource, PackageSource, Progress, WeightsSource

__all__ = [
    "Fetching",
    "InstalledSource",
    "OfficialSource",
    "PackageSource",
    "PinnedFile",
    "PinnedWeights",
    "PinnedWheel",
    "Progress",
    "WeightsCache",
    "WeightsError",
    "WeightsSource",
    "fetched_file",
    "pinned_weights",
    "read_lock",
    "weights_cache",
]
