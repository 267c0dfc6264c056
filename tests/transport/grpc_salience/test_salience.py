"""salience.v1 over real gRPC, on an engine whose numbers are known."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.patience import PATIENCE_SEC, until
from support.salience_server import SalienceServer, refused, salience_server
from support.token_engine import CONCEPTS, END, EOS, LAYERS, PAD, START, TokenEngine, logprob, next_token, readout

from omni_ws.config.keys import ApiKey, digest
from omni_ws.config.model import GrpcConfig, LimitsConfig, ServerConfig
from omni_ws.engine.base import EngineState
from omni_ws.engine.fake import EchoEngine
from omni_ws.errors import EngineFailed
from omni_ws.generated import salience_pb2 as messages
from omni_ws.generated.salience_pb2_grpc import SalienceStub
from omni_ws.service.tokens import IMAGE_OVERHEAD_BYTES

Status = grpc.StatusCode
Done = messages.GenerateDone
ALL = [{"start": 0, "end": 2**32 - 1}]


@pytest.fixture
def engine() -> TokenEngine:
    return TokenEngine()


@pytest.fixture
async def server(engine: TokenEngine) -> AsyncIterator[SalienceServer]:
    async with salience_server(engine) as running:
        yield running


def written(tokens: list[int], count: int) -> list[int]:
    """The next ``count`` tokens of the engine."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[-count:] if count else []


def picture(features: int, start: int) -> dict[str, Any]:
    return {
        "bytes": b"x" * features,
        "mime": "image/png",
        "pad_range_start": start,
        "pad_range_end": start + features + 2,
    }


def moved(image: dict[str, Any]) -> dict[str, Any]:
    """The image one token further on."""
    return {name: value + 1 if name.startswith("pad_range") else value for name, value in image.items()}


def block(features: int) -> list[int]:
    return [START, *[PAD] * features, END]


# the six calls


async def test_append_and_decode(server: SalienceServer) -> None:
    session = await server.open()
    tokens, done = await server.events(session, [5, 6, 7], max_tokens=4)
    answer = written([5, 6, 7], 4)
    assert [token.id for token in tokens] == answer
    assert [token.position for token in tokens] == [3, 4, 5, 6]
    assert not any(token.is_prefill or token.has_sampled_logprob or token.readout for token in tokens)
    assert (done.prompt_tokens, done.completion_tokens, done.total_tokens) == (3, 4, 7)
    assert done.finish_reason == Done.FINISH_REASON_LENGTH
    assert await server.dump(session) == [5, 6, 7, *answer]
    tokens, done = await server.events(session, [8], 7, max_tokens=1)
    assert done.prompt_tokens == 8
    assert [token.id for token in tokens] == written([5, 6, 7, *answer, 8], 1)


async def test_scoring_decodes_nothing(server: SalienceServer) -> None:
    session = await server.open()
    tokens, done = await server.events(session, [5, 6, 7], logprobs_ranges=[{"start": 0, "end": 2}], logprob_top_k=3)
    assert [(token.id, token.position, token.is_prefill) for token in tokens] == [(5, 0, True), (6, 1, True)]
    assert not tokens[0].has_sampled_logprob
    assert list(tokens[0].logprobs) == []
    assert tokens[1].has_sampled_logprob
    assert tokens[1].sampled_logprob == logprob(6, 1)
    assert len(tokens[1].logprobs) == 3
    assert (done.prompt_tokens, done.completion_tokens) == (3, 0)
    assert done.finish_reason == Done.FINISH_REASON_LENGTH


async def test_ranges_reach_back_and_ahead(server: SalienceServer, engine: TokenEngine) -> None:
    session = await server.open()
    await server.events(session, [5, 6])
    tokens, _ = await server.events(session, [7], 2, max_tokens=2, logprobs_ranges=ALL, readout_ranges=ALL)
    assert [token.position for token in tokens] == [0, 1, 2, 3, 4]
    assert [list(token.readout) for token in tokens] == [readout(token.id, token.position) for token in tokens]
    assert [token.has_sampled_logprob for token in tokens] == [False, True, True, True, True]
    assert len(engine.calls) == 2


