"""Talkers and vocoders in simulated time: a StepModel on the loop of a test, whose steps take as long as it is said."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_ws.engine.omni.step_model import Codes, LoadedModel, TalkerItem, VocoderInput


class TimedModel:
    """In place of a StepProcess; ``step_ms`` is how long a step takes. Entering it starts its work."""

    def __init__(self, loaded: LoadedModel, *, step_ms: float) -> None:
        self.model, self.facts = loaded
        #: What the model has made, by session.
        self._made: dict[int, asyncio.Queue[Any]] = {}
        self._step_ms = step_ms
        self._changed = asyncio.Event()
        self._numbers = itertools.count()

    @property
    def ms_per_frame(self) -> float:
        return 0.0

    async def __aenter__(self) -> Any:
        self._working = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._working.cancel()
        await asyncio.gather(self._working, return_exceptions=True)

    @asynccontextmanager
    async def open(self, settings: Mapping[str, Any]) -> AsyncIterator[_TimedSession]:
        number = next(self._numbers)
        self.model.open(number, settings)
        self._made[number] = asyncio.Queue()
        try:
            yield _TimedSession(self, number)
        finally:
            self.model.close(number)
            del self._made[number]

    async def _work(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self.model.busy:
                results = self.model.step()
                await asyncio.sleep(self._step_ms / 1000)
                for session, item in results:
                    if session in self._made:
                        self._made[session].put_nowait(item)


class _TimedSession:
    """In place of a StepSession."""

    def __init__(self, owner: TimedModel, number: int) -> None:
        self._owner = owner
        self._number = number

    async def feed(self, item: TalkerItem | VocoderInput) -> None:
        self._owner.model.feed(self._number, item)
        self._owner._changed.set()

    def grant(self, frames: int) -> None:
        self._owner.model.grant(self._number, frames)
        self._owner._changed.set()

    async def decode(self, item: VocoderInput) -> NDArray[np.float32]:
        await self.feed(item)
        made: NDArray[np.float32] = await self._owner._made[self._number].get()
        return made

    async def __aiter__(self) -> AsyncIterator[Codes]:
        while True:
            codes: Codes = await self._owner._made[self._number].get()
            yield codes
            if codes.end is not None:
                return
