"""``omni-ws serve`` that fetches a model while it answers by rules: killed, two at once, and in a conversation."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.commands import running
from support.file_server import FileServer, file_server
from support.native_client import native_client
from support.patience import PATIENCE_SEC, PERIOD_SEC
from support.raw_http import call
from support.real_models import smollm2_file

from omni_ws.weights import (
    Fetching,
    locked,
    pinned_weights,
)

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

#: SmolLM2 in Qwen's place, from the test's own publisher, on a machine that is large enough and has no other servers.
_SITE = """
from dataclasses import replace
from omni_ws import weights as module

real = module.pinned_weights()
small = real["smollm2"]
files = tuple(replace(file, official=None) for file in small.files)
weights = {{**real, "qwen": replace(small, name="qwen", official={url!r}, wheels=(), files=files)}}
module.pinned_weights = lambda: weights
from omni_ws import engine_choice
from omni_ws.engine.llm import auto_llm
auto_llm.LEAST_MEMORY = auto_llm.LEAST_CORES = auto_llm.LEAST_DISK = 0
engine_choice.LOCAL_SERVERS = ()
"""


@dataclass(frozen=True)
class Started:
    """A server that runs."""

    process: Process
    port: int
    said: list[str]
    #: Set at each further line of the log.
    news: asyncio.Event

    @property
    def websocket_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/streaming_input"

    async def until_said(self, text: str) -> None:
        """Wait for a line of the log that contains ``text``."""
        async with asyncio.timeout(PATIENCE_SEC):
            while not any(text in line for line in self.said):
                self.news.clear()
                await self.news.wait()

    async def until_fetching(self) -> None:
        """Wait until a part of the model was fetched, which no line of the log tells at once."""
        async with asyncio.timeout(PATIENCE_SEC):
            coming: dict[str, Any] = {}
            while not coming.get("bytes_done"):
                await asyncio.sleep(PERIOD_SEC)
                coming = (await self.llm())["coming"]

    async def llm(self) -> dict[str, Any]:
        """Return what ``/health`` says of the LLM."""
        found: dict[str, Any] = (await call(self.port, "GET", "/health")).json()["parts"]["llm"]
        return found


@pytest.fixture
def publisher() -> Iterator[FileServer]:
    file = smollm2_file()
    with file_server({f"/{file.name}": file.read_bytes()}) as served:
        yield served


@asynccontextmanager
async def serve(folder: Path, publisher: FileServer) -> AsyncIterator[Started]:
    (folder / "sitecustomize.py").write_text(_SITE.format(url=publisher.url))
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [environment.get("PYTHONPATH")])]),
        "no_proxy": "*",
    }
    flags = ("--port", "0", "--llm.fetch", "true", "--asr", "none", "--tts", "none")
    command = (sys.executable, "-m", "omni_ws", "serve", *flags)
    async with running(*command, at_once=False, stderr=asyncio.subprocess.PIPE, env=environment) as process:
        assert process.stderr is not None
        said: list[str] = []
        async with asyncio.timeout(PATIENCE_SEC):
            while not said or "in a browser" not in said[-1]:
                said.append((await process.stderr.readline()).decode())
                assert said[-1], said
        (port,) = re.findall(r":(\d+) in a browser", said[-1])
        started = Started(process, int(port), said, asyncio.Event())
        reading = asyncio.create_task(read_on(started, process.stderr))
        try:
            yield started
        finally:
            if process.returncode is None:
                process.terminate()
            await reading


async def read_on(server: Started, log: asyncio.StreamReader) -> None:
    """Read the log to its end: else it would fill the pipe."""
    while line := await log.readline():
        server.said.append(line.decode())
        server.news.set()


async def kill(server: Started) -> None:
    server.process.kill()
    await server.process.wait()


async def test_two_servers_fetch_once_what_a_killed_one_had_begun_and_a_conversation_goes_on(
    publisher: FileServer, tmp_path: Path
) -> None:
    publisher.trickle_sec = 0.2
    async with serve(tmp_path, publisher) as killed:
        first = next(line for line in killed.said if "still starting" not in line)
        assert "rules answer at once, and Qwen2.5-Coder-1.5B-Instruct as soon as it is fetched" in first
        await killed.until_fetching()
        await kill(killed)
    publisher.trickle_sec = None
    publisher.asked.clear()
    weights = tmp_path / "cache" / "omni_ws" / "weights"
    (lock,) = weights.glob(".qwen-*.lock")
    async with AsyncExitStack() as stack:
        # While another process fetches, both wait, and answer.
        with locked(lock, "qwen", Fetching()):
            one, two = [await stack.enter_async_context(serve(tmp_path, publisher)) for _ in range(2)]
            client = await stack.enter_async_context(native_client(one))
            await client.say("My name is Ada.")
            assert "Ada" in (await client.answer()).text
            assert client.created["parts"]["llm"]["name"] == "rules"
        told = await client.until("session_updated")
        assert told["parts"]["llm"]["name"] == "gguf"
        await client.say("Tell me a little about foxes.")
        answer = await client.answer()
        assert (answer.errors, answer.reason in ("stop", "length")) == ([], True)
        assert answer.text
        await client.say("What is my name?")
        assert "Ada" in (await client.answer()).text
        assert client.seen("error") == []
        await two.until_said("answers from now on")
        assert (await two.llm())["name"] == "gguf"
        assert len(publisher.asked) == 1
        await kill(two)
    async with serve(tmp_path, publisher) as again:
        await again.until_said("answers from now on")
        assert (await again.llm())["name"] == "gguf"
        assert any("which was fetched before, is being loaded" in line for line in again.said)
    assert len(publisher.asked) == 1
    assert pinned_weights()["smollm2"].files[0].size == next(weights.glob("qwen-*/*.gguf")).stat().st_size
