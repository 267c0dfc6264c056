"""Token sessions on a vLLM with too little cache, several keys, priorities, a Talker, and other requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support.engine_answers import Input, streamed
from support.salience_server import SalienceServer, salience_server
from support.vllm_engine import ALL, GREEDY, Reference, answer, close, plain_answer, random_vectors, readouts, request

from omni_ws.config.keys import ApiKey, digest
from omni_ws.config.model import GrpcConfig, ServerConfig, VllmConfig
from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import OutputModality
from omni_ws.engine.base import AudioOutput, ReadoutManifest
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.readouts import Readouts, ReadoutVectors

pytest.importorskip("vllm", reason="vLLM is not installed (make test-vllm)")

from support.tiny_models import ENGINE_ARGS, build_text_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

CONCEPTS = ("warm", "loud", "round")
KEYS = (ApiKey(name="one", key_sha256=digest("secret-one")), ApiKey(name="two", key_sha256=digest("secret-two")))
#: The size of vLLM's cache, in tokens.
ROOM = 18 * 32


def of(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer secret-{name}"),)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_text_model(tmp_path_factory.mktemp("models") / "text")


@pytest.fixture(scope="module")
def vectors() -> ReadoutVectors:
    return random_vectors(CONCEPTS)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(model: Path, vectors: ReadoutVectors) -> AsyncIterator[SalienceServer]:
    args = {**ENGINE_ARGS, "max_model_len": 512, "num_gpu_blocks_override": ROOM // 32}
    engine = VllmEngine(VllmConfig(model=str(model), args=args), readouts=Readouts(vectors))
    config = ServerConfig(grpc=GrpcConfig(port=0))
    async with salience_server(engine, keys=KEYS, config=config) as running:
        running.metadata = of("one")
        yield running


def told_to_vllm(server: SalienceServer, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record priority and cached tokens of each request from now on."""
    engine: Any = server.app.sessions.engine
    told: list[dict[str, Any]] = []
    generate = engine.tokens._model.generate

    async def noted(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
        told.append(dict(options))
        async for output in generate(*arguments, **options):
            told[-1].setdefault("cached", output.num_cached_tokens)
            yield output

    monkeypatch.setattr(engine.tokens._model, "generate", noted)
    return told


async def test_calls_that_are_interrupted_for_want_of_room_read_out_the_same(
    server: SalienceServer, model: Path, vectors: ReadoutVectors
) -> None:
    engine: Any = server.app.sessions.engine
    reference = Reference(model)
    texts = [[(index * step) % 250 + 1 for index in range(130)] for step in (3, 7, 11, 13)]
    sessions = [await server.open() for _ in texts]
    before = engine._readouts.channel.rows
    calls = [
        server.events(session, text, 0, max_tokens=120, top_k=1, readout_ranges=ALL)
        for session, text in zip(sessions, texts, strict=True)
    ]
    answers = await asyncio.gather(*calls)
    wanted = sum(len(tokens) for tokens, _ in answers)
    assert wanted > ROOM
    assert engine._readouts.channel.rows - before > wanted, "nothing was interrupted, so nothing was shown"
    for session, (tokens, _) in zip(sessions, answers, strict=True):
        assert close(readouts(tokens), reference.readouts(await server.dump(session), vectors))
        await server.close(session)


async def test_priorities_are_passed_on(server: SalienceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    told = told_to_vllm(server, monkeypatch)
    session = await server.open()
    await server.events(session, [5], priority=7)
    await server.events(session, [6], 1, priority=-3, max_tokens=1)
    assert [one["priority"] for one in told] == [7, 0]  # negative priorities require a permitted key
    await server.close(session)


async def test_what_one_key_had_computed_another_does_not_find(
    server: SalienceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = told_to_vllm(server, monkeypatch)
    text = [(index * 17) % 250 + 1 for index in range(100)]
    for name in ("one", "one", "two"):
        server.metadata = of(name)
        session = await server.open()
        await server.events(session, text)
        await server.close(session)
    server.metadata = of("one")
    assert [one["cached"] for one in told] == [0, 96, 0]


async def test_numbers_at_the_edge_of_what_the_wire_carries(server: SalienceServer) -> None:
    session = await server.open()
    most = 2**32 - 1
    _, done = await server.events(session, [5] * 508, max_tokens=most, top_k=most, temperature=1e-30, top_p=1e-6)
    assert done.total_tokens <= 512
    await server.close(session)


async def test_readouts_beside_a_chat_and_a_talker(voice_engine: VllmEngine) -> None:
    """The chat's answer is the same as without readouts, it is spoken, and the readouts are right meanwhile."""
    vectors = random_vectors(CONCEPTS)
    reference = Reference(Path(str(voice_engine.config.model)))
    text = [(index * 19) % 250 + 1 for index in range(150)]
    async with salience_server(voice_engine, stops_engine=False) as server:
        modalities = frozenset({OutputModality.TEXT, OutputModality.AUDIO})

        async def speak() -> int:
            asked = request(Input("hello there"), modalities=modalities)
            outputs = streamed(voice_engine, asked)
            return sum([len(one.samples) async for one in outputs if isinstance(one, AudioOutput)])

        session = await server.open()
        (tokens, _), (said, _), sound = await asyncio.gather(
            server.events(session, text, max_tokens=20, top_k=1, readout_ranges=ALL),
            answer(voice_engine, Input("what is it?"), sampling={**GREEDY, "temperature": 0}),
            speak(),
        )
        assert close(readouts(tokens), reference.readouts(await server.dump(session), vectors))
        assert sound > 0
        assert said == await plain_answer(voice_engine, "user: what is it?\nassistant:")


# invalid combinations


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pipeline_parallel_size", 2),
        ("data_parallel_size", 2),
        ("enforce_eager", False),
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}),
        ("worker_extension_cls", "another"),
        ("kv_transfer_config", {"kv_connector": "any"}),
    ],
)
async def test_arguments_that_do_not_go_with_readouts(
    model: Path, vectors: ReadoutVectors, name: str, value: Any
) -> None:
    args = {**ENGINE_ARGS, name: value}
    with pytest.raises(ConfigurationError, match=f"vllm.args.{name}"):
        VllmEngine(VllmConfig(model=str(model), args=args), readouts=Readouts(vectors))


async def test_vectors_of_another_size_end_the_start(model: Path) -> None:
    manifest = ReadoutManifest(concepts=("one",), layers=(1,), hidden_size=64, dtype="float16")
    vectors = ReadoutVectors(manifest, (np.ones((1, 64), np.float32),))
    engine = VllmEngine(VllmConfig(model=str(model), args=dict(ENGINE_ARGS)), readouts=Readouts(vectors))
    with pytest.raises(ConfigurationError, match="hidden size of 64"):
        await engine.start()
