"""StandInLog: which names of models were asked for that are not served."""

from __future__ import annotations

import logging
from typing import Final

from omni_ws.service.observing.log_lines import write_line

logger = logging.getLogger("omni_ws.model")

#: Names that are written down, and of each so many characters: clients make them up.
MAX_NAMES: Final = 64
MAX_NAME_CHARACTERS: Final = 128


class StandInLog:
    """One line for each name, the first time that it is asked for."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def asked(self, name: str, *, served: str) -> None:
        """``served`` is the model that stands in for ``name``."""
        name = name[:MAX_NAME_CHARACTERS]
        if name in self._names or len(self._names) == MAX_NAMES:
            return
        self._names.add(name)
        last = "; further names are not logged" if len(self._names) == MAX_NAMES else ""
        write_line(logger, logging.INFO, f"asked for a model by another name{last}", asked=name, served=served)
