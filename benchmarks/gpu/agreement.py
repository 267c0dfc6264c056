"""Whether a device computes what the CPU does: tiny shapes, the same weights, float32."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.conversations import answer, ask
from benchmarks.gpu.models import load_talker, load_vocoder
from benchmarks.gpu.shapes import Family, omni_shape
from omni_ws.engine.omni.step_process import VocoderInput

_FRAMES = 24


def equal_codes(family: Family, device: str, *, sessions: int = 3) -> float:
    """Return the share of the frames of greedy answers that are equal, up to the first that differs of each."""
    here, there = (_greedy(family, each, sessions) for each in ("cpu", device))
    equal = sum(_common(one, other) for one, other in zip(here, there, strict=True))
    return equal / sum(len(codes) for codes in here)


def sound_error(family: Family, device: str, *, frames: int = 40) -> float:
    """Return the largest difference between the sounds of the same codes, relative to the peak."""
    here, there = (_sound(family, each, frames) for each in ("cpu", device))
    return float(np.abs(here - there).max() / np.abs(here).max())


def _greedy(family: Family, device: str, sessions: int) -> list[NDArray[np.int64]]:
    shape = omni_shape(family, tiny=True)
    # Weights are made on the CPU, lest the device draw others.
    talker = load_talker(shape, device, torch.float32, slots=sessions, longest=512, made_on="cpu")
    if device != "cpu":
        # Graphs are to agree too.
        talker.warm_up()
    ask(talker, shape, sessions, temperature=0.0)
    answer(talker, shape, sessions, frames=_FRAMES)
    made: list[list[NDArray[np.int64]]] = [[] for _ in range(sessions)]
    while talker.busy:
        for session, item in talker.step():
            made[session].append(item.codes)
    return [np.concatenate(codes) for codes in made]


def _common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Return how many frames are equal before the first that differs."""
    count = min(len(one), len(other))
    different = np.flatnonzero((one[:count] != other[:count]).any(axis=1))
    return int(different[0]) if len(different) else count


def _sound(family: Family, device: str, frames: int) -> NDArray[np.float32]:
    shape = omni_shape(family, tiny=True)
    vocoder = load_vocoder(shape, device, slots=1, made_on="cpu")
    if device != "cpu":
        vocoder.warm_up()
    codebooks = 16 if family is Family.QWEN3 else 1
    codes = np.random.default_rng(0).integers(0, 2_048, (frames, codebooks))
    vocoder.open(0, {})
    vocoder.feed(0, VocoderInput(codes, last=True))
    samples = []
    while vocoder.busy:
        samples += [made for _, made in vocoder.step()]
    return np.concatenate(samples)
