"""What readouts cost while a model decodes, and what it costs to ask for them where everything is in the cache."""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Final

import numpy as np
from support.tiny_models import ENGINE_ARGS, build_larger_text_model

from benchmarks.vllm_parts.report import Report, Size, median_ratio, milliseconds
from omni_ws.config.model import VllmConfig
from omni_ws.core.token_ranges import TokenRanges
from omni_ws.engine.tokens import ReadoutManifest, TokenGeneration, TokenOutput, TokenSampling
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.readout_vectors import ReadoutVectors
from omni_ws.engine.vllm.readouts import Readouts

LAYERS: Final = (1, 4, 7)
CONCEPTS: Final = 16
HIDDEN: Final = 768
MOST_COST: Final = 0.10
PROMPT: Final = 64
DECODED: Final = 128
LONG: Final = 1600
EVERYWHERE: Final = TokenRanges([(0, 2**32 - 1)])
NOWHERE: Final = TokenRanges()


async def measure(report: Report, size: Size, models: Path) -> None:
    model = build_larger_text_model(models / "larger")
    async with AsyncExitStack() as stack:
        off = await stack.enter_async_context(_engine(model, None))
        on = await stack.enter_async_context(_engine(model, Readouts(_vectors())))
        for streams in (1, 8):
            await _decoding(report, size, {"off": off, "on": on}, streams)
        await _prefill(report, size, on)


async def _decoding(report: Report, size: Size, engines: dict[str, VllmEngine], streams: int) -> None:
    ways: dict[str, Callable[[], Awaitable[float]]] = {
        "no readouts in the engine (eager as well)": lambda: _decode_all(engines["off"], NOWHERE, streams),
        "readouts on, none asked for": lambda: _decode_all(engines["on"], NOWHERE, streams),
        "readouts on, of every token": lambda: _decode_all(engines["on"], EVERYWHERE, streams),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        await way()
    for turn in range(2 * size.rounds):
        names = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for name in names:
            times[name].append(await ways[name]())
    report.table(
        f"{len(LAYERS)} layers × {CONCEPTS} concepts, {streams} at a time: time of a decoded token, in turns",
        *("engine", "n", "ms a token", "cost, median of the pairs"),
    )
    first, *_ = baseline = times.pop(next(iter(ways)))
    assert first
    report.row(next(iter(ways)), str(len(baseline)), milliseconds(baseline), "")
    for name, values in times.items():
        cost = median_ratio(values, baseline) - 1
        report.row(
            name, str(len(values)), milliseconds(values), f"{cost:+.1%}; ≤ {MOST_COST:.0%}", met=cost <= MOST_COST
        )


async def _prefill(report: Report, size: Size, engine: VllmEngine) -> None:
    times: dict[str, list[float]] = {
        "readouts of all, nothing cached": [],
        "the same again": [],
        "without readouts": [],
    }
    for turn in range(size.rounds):
        tokens = [(index * 37 + turn) % 250 + 1 for index in range(LONG)]
        for name, ranges in zip(times, (EVERYWHERE, EVERYWHERE, NOWHERE), strict=True):
            began = time.perf_counter()
            await _run(engine, tokens, ranges, 0)
            times[name].append(time.perf_counter() - began)
    report.table(f"A list of {LONG} tokens, in this order", "call", "n", "ms")
    for name, values in times.items():
        report.row(name, str(len(values)), milliseconds(values))


async def _decode_all(engine: VllmEngine, ranges: TokenRanges, streams: int) -> float:
    """Seconds a decoded token, from the first of a stream to its last; the mean of the streams."""
    prompts = [[(index * 11 + number) % 250 + 1 for index in range(PROMPT)] for number in range(streams)]
    return statistics.mean(await asyncio.gather(*(_run(engine, prompt, ranges, DECODED) for prompt in prompts)))


async def _run(engine: VllmEngine, tokens: Sequence[int], ranges: TokenRanges, decoded: int) -> float:
    asked = TokenGeneration(
        request_id=uuid.uuid4().hex,
        tokens=tokens,
        images=(),
        max_tokens=decoded,
        sampling=TokenSampling(top_k=1),
        readout_ranges=ranges if not decoded or not ranges else TokenRanges([(len(tokens), 2**32 - 1)]),
    )
    times: list[float] = []
    async with aclosing(engine.tokens.generate_tokens(asked)) as events:
        async for event in events:
            if isinstance(event, TokenOutput):
                if ranges and len(event.readout) != len(LAYERS) * CONCEPTS:
                    raise RuntimeError("a token has no readout")
                times.append(time.perf_counter())
    if decoded and len(times) < decoded:
        raise RuntimeError("the answer ended early")
    return (times[-1] - times[0]) / (len(times) - 1) if decoded else 0.0


def _vectors() -> ReadoutVectors:
    random = np.random.default_rng(1)
    matrices = tuple(random.standard_normal((CONCEPTS, HIDDEN)).astype(np.float32) for _ in LAYERS)
    names = tuple(f"concept {index}" for index in range(CONCEPTS))
    return ReadoutVectors(ReadoutManifest(concepts=names, layers=LAYERS, hidden_size=HIDDEN, dtype="float16"), matrices)


@asynccontextmanager
async def _engine(model: Path, readouts: Readouts | None) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(
        VllmConfig(model=str(model), args={**ENGINE_ARGS, "kv_cache_memory_bytes": 256 << 20}), readouts=readouts
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
