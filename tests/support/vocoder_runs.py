"""Answers through a vocoder that runs in steps, and how their sound compares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_ws.engine.omni.step_process import StepModel, VocoderInput

Sound = NDArray[np.float32]


def finish(model: StepModel) -> dict[int, list[Sound]]:
    """Step until nothing is left to do; returns what each session got."""
    made: dict[int, list[Sound]] = {}
    while model.busy:
        for session, samples in model.step():
            made.setdefault(session, []).append(samples)
    return made


def decode(model: StepModel, items: Sequence[VocoderInput], session: int = 1, **settings: Any) -> list[Sound]:
    """Decode one answer, item by item."""
    model.open(session, settings)
    made = []
    for item in items:
        model.feed(session, item)
        made += finish(model)[session]
    model.close(session)
    return made


def joined(outputs: Iterable[Sound]) -> Sound:
    return np.concatenate([*outputs])


def difference(sound: Sound, expected: Sound) -> float:
    """Return the largest, in terms of the peak."""
    assert sound.shape == expected.shape
    return float(np.abs(sound - expected).max() / np.abs(expected).max())
