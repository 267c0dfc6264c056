"""omni_ws with engines for event streams alone: one stamps its first token, one sleeps in a task for each token."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Final

import uvloop
from msgspec import structs

from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.core.chunks import FinishReason, Usage
from omni_ws.engine.base import EngineOutput, Finished, GenerationRequest, OutputFilter, OutputWriter, TextOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings
from omni_ws.server import create_app, listen


class StampingEngine(EchoEngine):
    """Replaces the first word by ``@`` and the monotonic time, which all processes share."""

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        await super().generate(request, _Stamps(out))


class _Stamps(OutputFilter):
    """Stamps the first text of an answer."""

    def __init__(self, out: OutputWriter) -> None:
        super().__init__(out)
        self._done = False

    def write(self, output: EngineOutput) -> None:
        if not self._done:
            self._done = isinstance(output, TextOutput)
            output = _stamped(output)
        self._out.write(output)


def _stamped(output: EngineOutput) -> EngineOutput:
    return structs.replace(output, text=f"@{time.monotonic_ns()}") if isinstance(output, TextOutput) else output


class SleepingEngine(EchoEngine):
    """Echoes text like the fake engine, but in a task that sleeps for each word, as the peers do."""

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        text = b"".join([chunk.payload async for chunk in request.input]).decode()
        words = text.split()
        delay_ms = self.settings.first_chunk_delay_ms
        for word in words:
            await asyncio.sleep(delay_ms / 1000)
            delay_ms = self.settings.chunk_interval_ms
            output = TextOutput(f"{word} ")
            out.write(output)
            await out.drain()
        out.write(Finished(FinishReason.STOP, Usage(output_tokens=len(words))))


ENGINES: Final = {"stamping": StampingEngine, "sleeping": SleepingEngine}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interval-ms", type=int, required=True)
    parser.add_argument("--first-ms", type=int, required=True)
    options = parser.parse_args()
    settings = EchoSettings(first_chunk_delay_ms=options.first_ms, chunk_interval_ms=options.interval_ms)
    engine = ENGINES[options.engine](settings)
    await engine.start()
    async with listen(create_app(engine, ServerConfig(port=options.port, engine=EngineName.FAKE))):
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
