"""The gRPC port: TLS, reflection, keys, broken connections, health, draining and the end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from support.http_server import tls_contexts
from support.patience import PATIENCE_SEC
from support.salience_server import SalienceServer, raw_http2, refused, salience_server
from support.tcp_relay import Cut, Direction, tcp_relay
from support.token_engine import TokenEngine

from omni_ws import server as server_module
from omni_ws.cli import main
from omni_ws.config.keys import ApiKey, digest
from omni_ws.config.model import GrpcConfig, ServerConfig
from omni_ws.engine.base import EngineState, TokenEvent, TokenGeneration, TokenOutput
from omni_ws.generated import salience_pb2 as messages
from omni_ws.generated.salience_pb2_grpc import SalienceStub
from omni_ws.server import create_app, listen, serve_tokens

Status = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def opening() -> messages.OpenSessionRequest:
    return messages.OpenSessionRequest(model="local-model")


def requests() -> dict[str, Any]:
    """One for each call of the service."""
    found = {
        "OpenSession": opening(),
        "CloseSession": messages.CloseSessionRequest(),
        "ForkSession": messages.ForkSessionRequest(),
        "Generate": messages.GenerateRequest(),
        "GetReadoutManifest": messages.GetReadoutManifestRequest(),
        "DumpSession": messages.DumpSessionRequest(),
    }
    assert set(found) == {method.name for method in messages.DESCRIPTOR.services_by_name["Salience"].methods}
    return found


# TLS and reflection


async def test_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    tls_contexts(tmp_path)
    certificate = key = tmp_path / "certificate.pem"
    config = ServerConfig(grpc=GrpcConfig(port=0), ssl_certfile=certificate, ssl_keyfile=key)
    async with salience_server(TokenEngine(), config=config) as server:
        trusting = grpc.ssl_channel_credentials(certificate.read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{server.port}", trusting) as channel:
            server.stub = SalienceStub(channel)
            session = await server.open()
            await server.events(session, [5], max_tokens=2)
            assert len(await server.dump(session)) == 3
        for channel in (
            grpc.aio.secure_channel(f"127.0.0.1:{server.port}", grpc.ssl_channel_credentials()),
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}"),
        ):
            async with channel:
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await SalienceStub(channel).OpenSession(opening())
                assert failure.value.code() is Status.UNAVAILABLE


async def test_reflection_returns_the_definition() -> None:
    async with salience_server(TokenEngine()) as server:

        def ask() -> tuple[list[str], list[str]]:
            with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                known = ProtoReflectionDescriptorDatabase(channel)
                file = known.FindFileContainingSymbol("salience.v1.Salience")
                return list(known.get_services()), [method.name for method in file.service[0].method]

        services, calls = await asyncio.to_thread(ask)
    assert {"salience.v1.Salience", "grpc.health.v1.Health"} <= set(services)
    assert calls == [method.name for method in messages.DESCRIPTOR.services_by_name["Salience"].methods]


# keys


async def test_every_call_needs_the_key() -> None:
    async with salience_server(TokenEngine(), keys=(ApiKey(name="one", key_sha256=digest("secret")),)) as server:
        for name, request in requests().items():
            for metadata in (None, (("authorization", "Bearer wrong"),)):
                call = getattr(server.stub, name)(request, metadata=metadata)
                async with refused(Status.UNAUTHENTICATED):
                    if name == "Generate":
                        await anext(aiter(call))
                    else:
                        await call


async def test_the_rate_of_a_key_limits_its_calls() -> None:
    keys = (ApiKey(name="one", key_sha256=digest("secret"), requests_per_sec=0.001, burst=2),)
    async with salience_server(TokenEngine(), keys=keys) as server:
        server.metadata = (("authorization", "Bearer secret"),)
        session = await server.open()
        await server.events(session, [5])
        await server.events(session, [6], 1)
        async with refused(Status.UNAVAILABLE, "requests per second"):
            await server.events(session, [7], 2)
        assert await server.dump(session) == [5, 6]


# connections


class Endless(TokenEngine):
    """Writes as fast as it is read, and never ends by itself."""

    def __init__(self) -> None:
        super().__init__(max_model_len=1_000_000)
        #: Set when nobody has read for a while: nothing more fits into the connection.
        self.stuck = asyncio.Event()

    async def generate_tokens(self, generation: TokenGeneration) -> AsyncIterator[TokenEvent]:
        self.active_requests += 1
        loop = asyncio.get_running_loop()
        try:
            for position in range(len(generation.tokens), self.max_model_len):
                waits = loop.call_later(0.2, self.stuck.set)
                yield TokenOutput(id=7, position=position, is_prefill=False, readout=[0.5] * 64)
                waits.cancel()
        finally:
            self.active_requests -= 1
            self._ended.set()


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
async def test_a_client_that_disconnects_frees_the_engine(reset: bool) -> None:
    engine = Endless()
    async with salience_server(engine) as server, tcp_relay(server.port) as proxy:
        proxy.cuts.append(Cut(Direction.TO_CLIENT, after=20_000, reset=reset))
        session = await server.open()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
            request = messages.GenerateRequest(session_id=session, append_tokens=[900], max_tokens=900_000)
            call = SalienceStub(channel).Generate(request)
            received = 0

            async def read() -> None:
                nonlocal received
                async for _ in call:
                    received += 1

            with pytest.raises(grpc.aio.AioRpcError):
                await read()
        await server.idle()
        kept = await server.dump(session)
        assert received < len(kept) < 900_000


@pytest.mark.slow
@pytest.mark.real_time
async def test_closing_a_session_whose_client_does_not_read() -> None:
    engine = Endless()
    async with salience_server(engine) as server:
        session = await server.open()
        call = aiter(server.generate(session, [5], max_tokens=900_000))
        await anext(call)
        await engine.stuck.wait()
        await server.close(session)
        async with asyncio.timeout(PATIENCE_SEC):
            *_, last = [event async for event in call]
            assert last.done.finish_reason == messages.GenerateDone.FINISH_REASON_CANCELLED
            await server.idle()
        assert (server.sessions, server.held_bytes) == (0, 0)


# the end


@pytest.mark.slow
@pytest.mark.real_time
async def test_a_drain_waits_for_running_calls_and_refuses_new_ones() -> None:
    engine = TokenEngine()
    await engine.start()
    async with (
        listen(create_app(engine, ServerConfig(port=0, grpc=GrpcConfig(port=0)))) as http,
        serve_tokens(http.app) as listener,
    ):
        assert listener is not None
        listener.begin()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{listener.port}") as channel:
            server = SalienceServer(http.app, listener.port, channel, SalienceStub(channel))
            health: Any = health_pb2_grpc.HealthStub(channel)
            watch = aiter(health.Watch(health_pb2.HealthCheckRequest(service="salience.v1.Salience")))
            assert (await anext(watch)).status == SERVING
            session, idle = await server.open(), await server.open()
            engine.gate.clear()
            call = aiter(server.generate(session, [5], max_tokens=3))
            await anext(call)
            await engine.waiting.wait()
            draining = [asyncio.create_task(one.drain(3600)) for one in (http, listener)]
            assert (await anext(watch)).status == NOT_SERVING
            async with grpc.aio.insecure_channel(f"127.0.0.1:{listener.port}") as another:
                for stub in (server.stub, SalienceStub(another)):
                    async with refused(Status.UNAVAILABLE):
                        await stub.DumpSession(messages.DumpSessionRequest(session_id=idle))
            engine.gate.set()
            assert [event.WhichOneof("event") async for event in call] == ["token", "token", "done"]
            # Sessions that nobody can name any more hold up nothing.
            async with asyncio.timeout(PATIENCE_SEC):
                await asyncio.gather(*draining)
    assert engine.active_requests == 0


async def test_a_drain_ends_in_time() -> None:
    engine = TokenEngine()
    async with salience_server(engine) as server:
        session = await server.open()
        engine.gate.clear()
        call = aiter(server.generate(session, [5], max_tokens=3))
        await anext(call)
        await engine.waiting.wait()
        await server.listener.drain(0.2)
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        await engine.idle()
        assert server.sessions == 0


async def test_a_drain_does_not_wait_for_health_watchers_that_do_not_read() -> None:
    async with salience_server(TokenEngine()) as server, raw_http2(server.port, window=0) as client:
        client.begin(1, "/grpc.health.v1.Health/Watch", message_bytes=0, end=True)
        await client.until(lambda: client.headers[1])
        async with asyncio.timeout(PATIENCE_SEC):
            await server.listener.drain(20)


@pytest.mark.parametrize(("name", "status"), [("", SERVING), ("salience.v1.Salience", SERVING), ("another", None)])
async def test_health(name: str, status: int | None) -> None:
    async with salience_server(TokenEngine()) as server:
        health: Any = health_pb2_grpc.HealthStub(server.channel)
        request = health_pb2.HealthCheckRequest(service=name)
        watch = aiter(health.Watch(request))
        first = (await anext(watch)).status
        if status is None:
            assert first == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            async with refused(Status.NOT_FOUND):
                await health.Check(request)
        else:
            assert first == (await health.Check(request)).status == status


# the beginning


async def test_calls_are_refused_until_the_engine_has_started() -> None:
    engine = TokenEngine()
    engine.state = EngineState.STARTING
    app = create_app(engine, ServerConfig(grpc=GrpcConfig(port=0)))
    async with serve_tokens(app) as listener:
        assert listener is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{listener.port}") as channel:
            server = SalienceServer(app, listener.port, channel, SalienceStub(channel))
            health: Any = health_pb2_grpc.HealthStub(channel)
            watch = aiter(health.Watch(health_pb2.HealthCheckRequest(service="salience.v1.Salience")))
            assert (await anext(watch)).status == NOT_SERVING
            for name, request in requests().items():
                call = getattr(server.stub, name)(request)
                with pytest.raises(grpc.aio.AioRpcError, match="still starting") as refusal:
                    await (anext(aiter(call)) if name == "Generate" else call)
                assert refusal.value.code() is Status.UNAVAILABLE
                told = dict(tuple(refusal.value.trailing_metadata() or ()))
                assert (told["omni-error-code"], told["retry-after-ms"]) == ("engine_overloaded", "1000")
            await engine.start()
            listener.begin()
            assert (await anext(watch)).status == SERVING
            assert await server.dump(await server.open()) == []


async def test_the_server_ends_while_the_engine_starts() -> None:
    async with serve_tokens(create_app(TokenEngine(), ServerConfig(grpc=GrpcConfig(port=0)))) as listener:
        assert listener is not None
        async with asyncio.timeout(PATIENCE_SEC):
            await listener.drain(3600)


class NeverStarted(TokenEngine):
    async def start(self) -> None:
        raise AssertionError("this takes minutes with a real model")


@pytest.mark.parametrize("taken", ["http", "grpc"])
def test_a_taken_port_is_known_before_the_engine_starts(
    taken: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A second server on the machine may have been given another port for one protocol only."""
    engine = NeverStarted()
    monkeypatch.setattr(server_module, "create_engine", lambda config: engine)
    monkeypatch.setattr(server_module, "configure_logging", lambda *arguments: None)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as probe:
        free, port = probe.getsockname()[1], listening.getsockname()[1]
        probe.close()
        monkeypatch.setattr("omni_ws.server.DEFAULT_GRPC_PORT", port if taken == "grpc" else free)
        assert main(["serve", "--engine", "fake", "--port", str(port if taken == "http" else free)], {}) == 1
    assert capfd.readouterr().err.splitlines() == [
        f"omni-ws serve: error: port {port} on 127.0.0.1 is already in use; stop what uses it, or choose another "
        "with --port"
        if taken == "http"
        else f"omni-ws serve: error: gRPC cannot listen on 127.0.0.1:{port}, Address already in use: "
        "stop the process that uses the port, or choose another with --grpc-port (0: any)"
    ]
