"""Processes that are marked as a server's die with it, whoever started them; others live on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.commands import running
from support.patience import until

from omni_ws.engine.vllm.processes import is_marked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's processes are found in /proc")

#: A server whose models run another program, are forks, and are started by one of them; and a process of its own.
SERVER = """
import os, subprocess, sys, time
from omni_ws.engine.vllm.processes import MARK, marked_processes

SLEEPS = [sys.executable, "-c", "import time; time.sleep(1000)"]
PARENT = [sys.executable, "-c", "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=2).pid)", *SLEEPS]

def fork():
    pid = os.fork()
    if not pid:
        time.sleep(1000)
    return pid

own = [fork(), subprocess.Popen(SLEEPS).pid]
with marked_processes():
    with marked_processes():
        models = [subprocess.Popen(SLEEPS).pid]
    models += [fork(), subprocess.Popen(SLEEPS).pid]
    models.append(int(subprocess.run(PARENT, stdout=subprocess.PIPE).stdout))
own += [fork(), subprocess.Popen(SLEEPS).pid]
assert MARK not in os.environ
print(*models, flush=True)
print(*own, flush=True)
sys.stdin.read()
"""


def alive(process: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("ends", [True, False], ids=["by itself", "killed"])
async def test_what_a_server_marked_dies_with_it(ends: bool) -> None:

    pipes: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    async with running(sys.executable, "-c", SERVER, **pipes) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        models, own = [[int(pid) for pid in (await server.stdout.readline()).split()] for _ in range(2)]
        try:
            assert len(models) == len(own) == 4
            assert all(map(alive, models + own))
            if ends:
                server.stdin.close()
            else:
                server.kill()
            await until(lambda: not any(map(alive, models)))
            assert all(map(alive, own))
        finally:
            for process in (*models, *own):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def test_a_process_that_is_gone_has_no_mark() -> None:
    assert not is_marked("no process", "any mark")
