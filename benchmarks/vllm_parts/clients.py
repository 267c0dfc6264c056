"""Clients of the server: one in this process, or several in a process of their own.

``python -m benchmarks.vllm_parts.clients URL STREAMS TOKENS``: reads lines; for each one all clients ask concurrently,
and the seconds until all answers are complete are printed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from websockets.asyncio.client import ClientConnection, connect

WORDS: Final = "Hello there, how are you today?"


class Conversation:
    """A WebSocket session without history."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self._sequence = 0
        self._tokens = 0

    async def ask(self, tokens: int) -> tuple[float, float]:
        if tokens != self._tokens:
            self._tokens = tokens
            sampling = {"temperature": 0, "max_tokens": tokens}
            await self._send({"type": "session_config", "history": False, "sampling": sampling})
            await self._next("session_updated")
        began = time.perf_counter()
        await self._send({"type": "input_chunk", "sequence_id": self._sequence, "text": WORDS, "end_of_input": True})
        self._sequence += 1
        first = 0.0
        while True:
            frame = await self._next("output_chunk")
            if frame.get("text"):
                first = first or time.perf_counter() - began
            if frame.get("final"):
                check(frame["usage"]["output_tokens"], tokens)
                return first, time.perf_counter() - began

    async def _send(self, frame: dict[str, Any]) -> None:
        await self.socket.send(json.dumps(frame))

    async def _next(self, kind: str) -> dict[str, Any]:
        while True:
            frame: dict[str, Any] = json.loads(await self.socket.recv())
            if frame["type"] == "error":
                raise RuntimeError(f"the server refused: {frame}")
            if frame["type"] == kind:
                return frame


def check(count: int, tokens: int) -> None:
    if count != tokens:
        raise RuntimeError(f"the answer has {count} tokens instead of {tokens}")


@asynccontextmanager
async def clients(url: str, *, streams: int, tokens: int) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """Starts a process of clients; yields a function that lets all ask concurrently, and returns the seconds taken."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.vllm_parts.clients", url, str(streams), str(tokens)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    asking, answered = process.stdin, process.stdout

    async def ask() -> float:
        asking.write(b"\n")
        return float(await answered.readline())

    try:
        await ask()  # warm-up: not counted
        yield ask
    finally:
        asking.close()
        await process.wait()


async def _run(url: str, streams: int, tokens: int) -> None:
    conversations = [Conversation(await connect(url, compression=None)) for _ in range(streams)]
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        began = time.perf_counter()
        await asyncio.gather(*(conversation.ask(tokens) for conversation in conversations))
        print(time.perf_counter() - began, flush=True)
    for conversation in conversations:
        await conversation.socket.close()


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
