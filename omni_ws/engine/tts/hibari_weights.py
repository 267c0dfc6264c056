"""Whether this machine has what the voice hibari needs, and the file it speaks from. Loads none of its packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from omni_ws.engine.tts.synthesiser import NoVoice
from omni_ws.installing import install_command, this_python
from omni_ws.weights import pinned_weights, weights_cache

#: Its network and its rules are no interface: another version may not fit.
VERSION: Final = "0.2.1"


def hibari_file(file: Path | None = None) -> Path:
    """Return the file of the voice: ``file``, else the one in the cache of weights. Fetches nothing.

    Blocks: it reads the file whole where it has not been seen before. Raises NoVoice, which says what to do.
    """
    try:
        installed = version("hibari-tts")
    except PackageNotFoundError:
        installed = ""
    if not installed or find_spec("onnxruntime") is None:
        raise NoVoice(f"its packages are not installed: {install_command('hibari')}")
    if installed != VERSION:
        raise NoVoice(f"it needs hibari-tts {VERSION}, and {installed} is installed: {install_command('hibari')}")
    if file is not None:
        if not file.is_file():
            raise NoVoice(f"there is no file {file}")
        return file
    weights = pinned_weights()["hibari"]
    folder = weights_cache().find(weights)
    if folder is None:
        raise NoVoice(f"its weights are not on this machine: {this_python()} -m omni_ws weights fetch hibari")
    return folder / weights.files[0].name


def why_no_hibari(file: Path | None = None) -> str:
    """Return why hibari cannot speak here, with what to do; empty where it can. Blocks like ``hibari_file``."""
    try:
        hibari_file(file)
    except NoVoice as reason:
        return str(reason)
    return ""
