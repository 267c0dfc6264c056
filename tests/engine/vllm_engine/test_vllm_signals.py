"""Signals to the whole server: the model lives until the last answer was given, and never longer than the server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.commands import start_vllm_command
from support.raw_http import raw_client
from support.raw_http import request as http_request

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """``omni-ws serve`` over a tiny model in a process group of its own, and its port."""
    from support.tiny_models import build_text_model

    model = build_text_model(folder / "model")
    process = await start_vllm_command(folder, model)
    try:
        assert process.stderr is not None
        async with asyncio.timeout(100):
            while b"listens on http://127.0.0.1:" not in (line := await process.stderr.readline()):
                assert line, "the server did not start"
        yield process, int(line.split(b"127.0.0.1:")[1].split()[0])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@asynccontextmanager
async def long_answer(port: int) -> AsyncIterator[asyncio.Task[bytes]]:
    """A streamed answer that has begun; the task reads it to its end."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "temperature": 0}
    payload = json.dumps(body).encode()
    head = http_request(
        *("POST", "/v1/chat/completions", "Content-Type: application/json"),
        *(f"Content-Length: {len(payload)}", "Connection: close"),
    )
    async with raw_client(port) as client:
        await client.send(head + payload)
        begin = await client.reader.readuntil(b"data: ")
        assert b"200 OK" in begin
        yield asyncio.create_task(client.reader.read(-1))


async def test_ctrl_c_lets_the_answer_finish(tmp_path: Path) -> None:
    async with served(tmp_path) as (process, port), long_answer(port) as answer:
        os.killpg(process.pid, signal.SIGINT)
        rest = await asyncio.wait_for(answer, 60)
        assert b'"finish_reason":"length"' in rest
        assert b"data: [DONE]" in rest
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_a_server_that_is_killed_takes_its_models_along(tmp_path: Path) -> None:
    async with served(tmp_path) as (process, port), long_answer(port) as answer:
        left = children(process.pid)
        assert left
        process.kill()
        await process.wait()
        await asyncio.gather(answer, return_exceptions=True)
        async with asyncio.timeout(30):
            while any(Path(f"/proc/{child}").exists() for child in left):  # noqa: ASYNC110, ASYNC240 - not ours
                await asyncio.sleep(0.05)
