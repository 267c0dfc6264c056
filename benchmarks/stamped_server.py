"""omni_ws with the fake engine, whose first token of each answer carries the time of its creation."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import uvloop

from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.engine.base import EngineOutput, GenerationRequest, TextOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings
from omni_ws.server import create_app, listen


class StampingEngine(EchoEngine):
    """Replaces the first word by ``@`` and the monotonic time, which all processes share."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        stamped = False
        async with aclosing(super().generate(request)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                if not stamped and isinstance(output, TextOutput):
                    stamped, output = True, replace(output, text=f"@{time.monotonic_ns()}")
                yield output


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
