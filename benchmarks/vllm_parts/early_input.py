"""Latency after 1,600 tokens of input that arrived over 2.4 s, against the same prompt sent at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

from support.engine_answers import Input, streamed
from support.tiny_models import ENGINE_ARGS, build_text_model
from support.vllm_engine import llm_of, request, running_engine

from benchmarks.vllm_parts.report import Report, Size, median_ratio, milliseconds
from omni_ws.core.chunks import InputMode
from omni_ws.engine.base import Finished, TextOutput
from omni_ws.engine.vllm.engine import VllmEngine

TOKENS: Final = 1600
SECONDS: Final = 2.4
PIECE_SEC: Final = 0.06
#: Tokens of the template around the user's text; a token of the model is a byte.
_FRAME: Final = len("user: \nassistant:")
MOST_OF_ONE_SHOT: Final = 1 / 5

ENGINE: Final[Mapping[str, Any]] = {
    **ENGINE_ARGS,
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 256 << 20,
}
SAMPLING: Final[Mapping[str, Any]] = {"temperature": 0.0, "max_tokens": 8}
#: A stop string rules out a streamed prompt; the prefix cache is warmed instead.
WARMING: Final[Mapping[str, Any]] = {**SAMPLING, "stop": "\x07"}


async def measure(report: Report, size: Size, models: Path) -> None:
    report.table(
        f"{TOKENS} tokens that come in over {SECONDS} s: from the end of the input to the first token",
        *("input", "n", "ms, median (90 % of them)", "of the one-shot request, median of the pairs"),
    )
    async with running_engine(build_text_model(models / "larger", larger=True), ENGINE) as engine:
        await _one_shot(engine, _words(0))
        at_once: list[float] = []
        ways: dict[str, tuple[Mapping[str, Any], list[float]]] = {
            "streamed": (SAMPLING, []),
            "prefix cache warmed": (WARMING, []),
        }
        for seed in range(1, size.rounds + 1):
            words = _words(seed)
            seconds, expected = await _one_shot(engine, words)
            at_once.append(seconds)
            for sampling, times in ways.values():
                seconds, answer = await _as_it_comes(engine, words, sampling)
                if answer != expected:
                    raise RuntimeError("early work has changed the answer")
                times.append(seconds)
    report.row("one-shot request", str(size.rounds), milliseconds(at_once), "")
    for name, (_, times) in ways.items():
        part = median_ratio(times, at_once)
        target = f"{part:.3f}; ≤ {MOST_OF_ONE_SHOT:g}"
        report.row(name, str(size.rounds), milliseconds(times), target, met=part <= MOST_OF_ONE_SHOT)
    print("\nAll three gave the same greedy answers.")


def _words(seed: int) -> str:
    random = Random(seed)
    return "".join(random.choices("abcdefghijklmnopqrstuvwxyz     ", k=TOKENS - _FRAME - 2)).replace("  ", " x").strip()


async def _one_shot(engine: VllmEngine, words: str) -> tuple[float, str]:
    await llm_of(engine).reset_prefix_cache()
    source = Input(words)
    return await _first_token(engine, source, time.perf_counter(), InputMode.SNAPSHOT, SAMPLING)


async def _as_it_comes(engine: VllmEngine, words: str, sampling: Mapping[str, Any]) -> tuple[float, str]:
    await llm_of(engine).reset_prefix_cache()
    source = Input(open_end=True)
    pieces = round(SECONDS / PIECE_SEC)
    length = -(-len(words) // pieces)
    began = time.perf_counter()
    ended = began + SECONDS
    answering = asyncio.create_task(_first_token(engine, source, ended, InputMode.EXTEND, sampling))
    for number in range(pieces):
        await asyncio.sleep(began + number * PIECE_SEC - time.perf_counter())
        source.send(words[number * length : (number + 1) * length])
    await asyncio.sleep(ended - time.perf_counter())
    source.close()
    return await answering


async def _first_token(
    engine: VllmEngine, source: Input, since: float, mode: InputMode, sampling: Mapping[str, Any]
) -> tuple[float, str]:
    """Returns the seconds from ``since`` to the first output, and the answer."""
    first, text = None, ""
    async for output in streamed(engine, request(source, input_mode=mode, sampling=sampling)):
        if isinstance(output, TextOutput):
            first = first or time.perf_counter() - since
            text += output.text
        elif isinstance(output, Finished) and output.usage.input_tokens < TOKENS - 40:
            raise RuntimeError(f"the prompt had {output.usage.input_tokens} tokens")
    if first is None:
        raise RuntimeError("no text came")
    return first, text
