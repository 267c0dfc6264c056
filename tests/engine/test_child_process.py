"""Processes end with their input, and by force where they do not."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest
from support.until import until

from omni_ws.engine import child
from omni_ws.engine.child import end_process

READS = "import sys; print('up', flush=True); sys.stdin.read(); sys.exit(3)"
DOES_NOT_READ = "import signal; print('up', flush=True); signal.pause()"


async def start(program: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    return process


async def test_the_end_of_its_input_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "STOP_SEC", 60)
    assert await end_process(await start(READS), name="reader") == 3


async def test_one_that_goes_on_is_killed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(child, "STOP_SEC", 0.05)
    assert await end_process(await start(DOES_NOT_READ), name="sleeper") == -signal.SIGKILL
    assert "the sleeper does not end by itself and is killed" in caplog.text


async def test_one_that_goes_on_is_killed_at_once_if_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "STOP_SEC", 60)
    process = await start(DOES_NOT_READ)
    ending = asyncio.create_task(end_process(process, name="sleeper"))
    assert process.stdin is not None
    await until(process.stdin.is_closing)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert process.returncode == -signal.SIGKILL


async def test_one_that_has_ended_has_its_status() -> None:
    process = await start("print('up', flush=True)")
    await process.wait()
    assert await end_process(process, name="reader") == 0