async def test_empty_ranges_cover_nothing(server: SalienceServer, engine: TokenEngine) -> None:
    session = await server.open()
    tokens, done = await server.events(session, [5], logprobs_ranges=[{"start": 1, "end": 1}])
    assert (tokens, done.prompt_tokens) == ([], 1)


@pytest.mark.parametrize("stop", [[], [written([5], 2)[1]]])
async def test_a_token_that_ends_the_answer_is_part_of_it(server: SalienceServer, stop: list[int]) -> None:
    session = await server.open()
    start = next(first for first in range(1, 900) if EOS in written([first], 3)) if not stop else 5
    tokens, done = await server.events(session, [start], max_tokens=50, stop_token_ids=stop)
    assert done.finish_reason == Done.FINISH_REASON_EOS
    assert tokens[-1].id == (stop[0] if stop else EOS)
    assert (await server.dump(session))[-1] == tokens[-1].id


async def test_a_call_that_does_nothing_asks_no_engine(server: SalienceServer, engine: TokenEngine) -> None:
    session = await server.open()
    _, done = await server.events(session)
    assert (done.prompt_tokens, done.total_tokens, done.finish_reason) == (0, 0, Done.FINISH_REASON_LENGTH)
    await server.events(session, [5])
    _, done = await server.events(session, [], 1)
    assert (done.prompt_tokens, done.finish_reason) == (1, Done.FINISH_REASON_LENGTH)
    assert len(engine.calls) == 1


async def test_truncation_without_more_is_done(server: SalienceServer) -> None:
    session = await server.open()
    await server.events(session, [5, 6, 7])
    _, done = await server.events(session, [], 1, truncating=True)
    assert done.prompt_tokens == 1
    assert await server.dump(session) == [5]


async def test_forks_go_their_own_ways(server: SalienceServer) -> None:
    parent = await server.open()
    await server.events(parent, [5, 6, 7])
    child = await server.fork(parent, 2)
    await server.events(child, [9], 2)
    await server.close(parent)
    assert await server.dump(child) == [5, 6, 9]
    async with refused(Status.NOT_FOUND):
        await server.dump(parent)


async def test_the_manifest(server: SalienceServer) -> None:
    manifest = await server.stub.GetReadoutManifest(messages.GetReadoutManifestRequest())
    assert (tuple(manifest.concepts), tuple(manifest.layers)) == (CONCEPTS, LAYERS)
    assert (manifest.hidden_size, manifest.dtype) == (32, "float16")


async def test_without_readouts() -> None:
    async with salience_server(TokenEngine(readouts=False)) as server:
        manifest = await server.stub.GetReadoutManifest(messages.GetReadoutManifestRequest())
        assert manifest == messages.ReadoutManifest()
        session = await server.open()
        async with refused(Status.FAILED_PRECONDITION, "readouts are disabled"):
            await server.events(session, [5], readout_ranges=ALL)
        assert await server.dump(session) == []
        await server.events(session, [5], readout_ranges=[{"start": 1, "end": 1}])


async def test_open_says_how_much_the_model_reads_and_checks_its_name(server: SalienceServer) -> None:
    answer = await server.stub.OpenSession(messages.OpenSessionRequest(model="local-model"))
    assert answer.max_model_len == 64
    for name in ("", "another"):
        async with refused(Status.INVALID_ARGUMENT, "model"):
            await server.stub.OpenSession(messages.OpenSessionRequest(model=name))


# images


async def test_images_are_kept_once(server: SalienceServer, engine: TokenEngine) -> None:
    session = await server.open()
    await server.events(session, [5, *block(4)], images=[picture(4, 1)])
    held = server.held_bytes
    assert held == 7 * 4 + 4 + IMAGE_OVERHEAD_BYTES
    child = await server.fork(session, 7)
    assert server.held_bytes == held + 7 * 4 + IMAGE_OVERHEAD_BYTES  # for the image in either session
    await server.close(session)
    assert server.held_bytes == held
    await server.events(child, [6], 7)
    assert [image.start for image in engine.calls[-1].images] == [1]
    await server.close(child)
    assert server.held_bytes == 0


