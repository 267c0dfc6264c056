"""Weights of models: which files they are, and where the same bytes are found (``requirements/weights.lock``).

Synchronous, and slow where something has to be fetched: for worker threads and for commands.
"""

from omni_ws.weights.cache import WeightsCache, fetched_file, weights_cache
from omni_ws.weights.error import WeightsError
from omni_ws.weights.fetching import Fetching, Progress, WeightsSource
from omni_ws.weights.installed import InstalledSource
from omni_ws.weights.lock import PinnedFile, PinnedWeights, PinnedWheel, pinned_weights, read_lock
from omni_ws.weights.official import OfficialSource
from omni_ws.weights.packages import PackageSource

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
