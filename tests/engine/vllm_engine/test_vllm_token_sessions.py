"""Token sessions on the real vLLM, over real gRPC: continuations, log-probabilities, images and readouts.

The expected values are from transformers, with the same weights.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from salience_client import SalienceClient
from support.patience import PATIENCE_SEC, until
from support.salience_server import SalienceServer, refused, salience_server
from support.vllm_engine import (
    ALL,
    LAYERS,
    Reference,
    close,
    core_process,
    png,
    random_vectors,
    readouts,
    unfinished,
    until_state,
)

from omni_ws.config.model import VllmConfig
from omni_ws.config.values import ConfigurationError
from omni_ws.engine.base import EngineState, ReadoutManifest
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.readouts import Readouts, ReadoutVectors, load_vectors, save_vectors
from omni_ws.generated import salience_pb2 as messages

pytest.importorskip("vllm", reason="vLLM is not installed (make test-vllm)")

from support.tiny_models import ENGINE_ARGS, MULTIMODAL_ARGS, Family, build_text_model, omni_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

Status = grpc.StatusCode
Done = messages.GenerateDone
TEXT = [(index * 37) % 250 + 1 for index in range(200)]
CONCEPTS = ("warm", "loud", "round", "late", "near")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_text_model(tmp_path_factory.mktemp("models") / "text")


@pytest.fixture(scope="module")
def vectors() -> ReadoutVectors:
    return random_vectors(CONCEPTS)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(model: Path, vectors: ReadoutVectors) -> AsyncIterator[SalienceServer]:
    # Prompts longer than a step's budget are computed in several steps.
    args = {**ENGINE_ARGS, "max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 512}
    engine = VllmEngine(VllmConfig(model=str(model), args=args), readouts=Readouts(vectors))
    async with salience_server(engine) as running:
        yield running


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


# continuations and log-probabilities


async def test_a_greedy_continuation(server: SalienceServer, reference: Reference) -> None:
    session = await server.open()
    tokens, done = await server.events(session, TEXT, max_tokens=20, top_k=1)
    told = list(TEXT)
    for token in tokens:
        assert token.id == int(reference.run(told)[-1].argmax())
        told.append(token.id)
    assert await server.dump(session) == told
    assert (done.completion_tokens, done.finish_reason) == (20, Done.FINISH_REASON_LENGTH)
    await server.close(session)


async def test_appended_pieces_go_on_as_the_whole(server: SalienceServer) -> None:
    whole, pieces = await server.open(), await server.open()
    wanted, _ = await server.events(whole, TEXT, max_tokens=12, top_k=1)
    await server.events(pieces, TEXT[:70])
    await server.events(pieces, TEXT[70:150], 70)
    found, _ = await server.events(pieces, TEXT[150:], 150, max_tokens=12, top_k=1)
    assert [token.id for token in found] == [token.id for token in wanted]
    for session in (whole, pieces):
        await server.close(session)


@pytest.mark.parametrize("top", [0, 1, 20])
async def test_scores_are_those_of_the_model(server: SalienceServer, reference: Reference, top: int) -> None:
    session = await server.open()
    await server.events(session, TEXT[:100])
    ranges = [{"start": 0, "end": 3}, {"start": 90, "end": 110}]
    tokens, _ = await server.events(session, TEXT[100:], 100, logprobs_ranges=ranges, logprob_top_k=top)
    assert [token.position for token in tokens] == [*range(3), *range(90, 110)]
    scores = reference.run(TEXT)
    assert not tokens[0].has_sampled_logprob
    for token in tokens[1:]:
        before = scores[token.position - 1]
        assert token.is_prefill
        assert token.id == TEXT[token.position]
        assert token.sampled_logprob == pytest.approx(float(before[token.id]), rel=1e-3, abs=1e-4)
        assert [one.id for one in token.logprobs] == list(np.argsort(-before)[:top])
        assert [one.logprob for one in token.logprobs] == pytest.approx(sorted(before)[::-1][:top], rel=1e-3, abs=1e-4)
    await server.close(session)


async def test_decoded_tokens_are_scored_too(server: SalienceServer, reference: Reference) -> None:
    session = await server.open()
    tokens, _ = await server.events(session, TEXT, max_tokens=5, logprobs_ranges=[{"start": 202, "end": 204}])
    scores = reference.run(await server.dump(session))
    assert [token.has_sampled_logprob for token in tokens] == [False, False, True, True, False]
    for token in tokens[2:4]:
        assert token.sampled_logprob == pytest.approx(float(scores[token.position - 1][token.id]), rel=1e-3, abs=1e-4)
    await server.close(session)


@pytest.mark.parametrize("reading", [[], ALL])
async def test_a_stop_token_ends_the_answer_and_belongs_to_it(server: SalienceServer, reading: list[Any]) -> None:
    session = await server.open()
    tokens, _ = await server.events(session, TEXT, max_tokens=20, top_k=1)
    stop = tokens[4].id
    place = [token.id for token in tokens].index(stop)
    other = await server.open()
    tokens, done = await server.events(
        other, TEXT, max_tokens=20, top_k=1, stop_token_ids=[stop], readout_ranges=reading
    )
    decoded = [token for token in tokens if not token.is_prefill]
    assert (done.finish_reason, len(decoded), decoded[-1].id) == (Done.FINISH_REASON_EOS, place + 1, stop)
    assert (await server.dump(other))[-1] == stop
    for one in (session, other):
        await server.close(one)


async def test_the_whole_context(server: SalienceServer) -> None:
    answer = await server.stub.OpenSession(messages.OpenSessionRequest(model="local-model"))
    session, longest = answer.session_id, answer.max_model_len
    assert longest == 512  # the model's limit
    tokens = [TEXT[index % 200] for index in range(longest)]
    await server.events(session, tokens[: longest - 3])
    found, done = await server.events(session, [], longest - 3, max_tokens=9, readout_ranges=ALL, top_k=1)
    # The token in the last position would have no readout, and is not decoded.
    assert (len(found), done.finish_reason) == (longest - 1, Done.FINISH_REASON_LENGTH)
    assert all(len(token.readout) == len(LAYERS) * len(CONCEPTS) for token in found)
    found, done = await server.events(session, [], longest - 1, max_tokens=9, readout_ranges=ALL, top_k=1)
    assert (len(found), done.finish_reason) == (longest - 1, Done.FINISH_REASON_LENGTH)
    last = [{"start": longest - 2, "end": longest}]
    scored, _ = await server.events(session, [], longest - 1, logprobs_ranges=last)
    assert [token.has_sampled_logprob for token in scored] == [True]
    async with refused(Status.RESOURCE_EXHAUSTED, f"at most {longest - 1} tokens"):
        await server.events(session, [1], longest - 1)
    decoded, done = await server.events(session, [], longest - 1, max_tokens=9, logprobs_ranges=last)
    assert (len(decoded), decoded[-1].position, done.finish_reason) == (2, longest - 1, Done.FINISH_REASON_LENGTH)
    assert decoded[-1].has_sampled_logprob
    assert len(await server.dump(session)) == longest
    async with refused(Status.RESOURCE_EXHAUSTED):
        await server.events(session, [1], longest)
    async with refused(Status.RESOURCE_EXHAUSTED, f"at most {longest - 1} tokens"):
        await server.events(session, [], longest, logprobs_ranges=ALL)
    _, done = await server.events(session, [], longest, max_tokens=9)
    assert (done.completion_tokens, done.finish_reason) == (0, Done.FINISH_REASON_LENGTH)
    await server.close(session)


async def test_the_client_of_the_examples(server: SalienceServer, reference: Reference) -> None:
    async with SalienceClient(server.channel).session() as session:
        async for _ in session.generate(TEXT[:120], max_tokens=5, top_k=1):
            pass
        assert len(session.tokens) == 125
        async for _ in session.generate([*TEXT[:90], 7, 8], max_tokens=300, top_k=1):
            if len(session.tokens) > 95:
                break  # which cancels the call
        scores = reference.run(TEXT)
        wanted = [sum(float(scores[at - 1][TEXT[at]]) for at in range(*place)) for place in ((1, 200), (150, 160))]
        assert await session.score(TEXT, [(0, 200), (150, 160)]) == pytest.approx(wanted, rel=1e-3)
        assert await server.dump(session.session_id) == session.tokens == TEXT


# readouts


async def test_readouts_are_the_projected_residual_stream(
    server: SalienceServer, reference: Reference, vectors: ReadoutVectors
) -> None:
    session = await server.open()
    tokens, _ = await server.events(session, TEXT, max_tokens=10, top_k=1, readout_ranges=ALL)
    wanted = reference.readouts(await server.dump(session), vectors)
    assert [token.position for token in tokens] == list(range(210))
    assert close(readouts(tokens), wanted)
    await server.close(session)


async def test_readouts_are_the_same_however_they_come(
    server: SalienceServer, reference: Reference, vectors: ReadoutVectors
) -> None:
    """In three appends, after a fork, with everything cached, and concurrently with other calls."""
    wanted = reference.readouts(TEXT, vectors)
    session = await server.open()
    found: list[messages.Token] = []
    for start, end in ((0, 70), (70, 75), (75, 200)):
        tokens, _ = await server.events(session, TEXT[start:end], start, readout_ranges=[{"start": start, "end": end}])
        assert [token.position for token in tokens] == list(range(start, end))
        found += tokens
    assert close(readouts(found), wanted)
    fork = await server.fork(session, 200)
    again, _ = await server.events(fork, [], 200, readout_ranges=ALL)
    assert close(readouts(again), wanted)
    others = [await server.open() for _ in range(4)]
    calls = [
        server.events(one, TEXT[number:], 0, max_tokens=4, readout_ranges=ALL) for number, one in enumerate(others)
    ]
    for number, (tokens, _) in enumerate(await asyncio.gather(*calls)):
        tokens_of = await server.dump(others[number])
        assert close(readouts(tokens), reference.readouts(tokens_of, vectors))
    for one in (session, fork, *others):
        await server.close(one)


async def test_an_appended_piece_is_computed_alone(server: SalienceServer) -> None:
    """Positions before the range come from the cache; only those to be read out are computed."""
    engine: Any = server.app.sessions.engine
    session = await server.open()
    tokens = [(index * 11) % 250 + 1 for index in range(160)]
    await server.events(session, tokens)
    before = engine._readouts.channel.rows
    await server.events(session, [9, 8, 7], 160, readout_ranges=[{"start": 160, "end": 163}])
    assert engine._readouts.channel.rows - before == 3
    await server.close(session)


async def test_a_fork_goes_on_as_its_parent_would(server: SalienceServer) -> None:
    parent = await server.open()
    await server.events(parent, TEXT)
    child = await server.fork(parent, 120)
    await server.events(child, TEXT[120:], 120)
    first, _ = await server.events(parent, [], 200, max_tokens=6, top_k=1)
    second, _ = await server.events(child, [], 200, max_tokens=6, top_k=1)
    assert [token.id for token in first] == [token.id for token in second]
    for one in (parent, child):
        await server.close(one)


async def test_a_cancelled_call_frees_vllm(server: SalienceServer) -> None:
    engine: Any = server.app.sessions.engine
    session = await server.open()
    stream = server.generate(session, TEXT, 0, max_tokens=300, top_k=1, readout_ranges=[{"start": 200, "end": 400}])
    call = aiter(stream)
    for _ in range(3):
        await anext(call)
    stream.cancel()
    await until(lambda: not unfinished(engine))
    await server.idle()
    kept = await server.dump(session)
    assert len(kept) >= 203
    await server.events(session, [5], len(kept), max_tokens=1)
    await server.close(session)


async def test_a_model_that_dies_is_unavailable_and_the_session_lives_on(
    server: SalienceServer, reference: Reference, vectors: ReadoutVectors
) -> None:
    engine: Any = server.app.sessions.engine
    session = await server.open()
    stream = server.generate(session, TEXT, 0, max_tokens=300, top_k=1)
    call = aiter(stream)
    await anext(call)
    os.kill(core_process(engine), signal.SIGKILL)
    async with refused(Status.UNAVAILABLE):
        async for _ in call:
            pass
    kept = await server.dump(session)
    assert kept[: len(TEXT)] == TEXT
    await until_state(engine, EngineState.OK)
    tokens, _ = await server.events(session, [5], len(kept), max_tokens=2, top_k=1, readout_ranges=ALL)
    assert close(readouts(tokens), reference.readouts(await server.dump(session), vectors))
    await server.close(session)


# images


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def qwen2_vl(seeing_model: VllmEngine) -> AsyncIterator[SalienceServer]:
    async with salience_server(seeing_model, stops_engine=False) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def qwen25_omni() -> AsyncIterator[SalienceServer]:
    model = omni_checkpoint(Family.QWEN25)
    config = VllmConfig(model=str(model), args=dict(MULTIMODAL_ARGS), omni_speech=False)
    async with salience_server(VllmEngine(config, readouts=Readouts(random_vectors(CONCEPTS)))) as running:
        yield running


@pytest.fixture(params=["qwen2_vl", "qwen25_omni"])
def seeing(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


async def test_images_have_the_features_that_the_model_makes(seeing: SalienceServer) -> None:
    engine: Any = seeing.app.sessions.engine
    vision = engine.tokens.vision_tokens
    assert vision is not None
    picture = png(112, 56, "red")
    features = 112 * 56 // 28 // 28

    def block(count: int) -> list[int]:
        return [vision.start, *[vision.pad] * count, vision.end]

    def attached(count: int, data: bytes = picture, mime: str = "image/png") -> dict[str, Any]:
        return {"bytes": data, "mime": mime, "pad_range_start": 2, "pad_range_end": 4 + count}

    session = await seeing.open()
    for count in (features - 1, features + 1):
        async with refused(Status.INVALID_ARGUMENT, f"{features} features"):
            await seeing.events(session, [5, 6, *block(count)], images=[attached(count)])
    async with refused(Status.INVALID_ARGUMENT, "images[0]"):
        await seeing.events(session, [5, 6, *block(features)], images=[attached(features, b"GIF89a nothing")])
    assert await seeing.dump(session) == []
    asked: dict[str, Any] = {"max_tokens": 4, "top_k": 1, "logprobs_ranges": ALL, "readout_ranges": ALL}
    tokens, done = await seeing.events(session, [5, 6, *block(features), 7], images=[attached(features)], **asked)
    assert done.prompt_tokens == features + 5
    fork = await seeing.fork(session, features + 5)
    again, _ = await seeing.events(fork, [], features + 5, **asked)
    assert [token.id for token in again] == [token.id for token in tokens]
    other = await seeing.open()
    blue, _ = await seeing.events(
        other,
        [5, 6, *block(features), 7],
        images=[attached(features, png(112, 56, "blue"))],
        **asked,
    )
    last = features + 4
    assert blue[last].sampled_logprob != tokens[last].sampled_logprob
    assert not close(readouts(blue), readouts(tokens))


async def test_an_image_that_never_reached_the_model_is_sent_again(
    seeing: SalienceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = seeing.app.sessions.engine
    vision = engine.tokens.vision_tokens
    features = 112 * 56 // 28 // 28
    tokens = [5, 6, vision.start, *[vision.pad] * features, vision.end, 7]

    def attached(colour: str) -> list[dict[str, Any]]:
        return [{"bytes": png(112, 56, colour), "mime": "image/png", "pad_range_start": 2,
                 "pad_range_end": 4 + features}]  # fmt: skip

    rendering = engine.tokens._model.render
    left: list[str] = []

    async def left_behind(prompt: Any) -> Any:
        """Simulate a call that ends between the two steps."""
        rendered = await rendering(prompt)
        if len(prompt["prompt_token_ids"]) > 3 and not left:
            left.append("once")
            return await rendering(prompt)
        return rendered

    monkeypatch.setattr(engine.tokens._model, "render", left_behind)
    session = await seeing.open()
    first, _ = await seeing.events(session, tokens, images=attached("white"), max_tokens=3, top_k=1)
    assert left == ["once"]
    assert len(first) == 3
    # And a call that is really cancelled at that point.
    monkeypatch.setattr(engine.tokens._model, "render", rendering)
    reached, left_it = asyncio.Event(), asyncio.Event()
    generate = engine.tokens._model.generate

    async def stuck(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
        reached.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            left_it.set()

    monkeypatch.setattr(engine.tokens._model, "generate", stuck)
    other = await seeing.open()
    call = seeing.generate(other, tokens, images=attached("green"), max_tokens=3, top_k=1)
    reading = asyncio.ensure_future(anext(aiter(call)))
    await reached.wait()
    call.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await asyncio.wait_for(left_it.wait(), PATIENCE_SEC)
    await seeing.idle()
    monkeypatch.setattr(engine.tokens._model, "generate", generate)
    assert await seeing.dump(other) == []
    again, _ = await seeing.events(other, tokens, images=attached("green"), max_tokens=3, top_k=1)
    assert len(again) == 3


# files


def test_vectors_go_through_their_files(tmp_path: Path) -> None:
    files = tmp_path / "readout.safetensors", tmp_path / "readout.json"
    matrices = {3: np.eye(2, 8, dtype=np.float32), 1: -np.eye(2, 8, dtype=np.float32)}
    save_vectors(matrices, ["one", "two"], *files)
    loaded = load_vectors(*files)
    assert loaded.manifest == ReadoutManifest(concepts=("one", "two"), layers=(1, 3), hidden_size=8, dtype="float16")
    assert np.array_equal(loaded.matrices[1], matrices[3])
    loaded.check_model(hidden_size=8, layers=4)
    with pytest.raises(ConfigurationError, match="hidden size of 8; the model's is 16"):
        loaded.check_model(hidden_size=16, layers=4)
    with pytest.raises(ConfigurationError, match=r"\[3\]; the model has only 3 layers"):
        loaded.check_model(hidden_size=8, layers=3)