@pytest.mark.parametrize(
    ("tokens", "images", "match"),
    [
        (block(4), [], "exactly one vision block"),
        (block(4), [picture(5, 0)], "outside the appended"),
        (block(4), [{**picture(4, 0), "bytes": b"xx"}], "2 features"),
        (block(4), [{**picture(4, 0), "mime": "text/html"}], "images[0].mime"),
    ],
)
async def test_images_that_do_not_fit_change_nothing(
    server: SalienceServer, tokens: list[int], images: list[Any], match: str
) -> None:
    session = await server.open()
    await server.events(session, [5, 6])
    async with refused(Status.INVALID_ARGUMENT, match):
        await server.events(session, tokens, 1, truncating=True, images=[moved(one) for one in images])
    assert await server.dump(session) == [5, 6]
    assert server.held_bytes == 8


async def test_an_image_of_five_megabytes() -> None:
    class OneFeature(TokenEngine):
        async def check_images(self, images: Any) -> None:
            assert [len(image.data) for image in images] == [5 << 20]

    async with salience_server(OneFeature()) as server:
        session = await server.open()
        await server.events(session, block(1), images=[{**picture(1, 0), "bytes": b"x" * (5 << 20)}])
        assert server.held_bytes == 3 * 4 + (5 << 20) + IMAGE_OVERHEAD_BYTES


async def test_a_message_over_the_limit_is_refused() -> None:
    async with salience_server(TokenEngine(), max_message_bytes=100_000) as server:
        session = await server.open()
        async with refused(Status.RESOURCE_EXHAUSTED):
            await server.events(session, block(1), images=[{**picture(1, 0), "bytes": b"x" * 100_000}])
        assert await server.dump(session) == []


# bad input leaves everything as it was


@pytest.mark.parametrize(
    ("fields", "status", "match"),
    [
        ({"offset": 1}, Status.FAILED_PRECONDITION, "2 tokens, not 1"),
        ({"offset": 3}, Status.FAILED_PRECONDITION, "2 tokens, not 3"),
        ({"offset": 3, "truncating": True}, Status.FAILED_PRECONDITION, "offset"),
        ({"tokens": [1000]}, Status.INVALID_ARGUMENT, "append_tokens"),
        ({"tokens": [2**32 - 1]}, Status.INVALID_ARGUMENT, "append_tokens"),
        ({"tokens": [1] * 63}, Status.RESOURCE_EXHAUSTED, "got 65"),
        ({"logprob_top_k": 21}, Status.INVALID_ARGUMENT, "logprob_top_k"),
        ({"logprobs_ranges": [{"start": 2, "end": 1}]}, Status.INVALID_ARGUMENT, "logprobs_ranges[0]"),
        ({"readout_ranges": [{"start": 2, "end": 1}]}, Status.INVALID_ARGUMENT, "readout_ranges[0]"),
        ({"temperature": -1.0}, Status.INVALID_ARGUMENT, "temperature"),
        ({"temperature": float("nan")}, Status.INVALID_ARGUMENT, "temperature"),
        ({"temperature": float("inf")}, Status.INVALID_ARGUMENT, "temperature"),
        ({"top_p": 1.5}, Status.INVALID_ARGUMENT, "top_p"),
        ({"top_p": -0.5}, Status.INVALID_ARGUMENT, "top_p"),
        ({"top_p": float("nan")}, Status.INVALID_ARGUMENT, "top_p"),
        ({"stop_token_ids": [1000]}, Status.INVALID_ARGUMENT, "stop_token_ids"),
    ],
    ids=str,
)
async def test_what_is_refused_changes_nothing(
    server: SalienceServer, engine: TokenEngine, fields: dict[str, Any], status: grpc.StatusCode, match: str
) -> None:
    session = await server.open()
    await server.events(session, [5, 6])
    async with refused(status, match):
        await server.events(session, **{"tokens": [7], "offset": 2, "max_tokens": 2, **fields})
    assert await server.dump(session) == [5, 6]
    assert len(engine.calls) == 1
    await server.events(session, [7], 2, top_k=1, logprob_top_k=20, logprobs_ranges=ALL)


async def test_decoding_from_nothing_is_refused(server: SalienceServer) -> None:
    session = await server.open()
    async with refused(Status.INVALID_ARGUMENT, "max_tokens"):
        await server.events(session, max_tokens=1)


