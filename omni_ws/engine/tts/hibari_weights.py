"""Whether this machine has what the voice hibari needs, and the file it speaks from. Loads none of its packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from omni_ws.audio.vad import PACKAGE as RUNTIME
from omni_ws.engine.tts.synthesiser import NoVoice
from omni_ws.installing import fetch_command, install_command
from omni_ws.weights import fetched_file

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
    if not installed or not all(map(find_spec, ("hibari", RUNTIME))):
        raise NoVoice(f"its packages are not installed: {install_command('hibari')}")
    if installed != VERSION:
        raise NoVoice(f"it needs hibari-tts {VERSION}, and {installed} is installed: {install_command('hibari')}")
    if file is not None:
        if not file.is_file():
            raise NoVoice(f"there is no file {file}")
        return file
    if (fetched := fetched_file("hibari")) is None:
        raise NoVoice(f"its weights are not on this machine: {fetch_command('hibari')}")
    return fetched
