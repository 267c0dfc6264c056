"""Whether a disk has room, found out by writing: a full one still opens new files."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

#: At least what the smallest file takes.
_PROBE_BYTES: Final = 4096


def check_space(folder: Path) -> None:
    """Raises OSError where no file in ``folder`` can be written."""
    with TemporaryFile(dir=folder, buffering=0) as probe:
        probe.write(bytes(_PROBE_BYTES))