async def test_a_list_as_long_as_the_model_reads(server: SalienceServer, engine: TokenEngine) -> None:
    session = await server.open()
    await server.events(session, [5] * 63)
    tokens, done = await server.events(session, [], 63, max_tokens=9)
    assert (len(tokens), done.finish_reason) == (1, Done.FINISH_REASON_LENGTH)
    async with refused(Status.RESOURCE_EXHAUSTED):
        await server.events(session, [], 64, logprobs_ranges=ALL)
    assert len(await server.dump(session)) == 64
    asked = len(engine.calls)
    tokens, done = await server.events(session, [], 64, max_tokens=9)
    assert (len(tokens), done.prompt_tokens, done.finish_reason) == (0, 64, Done.FINISH_REASON_LENGTH)
    decoded = [{"start": 64, "end": 2**32 - 1}]
    _, done = await server.events(session, [], 64, max_tokens=9, logprobs_ranges=decoded, readout_ranges=decoded)
    assert (done.completion_tokens, done.finish_reason) == (0, Done.FINISH_REASON_LENGTH)
    assert len(engine.calls) == asked


@pytest.mark.parametrize("at", [4, 2**32 - 1])
async def test_a_fork_beyond_the_end(server: SalienceServer, at: int) -> None:
    session = await server.open()
    await server.events(session, [5, 6, 7])
    async with refused(Status.INVALID_ARGUMENT, "at_position"):
        await server.fork(session, at)


async def test_a_fork_inside_an_image(server: SalienceServer) -> None:
    session = await server.open()
    await server.events(session, block(2), images=[picture(2, 0)])
    async with refused(Status.FAILED_PRECONDITION, "inside the image"):
        await server.fork(session, 2)


async def test_unknown_sessions_are_refused(server: SalienceServer) -> None:
    await server.close("toks_nothing")
    async with refused(Status.NOT_FOUND):
        await server.events("toks_nothing", [5])
    async with refused(Status.NOT_FOUND):
        await server.fork("toks_nothing", 0)
    async with refused(Status.NOT_FOUND):
        await server.dump("")


# what is busy


async def test_a_busy_session_refuses_at_once(server: SalienceServer, engine: TokenEngine) -> None:
    session = await server.open()
    engine.gate.clear()
    stream = server.generate(session, [5], max_tokens=3)
    call = aiter(stream)
    first = await anext(call)
    await engine.waiting.wait()

    async def another() -> None:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await server.events(session, [6], 1)
        assert refusal.value.code() is Status.ABORTED
        told: dict[str, Any] = dict(tuple(refusal.value.trailing_metadata() or ()))
        assert told == {"omni-error-code": "session_busy", "retry-after-ms": "100"}

    await asyncio.gather(*(another() for _ in range(20)))
    async with refused(Status.ABORTED):
        await server.fork(session, 0)
    assert await server.dump(session) == [5, first.token.id]
    engine.gate.set()
    assert [event.WhichOneof("event") async for event in call] == ["token", "token", "done"]
    assert await server.dump(session) == [5, *written([5], 3)]


async def test_one_of_many_callers_at_a_time(server: SalienceServer) -> None:
    """Twenty callers append at the end that they last saw. Those that are late are refused, and nothing is lost."""
    session = await server.open()

    async def append(token: int) -> int:
        for _ in range(2000):
            offset = len(await server.dump(session))
            try:
                await server.events(session, [token], offset)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (Status.ABORTED, Status.FAILED_PRECONDITION):
                    raise
            else:
                return token
        pytest.fail("never its turn")

    assert sorted(await asyncio.gather(*(append(token) for token in range(100, 120)))) == list(range(100, 120))
    assert sorted(await server.dump(session)) == list(range(100, 120))


async def test_a_snapshot_before_anything_was_computed(server: SalienceServer, engine: TokenEngine) -> None:
    """An append is committed once the engine has answered. Until then a dump shows the list before it."""
    session = await server.open()
    await server.events(session, [5, 6])
    release = asyncio.Event()
    checking = asyncio.Event()

    async def check(images: Any) -> None:
        checking.set()
        await release.wait()

    engine.check_images = check  # type: ignore[method-assign]
    call = asyncio.create_task(server.events(session, block(2), 1, truncating=True, images=[picture(2, 1)]))
    await checking.wait()
    assert await server.dump(session) == [5, 6]
    release.set()
    await call
    assert await server.dump(session) == [5, *block(2)]


