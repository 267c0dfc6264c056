"""A LanguageModel without a model: it keeps what it reads, and goes on when a test lets it.

It sends media once, as vLLM does: a prompt whose media were processed before for one that never arrived fails, unless
they were forgotten.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput

from omni_ws.errors import EngineFailed


@dataclass
class ScriptedModel:
    """``broken_step`` is the number of a step before the end of the input that vLLM gives up."""

    context: int = 10_000
    block: int = 4
    broken_step: int | None = None
    #: The prompt that was answered: its tokens, and the media in it.
    read: tuple[list[int], list[Any]] | None = None
    open_requests: int = 0
    #: Steps that wait until the test lets them be computed.
    steps: deque[asyncio.Future[None]] = field(default_factory=deque)
    _early_steps: int = 0
    #: Media that the sending half of vLLM believes to be there, and those that are.
    _sent: list[Any] = field(default_factory=list)
    _arrived: list[Any] = field(default_factory=list)

    @property
    def llm(self) -> Any:
        return SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=self.context, get_vocab_size=lambda: 1 << 20),
            vllm_config=SimpleNamespace(cache_config=SimpleNamespace(block_size=self.block)),
        )

    async def render(self, prompt: Mapping[str, Any]) -> Any:
        items = [value for values in prompt.get("multi_modal_data", {}).values() for value in values]
        known = [any(item is other for other in self._sent) for item in items]
        self._sent += items
        return {"prompt_token_ids": prompt["prompt_token_ids"], "media": list(zip(items, known, strict=True))}

    async def forget_media(self) -> None:
        self._sent.clear()

    def generate(self, prompt: Any, params: Any, request_id: str, *, priority: int = 0) -> ScriptedOutputs:
        return ScriptedOutputs(self._generate(prompt, params, request_id))

    async def _generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        tokens: list[int] = []
        media: list[Any] = []
        self.open_requests += 1
        try:
            async for piece, wanted in _pieces(prompt, params):
                self._take(piece, media)
                tokens += piece["prompt_token_ids"]
                computed = asyncio.get_running_loop().create_future()
                self.steps.append(computed)
                await computed
                reason = "length"
                if wanted.max_tokens == 1:
                    self._early_steps += 1
                    reason = "abort" if self._early_steps == self.broken_step else "length"
                else:
                    self.read = (list(tokens), list(media))
                yield _output(request_id, tokens, reason)
                if reason == "abort":
                    return
        finally:
            self.open_requests -= 1

    def _take(self, piece: Mapping[str, Any], media: list[Any]) -> None:
        for item, known in piece["media"]:
            if known and not any(item is other for other in self._arrived):
                raise EngineFailed("an image was left out because it was sent before, and it never arrived")
            self._arrived.append(item)
            media.append(item)


class ScriptedOutputs(AsyncIterator[RequestOutput]):
    """Outputs that all pass through the iteration."""

    def __init__(self, outputs: AsyncGenerator[RequestOutput, None]) -> None:
        self.arrived = False
        self._outputs = outputs

    def hand_to(self, consume: object) -> None:
        pass

    def expect_output(self) -> None:
        self.arrived = False

    async def __anext__(self) -> RequestOutput:
        output = await anext(self._outputs)
        self.arrived = True
        return output

    async def aclose(self) -> None:
        await self._outputs.aclose()


async def _pieces(prompt: Any, params: Any) -> AsyncGenerator[tuple[Mapping[str, Any], Any], None]:
    if isinstance(prompt, Mapping):
        yield prompt, params
        return
    async for piece in prompt:
        yield piece.prompt, piece.sampling_params


def _output(request_id: str, tokens: list[int], reason: str) -> RequestOutput:
    said = CompletionOutput(0, "x", [0], None, None, finish_reason=reason)
    return RequestOutput(request_id, None, list(tokens), None, [said], finished=False)


class SteppedExecutor(Executor):
    """One thread that a test moves on: calls wait in ``calls`` until they are let run, in their order."""

    idle = False

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*arguments, **keywords))
            except Exception as error:
                future.set_exception(error)

        self.calls.append(run)
        return future
