"""Signals to the whole server: the model lives until the last answer has ended, and never longer than the server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from support.commands import forked_vllm_command, left_of
from support.patience import until
from support.raw_http import raw_client
from support.raw_http import request as http_request
from support.vllm_engine import STARTS_WITHIN_SEC

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LISTENS = re.compile(rb"listens on http://127\.0\.0\.1:(\d+)")


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[BaseProcess, int]]:
    """``omni-ws serve`` with a tiny model, and its port; it is in a process group of its own."""
    from support.tiny_models import build_text_model

    errors = folder / "errors"
    process = forked_vllm_command(folder, build_text_model(folder / "model"), errors)
    try:
        await until(lambda: not process.is_alive() or says(errors) is not None, seconds=STARTS_WITHIN_SEC)
        told = says(errors)
        assert told is not None, errors.read_text()
        yield process, int(told[1])
    finally:
        process.kill()
        await asyncio.to_thread(process.join)


def says(errors: Path) -> re.Match[bytes] | None:
    return LISTENS.search(errors.read_bytes()) if errors.exists() else None


def models_of(process: BaseProcess) -> set[int]:
    """What runs beside the server: its model, and what looks after the model."""
    assert process.pid is not None
    return set(left_of(process.pid)) - {process.pid}


@asynccontextmanager
async def long_answer(port: int) -> AsyncIterator[asyncio.Task[bytes]]:
    """Start a streamed answer, and return the task that reads it to its end."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "temperature": 0, "max_tokens": 300}
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


async def test_sigterm_lets_the_answer_finish_and_nothing_else(tmp_path: Path) -> None:
    """As a container is stopped. What a stop takes and leaves shows Ctrl-C, in test_serve_tiny.py."""
    async with serving(tmp_path) as (process, port):
        assert models_of(process)
        async with long_answer(port) as answer:
            process.terminate()
            rest = await answer
        assert b'"finish_reason":"length"' in rest
        assert b"data: [DONE]" in rest
        await asyncio.to_thread(process.join, 300)
        assert process.exitcode == 0
        await until(lambda: not models_of(process))


async def test_a_server_that_is_killed_takes_its_models_along(tmp_path: Path) -> None:
    async with serving(tmp_path) as (process, port), long_answer(port) as answer:
        assert models_of(process)
        process.kill()
        await asyncio.to_thread(process.join)
        await asyncio.gather(answer, return_exceptions=True)
        await until(lambda: not models_of(process))
