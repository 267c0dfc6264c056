"""Token sessions: bookkeeping of long lists, and CPU time of a token over gRPC."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from benchmarks.server_process import cpu_seconds, free_port, running
from benchmarks.token_server import MetronomeEngine
from omni_ws.core.quota import ByteBudget
from omni_ws.engine.base import TokenEvent, TokenGeneration, TokensFinished, TokenStop
from omni_ws.service.sessions.admission import Admission
from omni_ws.service.tokens import (
    TokenCall,
    TokenSessions,
)

LONG: Final = 200_000
MOST_CALL_SEC: Final = 0.001
MOST_FORK_SEC: Final = 0.005
STREAMS: Final = 32
ALL: Final = {"start": 0, "end": 2**32 - 1}


class _Instant(MetronomeEngine):
    """Engine that accepts any list and does nothing."""

    async def generate_tokens(self, generation: TokenGeneration) -> AsyncIterator[TokenEvent]:
        yield TokensFinished(TokenStop.LENGTH)


async def _bookkeeping(repeat: int) -> bool:
    sessions = TokenSessions(
        _Instant(),
        ttl_sec=1800,
        budget=ByteBudget(1 << 30),
        admission=Admission(max_sessions=10),
        check_ready=lambda: None,
    )
    session_id = sessions.open(None)

    async def append(tokens: Sequence[int], offset: int, truncating: bool = False) -> None:
        call = TokenCall(tokens=tokens, offset=offset, truncating=truncating)
        async for _ in sessions.generate(session_id, None, call):
            pass

    await append([7] * LONG, 0)
    appends, rewrites, forks = [], [], []
    for done in range(repeat):
        begun = time.thread_time()
        await append([1] * 100, LONG + 100 * done)
        appends.append(time.thread_time() - begun)
    for _ in range(repeat):
        begun = time.thread_time()
        await append([1] * 100, LONG - 100, truncating=True)
        rewrites.append(time.thread_time() - begun)
        begun = time.thread_time()
        child = sessions.fork(session_id, None, at=LONG)
        forks.append(time.thread_time() - begun)
        sessions.close(child, None)
    sessions.close_all()
    print(f"**Book-keeping at {LONG:,} tokens, CPU time, {repeat} of each**\n")
    print("| what | median µs | highest | target |\n|---|---|---|---|")
    met = True
    for name, times, most in (
        ("a call that appends 100 tokens", appends, MOST_CALL_SEC),
        ("a call that rewrites the last 100", rewrites, MOST_CALL_SEC),
        ("a fork of all", forks, MOST_FORK_SEC),
    ):
        middle = statistics.median(times)
        met = met and middle <= most
        verdict = "met" if middle <= most else "MISSED"
        print(f"| {name} | {middle * 1e6:.0f} | {max(times) * 1e6:.0f} | ≤ {most * 1000:g} ms: {verdict} |", flush=True)
    return met


async def _streams(port: int, pid: int, tokens: int, fields: dict[str, Any]) -> float:
    """CPU seconds of the server per token, at 32 streams of 50 tokens a second."""
    import grpc

    from omni_ws.generated import salience_pb2 as messages
    from omni_ws.generated.salience_pb2_grpc import SalienceStub

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = SalienceStub(channel)

        async def stream() -> int:
            opened = await stub.OpenSession(messages.OpenSessionRequest(model="local-model"))
            request = messages.GenerateRequest(
                session_id=opened.session_id, append_tokens=[5], max_tokens=tokens, **fields
            )
            received = 0
            async for _ in stub.Generate(request):
                received += 1
            await stub.CloseSession(messages.CloseSessionRequest(session_id=opened.session_id))
            return received - 1

        before = cpu_seconds(pid)
        received = sum(await asyncio.gather(*(stream() for _ in range(STREAMS))))
        if received != STREAMS * tokens:
            raise RuntimeError(f"{received} tokens came, not {STREAMS * tokens}")
        return (cpu_seconds(pid) - before) / received


def _over_grpc(rounds: int, tokens: int) -> None:
    ways: dict[str, dict[str, Any]] = {
        "ids alone": {},
        "with log-probabilities of 5": {"logprobs_ranges": [ALL], "logprob_top_k": 5},
        "with readouts of 3 × 16": {"readout_ranges": [ALL]},
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    port = free_port()
    with running("benchmarks.token_server", port=port) as process:
        for _ in range(rounds):
            for name, fields in ways.items():
                times[name].append(asyncio.run(_streams(port, process.pid, tokens, fields)))
    print(f"\n**{STREAMS} streams of 50 tokens a second over gRPC: CPU time of the server a token, {rounds} runs**\n")
    print("| what | median µs | lowest | highest |\n|---|---|---|---|")
    for name, values in times.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"| {name} | {middle * 1e6:.0f} | {low * 1e6:.0f} | {high * 1e6:.0f} |", flush=True)


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks salience", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run of each")
    options = parser.parse_args(arguments)
    print("### Token sessions\n")
    met = asyncio.run(_bookkeeping(20 if options.quick else 200))
    _over_grpc(1 if options.quick else 5, 100 if options.quick else 250)
    return met
