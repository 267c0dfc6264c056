"""Fixtures of Live sessions: ready-made sound that the application plays."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from support.inline_workers import inline
from support.live_server import live_server
from support.realtime_client import LiveClient, live_client
from support.scripted_engines import Talker, delegates, spoken

from omni_ws.transport.realtime.live_parts import (
    LEAD_MS,
    MAX_FIXTURE_BYTES,
    MAX_FIXTURE_SEC,
)

pytestmark = pytest.mark.virtual_clock

PLAY, PLAYED = "session.output_audio.fixture.play", "session.output_audio.fixture.played"
MS = 48
#: A level that no answer has.
LEVEL = 1234
SIX = "One is here. Two is here. Three is here. Four is here. Five is here. Six is here."


def fixture(ms: int) -> str:
    return base64.b64encode(np.full(24 * ms, LEVEL, "<i2").tobytes()).decode()


def levels(client: LiveClient) -> list[int]:
    """The level of each millisecond of what was played."""
    samples = np.frombuffer(bytes(client.sound), "<i2")
    return [int(one) for one in samples[:: MS // 2]]


async def test_it_interrupts_speech_and_is_played_whole() -> None:
    engine = Talker("hello", reply=lambda said: spoken(SIX))
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start()
        speaking = asyncio.create_task(client.speak())
        while "One" not in client.said():
            await client.receive()
        await speaking
        began = len(client.sound)
        await client.send(PLAY, audio=fixture(1500), event_id="play")
        playing = await client.until("session.output_audio.fixture.playing")
        assert playing["client_event_id"] == "play"
        error = await client.failed("session.commentary.append", delegation_id=None, content="Tell it.")
        assert error["code"] == "invalid_value"
        error = await client.failed(PLAY, audio=fixture(100))
        assert (error["code"], error["param"]) == ("invalid_value", "type")
        assert (await client.until(PLAYED))["client_event_id"] == "play"
        await asyncio.sleep(1)
        await client.end()
        played = [at for at, level in enumerate(levels(client)) if level == LEVEL]
        assert (len(played), played[-1] - played[0]) == (1500, 1499)
        assert began // MS <= played[0] <= began // MS + LEAD_MS + 200
        assert not any(levels(client)[played[-1] + 1 :]), "the answer goes on"
        assert "Six" not in client.said()
        assert client.seen(PLAYED)[0]["event_id"] == client.received[-2]["event_id"]


async def test_nothing_is_heard_meanwhile_and_all_is_heard_afterwards() -> None:
    engine = Talker("first", "second")
    async with live_server(engine) as server, live_client(inline(server)) as client:
        await client.start()
        await client.send(PLAY, audio=fixture(3000))
        await client.until("session.output_audio.fixture.playing")
        await client.speak()
        assert not client.seen(PLAYED)
        assert "client_event_id" not in await client.until(PLAYED)
        assert not client.heard()
        await client.send(PLAY, audio=fixture(100))  # another one may follow
        await client.until(PLAYED)
        await client.speak()
        while client.heard() != "first":
            await client.receive()
        assert engine.asked == ["first"]


async def test_work_that_it_cancels_is_not_told() -> None:
    """The answer has handed the work over and is not over: it is cancelled, and the work with it."""
    never = asyncio.Event()

    def reply(said: str) -> Iterable[Any]:
        yield from delegates("One moment.")[:-1]
        yield never.wait

    async with live_server(Talker("go", reply=reply)) as server, live_client(inline(server)) as client:
        await client.start()
        await client.speak()
        while "One" not in client.said():
            await client.receive()
        await client.send(PLAY, audio=fixture(100))
        delegation = (await client.until("session.delegation.created"))["delegation"]["id"]
        await client.until(PLAYED)
        error = await client.failed("session.commentary.append", delegation_id=delegation, content="It is in Lisbon.")
        assert (error["code"], error["param"]) == ("invalid_value", "delegation_id")
        await client.end()
        assert len(client.seen("error")) == 1


@pytest.mark.parametrize(("kind", "rate"), [("pcm", 16_000), ("pcmu", 8000), ("pcma", 8000)])
async def test_it_is_converted_to_the_format_of_the_session(kind: str, rate: int) -> None:
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        await client.start(audio={"format": {"type": f"audio/{kind}", "rate": rate}})
        silence = {"pcm": 0, "pcmu": 0xFF, "pcma": 0xD5}[kind]
        await client.send(PLAY, audio=fixture(1000))
        await client.until(PLAYED)
        await client.end()
        sounding = sum(byte != silence for byte in client.sound)
        assert sounding == pytest.approx(rate * (2 if kind == "pcm" else 1), rel=0.02)


async def test_the_longest() -> None:
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        await client.start()
        error = await client.failed(PLAY, audio=base64.b64encode(bytes(MAX_FIXTURE_BYTES + 2)).decode())
        assert error["code"] == "invalid_audio"
        await client.send(PLAY, audio=fixture(MAX_FIXTURE_SEC * 1000))
        await client.until("session.output_audio.fixture.playing")
        await client.end()  # in the middle of it
        assert not client.seen(PLAYED)


@pytest.mark.parametrize("audio", [None, "", "AAA", "AAAA", "no base64", 7])
async def test_audio_that_is_none_interrupts_nothing(audio: Any) -> None:
    async with live_server(Talker()) as server, live_client(inline(server)) as client:
        await client.start()
        error = await client.failed(PLAY, audio=audio)
        assert (error["code"], error["param"]) == ("invalid_audio", "audio")
        assert not client.seen("session.output_audio.fixture.playing")
