"""Server with token sessions whose engine emits a token every 20 ms, to measure everything around the engine."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Final

from omni_ws.config.model import GrpcConfig, ServerConfig
from omni_ws.core.token_session import TokenImage, VisionTokens
from omni_ws.engine import base
from omni_ws.engine.base import (
    EngineCapabilities,
    ReadoutManifest,
    TokenEvent,
    TokenGeneration,
    TokenOutput,
    TokensFinished,
    TokenStop,
)
from omni_ws.engine.fake import CAPABILITIES, EchoEngine
from omni_ws.server import create_app, serve_tokens

INTERVAL_SEC: Final = 0.02
LAYERS: Final = 3
CONCEPTS: Final = 16
CONTEXT: Final = 1_000_000


class MetronomeEngine(EchoEngine, base.TokenEngine):
    """Emits precomputed tokens and readouts."""

    max_model_len = CONTEXT
    vocabulary_size = 32_000
    vision_tokens: VisionTokens | None = None
    readout_manifest = ReadoutManifest(
        concepts=tuple(f"concept {index}" for index in range(CONCEPTS)),
        layers=tuple(range(LAYERS)),
        hidden_size=768,
        dtype="float16",
    )

    @property
    def tokens(self) -> MetronomeEngine:
        return self

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(CAPABILITIES, token_sessions=True)

    async def check_images(self, images: Sequence[TokenImage]) -> None:
        raise NotImplementedError

    async def generate_tokens(self, generation: TokenGeneration) -> AsyncIterator[TokenEvent]:
        readout = [0.25] * (LAYERS * CONCEPTS) if generation.readout_ranges else ()
        likeliest = tuple((token, -0.5) for token in range(generation.logprob_top_k))
        length = len(generation.tokens)
        clock = asyncio.get_running_loop().time
        due = clock()
        for position in range(length, length + generation.max_tokens):
            due += INTERVAL_SEC
            await asyncio.sleep(max(0.0, due - clock()))
            logprob = -0.5 if generation.logprob_ranges else None
            yield TokenOutput(
                id=7, position=position, is_prefill=False, readout=readout, logprobs=likeliest, logprob=logprob
            )
        yield TokensFinished(TokenStop.LENGTH)


async def serve(port: int) -> None:
    engine = MetronomeEngine()
    await engine.start()
    async with serve_tokens(create_app(engine, ServerConfig(grpc=GrpcConfig(port=port)))) as listener:
        assert listener is not None
        listener.begin()
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(port))
    else:
        uvloop.run(serve(port))


if __name__ == "__main__":
    main()
