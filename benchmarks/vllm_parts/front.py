"""omni_ws beside vLLM's own HTTP server: the same model, the same requests to ``/v1/chat/completions`` of both.

Each server has a process for its front and one for the model. The clients are in this process, and take turns.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from support.tiny_models import ENGINE_ARGS, build_text_model

from benchmarks.server_process import START_TIMEOUT_SEC, child_processes, cpu_seconds, free_port, running_command
from benchmarks.vllm_parts.clients import WORDS, check
from benchmarks.vllm_parts.report import Report, Size, median_difference, median_ratio, milliseconds

OURS: Final = "omni_ws"
THEIRS: Final = "vllm serve"
STREAMS: Final = 8
SHORT: Final = 8
LONG: Final = 200


async def measure(report: Report, size: Size, models: Path) -> None:
    model = str(build_text_model(models / "text"))
    with _running(OURS, model) as ours, _running(THEIRS, model) as theirs:
        async with _reached(ours, model) as our_front, _reached(theirs, model) as their_front:
            fronts = {OURS: our_front, THEIRS: their_front}
            for front in fronts.values():
                for _ in range(2):
                    await front.ask_at_once(SHORT)
            await _first_tokens(report, size, fronts)
            await _throughput(report, size, fronts)


@dataclass(frozen=True, slots=True)
class _Front:
    """A server that answers."""

    client: httpx.AsyncClient
    model: str
    pid: int

    async def ask(self, tokens: int) -> float:
        """Return the seconds to the first text."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": WORDS}],
            "temperature": 0,
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, first, count = time.perf_counter(), 0.0, 0
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not first and line.startswith("data: {") and _text(json.loads(line[6:])):
                    first = time.perf_counter() - began
                if '"completion_tokens"' in line:
                    count = json.loads(line[6:])["usage"]["completion_tokens"]
        check(count, tokens)
        return first

    async def ask_at_once(self, tokens: int) -> float:
        """Return the seconds until all answers are complete."""
        began = time.perf_counter()
        await asyncio.gather(*(self.ask(tokens) for _ in range(STREAMS)))
        return time.perf_counter() - began

    def spent(self) -> tuple[float, float]:
        """CPU seconds of the front, and of the model."""
        return cpu_seconds(self.pid), sum(map(cpu_seconds, child_processes(self.pid)))


def _text(chunk: Mapping[str, Any]) -> bool:
    return any(choice["delta"].get("content") for choice in chunk["choices"])


@contextmanager
def _running(name: str, model: str) -> Iterator[tuple[int, int]]:
    """The server's port and process; it may still load its model."""
    port = free_port()
    arguments = (*_OMNI_WS, model, *_ours(ENGINE_ARGS)) if name == OURS else (*_VLLM, model, *_theirs(ENGINE_ARGS))
    with running_command(sys.executable, *arguments, port=port) as process:
        yield port, process.pid


_OMNI_WS: Final = (
    *("-m", "omni_ws", "serve", "--engine", "vllm", "--log-level", "warning"),
    *("--grpc-port", "0", "--model"),
)
_VLLM: Final = (
    *("-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--disable-log-stats"),
    *("--disable-uvicorn-access-log", "--model"),
)


def _ours(args: Mapping[str, Any]) -> list[str]:
    return [word for name, value in args.items() for word in (f"--vllm.args.{name}", json.dumps(value).strip('"'))]


def _theirs(args: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


@asynccontextmanager
async def _reached(server: tuple[int, int], model: str) -> AsyncIterator[_Front]:
    port, pid = server
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        end = time.monotonic() + START_TIMEOUT_SEC
        while not await _healthy(client):
            if time.monotonic() > end:
                raise RuntimeError(f"the server at port {port} does not start")
            await asyncio.sleep(0.2)
        yield _Front(client, model, pid)


async def _healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).is_success
    except httpx.TransportError:
        return False


async def _first_tokens(report: Report, size: Size, fronts: Mapping[str, _Front]) -> None:
    times: dict[str, list[float]] = {name: [] for name in fronts}
    for turn in range(size.pairs):
        for name in sorted(fronts, reverse=turn % 2 == 1):
            times[name].append(await fronts[name].ask(SHORT))
    report.table("Time to the first token over HTTP, one request at a time, in turns", "server", "n", "ms")
    for name, values in times.items():
        report.row(name, str(len(values)), milliseconds(values))
    later = median_difference(times[THEIRS], times[OURS])
    print(f"\nOurs − theirs, median of the pairs: {later * 1000:+.2f} ms")


@dataclass(frozen=True, slots=True)
class _Round:
    """What a token of a round took, in seconds: of time, and of CPU time of the front and of the model."""

    time: float
    front: float
    model: float


async def _throughput(report: Report, size: Size, fronts: Mapping[str, _Front]) -> None:
    rounds: dict[str, list[_Round]] = {name: [] for name in fronts}
    for turn in range(2 * size.rounds):
        for name in sorted(fronts, reverse=turn % 2 == 1):
            rounds[name].append(await _round(fronts[name]))
    report.table(
        f"{STREAMS} answers of {LONG} tokens at once over HTTP, in turns",
        *("server", "n", "tokens/s, median", "µs of CPU a token: front", "model"),
    )
    for name, own in rounds.items():
        figures = (f"{statistics.median(getattr(one, part) for one in own) * 1e6:.0f}" for part in ("front", "model"))
        report.row(name, str(len(own)), f"{statistics.median(1 / one.time for one in own):.0f}", *figures)
    for what, part in (("CPU time of the front", "front"), ("Time", "time")):
        ours, theirs = ([getattr(one, part) for one in rounds[name]] for name in (OURS, THEIRS))
        print(f"\n{what}, ours ÷ theirs, median of the pairs: {median_ratio(ours, theirs):.2f}")


async def _round(front: _Front) -> _Round:
    before = front.spent()
    seconds = await front.ask_at_once(LONG)
    of_front, of_model = (now - then for now, then in zip(front.spent(), before, strict=True))
    tokens = STREAMS * LONG
    return _Round(seconds / tokens, of_front / tokens, of_model / tokens)
