"""The store of sessions: bytes of a session at rest, time until a word is settled, and how soon many sessions move.

A session with typed turns of everyday length is written by a real server, and then as often as ``--sessions`` says,
under other names. A new server has the store, and ``--moved`` clients of these sessions come to it at once, each over a
WebSocket of its own. The clients share the machine with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import orjson
from websockets.asyncio.client import connect

from benchmarks.server_process import cpu_seconds, free_port, running_command, serving
from omni_ws.config.model import SessionsConfig
from omni_ws.core.quota import ByteBudget
from omni_ws.metrics import Metrics
from omni_ws.service.sessions.factory import configured_store
from omni_ws.service.sessions.session import SavedSession
from omni_ws.service.store.records import packed
from omni_ws.service.store.session_store import SessionStore

#: Targets.
MAX_BYTES_AT_REST: Final = 8192
MAX_MOVE_SEC: Final = 30.0
TURNS: Final = 20
WORDS: Final = tuple(
    "could you please tell me how the weather in these mountains is going to be on next weekend".split()  # noqa: SIM905
)
_TOKEN: Final = "of-every-client"
_SETTLED: Final = 500


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks session_store", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the sessions")
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--moved", type=int, default=1000)
    parser.add_argument("--stores", nargs="+", default=["sqlite", "redis"], choices=["sqlite", "redis"])
    options = parser.parse_args(arguments)
    if options.quick:
        options.sessions, options.moved = options.sessions // 10, options.moved // 10
    met = True
    print(f"### {options.sessions} sessions of {TURNS} typed turns at rest, of which {options.moved} move at once\n")
    print("| store | bytes each | settled p50 ms | p99 ms | written sec | moved sec | CPU sec | client p50 sec | p99 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in options.stores:
        if kind == "redis" and shutil.which("redis-server") is None:
            print("redis: redis-server is not installed", file=sys.stderr)
            continue
        with TemporaryDirectory() as folder, _store(kind, Path(folder)) as store:
            met = measure(kind, store, options.sessions, options.moved) and met
    return met


@contextmanager
def _store(kind: str, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:{folder / 'sessions.db'}"
        return
    port = free_port()
    durable = ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec")
    with running_command("redis-server", *durable, "--dir", str(folder), "--loglevel", "warning", port=port):
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def _server(store: str, moved: int) -> Iterator[tuple[int, int]]:
    """Run a server. Yields its port and its process."""
    port = free_port()
    limits = ("--limits.max-sessions", str(2 * moved), "--log-level", "warning")
    with serving("--engine", "fake", "--sessions.store", store, *limits, port=port) as process:
        yield port, process.pid


def measure(kind: str, store: str, sessions: int, moved: int) -> bool:
    with _server(store, moved) as (port, _):
        session_id, last_output = asyncio.run(_talk(port))
        # Its client is cut off, and so is the server.
    at_rest, settled, written = asyncio.run(_multiply(store, session_id, sessions))
    with _server(store, moved) as (port, process):
        began, cpu = time.monotonic(), cpu_seconds(process)
        took = asyncio.run(_move(port, moved, last_output))
        move, cpu = time.monotonic() - began, cpu_seconds(process) - cpu
    cuts, waits = statistics.quantiles(settled, n=100), statistics.quantiles(took, n=100)
    settles = f"{cuts[49] * 1e3:.2f} | {cuts[98] * 1e3:.2f}"
    moves = f"{move:.1f} | {cpu:.1f} | {waits[49]:.1f} | {waits[98]:.1f}"
    print(f"| {kind} | {at_rest} | {settles} | {written:.1f} | {moves} |", flush=True)
    return at_rest <= MAX_BYTES_AT_REST and move <= MAX_MOVE_SEC


async def _talk(port: int) -> tuple[str, int]:
    """Type turns, and leave without a word. Returns the session's id and its last output."""
    connection = await connect(f"ws://127.0.0.1:{port}/v1/streaming_input")
    session_id, last, words = "", -1, random.Random(0)
    for number in range(TURNS):
        said = " ".join(words.sample(WORDS, len(WORDS)))
        chunk = {"type": "input_chunk", "sequence_id": number, "modality": "text", "text": said, "end_of_input": True}
        await connection.send(orjson.dumps(chunk).decode())
        while True:
            frame = orjson.loads(await connection.recv())
            session_id = frame.get("session_id", session_id)
            if frame["type"] == "error":
                raise RuntimeError(frame["error"])
            if frame["type"] == "output_chunk":
                last = frame["sequence_id"]
                await connection.send(orjson.dumps({"type": "output_ack", "sequence_id": last}).decode())
                if frame.get("final"):
                    break
    connection.transport.abort()
    await connection.wait_closed()
    return session_id, last


