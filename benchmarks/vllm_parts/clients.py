"""Clients of the server: one in this process, or several in a process of their own.

``python -m benchmarks.vllm_parts.clients URL STREAMS TOKENS``: reads lines; for each one all clients ask concurrently,
and the seconds until all answers are complete are printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection

from benchmarks.load import Load, Stream, masked

#: How long the clients wait for the next frame of any of them.
PATIENCE_SEC: Final = 60.0
_TEXT: Final = 0x81
_FINAL: Final = b'"final":true'

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
            await self._send(_config(tokens))
            await self._next("session_updated")
        began = time.perf_counter()
        await self._send(_question(self._sequence))
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


class _Client(Stream):
    """A connection that looks for the ends of answers, and at nothing else: the model needs the CPU more."""

    def __init__(self, port: int, tokens: int) -> None:
        #: Set at the final of an answer.
        self.answered = False
        self._tokens = tokens
        self._asked = 0
        prelude = json.dumps(_config(tokens))
        load = Load(servers=[], streams=1, seconds=0, warm_up=0, binary=False, echo=False, prelude=prelude)
        super().__init__(load, port)

    def ask(self) -> None:
        self.answered = False
        self.socket.send(masked(json.dumps(_question(self._asked)).encode(), _TEXT))
        self._asked += 1

    def _count(self, kind: int, data: bytes, start: int, end: int) -> None:
        super()._count(kind, data, start, end)
        if data.find(_FINAL, start, end) >= 0:
            check(json.loads(data[start:end])["usage"]["output_tokens"], self._tokens)
            self.answered = True


def _config(tokens: int) -> dict[str, Any]:
    return {"type": "session_config", "history": False, "sampling": {"temperature": 0, "max_tokens": tokens}}


def _question(sequence_id: int) -> dict[str, Any]:
    return {"type": "input_chunk", "sequence_id": sequence_id, "text": WORDS, "end_of_input": True}


def _run(url: str, streams: int, tokens: int) -> None:
    port = urlsplit(url).port
    assert port is not None
    clients = {client.socket.fileno(): client for client in (_Client(port, tokens) for _ in range(streams))}
    with select.epoll() as poll:
        for file in clients:
            poll.register(file, select.EPOLLIN)
        while _asked_to_go_on(clients, poll):
            began = time.perf_counter()
            for client in clients.values():
                client.ask()
            while not all(client.answered for client in clients.values()):
                _receive(clients, poll, PATIENCE_SEC)
            print(time.perf_counter() - began, flush=True)
    for client in clients.values():
        client.close()


def _asked_to_go_on(clients: Mapping[int, _Client], poll: select.epoll) -> bool:
    """Wait for the next line, and meanwhile answer pings."""
    poll.register(sys.stdin.fileno(), select.EPOLLIN)
    while sys.stdin.fileno() not in _receive(clients, poll, None):
        pass
    poll.unregister(sys.stdin.fileno())
    return bool(os.read(sys.stdin.fileno(), 1))


def _receive(clients: Mapping[int, _Client], poll: select.epoll, seconds: float | None) -> list[int]:
    """Read what has arrived; returns the files that were ready."""
    ready = [file for file, _ in poll.poll(seconds)]
    if not ready:
        raise RuntimeError("the server does not answer")
    for file in ready:
        if file in clients:
            clients[file].receive()
    return ready


if __name__ == "__main__":
    _run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
