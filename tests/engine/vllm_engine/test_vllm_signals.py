"""Signals to the whole server: the model lives until the last answer has ended, and never longer than the server."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from support.commands import forked_vllm_command, start_vllm_command
from support.raw_http import raw_client
from support.raw_http import request as http_request
from support.until import until
from support.vllm_engine import STARTS_WITHIN_SEC

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

#: The CPU time of a stop. It takes 1.1 s; tearing down a process of vLLM by itself takes Python 4 s and more.
IDLE_STOP_CPU_SEC = 2.5
LISTENS = re.compile(rb"listens on http://127\.0\.0\.1:(\d+)")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from support.tiny_models import build_text_model

    return build_text_model(tmp_path / "model")


@pytest_asyncio.fixture(loop_scope="module")
async def server(tmp_path: Path, model: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """``omni-ws serve`` with a tiny model, in a process group of its own."""
    process = await start_vllm_command(tmp_path, model)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def port_of(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    async with asyncio.timeout(STARTS_WITHIN_SEC):
        while (told := LISTENS.search(line := await process.stderr.readline())) is None:
            assert line, "the server did not start"
    return int(told[1])


def says(errors: Path) -> re.Match[bytes] | None:
    return LISTENS.search(errors.read_bytes()) if errors.exists() else None


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


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


def folder_of_sockets(process: int) -> Path:
    """Where vLLM's processes below this one have theirs."""
    variables = [one for child in children(process) for one in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")]
    (folder,) = {one for one in variables if one.startswith(b"VLLM_RPC_BASE_PATH=")}
    return Path(folder.decode().partition("=")[2])


def cpu_seconds(process: int) -> float:
    """The CPU time of a process and those below it, so far."""
    import psutil

    whole = [psutil.Process(process), *psutil.Process(process).children(recursive=True)]
    return sum(sum(one.cpu_times()[:4]) for one in whole)


def ended_cpu_seconds() -> float:
    """The CPU time of the processes that have ended and been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def test_sigterm_lets_the_answer_finish_and_nothing_else(server: asyncio.subprocess.Process) -> None:
    """As a container is stopped. An idle server stops at once. Ctrl-C is that of test_serve_tiny.py."""
    process, port = server, await port_of(server)
    left = children(process.pid)
    sockets = folder_of_sockets(process.pid)
    assert sockets.stat().st_mode & 0o777 == 0o700
    assert any(path.is_socket() for path in sockets.iterdir())
    async with long_answer(port) as answer:
        process.send_signal(signal.SIGTERM)
        before = 0.0
        async with asyncio.timeout(500):
            while not answer.done():
                before = cpu_seconds(process.pid) + ended_cpu_seconds()
                await asyncio.sleep(0.1)
        rest = await answer
        assert b'"finish_reason":"length"' in rest
        assert b"data: [DONE]" in rest
        assert await asyncio.wait_for(process.wait(), 300) == 0
    assert ended_cpu_seconds() - before < IDLE_STOP_CPU_SEC
    await until(lambda: not any(is_running(child) for child in left))
    assert not sockets.exists()


async def test_a_server_that_is_killed_takes_its_models_along(tmp_path: Path, model: Path) -> None:
    process, errors = forked_vllm_command(tmp_path, model, tmp_path / "errors"), tmp_path / "errors"
    await until(lambda: not process.is_alive() or says(errors) is not None, seconds=STARTS_WITHIN_SEC)
    told = says(errors)
    assert told is not None, errors.read_text()
    assert process.pid is not None
    async with long_answer(int(told[1])) as answer:
        left = children(process.pid)
        assert left
        process.kill()
        await asyncio.to_thread(process.join)
        await asyncio.gather(answer, return_exceptions=True)
        async with asyncio.timeout(300):
            while any(Path(f"/proc/{child}").exists() for child in left):  # noqa: ASYNC110, ASYNC240 - not ours
                await asyncio.sleep(0.05)
