"""Overhead of omni_ws over vLLM: of the time to the first token, and of eight concurrent answers."""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

from support.live_server import live_server
from support.tiny_models import ENGINE_ARGS, build_text_model
from support.vllm_engine import Input, llm_of, request
from websockets.asyncio.client import connect

from benchmarks.vllm_parts.clients import WORDS, Conversation, check, clients
from benchmarks.vllm_parts.report import Report, Size, median_difference, median_ratio, milliseconds
from omni_ws.config.model import VllmConfig
from omni_ws.core.chunks import InputMode
from omni_ws.engine.base import Finished, TextOutput
from omni_ws.engine.vllm.engine import VllmEngine

PROMPT: Final = f"user: {WORDS}\nassistant:"
MOST_ADDED_SEC: Final = 0.003
MOST_COST: Final = 0.05
STREAMS: Final = 8
SHORT: Final = 8
LONG: Final = 200

#: Takes the length of an answer in tokens; returns seconds to its first text and to its end.
Ask = Callable[[int], Awaitable[tuple[float, float]]]


async def measure(report: Report, size: Size, models: Path) -> None:
    engine = VllmEngine(VllmConfig(model=str(build_text_model(models / "text")), args=dict(ENGINE_ARGS)))
    async with live_server(engine) as server:
        conversation = Conversation(await connect(server.websocket_url))
        ways: dict[str, Ask] = {
            "vLLM itself": lambda tokens: _ask_vllm(engine, tokens),
            "engine, snapshot": lambda tokens: _ask(engine, tokens, InputMode.SNAPSHOT),
            "engine, extend": lambda tokens: _ask(engine, tokens, InputMode.EXTEND),
            "whole server, WebSocket": conversation.ask,
        }
        for ask in ways.values():
            for _ in range(2 * STREAMS):
                await ask(SHORT)
        await _first_tokens(report, size, ways)
        await conversation.socket.close()
        rounds = {name: partial(_at_once, ask) for name, ask in ways.items()}
        async with clients(server.websocket_url, streams=STREAMS, tokens=LONG) as over_the_wire:
            await _throughput(report, size, {**rounds, "whole server, WebSocket": over_the_wire})


async def _first_tokens(report: Report, size: Size, ways: dict[str, Ask]) -> None:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(size.pairs):
        for name in _in_turn(ways, turn):
            times[name].append((await ways[name](SHORT))[0])
    report.table(
        "Time to the first token, one request at a time, in turns", "who", "n", "ms", "added, median of the pairs"
    )
    direct = times.pop("vLLM itself")
    report.row("vLLM itself", str(size.pairs), milliseconds(direct), "")
    for name, values in times.items():
        added = median_difference(direct, values)
        target = f"{added * 1000:+.2f} ms; ≤ {MOST_ADDED_SEC * 1000:g}"
        report.row(name, str(size.pairs), milliseconds(values), target, met=added <= MOST_ADDED_SEC)


async def _at_once(ask: Ask) -> float:
    """Returns the seconds until all answers are complete."""
    began = time.perf_counter()
    await asyncio.gather(*(ask(LONG) for _ in range(STREAMS)))
    return time.perf_counter() - began


async def _throughput(report: Report, size: Size, rounds: dict[str, Callable[[], Awaitable[float]]]) -> None:
    rates: dict[str, list[float]] = {name: [] for name in rounds}
    for turn in range(2 * size.rounds):
        for name in _in_turn(rounds, turn):
            rates[name].append(STREAMS * LONG / await rounds[name]())
    report.table(
        f"{STREAMS} answers of {LONG} tokens at once, in turns",
        *("who", "n", "tokens/s, median", "cost, median of the pairs"),
    )
    direct = rates.pop("vLLM itself")
    report.row("vLLM itself", str(len(direct)), f"{statistics.median(direct):.0f}", "")
    for name, values in rates.items():
        cost = 1 - median_ratio(values, direct)
        figure = f"{statistics.median(values):.0f}"
        report.row(name, str(len(values)), figure, f"{cost:+.1%}; ≤ {MOST_COST:.0%}", met=cost <= MOST_COST)


def _in_turn(ways: Iterable[str], turn: int) -> list[str]:
    """Rotates the order, since the first one may be disturbed by the round before."""
    names = list(ways)
    begin = turn % len(names)
    return names[begin:] + names[:begin]


async def _ask_vllm(engine: VllmEngine, tokens: int) -> tuple[float, float]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    began = time.perf_counter()
    first, count = 0.0, 0
    parameters = SamplingParams(temperature=0, max_tokens=tokens, output_kind=RequestOutputKind.DELTA)
    async for output in llm_of(engine).generate({"prompt": PROMPT}, parameters, uuid.uuid4().hex):
        first = first or time.perf_counter() - began
        count += len(output.outputs[0].token_ids)
    check(count, tokens)
    return first, time.perf_counter() - began


async def _ask(engine: VllmEngine, tokens: int, mode: InputMode) -> tuple[float, float]:
    began = time.perf_counter()
    first, count = 0.0, 0
    sampling = {"temperature": 0.0, "max_tokens": tokens}
    async for output in engine.generate(request(Input(WORDS), input_mode=mode, sampling=sampling)):
        if isinstance(output, TextOutput):
            first = first or time.perf_counter() - began
        elif isinstance(output, Finished):
            count = output.usage.output_tokens
    check(count, tokens)
    return first, time.perf_counter() - began
