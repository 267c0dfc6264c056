"""Mode A uploads of any length take constant memory; OMNI_WS_TEST_UPLOAD_MIB sets their size."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.live_server import live_server
from support.raw_http import arriving_events, chunked, raw_client, request
from support.scripted_engines import ActingEngine

CHAT = "/v1/chat/completions"
MIB = 1 << 20
UPLOAD_MIB = int(os.environ.get("OMNI_WS_TEST_UPLOAD_MIB", "96"))
#: Allowance for buffers, queues and the allocator, far below the size of an upload.
GROWTH_MIB = 24
PARAMETERS = b'{"stream_options":{"include_usage":true}}\n'
HEADERS = ("X-Streaming-Input: true", "Transfer-Encoding: chunked")


@contextlib.asynccontextmanager
async def server_process() -> AsyncIterator[tuple[int, int]]:
    """Process id and port of a server with the fake engine."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omni_ws", "serve", "--engine", "fake", "--port", "0"),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert process.stderr is not None
    try:
        while not (found := re.search(rb"listens on http://127\.0\.0\.1:(\d+)", await process.stderr.readline())):
            assert process.returncode is None
        yield process.pid, int(found[1])
    finally:
        process.terminate()
        await process.communicate()


def peak_mib(pid: int) -> float:
    """Peak resident memory of the process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


async def upload(port: int, *headers: str, head: bytes, piece: bytes, mib: int) -> tuple[int, dict[str, int]]:
    """Send ``piece`` repeatedly while the response is read. Returns the bytes of the answer, and its usage."""
    async with raw_client(port) as client:
        target = f"{CHAT}?stream_options.include_usage=true"
        await client.send(request("POST", target, *HEADERS, *headers))

        async def send() -> None:
            if head:
                await client.send(chunked(head, end=False))
            framed = chunked(piece, end=False)
            for _ in range(mib * MIB // len(piece)):
                await client.send(framed)
            await client.send(b"0\r\n\r\n")

        sending = asyncio.create_task(send())
        assert (await client.head())[1] == 200
        received, usage, last = 0, {}, ""
        async for event in arriving_events(client):
            received += len(event.data)
            if '"usage"' in event.data[:1000]:
                usage = event.json()["usage"]
            last = event.data
        await sending
        assert last == "[DONE]"
        return received, usage


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured in /proc")
async def test_an_upload_of_any_length_runs_in_flat_memory() -> None:
    async with server_process() as (pid, port):
        audio = ("Content-Type: audio/pcm",)
        await upload(port, *audio, head=b"", piece=bytes(256 * 1024), mib=8)
        before = peak_mib(pid)
        _, usage = await upload(port, *audio, head=b"", piece=bytes(256 * 1024), mib=UPLOAD_MIB)
        assert usage["input_audio_ms"] == UPLOAD_MIB * MIB // 32
        grown = peak_mib(pid) - before
        assert grown < GROWTH_MIB


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured in /proc")
async def test_an_echo_of_any_length_runs_in_flat_memory() -> None:
    line = b'{"text":"%b"}\n' % (b"word" * 16 * 1024)
    async with server_process() as (pid, port):
        await upload(port, head=PARAMETERS, piece=line, mib=8)
        before = peak_mib(pid)
        mib = UPLOAD_MIB // 2
        received, usage = await upload(port, head=PARAMETERS, piece=line, mib=mib)
        assert received > mib * MIB * 0.99
        assert usage["input_after_start_bytes"] > mib * MIB * 0.99
        grown = peak_mib(pid) - before
        assert grown < GROWTH_MIB


async def test_an_engine_that_does_not_extend_ends_it_at_the_cap() -> None:
    limits = {"max_payload_per_session": 4 * MIB}
    async with (
        live_server(ActingEngine("fake", extend=False), streaming_input=limits) as server,
        raw_client(server.port) as client,
    ):
        await client.send(request("POST", CHAT, *HEADERS, "Content-Type: audio/pcm"), chunked(b"..", end=False))
        await server.until(lambda: server.sessions == 1)
        sent = 2
        with contextlib.suppress(ConnectionError):
            while sent < 64 * MIB and server.sessions:
                await client.send(chunked(bytes(64 * 1024), end=False))
                await asyncio.sleep(0)
                sent += 64 * 1024
                assert server.held_bytes <= 4 * MIB + 1024  # the error is held, too
        response = await client.response()
        assert (response.status, response.error["code"]) == (413, "payload_too_large")
        assert 4 * MIB < sent < 12 * MIB
