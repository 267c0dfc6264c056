"""Overhead of omni_ws over vLLM: time to the first token, then rate and CPU time of eight concurrent answers.

The clients of the server run in a process of their own, so this process consumes the CPU time of what it measures: of
AsyncLLM, with the server on top of it or without.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from support.engine_answers import Input, streamed
from support.live_server import live_server
from support.tiny_models import ENGINE_ARGS, build_text_model
from support.vllm_engine import core_process, llm_of, request
from websockets.asyncio.client import connect

from benchmarks.server_process import cpu_seconds
from benchmarks.vllm_parts.clients import WORDS, Conversation, check, clients
from benchmarks.vllm_parts.report import Report, Size, median_difference, median_ratio, milliseconds
from omni_ws.config.model import VllmConfig
from omni_ws.core.chunks import InputMode
from omni_ws.engine.base import Finished, TextOutput
from omni_ws.engine.vllm.engine import VllmEngine

PROMPT: Final = f"user: {WORDS}\nassistant:"
MOST_ADDED_SEC: Final = 0.003
LEAST_RATE: Final = 0.98
MOST_CPU: Final = 1.3
STREAMS: Final = 8
SHORT: Final = 8
LONG: Final = 200

DIRECT: Final = "vLLM itself"
SERVER: Final = "whole server, WebSocket"

#: Takes the length of an answer in tokens; returns seconds to its first text and to its end.
Ask = Callable[[int], Awaitable[tuple[float, float]]]


async def measure(report: Report, size: Size, models: Path) -> None:
    engine = VllmEngine(VllmConfig(model=str(build_text_model(models / "text")), args=dict(ENGINE_ARGS)))
    async with live_server(engine) as server:
        conversation = Conversation(await connect(server.websocket_url))
        ways: dict[str, Ask] = {
            DIRECT: lambda tokens: _ask_vllm(engine, tokens),
            "engine, snapshot": lambda tokens: _ask(engine, tokens, InputMode.SNAPSHOT),
            "engine, extend": lambda tokens: _ask(engine, tokens, InputMode.EXTEND),
            SERVER: conversation.ask,
        }
        for ask in ways.values():
            for _ in range(2 * STREAMS):
                await ask(SHORT)
        await _first_tokens(report, size, ways)
        await conversation.socket.close()
        rounds = {name: partial(_at_once, ask) for name, ask in ways.items()}
        async with clients(server.websocket_url, streams=STREAMS, tokens=LONG) as over_the_wire:
            await _throughput(report, size, {**rounds, SERVER: over_the_wire}, model=core_process(engine))


async def _first_tokens(report: Report, size: Size, ways: dict[str, Ask]) -> None:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(size.pairs):
        for name in _in_turn(ways, turn):
            times[name].append((await ways[name](SHORT))[0])
    report.table(
        "Time to the first token, one request at a time, in turns", "who", "n", "ms", "added, median of the pairs"
    )
    direct = times.pop(DIRECT)
    report.row(DIRECT, str(size.pairs), milliseconds(direct), "")
    for name, values in times.items():
        added = median_difference(direct, values)
        target = f"{added * 1000:+.2f} ms; ≤ {MOST_ADDED_SEC * 1000:g}"
        report.row(name, str(size.pairs), milliseconds(values), target, met=added <= MOST_ADDED_SEC)


async def _at_once(ask: Ask) -> float:
    """Returns the seconds until all answers are complete."""
    began = time.perf_counter()
    await asyncio.gather(*(ask(LONG) for _ in range(STREAMS)))
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class _Cost:
    """What a token of a round took, in seconds: of time, and of CPU time of this process and of the model's."""

    time: float
    server: float
    model: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return 1 / self.time

    @property
    def both(self) -> float:
        """CPU time of both processes."""
        return self.server + self.model


async def _throughput(
    report: Report, size: Size, rounds: dict[str, Callable[[], Awaitable[float]]], *, model: int
) -> None:
    costs: dict[str, list[_Cost]] = {name: [] for name in rounds}
    for turn in range(2 * size.rounds):
        for name in _in_turn(rounds, turn):
            costs[name].append(await _cost(rounds[name], model))
    what = f"{STREAMS} answers of {LONG} tokens at once, in turns"
    report.table(what, "who", "n", "tokens/s, median", "of vLLM's own, median of the pairs")
    direct = costs.pop(DIRECT)
    report.row(DIRECT, str(len(direct)), f"{statistics.median(one.rate for one in direct):.0f}", "")
    for name, own in costs.items():
        share = median_ratio([one.rate for one in own], [one.rate for one in direct])
        target = f"{share:.1%}; ≥ {LEAST_RATE:.0%}"
        rate = f"{statistics.median(one.rate for one in own):.0f}"
        report.row(name, str(len(own)), rate, target, met=share >= LEAST_RATE)
    report.table(
        f"CPU time of these answers, of which the model's process took {_median_ms(direct, 'model')} ms a token",
        *("who", "n", "ms a token, median", "with the model's process", "of vLLM's own, median of the pairs"),
    )
    report.row(DIRECT, str(len(direct)), _median_ms(direct, "server"), _median_ms(direct, "both"), "")
    for name, own in costs.items():
        share = median_ratio([one.server for one in own], [one.server for one in direct])
        target = f"{share:.2f} ×; ≤ {MOST_CPU:g} ×"
        figures = (_median_ms(own, "server"), _median_ms(own, "both"))
        report.row(name, str(len(own)), *figures, target, met=share <= MOST_CPU)


async def _cost(round_of_answers: Callable[[], Awaitable[float]], model: int) -> _Cost:
    server_before, model_before = time.process_time(), cpu_seconds(model)
    seconds = await round_of_answers()
    tokens = STREAMS * LONG
    return _Cost(
        seconds / tokens, (time.process_time() - server_before) / tokens, (cpu_seconds(model) - model_before) / tokens
    )


def _median_ms(costs: Iterable[_Cost], part: str) -> str:
    return f"{statistics.median(getattr(cost, part) for cost in costs) * 1000:.3f}"


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
    async for output in streamed(engine, request(Input(WORDS), input_mode=mode, sampling=sampling)):
        if isinstance(output, TextOutput):
            first = first or time.perf_counter() - began
        elif isinstance(output, Finished):
            count = output.usage.output_tokens
    check(count, tokens)
    return first, time.perf_counter() - began
