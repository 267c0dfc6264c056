"""An engine whose outputs come when a test lets them, in whatever server a request is answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from functools import partial

from support.engine_answers import written

from omni_ws.engine.base import Finished, GenerationRequest, OutputWriter, TextOutput
from omni_ws.engine.fake import EchoEngine


class Reins:
    """How many outputs each request may have so far, in whatever server it is answered."""

    def __init__(self) -> None:
        self.loose = True
        self._allowed: Counter[str] = Counter()
        self._changed = asyncio.Event()

    def allow(self, request_id: str, outputs: int) -> None:
        self._allowed[request_id] += outputs
        self._pull()

    def let_go(self) -> None:
        self.loose = True
        self._pull()

    def _pull(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, request_id: str, output: int) -> None:
        while not self.loose and output >= self._allowed[request_id]:
            await self._changed.wait()


class ReinedEngine(EchoEngine):
    """Says what it sees of the history, then echoes its input, each output when it may."""

    def __init__(self, reins: Reins) -> None:
        super().__init__()
        self._reins = reins

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        seen = "".join(f"{message.role}: {message.text}/" for message in request.history)
        made = 0
        async with aclosing(written(partial(super().generate, request))) as outputs:
            await self._reins.until(request.request_id, made)
            out.write(TextOutput(f"<{seen}>"))
            async for output in outputs:
                if not isinstance(output, Finished):
                    made += 1
                    await self._reins.until(request.request_id, made)
                out.write(output)
                await out.drain()
