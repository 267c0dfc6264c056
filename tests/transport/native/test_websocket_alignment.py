"""``alignment: "timestamp"``: the engine gets input of several modalities by its times, also what extends a request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.live_server import live_server
from support.native_client import NativeClient, native_client
from support.raw_http import chunked, raw_client, request

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, Usage
from omni_ws.engine.base import Finished, GenerationRequest, OutputWriter, TextOutput
from omni_ws.engine.fake import EchoEngine
from omni_ws.service.conversation.request import INPUT_QUEUE_BYTES

pytestmark = pytest.mark.virtual_clock


@dataclass
class Notes:
    """What the engine got, in order, and when."""

    chunks: list[InputChunk] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    more: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, count: int) -> list[str]:
        while len(self.chunks) < count:
            self.more.clear()
            await self.more.wait()
        return [f"{chunk.modality[0]}{chunk.timestamp_ms}" for chunk in self.chunks]


class NotingEngine(EchoEngine):
    """Notes each chunk as it gets it, and answers with how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = Notes()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.active_requests += 1
        try:
            async for chunk in request.input:
                self.notes.chunks.append(chunk)
                self.notes.times.append(asyncio.get_running_loop().time())
                self.notes.more.set()
            out.write(TextOutput(str(len(self.notes.chunks))))
            out.write(Finished(FinishReason.STOP, Usage()))
        finally:
            self.active_requests -= 1


async def begin(client: NativeClient, **config: Any) -> None:
    """Start a request that has had audio and video."""
    policy = {"type": "on_min_length", "min_chunks": 2}
    await client.configure(alignment="timestamp", start_policy=policy, history=False, **config)
    await client.binary(bytes(640), timestamp_ms=0)
    await client.binary(b"\xff\xd8\xff", Modality.VIDEO, timestamp_ms=0)
    await client.until("response_started")


async def test_what_extends_a_request_comes_in_the_order_of_its_times() -> None:
    engine = NotingEngine()
    async with live_server(engine) as server, native_client(server) as client:
        await begin(client, alignment_window_ms=100)
        await client.binary(bytes(640), timestamp_ms=300)
        await client.binary(bytes(640), timestamp_ms=400)
        await client.barrier()
        assert len(engine.notes.chunks) == 2
        await client.binary(b"\xff\xd8\xff", Modality.VIDEO, timestamp_ms=250)
        assert await engine.notes.until(4) == ["a0", "v0", "v250", "a300"]
        await client.chunk("now")
        assert (await engine.notes.until(5))[4:] == ["tNone"]
        await client.chunk("last", end=True, timestamp_ms=390)
        assert (await client.answer()).text == "7"
        assert (await engine.notes.until(7))[5:] == ["t390", "a400"]


@pytest.mark.parametrize(("operators", "wanted", "waits_ms"), [(None, None, 200), (700, None, 700), (700, 1500, 1500)])
async def test_it_waits_no_longer_than_the_window(operators: int | None, wanted: int | None, waits_ms: int) -> None:
    engine = NotingEngine()
    settings = {} if operators is None else {"alignment_window_ms": operators}
    async with live_server(engine, streaming_input=settings) as server, native_client(server) as client:
        await begin(client, alignment_window_ms=wanted)
        began = asyncio.get_running_loop().time()
        await client.binary(bytes(640), timestamp_ms=9000)
        await engine.notes.until(3)
        assert engine.notes.times[2] - began == pytest.approx(waits_ms / 1000, abs=0.05)
        await client.chunk(end=True)
        await client.answer()


@pytest.mark.parametrize("config", [{"alignment_window_ms": 0}, {"alignment": "arrival"}])
async def test_without_a_window_it_waits_for_nobody(config: dict[str, Any]) -> None:
    engine = NotingEngine()
    async with live_server(engine) as server, native_client(server) as client:
        await begin(client)
        await client.chunk(end=True)
        await client.answer()
        await client.configure(**config)
        for timestamp_ms in (0, 9000, 500):
            await client.binary(bytes(640), timestamp_ms=timestamp_ms)
            await client.binary(b"\xff\xd8\xff", Modality.VIDEO, timestamp_ms=0)
        await client.barrier()
        assert (await engine.notes.until(8))[4:] == ["a9000", "v0", "a500", "v0"]
        await client.chunk(end=True)
        await client.answer()


async def test_what_waits_is_input_that_a_client_must_not_outrun() -> None:
    engine = NotingEngine()
    limits = {"max_payload_per_session": 2 * INPUT_QUEUE_BYTES, "alignment_window_ms": 2000}
    async with live_server(engine, streaming_input=limits) as server, native_client(server) as client:
        await begin(client)
        for number in range(64):
            await client.binary(bytes(1 << 16), timestamp_ms=9000 + number, end=number == 63)
        answer = await client.answer()
        assert (answer.reason, answer.text) == ("stop", "66")
        await server.until(lambda: server.held_bytes < 1000)


async def test_a_request_that_is_cancelled_meanwhile_leaves_nothing() -> None:
    engine = NotingEngine()
    async with live_server(engine) as server, native_client(server) as client:
        await begin(client)
        await client.binary(bytes(640), timestamp_ms=9000)
        await client.send("cancel")
        assert (await client.answer()).reason == "cancelled"
        await asyncio.sleep(5)
        assert len(engine.notes.chunks) == 2
        await server.until(lambda: not server.held_bytes)


async def test_a_streamed_body_is_ordered_as_well() -> None:
    engine = NotingEngine()
    lines = [
        b'{"alignment":"timestamp","start_policy":"on_first_chunk"}',
        b'{"text":"a","timestamp_ms":0}',
        b'{"modality":"image","payload":"/9j/","timestamp_ms":900}',
        b'{"text":"b","timestamp_ms":800}',
        b'{"text":"c","timestamp_ms":600}',
    ]
    async with live_server(engine) as server, raw_client(server.port) as client:
        await client.send(
            request("POST", "/v1/chat/completions", "X-Streaming-Input: true", "Transfer-Encoding: chunked"),
            *(chunked(line + b"\n", end=False) for line in lines),
        )
        assert await engine.notes.until(4) == ["t0", "t800", "i900", "t600"]
        await client.send(chunked(b""))
        assert (await client.head())[1] == 200
