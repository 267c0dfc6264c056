"""The gRPC service on a free port, and a stub that talks to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import GrpcConfig, ServerConfig
from omni_ws.generated import salience_pb2 as messages
from omni_ws.generated.salience_pb2_grpc import SalienceStub
from omni_ws.server import App, create_app, serve_tokens


@dataclass
class SalienceServer:
    app: App
    port: int
    channel: grpc.aio.Channel
    stub: Any
    metadata: tuple[tuple[str, str], ...] = ()
    #: None where the test serves by other means.
    listener: Any = None

    @property
    def held_bytes(self) -> int:
        return self.app.sessions.budget.used

    @property
    def sessions(self) -> int:
        return self.app.sessions.admission.sessions

    async def idle(self) -> None:
        """Until no call is at work: one that was cancelled ends later than its client believes."""
        await self.listener._servicer.wait_idle()

    def call(self, method: str, **fields: Any) -> Any:
        request = getattr(messages, f"{method}Request")(**fields)
        return getattr(self.stub, method)(request, metadata=self.metadata)

    async def open(self) -> str:
        session_id: str = (await self.call("OpenSession", model="local-model")).session_id
        return session_id

    def generate(self, session_id: str, tokens: Sequence[int] = (), offset: int = 0, **fields: Any) -> Any:
        return self.call("Generate", session_id=session_id, append_tokens=tokens, offset=offset, **fields)

    async def events(
        self, session_id: str, tokens: Sequence[int] = (), offset: int = 0, **fields: Any
    ) -> tuple[list[messages.Token], messages.GenerateDone]:
        events = [event async for event in self.generate(session_id, tokens, offset, **fields)]
        assert [event.WhichOneof("event") for event in events] == ["token"] * (len(events) - 1) + ["done"]
        return [event.token for event in events[:-1]], events[-1].done

    async def dump(self, session_id: str) -> list[int]:
        return list((await self.call("DumpSession", session_id=session_id)).tokens)

    async def fork(self, session_id: str, at: int) -> str:
        fork: str = (await self.call("ForkSession", session_id=session_id, at_position=at)).session_id
        return fork

    async def close(self, session_id: str) -> None:
        await self.call("CloseSession", session_id=session_id)


@asynccontextmanager
async def salience_server(
    engine: Any,
    *,
    keys: tuple[ApiKey, ...] = (),
    config: ServerConfig | None = None,
    stops_engine: bool = True,
    **settings: Any,
) -> AsyncIterator[SalienceServer]:
    """``settings`` are those of the gRPC section. An engine that others use too goes on (not ``stops_engine``)."""
    config = config or ServerConfig(grpc=GrpcConfig(port=0, **settings))
    await engine.start()
    app = create_app(engine, config, keys)
    try:
        async with serve_tokens(app) as listener:
            assert listener is not None
            listener.begin()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{listener.port}") as channel:
                yield SalienceServer(app, listener.port, channel, SalienceStub(channel), listener=listener)
        assert app.sessions.admission.sessions == 0
        assert app.sessions.budget.used == 0
        assert engine.active_requests == 0
    finally:
        if stops_engine:
            await engine.stop()


@asynccontextmanager
async def refused(status: grpc.StatusCode, match: str = "") -> AsyncIterator[None]:
    """The block is answered with this status, whose text contains ``match``."""
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        yield
    assert (refusal.value.code(), match in (refusal.value.details() or "")) == (status, True), refusal.value
