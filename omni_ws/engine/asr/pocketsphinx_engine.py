"""PocketSphinxEngine: speech recognition with PocketSphinx and its packaged model of American English."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

from omni_ws.engine.asr.pocketsphinx_recogniser import PocketSphinxRecogniser
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.cores import cores

#: Utterances that are written down at the same time: one a core, up to so many.
MAX_SCRIBES: Final = 8


class PocketSphinxEngine(RecogniserEngine):
    """``warm_recognisers`` are loaded at the start. Each of ``max_recognisers`` takes 90 MB while someone speaks."""

    def __init__(
        self,
        *,
        max_recognisers: int | None = None,
        warm_recognisers: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        scribes = min(cores(), MAX_SCRIBES)
        super().__init__(
            "pocketsphinx",
            partial(
                PocketSphinxRecogniser, warm=min(warm_recognisers, max_recognisers or warm_recognisers), scribes=scribes
            ),
            model="en-us",
            languages=frozenset({"en"}),
            max_talkers=max_recognisers,
            clock=clock,
        )
