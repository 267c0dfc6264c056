"""ClientSession.history: what was said, for a session that goes on with it."""

from __future__ import annotations

import asyncio

import pytest
from support.live_server import live_server

from omni_ws.client import ConnectionLost, connect

KEEPS = {"resume_grace_sec": 60.0}
SAID = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "one"}]


async def test_another_session_goes_on_with_the_history() -> None:
    async with live_server() as server:
        async with connect(server.websocket_url) as session:
            await session.ask_text("one")
            told, original = await asyncio.gather(session.history(), session.history(original=True))
        assert told == original == SAID
        async with connect(server.websocket_url, config={"history_items": told}) as session:
            assert await session.history() == SAID


@pytest.mark.parametrize("arrived", [False, True])
async def test_it_outlives_a_connection(arrived: bool) -> None:
    async with (
        live_server(streaming_input=KEEPS) as server,
        connect(server.websocket_url, reconnect=True) as session,
    ):
        await session.ask_text("one")
        (conversation,) = server.app.sessions.conversations
        before = conversation.outbox.journaled
        asking = asyncio.create_task(session.history())
        if arrived:
            session._link.websocket.transport.pause_reading()
            await server.until(lambda: conversation.outbox.journaled > before, "the reply")
        else:
            await asyncio.sleep(0)
        session._link.websocket.transport.abort()
        assert await asking == SAID
        await session.ask_text("two")
        assert len(await session.history()) == 4


async def test_it_fails_with_the_session() -> None:
    async with live_server() as server:
        session_of = connect(server.websocket_url)
        session = await session_of.__aenter__()
        session._link.websocket.transport.pause_reading()
        asking = asyncio.create_task(session.history())
        await asyncio.sleep(0)
        session._link.websocket.transport.abort()
        with pytest.raises(ConnectionLost):
            await asking
        with pytest.raises(ConnectionLost):
            await session.history()
        await session_of.__aexit__(None, None, None)