async def test_closing_a_busy_session_stops_it(server: SalienceServer, engine: TokenEngine) -> None:
    session = await server.open()
    engine.gate.clear()
    stream = server.generate(session, [5], max_tokens=3)
    call = aiter(stream)
    await anext(call)
    await engine.waiting.wait()
    await server.close(session)
    (last,) = [event async for event in call]
    assert (last.done.prompt_tokens, last.done.completion_tokens, last.done.total_tokens) == (1, 1, 2)
    assert last.done.finish_reason == Done.FINISH_REASON_CANCELLED
    assert await stream.code() is Status.OK
    assert (server.sessions, server.held_bytes, engine.active_requests) == (0, 0, 0)
    await server.close(session)


async def test_a_session_that_is_closed_before_the_first_event(server: SalienceServer, engine: TokenEngine) -> None:
    session = await server.open()
    engine.gate.clear()
    engine.holds_first = True
    call = server.generate(session, [5, 6], max_tokens=3)
    await engine.waiting.wait()
    await server.close(session)
    (last,) = [event async for event in call]
    assert (last.done.prompt_tokens, last.done.completion_tokens) == (2, 0)
    assert last.done.finish_reason == Done.FINISH_REASON_CANCELLED
    assert await call.code() is Status.OK


async def test_a_client_that_cancels_keeps_what_it_was_sent(server: SalienceServer, engine: TokenEngine) -> None:
    session = await server.open()
    engine.gate.clear()
    stream = server.generate(session, [5], max_tokens=3)
    call = aiter(stream)
    first = await anext(call)
    await engine.waiting.wait()
    stream.cancel()
    await server.idle()
    assert await server.dump(session) == [5, first.token.id]
    engine.gate.set()
    await server.events(session, [6], 2)


async def test_a_disconnected_client_frees_the_engine(server: SalienceServer, engine: TokenEngine) -> None:
    session = await server.open()
    engine.gate.clear()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        request = messages.GenerateRequest(session_id=session, append_tokens=[5], max_tokens=3)
        call = aiter(SalienceStub(channel).Generate(request))
        await anext(call)
        await engine.waiting.wait()
    await server.idle()
    assert len(await server.dump(session)) == 2


async def test_a_deadline_frees_the_engine(server: SalienceServer, engine: TokenEngine) -> None:
    session = await server.open()
    engine.gate.clear()
    request = messages.GenerateRequest(session_id=session, append_tokens=[5], max_tokens=3)
    async with refused(Status.DEADLINE_EXCEEDED):
        async for _ in server.stub.Generate(request, timeout=3):
            pass
    await server.idle()
    assert len(await server.dump(session)) == 2


# the engine


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (EngineFailed("the model died", fatal=True), Status.UNAVAILABLE),
        (EngineFailed("one request failed"), Status.INTERNAL),
        (RuntimeError("secret"), Status.INTERNAL),
    ],
)
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.filterwarnings("ignore")
async def test_an_engine_that_breaks(
    server: SalienceServer, engine: TokenEngine, failure: Exception, status: grpc.StatusCode, after: int
) -> None:
    session = await server.open()
    await server.events(session, [5, 6])
    engine.fail_with, engine.fail_after = failure, after
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await server.events(session, [7], 1, truncating=True, max_tokens=3)
    assert raised.value.code() is status
    assert "; error id err_" in (raised.value.details() or "")
    assert "secret" not in (raised.value.details() or "")
    engine.fail_with = None
    sent = written([5, 7], after)
    assert await server.dump(session) == ([5, 7, *sent] if after else [5, 6])


async def test_calls_are_refused_while_the_engine_is_unavailable(server: SalienceServer, engine: TokenEngine) -> None:
    session = await server.open()
    engine.state = EngineState.UNHEALTHY
    async with refused(Status.UNAVAILABLE):
        await server.events(session, [5])
    async with refused(Status.UNAVAILABLE):
        await server.open()
    engine.state = EngineState.OK
    await server.events(session, [5])


