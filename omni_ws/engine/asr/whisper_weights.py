"""Where the weights of Whisper are, and whether it can be used here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from omni_ws.errors import EngineFailed
from omni_ws.installing import fetch_command, install_command
from omni_ws.weights import pinned_weights, weights_cache

#: The weights that are pinned, by the names of the models.
PINNED: Final[Mapping[str, str]] = {"tiny.en": "whisper-tiny-en", "base": "whisper-base"}
DEFAULT_MODEL: Final = "tiny.en"


def whisper_problem(model: str = DEFAULT_MODEL) -> str | None:
    """Why Whisper cannot recognise speech here, in a sentence that says what to do; None if it can.

    ``model`` is a name of ``PINNED`` or a folder. Reads weights whole the first time, which takes 0.1 s.
    """
    if find_spec("ctranslate2") is None:
        return f"Whisper needs the package ctranslate2: {install_command('whisper')}"
    try:
        whisper_folder(model)
    except EngineFailed as error:
        return error.message
    return None


def whisper_folder(model: str) -> Path:
    """The folder with the weights of a model, see ``whisper_problem``. Raises EngineFailed. Fetches nothing."""
    name = PINNED.get(model)
    if name is None:
        if (folder := Path(model)).is_dir():
            return folder
        raise EngineFailed(f"there is no folder {model}; Whisper is {', '.join(PINNED)}, or a folder with its files")
    if (found := weights_cache().find(pinned_weights()[name])) is not None:
        return found
    raise EngineFailed(f"the weights of Whisper {model} are not here; fetch them with: {fetch_command(name)}")
