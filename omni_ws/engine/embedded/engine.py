"""EmbeddedEngine: it hears, answers by rules, and speaks, with nothing but packages on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from omni_ws.engine.asr.pocketsphinx_engine import PocketSphinxEngine
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.embedded.config import EmbeddedConfig
from omni_ws.engine.llm.rules_engine import RulesEngine
from omni_ws.engine.tts.synthesis_engine import SynthesisEngine


class EmbeddedEngine(ComposedEngine):
    """Deterministic: the same input gives the same text."""

    def __init__(
        self,
        config: EmbeddedConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        config = config or EmbeddedConfig()
        self.asr = PocketSphinxEngine(
            max_recognisers=config.max_recognisers, warm_recognisers=config.warm_recognisers, clock=clock
        )
        self.tts = SynthesisEngine(config.voice, default_voice=config.default_voice)
        self.llm = RulesEngine(now=now)
        super().__init__(self.llm, asr=self.asr, tts=self.tts, name="embedded", model=config.model)
