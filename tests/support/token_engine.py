"""An engine with token sessions whose every number follows from the tokens, and that can be held up and broken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

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
from omni_ws.errors import ContextLengthExceeded, InvalidValue

VOCABULARY = 1000
EOS = 0
START, PAD, END = 990, 991, 992
LAYERS, CONCEPTS = (1, 3), ("warm", "loud", "round")


def next_token(tokens: Sequence[int]) -> int:
    return (tokens[-1] * 7 + len(tokens)) % 900


def logprob(token: int, position: int) -> float:
    return -((token + position) % 16) / 16 - 0.0625


def readout(token: int, position: int) -> list[float]:
    return [token + 0.25 * layer + 0.5 * concept for layer in range(len(LAYERS)) for concept in range(len(CONCEPTS))]


class TokenEngine(EchoEngine, base.TokenEngine):
    """Features of an image: as many as it has bytes.

    ``gate`` closed holds up every output after the first, with ``holds_first`` that one too.
    """

    def __init__(self, *, max_model_len: int = 64, readouts: bool = True) -> None:
        super().__init__()
        self.max_model_len = max_model_len
        self.vocabulary_size = VOCABULARY
        self.vision_tokens: VisionTokens | None = VisionTokens(START, PAD, END)
        self.readout_manifest = (
            ReadoutManifest(concepts=CONCEPTS, layers=LAYERS, hidden_size=32, dtype="float16")
            if readouts
            else ReadoutManifest()
        )
        self.gate = asyncio.Event()
        self.gate.set()
        self.holds_first = False
        self.waiting = asyncio.Event()
        self._ended = asyncio.Event()
        self.calls: list[TokenGeneration] = []
        self.fail_with: BaseException | None = None
        self.fail_after = 0

    async def idle(self) -> None:
        """Waits until no call is left."""
        while self.active_requests:
            self._ended.clear()
            await self._ended.wait()

    @property
    def tokens(self) -> TokenEngine:
        return self

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(CAPABILITIES, token_sessions=True)

    async def check_images(self, images: Sequence[TokenImage]) -> None:
        for index, image in enumerate(images):
            if len(image.data) != image.features:
                raise InvalidValue(
                    f"the model makes {len(image.data)} features of it, not {image.features}", param=f"images[{index}]"
                )

    async def generate_tokens(self, generation: TokenGeneration) -> AsyncIterator[TokenEvent]:
        self.calls.append(generation)
        self.active_requests += 1
        try:
            sent = 0
            async for event in self._events(generation):
                if self.fail_with is not None and sent == self.fail_after:
                    raise self.fail_with
                if (sent or self.holds_first) and not self.gate.is_set():
                    self.waiting.set()
                    await self.gate.wait()
                sent += 1
                yield event
        finally:
            self.active_requests -= 1
            self._ended.set()

    async def _events(self, generation: TokenGeneration) -> AsyncIterator[TokenEvent]:
        tokens = list(generation.tokens)
        if len(tokens) >= self.max_model_len:
            raise ContextLengthExceeded("the list is full")
        for position, token in enumerate(tokens):
            if position in generation.logprob_ranges or position in generation.readout_ranges:
                yield self._output(generation, token, position, is_prefill=True)
        for _ in range(generation.max_tokens):
            token = next_token(tokens)
            yield self._output(generation, token, len(tokens), is_prefill=False)
            tokens.append(token)
            if token == EOS or token in generation.sampling.stop_token_ids:
                yield TokensFinished(TokenStop.EOS)
                return
        yield TokensFinished(TokenStop.LENGTH)

    def _output(self, generation: TokenGeneration, token: int, position: int, *, is_prefill: bool) -> TokenOutput:
        scored = position in generation.logprob_ranges and position > 0
        return TokenOutput(
            id=token,
            position=position,
            is_prefill=is_prefill,
            readout=readout(token, position) if position in generation.readout_ranges else (),
            logprobs=tuple((other, -0.5 - other) for other in range(generation.logprob_top_k)) if scored else (),
            logprob=logprob(token, position) if scored else None,
        )
