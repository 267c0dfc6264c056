"""The Thinker of a tiny omni model on vLLM, without Talker and vocoder: requests to it, and the items that it emits."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.engine_answers import Answer, Input
from support.tiny_models import MULTIMODAL_ARGS
from support.vllm_engine import request

from omni_ws.core.chunks import OutputModality
from omni_ws.engine.channel import Channel
from omni_ws.engine.decoding import DecodedPart
from omni_ws.engine.omni.step_process import AnswerEnd, AnswerRows, PromptReset, PromptRows, TalkerItem
from omni_ws.engine.threads import MediaRoom, SoleThread
from omni_ws.engine.vllm.checkpoint import read_checkpoint
from omni_ws.engine.vllm.early_input import EarlyBudget
from omni_ws.engine.vllm.language_model import LanguageModel, use_first_model_runner
from omni_ws.engine.vllm.sampling import TokenBytes
from omni_ws.engine.vllm.thinker import Thinker, ThinkerParts
from omni_ws.engine.vllm.thinker_rows import ThinkerRows

ARGS: Mapping[str, Any] = {
    **MULTIMODAL_ARGS,
    # Less than many prompts have.
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "limit_mm_per_prompt": {"audio": 4, "image": 4, "video": 2},
}


@dataclass
class Heard:
    """What a Talker would have got of one answer: the whole prompt and what was spoken."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    marked: NDArray[np.bool_]
    states: NDArray[np.float32]
    spoken: NDArray[np.int64]
    answer_states: NDArray[np.float32]
    text: str
    thinker: Thinker
    items: Sequence[TalkerItem]

    @property
    def skipped_cache(self) -> bool:
        """Whether the prompt was computed again, as rows were missing."""
        assert self.thinker._feed is not None
        return self.thinker._feed.skips_cache


def heard(items: Sequence[TalkerItem], text: str, thinker: Thinker) -> Heard:
    """What the items amount to; they are in their order and whole."""
    *said, end = items
    assert end == AnswerEnd()
    resets = [place for place, item in enumerate(said) if isinstance(item, PromptReset)]
    counted = said[resets[-1] + 1 :] if resets else said
    prompt = [item for item in counted if isinstance(item, PromptRows)]
    answer = [item for item in counted if isinstance(item, AnswerRows)]
    assert [*prompt, *answer] == [*counted], "the prompt comes first"
    for item in prompt:
        assert item.tokens.shape == item.states.shape == item.positions.shape[1:]
        assert len(item.hidden) == item.states.sum()
    return Heard(
        tokens=np.concatenate([item.tokens for item in prompt]),
        positions=np.concatenate([item.positions for item in prompt], axis=1),
        marked=np.concatenate([item.states for item in prompt]),
        states=np.concatenate([item.hidden for item in prompt]),
        spoken=np.concatenate([item.tokens for item in answer] or [np.zeros(0, np.int64)]),
        answer_states=np.concatenate([item.hidden for item in answer] or [np.zeros((0, 0), np.float32)]),
        text=text,
        thinker=thinker,
        items=items,
    )


class DecodedInput(Channel[DecodedPart]):
    """Decoded input that a test writes."""

    def __init__(self, *parts: DecodedPart, open_end: bool = False) -> None:
        super().__init__(math.inf, cost=lambda _: 1)
        for part in parts:
            self.put_nowait(part)
        if not open_end:
            self.close()


async def _run(thinker: Thinker, source: DecodedInput, sink: Channel[Any], answer: Answer) -> None:
    try:
        await thinker.run(source, sink, answer)
    except Exception as error:
        sink.fail(error)
    finally:
        sink.close()


class OmniThinker:
    """A running Thinker."""

    def __init__(self, folder: Path, **args: Any) -> None:
        self.rows = ThinkerRows(json.loads((folder / "config.json").read_text()), kept_bytes=64 << 20)
        self.args = {**ARGS, **args, "model": str(folder), **ThinkerRows.engine_args}
        self.model = LanguageModel("Thinker", self.args, setting="vllm.args", prepare=self.rows.install)
        self.parts: ThinkerParts

    async def start(self) -> None:
        use_first_model_runner()
        await self.rows.channel.start()
        await self.model.start()
        checkpoint = await asyncio.to_thread(read_checkpoint, self.model)
        self.parts = ThinkerParts(
            model=self.model,
            form=checkpoint.form,
            budget=EarlyBudget.of(self.model),
            thread=SoleThread("tokenizer"),
            sampling=checkpoint.sampling,
            sample_rate=checkpoint.sample_rate,
            shortest_segment_ms=3000,
            most_audio=checkpoint.most_audio,
            decoding=ThreadPoolExecutor(2),
            parser=None,
            template_arguments={},
            token_bytes=cache(lambda: TokenBytes(self.model.llm.get_tokenizer())),
            cache_salt=lambda asked: asked.owner,
        )

    async def stop(self) -> None:
        await self.model.stop()
        await self.rows.channel.stop()

    @asynccontextmanager
    async def asked(
        self, source: DecodedInput, *, parser: Any = None, **changes: Any
    ) -> AsyncIterator[tuple[Thinker, Channel[Any], Answer]]:
        """A Thinker that runs, with the channel of its items, and its answer."""
        asked = request(Input(), modalities=frozenset({OutputModality.TEXT, OutputModality.AUDIO}), **changes)
        sink: Channel[Any] = Channel(math.inf, cost=lambda _: 1)
        answer = Answer()
        with MediaRoom().share() as share:
            parts = replace(self.parts, parser=parser)
            thinker = Thinker(parts, asked, writes=True, share=share, rows=self.rows)
            running = asyncio.create_task(_run(thinker, source, sink, answer))
            try:
                yield thinker, sink, answer
            finally:
                running.cancel()
                await asyncio.wait([running])

    async def answer(self, source: DecodedInput, **changes: Any) -> Heard:
        async with self.asked(source, **changes) as (thinker, sink, answer):
            items = [item async for item in sink]
        return heard(items, answer.text, thinker)
