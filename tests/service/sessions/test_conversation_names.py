"""Engines know which requests are of one conversation: what they keep of it is found again, by nobody else."""

from __future__ import annotations

import pytest
from support.live_server import live_server
from support.native_client import native_client
from support.raw_http import post

from omni_ws.engine.fake import ScriptedEngine

pytestmark = pytest.mark.asyncio


async def test_the_requests_of_a_session_are_one_conversation() -> None:
    engine = ScriptedEngine([])
    async with live_server(engine) as server:
        for _ in range(2):
            async with native_client(server) as client:
                for text in ("one", "two"):
                    await client.say(text)
                    await client.answer()
    first, second, other, *_ = (request.conversation for request in engine.requests)
    assert first == second
    assert first
    assert other not in (None, first)


async def test_a_request_over_http_is_of_none() -> None:
    engine = ScriptedEngine([])
    async with live_server(engine) as server:
        await post(server.port, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})
    assert [request.conversation for request in engine.requests] == [None]