async def test_an_engine_without_token_sessions_has_no_service() -> None:
    from omni_ws.config.values import ConfigurationError
    from omni_ws.server import create_app, serve_tokens

    app = create_app(EchoEngine(), ServerConfig())
    async with serve_tokens(app) as listener:
        assert listener is None
    with pytest.raises(ConfigurationError, match="token sessions are not supported"):
        async with serve_tokens(create_app(EchoEngine(), ServerConfig(grpc=GrpcConfig(port=0)))):
            pass


async def test_a_taken_port_is_an_error(server: SalienceServer) -> None:
    from omni_ws.server import create_app, serve_tokens

    app = create_app(TokenEngine(), ServerConfig(grpc=GrpcConfig(port=server.port)))
    with pytest.raises(OSError, match=r"cannot listen.*--grpc-port"):
        async with serve_tokens(app):
            pass


async def test_port_0_binds_any_free_port(server: SalienceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_ws.server import create_app, serve_tokens

    monkeypatch.setattr("omni_ws.server.DEFAULT_GRPC_PORT", server.port)
    app = create_app(TokenEngine(), ServerConfig(port=0))
    async with serve_tokens(app) as other:
        assert other is not None
        assert other.port not in (0, server.port)


# limits, keys, time


async def test_keys_have_their_own_sessions() -> None:
    keys = (
        ApiKey(name="one", key_sha256=digest("secret-one"), max_sessions=2),
        ApiKey(name="two", key_sha256=digest("secret-two")),
    )
    async with salience_server(TokenEngine(), keys=keys) as server:
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "Basic secret-one"),)):
            server.metadata = metadata
            async with refused(Status.UNAUTHENTICATED):
                await server.open()
            async with refused(Status.UNAUTHENTICATED):
                await server.events("toks_any")
            async with refused(Status.UNAUTHENTICATED):
                await server.stub.GetReadoutManifest(messages.GetReadoutManifestRequest(), metadata=metadata)
        server.metadata = (("authorization", "Bearer secret-one"),)
        session = await server.open()
        other = await server.open()
        async with refused(Status.UNAVAILABLE, "at most 2 concurrent sessions"):
            await server.open()
        async with refused(Status.UNAVAILABLE, "at most 2 concurrent sessions"):
            await server.fork(session, 0)
        await server.close(other)
        await server.events(session, [5])
        server.metadata = (("authorization", "Bearer secret-two"),)
        async with refused(Status.NOT_FOUND):
            await server.dump(session)
        await server.close(session)
        server.metadata = (("authorization", "Bearer secret-one"),)
        assert await server.dump(session) == [5]


async def test_the_byte_budget_limits_sessions() -> None:
    config = ServerConfig(grpc=GrpcConfig(port=0), limits=LimitsConfig(max_held_bytes=40))
    async with salience_server(TokenEngine(), config=config) as server:
        session = await server.open()
        async with refused(Status.UNAVAILABLE):
            await server.events(session, [5] * 11)
        assert (server.held_bytes, await server.dump(session)) == (0, [])
        await server.events(session, [5] * 10)
        assert server.held_bytes == 40
        async with refused(Status.UNAVAILABLE):
            await server.fork(session, 1)
        await server.events(session, [], 0, truncating=True)
        assert server.held_bytes == 0


async def test_the_number_of_sessions_is_limited() -> None:
    config = ServerConfig(grpc=GrpcConfig(port=0), limits=LimitsConfig(max_sessions=1))
    async with salience_server(TokenEngine(), config=config) as server:
        session = await server.open()
        async with refused(Status.UNAVAILABLE):
            await server.open()
        await server.close(session)
        await server.open()