async def _multiply(store: str, session_id: str, sessions: int) -> tuple[int, list[float], float]:
    """Write a session under many names. Returns the bytes of one, times until an entry is settled, and the whole."""
    budget = ByteBudget(1 << 40)
    kept = configured_store(SessionsConfig(store=store), budget=budget, metrics=Metrics())
    assert kept is not None
    await kept.start()
    taken = await kept.take(session_id, force=True)
    assert taken is not None
    saved = msgspec.msgpack.decode(taken.snapshot, type=SavedSession)
    digest = hashlib.sha256(_TOKEN.encode()).digest()
    began = time.monotonic()
    for start in range(0, sessions, 100):
        leases = []
        for number in range(start, min(start + 100, sessions)):
            name = f"sess_of_the_benchmark_{number}"
            lease = kept.begin(name, kind=taken.found.clear.kind, owner=None)
            data = msgspec.msgpack.encode(msgspec.structs.replace(saved, session_id=name, token=digest))
            kept.snapshot(lease, data, tokens=(digest,), away=True)
            leases.append(lease)
        for lease in leases:
            await kept.settle(lease)
            kept.release(lease, delete=False)
    await kept.settle(leases[-1])
    written = time.monotonic() - began
    settled = await _settle_words(kept, taken.snapshot)
    at_rest = len(packed(taken.snapshot)) + sum(map(len, taken.entries))
    await kept.stop()
    return at_rest, settled, written


async def _settle_words(kept: SessionStore, data: bytes) -> list[float]:
    lease = kept.begin("sess_that_talks", kind="native", owner=None)
    kept.snapshot(lease, data, tokens=(), away=False)
    await kept.settle(lease)
    times = []
    for _ in range(_SETTLED):
        began = time.perf_counter()
        kept.append(lease, b"a word of an answer")
        await kept.settle(lease)
        times.append(time.perf_counter() - began)
        await asyncio.sleep(0.002)
    kept.release(lease, delete=True)
    return times


async def _move(port: int, moved: int, last_output: int) -> list[float]:
    """Let clients come back at once. Returns how long each waited until it was resumed."""

    async def come_back(number: int) -> float:
        began = time.monotonic()
        query = f"session_id=sess_of_the_benchmark_{number}&resume_token={_TOKEN}"
        url = f"ws://127.0.0.1:{port}/v1/streaming_input?{query}&last_output={last_output}"
        while True:
            connection = await connect(url, open_timeout=120, ping_interval=None, compression=None)
            frame = orjson.loads(await connection.recv())
            if frame["type"] == "session_resumed":
                break
            await connection.close()
            if frame["error"]["code"] != "engine_overloaded":
                raise RuntimeError(frame)
            await asyncio.sleep(frame["error"]["retry_after_ms"] / 1000)
        async with connection:
            took = time.monotonic() - began
            resumed.append(number)
            if len(resumed) == moved:
                everybody.set()
            await everybody.wait()
        return took

    resumed: list[int] = []
    everybody = asyncio.Event()
    return await asyncio.gather(*(come_back(number) for number in range(moved)))
