"""The folder for what can be made or fetched again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """``omni_ws`` in the user's cache folder (XDG Base Directory Specification).

    A user that the system does not know, as in some containers, has its home at ``/``.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):
        return Path(cache) / "omni_ws"
    home = os.path.expanduser("~")
    return Path(home if os.path.isabs(home) else "/") / ".cache" / "omni_ws"
