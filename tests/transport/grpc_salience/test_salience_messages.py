"""The limits of messages that are arriving: bytes buffered, messages at a time, time, and the budget."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from support.salience_server import SalienceServer, raw_http2, refused, salience_server
from support.token_engine import TokenEngine

from omni_ws.config.keys import ApiKey, digest
from omni_ws.config.model import GrpcConfig, LimitsConfig, ServerConfig
from omni_ws.generated import salience_pb2 as messages
from omni_ws.generated.salience_pb2_grpc import SalienceStub
from omni_ws.service.sessions.admission import Addresses
from omni_ws.transport import grpc_salience
from omni_ws.transport.grpc_salience import (
    MAX_KEYLESS_CALLS,
    peer_address,
)

Status = grpc.StatusCode
MIB = 1 << 20
CLOSE, GENERATE = "/salience.v1.Salience/CloseSession", "/salience.v1.Salience/Generate"
HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
#: What gRPC buffers of a message that is not being read.
UNREAD = 65_535


def configured(*, held: int = 1024 * MIB, connections: int = 100, **settings: Any) -> ServerConfig:
    return ServerConfig(
        grpc=GrpcConfig(port=0, **settings), limits=LimitsConfig(max_held_bytes=held, max_connections=connections)
    )


@asynccontextmanager
async def serving(engine: TokenEngine | None = None, **settings: Any) -> AsyncIterator[SalienceServer]:
    async with salience_server(engine or TokenEngine(), config=configured(**settings)) as server:
        yield server


def number(status: grpc.StatusCode) -> int:
    value: int = status.value[0]
    return value


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """How long a message is a prompt one."""
    return lambda seconds: monkeypatch.setattr(grpc_salience, "PROMPT_SEC", seconds)


# places


async def test_a_message_that_is_not_read_is_not_buffered(patience: Callable[[float], None]) -> None:
    patience(60)
    async with serving(held=2 * MIB, max_message_bytes=MIB) as server, raw_http2(server.port) as client:
        client.begin(1, CLOSE, message_bytes=MIB)
        await client.send(1, MIB - 1)
        client.begin(3, CLOSE, message_bytes=MIB)
        await client.send(3, UNREAD - 5)
        await client.ping()
        assert (client.sent(1), client.sent(3), client.room(3)) == (MIB + 4, UNREAD, 0)
        assert server.held_bytes == 0
        # One byte later the place is another's. Zeros are no request.
        await client.send(1, 1)
        assert await client.status(1) == number(Status.INVALID_ARGUMENT)
        await client.send(3, MIB + 5 - UNREAD)
        assert await client.status(3) == number(Status.INVALID_ARGUMENT)


async def test_the_number_of_slow_messages_is_limited(patience: Callable[[float], None]) -> None:
    patience(0.05)
    async with serving(held=5 * MIB, max_message_bytes=MIB) as server, raw_http2(server.port) as client:
        for stream in (1, 3, 5):  # there are two places for them
            client.begin(stream, CLOSE, message_bytes=MIB)
        await client.until(lambda: client.over)
        (refused_one,) = client.over
        assert await client.status(refused_one) == number(Status.UNAVAILABLE)
        assert b"engine_overloaded" in client.headers[refused_one]
        one, _ = {1, 3, 5} - {refused_one}
        # Whoever is prompt needs no such place.
        patience(60)
        assert await server.dump(await server.open()) == []
        await client.send(one, MIB)
        assert await client.status(one) == number(Status.INVALID_ARGUMENT)  # zeros are no request
        # So there is one again.
        patience(0)
        client.begin(7, CLOSE, message_bytes=MIB)
        await client.send(7, MIB)
        assert await client.status(7) == number(Status.INVALID_ARGUMENT)
        assert client.over == {refused_one, one, 7}


async def test_a_client_that_disconnects_in_a_message_frees_its_slot(patience: Callable[[float], None]) -> None:
    patience(60)
    async with serving(held=2 * MIB, max_message_bytes=MIB) as server:
        async with raw_http2(server.port) as client:
            client.begin(1, CLOSE, message_bytes=MIB)
            await client.send(1, MIB - 1)
        assert await server.dump(await server.open()) == []


# time


@pytest.mark.parametrize("begun", [None, 100], ids=["nothing", "a beginning"])
async def test_a_message_that_does_not_arrive_times_out(begun: int | None, patience: Callable[[float], None]) -> None:
    patience(0.05)
    async with serving(message_timeout_sec=0.1) as server, raw_http2(server.port) as client:
        client.begin(1, GENERATE, message_bytes=begun)
        assert await client.status(1) == number(Status.DEADLINE_EXCEEDED)
        assert b"was incomplete after 0.1 seconds" in client.headers[1]


async def test_messages_without_a_key_time_out_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_salience, "KEYLESS_SEC", 0.05)
    async with serving() as server, raw_http2(server.port) as client:
        client.begin(1, HEALTH, message_bytes=None)
        client.begin(3, REFLECTION, message_bytes=None)
        assert await client.status(1) == number(Status.DEADLINE_EXCEEDED)
        assert await client.status(3) == number(Status.OK)  # who asks nothing more has asked all


async def test_a_call_without_its_key_is_refused_before_its_message() -> None:
    keys = (ApiKey(name="one", key_sha256=digest("secret")),)
    async with salience_server(TokenEngine(), keys=keys) as server, raw_http2(server.port) as client:
        for stream, path in ((1, GENERATE), (3, CLOSE)):
            client.begin(stream, path, message_bytes=None)
            assert await client.status(stream) == number(Status.UNAUTHENTICATED)


# what it counts for


@pytest.mark.parametrize("room", [0, -1], ids=["at the limit", "one past it"])
async def test_a_large_message_is_charged_while_its_call_runs(room: int) -> None:
    request = messages.CloseSessionRequest(session_id="x" * 100_000)
    async with serving(held=request.ByteSize() + room) as server:
        if room < 0:
            async with refused(Status.UNAVAILABLE, "buffer for unprocessed input is full"):
                await server.stub.CloseSession(request)
        else:
            await server.stub.CloseSession(request)
        assert server.held_bytes == 0


async def test_a_large_message_is_charged_besides_its_session() -> None:
    engine = TokenEngine(max_model_len=200_000)
    async with serving(engine) as server:
        session = await server.open()
        engine.gate.clear()
        call = aiter(server.generate(session, [900] * 50_000, max_tokens=3))
        await anext(call)
        await engine.waiting.wait()
        request = messages.GenerateRequest(session_id=session, append_tokens=[900] * 50_000, max_tokens=3)
        assert server.held_bytes == 4 * 50_000 + request.ByteSize()
        engine.gate.set()
        assert [event.WhichOneof("event") async for event in call] == ["token", "token", "done"]
        assert server.held_bytes == 4 * 50_003


async def test_a_full_server_still_closes_sessions() -> None:
    async with serving() as server:
        session = await server.open()
        budget = server.app.sessions.budget
        free = budget.capacity - budget.used
        budget.take(free)
        await server.close(session)
        assert server.sessions == 0
        budget.give(free)


# how many


async def test_the_number_of_calls_is_limited() -> None:
    engine = TokenEngine()
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with serving(engine, connections=3) as server:
        sessions = [await server.open() for _ in range(4)]
        engine.gate.clear()
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=own) as one,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=own) as another,
        ):
            calls = []
            for channel, session in zip((server.channel, one, another), sessions, strict=False):
                server.stub = SalienceStub(channel)
                calls.append(aiter(server.generate(session, [5], max_tokens=3)))
                await anext(calls[-1])
            async with refused(Status.UNAVAILABLE, "at most 3 concurrent calls"):
                await server.events(sessions[3], [5])
            engine.gate.set()
            for call in calls:
                assert [event.WhichOneof("event") async for event in call] == ["token", "token", "done"]
            await server.events(sessions[3], [5])


async def test_calls_without_a_key_take_no_place_of_others() -> None:
    async with serving() as server:
        watching = HealthStub(server.channel)
        watches = [watching.Watch(HealthCheckRequest()) for _ in range(MAX_KEYLESS_CALLS)]
        for watch in watches:
            await watch.read()
        async with refused(Status.UNAVAILABLE, f"at most {MAX_KEYLESS_CALLS} concurrent calls"):
            await watching.Watch(HealthCheckRequest()).read()
        await server.events(await server.open(), [5])
        for watch in watches:
            watch.cancel()


async def test_the_number_of_connections_is_limited() -> None:
    async with serving(connections=2) as server, raw_http2(server.port) as one, raw_http2(server.port) as two:
        await one.until(lambda: one.greeted)
        await two.until(lambda: two.greeted)
        async with raw_http2(server.port) as three:
            await three.until(lambda: three.closed)
        assert not one.closed
        assert not two.closed


# what is no message


async def test_an_invalid_message_is_refused() -> None:
    async with serving() as server:
        bare: Any = server.channel.unary_unary(CLOSE)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await bare(b"\xff\xff")
        assert (refusal.value.code(), "cannot be decoded" in str(refusal.value.details())) == (
            Status.INVALID_ARGUMENT,
            True,
        )
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await server.channel.stream_unary(CLOSE)(iter(()))
        assert (refusal.value.code(), "no message" in str(refusal.value.details())) == (Status.INVALID_ARGUMENT, True)


async def test_a_small_message_that_unpacks_to_a_large_one_is_refused() -> None:
    async with serving(max_message_bytes=100_000) as server:
        request = messages.CloseSessionRequest(session_id="x" * 10_000_000)
        async with refused(Status.RESOURCE_EXHAUSTED, "larger than max"):
            await server.stub.CloseSession(request, compression=grpc.Compression.Gzip)
        request = messages.CloseSessionRequest(session_id="x" * 90_000)
        await server.stub.CloseSession(request, compression=grpc.Compression.Gzip)


@pytest.mark.parametrize("past", [0, 1], ids=["at the limit", "one past it"])
async def test_fields_of_a_large_message(past: int) -> None:
    """Each of two bytes, a range from 0 to 0."""
    async with serving() as server:
        session = await server.open()
        message = messages.GenerateRequest(session_id=session).SerializeToString()
        bare: Any = server.channel.unary_stream(GENERATE)
        call = bare(message + b"\x42\x00" * (grpc_salience.MAX_FIELDS - 1 + past))
        match = "65536 fields" if past else "readout_ranges: at most 16384"
        async with refused(Status.INVALID_ARGUMENT, match):
            await anext(aiter(call))
        assert await server.dump(session) == []


@pytest.mark.parametrize("field", ["logprobs_ranges", "readout_ranges", "stop_token_ids", "images"])
async def test_entries_of_a_field(field: str) -> None:
    entry: Any = messages.PositionRange(start=0, end=1)
    if field == "stop_token_ids":
        entry = 5
    elif field == "images":
        entry = messages.ImageAttachment(mime="image/png")
    many: dict[str, Any] = {field: [entry] * 16_384}
    too_many: dict[str, Any] = {field: [entry] * 16_385}
    async with serving() as server:
        session = await server.open()
        async with refused(Status.INVALID_ARGUMENT, f"{field}: at most 16384"):
            await server.events(session, [5], **too_many)
        assert await server.dump(session) == []
        if field != "images":
            await server.events(session, [5], **many)
        else:  # so many, but no places for them
            async with refused(Status.INVALID_ARGUMENT, "images: no vision block"):
                await server.events(session, [5], **many)


@pytest.mark.parametrize(
    ("peer", "counted"),
    [
        ("ipv4:192.0.2.1:4711", "192.0.2.1"),
        ("ipv6:%5B2001:db8::1%5D:4711", "2001:db8::/64"),
        ("ipv6:[2001:db8::1]:4711", "2001:db8::/64"),
        ("ipv4:127.0.0.1:4711", None),
        ("unix:/run/omni_ws", None),
    ],
)
def test_the_holder_of_a_peer(peer: str, counted: str | None) -> None:
    assert Addresses().counted(peer_address(peer)) == counted
