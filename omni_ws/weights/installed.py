"""Weights out of packages that are installed beside the server."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from omni_ws.weights.fetching import Fetching, is_pinned, settle
from omni_ws.weights.lock import PinnedFile, PinnedWeights


class InstalledSource:
    """Copies files that are among those of installed packages and have the pinned bytes. Transfers nothing."""

    name = "installed"

    def fetch(self, weights: PinnedWeights, missing: Sequence[PinnedFile], folder: Path, fetching: Fetching) -> None:
        for file in missing:
            if len(file.members) != 1:
                continue
            places = (Path(place) / file.members[0] for place in sys.path)
            if (found := next((path for path in places if _holds(path, file)), None)) is not None:
                part = folder / f"{file.name}.part"
                shutil.copyfile(found, part)
                settle(part, file, folder)


def _holds(path: Path, file: PinnedFile) -> bool:
    """Whether the pinned bytes are there. A part of the path may be a file: an archive, or a program of that name."""
    try:
        return is_pinned(path, file)
    except OSError:
        return False
