from __future__ import annotations

from omni_ws.config import ServerConfig
from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Task, Usage
from omni_ws.engine.base import (
    EngineCapabilities,
    EngineState,
    Finished,
    GenerationRequest,
    OutputWriter,
    TextOutput,
)


class ShoutingEngine:
    name = model = "shout"
    state = EngineState.OK
    active_requests = 0
    capabilities = EngineCapabilities(
        input_modalities=frozenset({Modality.TEXT}),
        output_modalities=frozenset({OutputModality.TEXT}),
        tasks=frozenset({Task.CHAT}),
        extend=True,
    )

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def describe(self) -> tuple[str, ...]:
        return (f"shouts with {self._mark}",)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        async for chunk in request.input:
            out.write(TextOutput(chunk.payload.decode().upper()))
            await out.drain()
        out.write(TextOutput(self._mark))
        out.write(Finished(FinishReason.STOP, Usage()))


def engine(config: ServerConfig) -> ShoutingEngine:
    return ShoutingEngine(config.plugins.get("shout", {}).get("mark", "!"))
