"""The files that the server gives to browsers."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path


def folders() -> tuple[Traversable, Traversable]:
    """Return the folders of the pages and of the client library, in the installed package or in the repository."""
    packaged = resources.files(__name__)
    if packaged.joinpath("browser").is_dir():
        return packaged.joinpath("browser"), packaged
    repository = Path(__file__).parents[2]
    return repository / "examples" / "browser", repository / "clients" / "js"
