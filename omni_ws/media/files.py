"""Files that a request may name: those below one folder, and no others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from omni_ws.errors import InvalidValue, UnsupportedParameter


def open_below(root: Path | None, path: str) -> BinaryIO:
    """The file ``path``, absolute or relative to ``root``, in which it must lie, links followed.

    Where it does not, the answer is the same whether there is such a file or not. Raises UnsupportedParameter without
    a root, else InvalidValue.
    """
    if root is None:
        raise UnsupportedParameter("this server reads no files; send a data: URL")
    try:
        folder = root.resolve()
        place = (folder / path).resolve()
        if not place.is_relative_to(folder):
            raise InvalidValue("the path leads out of the folder that files may be read from")
        if not place.is_file():  # a pipe would make everyone wait
            raise InvalidValue("there is no such file")
        return open(place, "rb", opener=_open_without_links)  # the caller closes it
    except (OSError, ValueError, RuntimeError):
        raise InvalidValue("there is no such file") from None


def _open_without_links(path: str, flags: int) -> int:
    """The path was followed to its end: a link there is newer than the check."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
