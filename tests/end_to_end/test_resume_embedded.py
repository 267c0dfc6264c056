"""Connections that break, and connections that live, over an engine that really works."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.embedded_engine import EmbeddedEngine
from support.live_server import LiveServer, live_server
from support.speech_clips import WORDS, clip_bytes
from support.tcp_relay import Cut, Direction, tcp_relay

from omni_ws.client import Answer, connect
from omni_ws.errors import ShuttingDown

pytestmark = [pytest.mark.slow, pytest.mark.real_time, pytest.mark.asyncio(loop_scope="module")]

CUTS = 6
FRAME_BYTES = 3200
CONFIG = {"modalities": ["text"]}
#: Sent within the work of a single turn, too.
PINGS: dict[str, Any] = {"ping_interval_sec": 0.2, "ping_timeout_sec": 20}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[LiveServer]:
    async with live_server(EmbeddedEngine(), streaming_input={"resume_grace_sec": 30, **PINGS}) as running:
        yield running
        running.native.end_all(ShuttingDown("the test is over"))


async def ask(url: str, *, reconnect: bool) -> Answer:
    audio = clip_bytes("goforward")
    async with connect(url, reconnect=reconnect, config=CONFIG) as session:
        for start in range(0, len(audio), FRAME_BYTES):
            await session.send_audio(audio[start : start + FRAME_BYTES])
        await session.finish()
        return await session.answer()


async def test_speech_over_connections_that_break(server: LiveServer) -> None:
    rng = random.Random(3)
    async with tcp_relay(server.port) as proxy:
        url = f"ws://127.0.0.1:{proxy.port}/v1/streaming_input"
        async with connect(url, config=CONFIG):
            pass
        opened = proxy.carried  # up to here there is no second try
        unbroken = await ask(url, reconnect=True)
        assert unbroken.transcript == WORDS["goforward"]
        carried = proxy.carried
        for _ in range(CUTS):
            direction = rng.choice(list(Direction))
            cut = Cut(direction, rng.randrange(opened[direction], carried[direction]), rng.random() < 0.5)
            proxy.cuts.append(cut)
            answer = await ask(url, reconnect=True)
            assert (answer.transcript, answer.text) == (unbroken.transcript, unbroken.text), cut
            proxy.cuts.clear()
        assert proxy.made >= CUTS // 2


async def test_busy_engine_costs_no_live_connection(server: LiveServer) -> None:
    answers = await asyncio.gather(*(ask(server.websocket_url, reconnect=False) for _ in range(6)))
    assert {answer.transcript for answer in answers} == {WORDS["goforward"]}
