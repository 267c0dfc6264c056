"""One attempt to fetch: who wants to hear how it goes, and when it is given up."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from omni_ws.weights.error import WeightsError
from omni_ws.weights.lock import PinnedFile, PinnedWeights


@dataclass(frozen=True, slots=True)
class Progress:
    """What is being done for which weights; ``done`` and ``total`` are bytes, where known."""

    name: str
    doing: str
    done: int | None = None
    total: int | None = None


def _unheard(progress: Progress) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True)
class Fetching:
    """``progress`` is called from the fetching thread; setting ``stop`` gives up at the next block."""

    progress: Callable[[Progress], None] = _unheard
    stop: threading.Event = field(default_factory=threading.Event)

    def go_on(self) -> None:
        """Raises WeightsError if the fetch was given up."""
        if self.stop.is_set():
            raise WeightsError("given up")


class WeightsSource(Protocol):
    """A place that may have the files of weights."""

    #: What messages call it.
    name: str

    def fetch(self, weights: PinnedWeights, missing: Sequence[PinnedFile], folder: Path, fetching: Fetching) -> None:
        """Puts the missing files into ``folder``, each whole and verified. Raises WeightsError or OSError.

        Files with a name ending in ``.part`` are kept for the next attempt; one process at a time is in a folder.
        """


def is_pinned(path: Path, file: PinnedFile) -> bool:
    """Whether a file holds exactly the pinned bytes. Reads it whole, unless its size tells."""
    try:
        with path.open("rb") as opened:
            if path.stat().st_size != file.size:
                return False
            return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256
    except (FileNotFoundError, IsADirectoryError):
        return False


def settle(part: Path, file: PinnedFile, folder: Path) -> None:
    """Gives a whole file its name, or removes it and raises WeightsError if it is another file."""
    if not is_pinned(part, file):
        part.unlink()
        raise WeightsError(f"{file.name} is not the file that was pinned")
    part.replace(folder / file.name)
