"""The programs in docs/openai.md do what they say."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from support.live_server import live_server

GUIDE = Path(__file__).parents[1] / "docs" / "openai.md"
CLIENT, EMBEDDED, WHOLE = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


async def run(program: str, *, until: bytes | None = None) -> tuple[int, bytes]:
    """Exit status and output; with ``until`` SIGTERM is sent when that has been printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMNI_WS_PORT": "0", "PYTHONPATH": str(GUIDE.parents[1])},
    )
    assert process.stdout is not None
    output = b""
    try:
        while line := await process.stdout.readline():
            output += line
            if until is not None and until in line:
                process.send_signal(signal.SIGTERM)
        return await process.wait(), output
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.slow
async def test_routes_over_an_engine_of_ones_own() -> None:
    status, output = await run(EMBEDDED)
    assert status == 0, output
    assert re.fullmatch(rb"http://127\.0\.0\.1:\d+/v1\n", output)


@pytest.mark.slow
async def test_the_whole_life_of_a_server() -> None:
    program = WHOLE.replace('engine="fake"', 'engine="fake", port=0')
    status, output = await run(program, until=b"listens on")
    assert status == 0, output


@pytest.mark.slow
async def test_the_client() -> None:
    pytest.importorskip("openai", reason="the openai package is not installed")
    async with live_server() as server:
        status, output = await run(CLIENT.replace("8080", str(server.port)))
    assert (status, output) == (0, b"What is two plus two?")
