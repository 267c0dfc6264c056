"""Checks for free disk space by writing, since a full disk still opens new files."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

#: At least the size of a block, so that the probe needs one.
_PROBE_BYTES: Final = 4096


def check_space(folder: Path) -> None:
    """Raise OSError if no file in ``folder`` can be written."""
    with TemporaryFile(dir=folder, buffering=0) as probe:
        probe.write(bytes(_PROBE_BYTES))
