"""HTTP requests that end before the first step of their tasks, and those that are fed with many chunks."""

from __future__ import annotations

import asyncio

from support.live_server import live_server
from support.patience import until

from omni_ws.core.chunks import AudioEncoding, InputChunk, Modality
from omni_ws.transport.routes.sole_request import SoleRequest


async def test_what_never_ran_holds_nothing() -> None:
    async def source(session: SoleRequest) -> None:
        raise AssertionError("it begins later")

    async with live_server() as server:
        conversation = server.app.sessions.open(output_formats=frozenset({AudioEncoding.PCM16}), single_request=True)
        session = SoleRequest(conversation)
        async with session.running(source):
            chunk = InputChunk(Modality.TEXT, b"hello", 0)
            session.conversation.receive_chunk(chunk, now=asyncio.get_running_loop().time())
            assert server.held_bytes > 0
        assert (server.held_bytes, session.conversation.busy) == (0, False)


async def test_many_chunks_of_one_body_leave_the_loop_to_others() -> None:
    passes = 0

    async def others() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    async with live_server() as server:
        conversation = server.app.sessions.open(output_formats=frozenset({AudioEncoding.PCM16}), single_request=True)
        conversation.configure({"start_policy": "on_end_only"})
        session = SoleRequest(conversation)
        other = asyncio.create_task(others())
        async with session.running([InputChunk(Modality.TEXT, b"a")] * 1000):
            passes = 0
            await until(lambda: conversation.stream.received_bytes == 1000)
            assert passes >= 10
        other.cancel()
