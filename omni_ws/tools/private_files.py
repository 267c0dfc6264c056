"""Small files that only their owner may read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def read_private(path: Path) -> bytes | None:
    """The content; None if the file is missing, or others can read it and its secret may be known. Raises OSError."""
    try:
        with path.open("rb") as file:
            shared = os.name == "posix" and os.fstat(file.fileno()).st_mode & 0o077
            return None if shared else file.read()
    except FileNotFoundError:
        return None


def write_private(path: Path, content: bytes) -> None:
    """Replaces the file as a whole; makes its folder. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent)  # with mode 0600
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
