"""Many small pictures that unfold to large ones, at once: the server's memory is bounded, and others go on."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
from PIL import Image
from support.raw_http import raw_client, request

from omni_ws.client import connect

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real_time,
    pytest.mark.usefixtures("no_weights"),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured in /proc"),
]

MIB = 1 << 20
REQUESTS = 48
HELD_MIB = 512
#: Beyond what is counted: the requests' own bytes, threads, and the allocator's habits.
UNCOUNTED_MIB = 128
#: Of an innocent client, in seconds: the machine's other work counts too.
MAX_LAG = 0.5


@contextlib.asynccontextmanager
async def server_process() -> AsyncIterator[tuple[int, int]]:
    """Process id and port of a server with the embedded engine."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omni_ws", "serve", "--engine", "embedded", "--port", "0"),
        *("--limits.max-held-bytes", f"{HELD_MIB}MiB"),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert process.stderr is not None
    reading: asyncio.Task[bytes] | None = None
    try:
        while not (found := re.search(rb"listens on http://127\.0\.0\.1:(\d+)", await process.stderr.readline())):
            assert process.returncode is None
        reading = asyncio.create_task(process.stderr.read())
        yield process.pid, int(found[1])
    finally:
        process.terminate()
        await process.wait()
        if reading is not None:
            await reading


def peak_mib(pid: int) -> float:
    """The most memory that the process ever had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) / 1024


def picture_request(size: tuple[int, int]) -> bytes:
    """The body of a chat request with one white picture."""
    file = io.BytesIO()
    Image.new("1", size).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = orjson.dumps({"model": "omni-embedded", "messages": [{"role": "user", "content": content}]})
    assert len(body) < 6000
    return body


async def status_of(body: bytes, *, port: int) -> int:
    async with raw_client(port) as client:
        await client.send(request("POST", "/v1/chat/completions", body=body))
        _, status, headers = await client.head()
        if status == 503:
            assert int(dict(headers)["retry-after"]) >= 1
        return status


async def test_small_pictures_that_unfold_fill_no_memory() -> None:
    async with server_process() as (pid, port), connect(f"ws://127.0.0.1:{port}/v1/streaming_input") as innocent:
        await innocent.ping()
        assert await status_of(picture_request((8, 8)), port=port) == 200
        # Encoded once, before any connection: a head has to arrive in time.
        large = picture_request((8192, 4096))
        before = peak_mib(pid)
        flood = asyncio.gather(*(status_of(large, port=port) for _ in range(REQUESTS)))
        lags = []
        while not flood.done():
            lags.append(await innocent.ping())
            await asyncio.sleep(0.02)
        statuses = await flood
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) >= 1
        assert peak_mib(pid) - before < HELD_MIB + UNCOUNTED_MIB
        assert sorted(lags)[int(len(lags) * 0.99)] < MAX_LAG, sorted(lags)[-10:]
        print(
            f"{statuses.count(200)} answered, {statuses.count(503)} refused; {peak_mib(pid) - before:.0f} MiB;"
            f" ping p99 {sorted(lags)[int(len(lags) * 0.99)] * 1000:.1f} ms, {len(lags)}"
        )
        began = time.monotonic()
        assert await status_of(large, port=port) == 200
        assert time.monotonic() - began < 20
