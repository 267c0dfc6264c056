"""HTTP requests that end before the first step of their tasks."""

from __future__ import annotations

import asyncio

from support.live_server import live_server

from omni_ws.core.audio_format import AudioEncoding
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.transport.routes.http_session import HttpSession


async def test_what_never_ran_holds_nothing() -> None:
    async def source() -> None:
        raise AssertionError("it begins later")

    async with live_server() as server:
        conversation = server.app.sessions.open(output_formats=frozenset({AudioEncoding.PCM16}), single_request=True)
        session = HttpSession(conversation, conversation.outbox)
        async with session.running(source):
            chunk = InputChunk(Modality.TEXT, b"hello", 0)
            session.conversation.receive_chunk(chunk, now=asyncio.get_running_loop().time())
            assert server.held_bytes > 0
        assert (server.held_bytes, session.conversation.busy) == (0, False)
