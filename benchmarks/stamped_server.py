"""omni_ws with the fake engine, whose first token of each answer carries the time of its creation."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import uvloop
from msgspec import structs

from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.engine.base import EngineOutput, GenerationRequest, OutputSink, TextOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings
from omni_ws.server import create_app, listen


class StampingEngine(EchoEngine):
    """Replaces the first word by ``@`` and the monotonic time, which all processes share."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        stamps = _Stamps(request.sink)
        async with aclosing(super().generate(replace(request, sink=stamps))) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                yield stamps.yielded(output)


class _Stamps:
    """Stamps the first text of an answer on its way to ``sink``."""

    def __init__(self, sink: OutputSink) -> None:
        self._sink = sink
        self._done = False

    def offer(self, output: EngineOutput) -> bool:
        taken = self._sink.offer(output if self._done else _stamped(output))
        self._done |= taken and isinstance(output, TextOutput)
        return taken

    def yielded(self, output: EngineOutput) -> EngineOutput:
        """Return an output that was not taken."""
        if self._done:
            return output
        self._done = isinstance(output, TextOutput)
        return _stamped(output)


def _stamped(output: EngineOutput) -> EngineOutput:
    return structs.replace(output, text=f"@{time.monotonic_ns()}") if isinstance(output, TextOutput) else output


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interval-ms", type=int, required=True)
    parser.add_argument("--first-ms", type=int, required=True)
    options = parser.parse_args()
    engine = StampingEngine(EchoSettings(first_chunk_delay_ms=options.first_ms, chunk_interval_ms=options.interval_ms))
    await engine.start()
    async with listen(create_app(engine, ServerConfig(port=options.port, engine=EngineName.FAKE))):
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
