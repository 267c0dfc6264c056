"""Cost of readouts while a model decodes, and of readouts of a prompt that is in the prefix cache."""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Final

import numpy as np
from support.tiny_models import ENGINE_ARGS, build_text_model

from benchmarks.vllm_parts.report import Report, Size, median_ratio, milliseconds
from omni_ws.config.model import VllmConfig
from omni_ws.core.token_session import TokenRanges
from omni_ws.engine.base import ReadoutManifest, TokenGeneration, TokenOutput, TokenSampling
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.readouts import Readouts, ReadoutVectors

LAYERS: Final = (1, 4, 7)
CONCEPTS: Final = 16
HIDDEN: Final = 768
MOST_COST: Final = 0.10
PROMPT: Final = 64
DECODED: Final = 128
LONG: Final = 1600
EVERYWHERE: Final = TokenRanges([(0, 2**32 - 1)])
NOWHERE: Final = TokenRanges()
STREAMS: Final = (1, 8)
OFF, ON = "off", "on"
#: Engine and readouts of each variant.
WAYS: Final = {
    "no readouts in the engine (eager as well)": (OFF, NOWHERE),
    "readouts on, none asked for": (ON, NOWHERE),
    "readouts on, of every token": (ON, EVERYWHERE),
}


async def measure(report: Report, size: Size, models: Path) -> None:
    model = build_text_model(models / "larger", larger=True)
    times: dict[int, dict[str, list[float]]] = {streams: {way: [] for way in WAYS} for streams in STREAMS}
    # The engine started first may be on a better or worse core: each is first in half of the runs.
    for order in ((OFF, ON), (ON, OFF)):
        async with AsyncExitStack() as stack:
            engines: dict[str, VllmEngine] = {}
            for name in order:
                readouts = Readouts(_vectors()) if name == ON else None
                engines[name] = await stack.enter_async_context(_engine(model, readouts))
            for streams, found in times.items():
                await _decode_in_turns(engines, streams, found, turns=size.rounds)
            if order[0] == ON:
                for streams, found in times.items():
                    _tell(report, streams, found)
                await _prefill(report, size, engines[ON])


async def _decode_in_turns(
    engines: dict[str, VllmEngine], streams: int, found: dict[str, list[float]], *, turns: int
) -> None:
    for turn in range(turns + 1):
        begin = turn % len(WAYS)
        for way in [*WAYS][begin:] + [*WAYS][:begin]:
            name, ranges = WAYS[way]
            seconds = await _decode_all(engines[name], ranges, streams)
            if turn:  # the first is a warm-up
                found[way].append(seconds)


def _tell(report: Report, streams: int, found: dict[str, list[float]]) -> None:
    report.table(
        f"{len(LAYERS)} layers × {CONCEPTS} concepts, {streams} at a time: time of a decoded token, in turns",
        *("engine", "n", "ms a token", "against the first", "against the second"),
    )
    off, idle, asked = found.values()
    rows = (("", ""), (_cost(idle, off), ""), (_cost(asked, off), _cost(asked, idle)))
    for (way, values), (first, second) in zip(found.items(), rows, strict=True):
        cells = (way, str(len(values)), milliseconds(values), first)
        if second:
            most = max(median_ratio(asked, off), median_ratio(asked, idle)) - 1
            report.row(*cells, f"{second}; both ≤ {MOST_COST:.0%}", met=most <= MOST_COST)
        else:
            report.row(*cells, second)


def _cost(values: Sequence[float], baseline: Sequence[float]) -> str:
    return f"{median_ratio(values, baseline) - 1:+.1%}"


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
    """Seconds per decoded token, from the first to the last of a stream; mean over the streams."""
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
