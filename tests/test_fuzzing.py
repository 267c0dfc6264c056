"""The fuzzing targets hold for their own seeds; exploring from there needs the fuzzer (fuzzing/README.md)."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "fuzzing"
TARGETS = sorted(path.stem for path in FOLDER.glob("fuzz_*.py"))


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(request.param)


def test_there_are_targets() -> None:
    assert len(TARGETS) >= 4


def test_a_target_holds_for_its_seeds(target: Any) -> None:
    seeds = list(target.seeds())
    assert len(seeds) > 4
    for seed in seeds:
        target.check(seed)


def test_a_target_holds_for_what_fuzzing_found(target: Any, request: pytest.FixtureRequest) -> None:
    found = list(target.harness.kept(target.__name__))
    assert len(found) > 4
    for one in found:
        target.check(one)


def test_a_target_holds_for_damaged_seeds(target: Any) -> None:
    chance = random.Random(1)
    for seed in target.seeds():
        damaged = bytearray(seed)
        for _ in range(3):
            place = chance.randrange(len(damaged) + 1)
            damaged[place : place + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
            target.check(bytes(damaged))
