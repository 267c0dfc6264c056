"""Connections cut anywhere: each conversation is the one that was never broken."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest
from support.cutting_proxy import Cut, CuttingProxy, Direction, cutting_proxy
from support.live_server import LiveServer, live_server
from support.resuming_client import ResumingClient

from omni_ws.engine.fake import EchoEngine, EchoSettings
from omni_ws.errors import ShuttingDown

#: Where a connection breaks, as parts of what a whole one carries: from the handshake to the last final.
PLACES: Final = (0.0, 0.01, 0.05, 0.3, 0.7, 0.99)
TURNS: Final[list[list[str | bytes]]] = [
    ["The first ", "request is ", "text."],
    [random.Random(number).randbytes(1280) for number in range(12)],
    ["And ", "another."],
]
CONFIG: Final[dict[str, Any]] = {"start_policy": "on_first_chunk"}


async def converse(server: LiveServer, proxy: CuttingProxy, seed: int, *cuts: Cut) -> ResumingClient:
    proxy.cuts.extend(cuts)
    client = ResumingClient(proxy.port, TURNS, rng=random.Random(seed), **CONFIG)
    await client.converse()
    proxy.cuts.clear()
    return client


@pytest.mark.slow
@pytest.mark.parametrize("pace_ms", [0, 1])
async def test_conversation_is_the_one_that_was_never_broken(pace_ms: int) -> None:
    rng = random.Random(pace_ms)
    engine = EchoEngine(EchoSettings(chunk_ms=10, chunk_interval_ms=pace_ms))
    resumed = made = 0
    async with (
        live_server(engine, streaming_input={"resume_grace_sec": 30}) as server,
        cutting_proxy(server.port) as proxy,
    ):
        unbroken = await converse(server, proxy, 0)
        assert unbroken.connections == 1
        assert len(unbroken.view) > 30
        carried = proxy.carried
        cuts = [
            Cut(direction, int(place * carried[direction]), bool(number % 2))
            for direction in Direction
            for number, place in enumerate(PLACES)
        ]
        # Once each, then three of them in one conversation.
        for seed, broken in enumerate([*([cut] for cut in cuts), *(rng.sample(cuts, 3) for _ in range(4))]):
            client = await converse(server, proxy, seed, *broken)
            assert client.view == unbroken.view, f"{seed}: {broken}"
            resumed += client.resumed
        made = proxy.made
        # What is left are sessions whose clients never heard of them: the connection broke before their first frame.
        assert server.sessions <= len(PLACES)
        server.native.end_all(ShuttingDown("the test is over"))
        await server.check_empty()
    assert resumed >= len(PLACES)
    assert made >= len(cuts)
