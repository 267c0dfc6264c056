"""A call of the messages that Twilio documents, in its fields and forms. Not tried on a real line."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from support.live_server import live_server
from websockets.asyncio.client import connect

from omni_ws.engine.base import TextOutput
from omni_ws.engine.fake import ScriptedEngine

MESSAGES = (Path(__file__).parents[2] / "data/telephony/twilio.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.virtual_clock
async def test_a_call_as_twilio_documents_it() -> None:
    engine = ScriptedEngine([TextOutput("Good morning.")])
    *call, stop = MESSAGES
    async with (
        live_server(engine, telephony={"enabled": True}) as server,
        connect(f"ws://127.0.0.1:{server.port}/v1/telephony/media-stream") as gateway,
    ):
        for message in call:
            await gateway.send(message)
        await server.until(lambda: bool(engine.requests))
        await gateway.send(stop)
        await gateway.wait_closed()
        assert gateway.close_code == 1000
    (asked,) = engine.requests  # the keys that were pressed
    assert asked.instructions == orjson.loads(MESSAGES[1])["start"]["customParameters"]["instructions"]
