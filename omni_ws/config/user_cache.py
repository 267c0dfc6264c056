"""The folder for what can be made or fetched again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """``omni_ws`` in the user's cache folder (XDG Base Directory Specification)."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path("~/.cache").expanduser()) / "omni_ws"
