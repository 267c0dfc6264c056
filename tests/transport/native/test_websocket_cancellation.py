"""Whatever happens to a connection, at whatever step of a request's life, nothing of it stays behind."""

from __future__ import annotations

import asyncio

import pytest
from support.live_server import live_server
from support.native_client import NativeClient, native_client

from omni_ws.engine.base import GenerationRequest, OutputWriter, TextOutput
from omni_ws.engine.fake import EchoEngine
from omni_ws.errors import EngineOverloaded, ShuttingDown

STEPS = range(40)


class Halting(EchoEngine):
    """Lets the loop run at every output and before its end, so that there are more steps to be cut off at."""

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.active_requests += 1
        try:
            async for chunk in request.input:
                for word in chunk.payload.decode().split():
                    await asyncio.sleep(0)
                    out.write(TextOutput(word))
                    await out.drain()
        finally:
            try:
                await asyncio.sleep(0)
            finally:
                self.active_requests -= 1


async def passes(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def life(client: NativeClient) -> None:
    """What a session consists of, without waiting for anything."""
    await client.send("session_config", max_lead_ms=100)
    await client.chunk("one two ")
    await client.binary(bytes(640), number=5)
    await client.chunk("three", number=1, end=True)
    await client.say("another ", number=2)


@pytest.mark.parametrize("how", ["reset", "close", "garbage"])
async def test_client_ends_at_any_step(how: str) -> None:
    async with live_server(Halting()) as server:
        for step in STEPS:
            async with native_client(server, greeted=step > 3) as client:
                sending = asyncio.create_task(life(client))
                await passes(step)
                match how:
                    case "reset":
                        client.gone()
                    case "close":
                        await client.connection.close()
                    case "garbage":
                        client.connection.transport.write(b"\xff" * 10)
                await asyncio.gather(sending, return_exceptions=True)
            await server.check_empty()


@pytest.mark.parametrize("error", [ShuttingDown("going"), EngineOverloaded("no room")], ids=["orderly", "failing"])
async def test_session_ends_at_any_step(error: ShuttingDown | EngineOverloaded) -> None:
    async with live_server(Halting()) as server:
        for step in STEPS:
            async with native_client(server) as client:
                sending = asyncio.create_task(life(client))
                await passes(step)
                server.native.end_all(error)
                code = await client.closed()
                await asyncio.gather(sending, return_exceptions=True)
                assert code == error.wire.websocket_close
                told = client.seen("session_closing" if isinstance(error, ShuttingDown) else "error")
                assert len(told) == 1
                opened = {frame["request_id"] for frame in client.seen("response_started")}
                assert opened <= set(client.guarantees.finished)
            await server.check_empty()


async def test_handler_is_cancelled_at_any_step() -> None:
    """As when the event loop is shut down under the server."""
    for step in STEPS:
        async with live_server(Halting(), expect_errors=True) as server:
            async with native_client(server, greeted=step > 3) as client:
                sending = asyncio.create_task(life(client))
                await passes(step)
                for task in tuple(server.running._server.handler_tasks):
                    task.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            await server.check_empty()


async def test_cancel_at_any_step_gives_one_final_for_each_request() -> None:
    async with live_server(Halting()) as server, native_client(server) as client:
        for step in STEPS:
            await client.chunk("one two ")
            await client.chunk("three", end=True)
            await passes(step)
            await client.send("cancel")
            assert (await client.answer()).reason in ("cancelled", "stop")
        await client.barrier()
        assert len(client.guarantees.finished) == len(STEPS)
