"""Readout vectors at random, for the tiny models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omni_ws.engine.base import ReadoutManifest
from omni_ws.engine.vllm.readouts import ReadoutVectors

#: Of the tiny text model.
LAYERS = (0, 1)
HIDDEN_SIZE = 128


def random_vectors(concepts: Sequence[str]) -> ReadoutVectors:
    random = np.random.default_rng(5)
    matrices = tuple(random.standard_normal((len(concepts), HIDDEN_SIZE)).astype(np.float32) for _ in LAYERS)
    manifest = ReadoutManifest(concepts=tuple(concepts), layers=LAYERS, hidden_size=HIDDEN_SIZE, dtype="float16")
    return ReadoutVectors(manifest, matrices)
