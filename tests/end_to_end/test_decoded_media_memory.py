"""Many small pictures that unfold to large ones, at once: the server's memory is bounded, and others go on."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import re
import sys
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
REQUESTS = 12
HELD_MIB = 256
#: Beyond what is counted: the requests' own bytes, threads, and the allocator's habits.
UNCOUNTED_MIB = 128
#: Of the server's CPU time, so much is the event loop's at most: pictures are not unfolded there.
LOOPS_SHARE = 0.5


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


def worked(pid: int) -> tuple[float, float]:
    """CPU seconds of the thread with the event loop, and of all threads."""
    spent = {
        thread.name: int((thread / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
        for thread in Path(f"/proc/{pid}/task").iterdir()
    }
    return spent[str(pid)], sum(spent.values())


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
        large = picture_request((4096, 4096))
        before, worked_before = peak_mib(pid), worked(pid)
        flood = asyncio.gather(*(status_of(large, port=port) for _ in range(REQUESTS)))
        while not flood.done():
            await innocent.ping()
            await asyncio.wait([flood], timeout=0.02)
        statuses = await flood
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) >= 1
        assert peak_mib(pid) - before < HELD_MIB + UNCOUNTED_MIB
        of_loop, of_all = (after - begun for after, begun in zip(worked(pid), worked_before, strict=True))
        assert of_loop < LOOPS_SHARE * of_all, (of_loop, of_all)
        assert await status_of(large, port=port) == 200