async def test_health(server: SalienceServer) -> None:
    stub: Any = health_pb2_grpc.HealthStub(server.channel)
    for name in ("", "salience.v1.Salience"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


# the definition


def definition(serialized: bytes) -> descriptor_pb2.FileDescriptorProto:
    """Without the names in JSON, which not every compiler writes down."""
    file = descriptor_pb2.FileDescriptorProto.FromString(serialized)
    for message in file.message_type:
        for field in message.field:
            field.ClearField("json_name")
    return file


def published() -> descriptor_pb2.FileDescriptorProto:
    """The service as its users know it."""
    compiled = (Path(__file__).parents[2] / "data" / "salience.binpb").read_bytes()
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(compiled).file
    return definition(file.SerializeToString())


def test_the_definition_is_the_published_one() -> None:
    assert definition(messages.DESCRIPTOR.serialized_pb) == published()


def test_the_stubs_are_those_of_the_definition(tmp_path: Path) -> None:
    """``make stubs`` after a change of protocol/salience.proto."""
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")
    folder = Path(__file__).parents[3] / "protocol"
    compiled = tmp_path / "descriptors"
    # In a process of its own: the compiler shares unique symbols of its protobuf (ShutdownData) with the library of the
    # voice detector, which is built with another one and would abort when it is loaded later.
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", f"--descriptor_set_out={compiled}"]
    subprocess.run([*command, str(folder / "salience.proto")], check=True, timeout=PATIENCE_SEC)
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file
    assert definition(file.SerializeToString()) == definition(messages.DESCRIPTOR.serialized_pb)


async def test_a_client_made_from_the_published_definition(server: SalienceServer) -> None:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(published())
    service = pool.FindServiceByName("salience.v1.Salience")

    def call(name: str, stream: bool = False) -> Any:
        method = service.FindMethodByName(name)
        request, answer = (message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type))
        make = server.channel.unary_stream if stream else server.channel.unary_unary
        rpc: Any = make(
            f"/{service.full_name}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=answer.FromString,
        )
        return lambda **fields: rpc(request(**fields))

    opened = await call("OpenSession")(model="local-model")
    generate = call("Generate", stream=True)
    events = [
        event
        async for event in generate(
            session_id=opened.session_id, append_tokens=[5, 6], max_tokens=2, logprobs_ranges=ALL, readout_ranges=ALL
        )
    ]
    answer = written([5, 6], 2)
    assert [event.token.id for event in events[:-1]] == [5, 6, *answer]
    assert list(events[0].token.readout) == readout(5, 0)
    assert events[1].token.sampled_logprob == logprob(6, 1)
    assert events[-1].done.total_tokens == 4
    forked = await call("ForkSession")(session_id=opened.session_id, at_position=3)
    await call("CloseSession")(session_id=opened.session_id)
    dumped = await call("DumpSession")(session_id=forked.session_id)
    assert list(dumped.tokens) == [5, 6, answer[0]]
    assert list((await call("GetReadoutManifest")()).concepts) == list(CONCEPTS)


async def test_two_hundred_thousand_tokens() -> None:
    count = 200_000
    async with salience_server(TokenEngine(max_model_len=count + 1)) as server:
        session = await server.open()
        await server.events(session, [7] * count)
        assert await server.dump(session) == [7] * count
        child = await server.fork(session, count - 1)
        await server.events(child, [8], count - 1)
        assert (await server.dump(child))[-2:] == [7, 8]
        assert server.held_bytes == 8 * count


async def test_calls_are_counted_by_their_names_and_statuses(server: SalienceServer, engine: TokenEngine) -> None:
    session = await server.open()
    await server.events(session, [5, 6, 7], max_tokens=4)
    async with refused(Status.NOT_FOUND):
        await server.dump("nobody's")
    engine.gate.clear()  # a call that ends by itself is not cancelled
    calling = server.generate(session, max_tokens=10_000, offset=7)
    await anext(aiter(calling))
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await anext(aiter(calling))
    made: Any = server.channel.unary_unary("/salience.v1.Salience/whatever-a-client-wrote")
    async with refused(Status.UNIMPLEMENTED):
        await made(b"")
    counted = server.app.sessions.metrics.grpc_calls

    def calls() -> dict[tuple[str, str], float]:
        (family,) = counted.collect()
        found = (sample for sample in family.samples if sample.name.endswith("_total"))
        return {(sample.labels["method"], sample.labels["status"]): sample.value for sample in found}

    await until(lambda: len(calls()) == 4)
    assert calls() == {
        ("OpenSession", "OK"): 1,
        ("Generate", "OK"): 1,
        ("DumpSession", "NOT_FOUND"): 1,
        ("Generate", "CANCELLED"): 1,
    }
