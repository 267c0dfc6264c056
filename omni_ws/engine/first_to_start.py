"""FirstToStart: an engine that stands for the best of several engines that starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from omni_ws.engine.base import Engine, EngineCapabilities, EngineState, GenerationRequest, OutputWriter
from omni_ws.errors import EngineFailed

logger = logging.getLogger(__name__)


class FirstToStart:
    """An engine that stands for the first of several ``engines`` that starts on this machine.

    ``engines`` maps names for the operator to engines, the best first. After the start, ``why`` is the reason why the
    best engine is not used; None if it is.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = dict(engines)
        self.engine = next(iter(self._engines.values()))
        self.name = self.engine.name
        self.model = self.engine.model
        self.why: str | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return self.engine.capabilities

    @property
    def state(self) -> EngineState:
        return self.engine.state

    @property
    def active_requests(self) -> int:
        return self.engine.active_requests

    def describe(self) -> tuple[str, ...]:
        return (*self.engine.describe(), *filter(None, [self.why]))

    async def start(self) -> None:
        """Start the first engine that starts. Idempotent. Raises the error of the last engine if none does."""
        if self.state is not EngineState.STARTING:
            return
        best, last = next(iter(self._engines)), next(reversed(self._engines))
        reasons = []
        for name, engine in self._engines.items():
            self.engine = engine
            try:
                await engine.start()
                break
            except Exception as error:
                await engine.stop()
                if name == last:
                    raise
                if not isinstance(error, EngineFailed):
                    logger.warning("%s does not start", name, exc_info=error)
                reasons.append(error.message if isinstance(error, EngineFailed) else f"{type(error).__name__}: {error}")
        self.name, self.model = self.engine.name, self.engine.model
        self.why = f"{name} instead of {best}: {'; '.join(reasons)}" if reasons else None

    async def stop(self) -> None:
        await self.engine.stop()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        await self.engine.generate(request, out)
