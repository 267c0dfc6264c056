"""Opens media files that a request names, confined to one folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from omni_ws.errors import InvalidValue, UnsupportedParameter


def open_below(root: Path | None, path: str) -> BinaryIO:
    """Open the file at ``path``, absolute or relative to ``root``; after resolving links it must be inside ``root``.

    Raises UnsupportedParameter when ``root`` is None. Otherwise raises InvalidValue; for a path outside ``root`` the
    error does not depend on whether the file exists. The caller closes the file.
    """
    if root is None:
        raise UnsupportedParameter("this server reads no files; send a data: URL")
    try:
        folder = root.resolve()
        place = (folder / path).resolve()
        if not place.is_relative_to(folder):
            raise InvalidValue("the path leads out of the folder that files may be read from")
        if not place.is_file():  # reading a pipe might block forever
            raise InvalidValue("there is no such file")
        return open(place, "rb", opener=_open_without_links)  # the caller closes it
    except (OSError, ValueError, RuntimeError):
        raise InvalidValue("there is no such file") from None


def _open_without_links(path: str, flags: int) -> int:
    """Open a resolved path. A link there was created after the check, and is refused."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
