"""The soft sound that a caller hears while an answer is thought about for long."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest
from support.inline_workers import inline, loud
from support.live_server import live_server
from support.telephones import AsteriskCall, asterisk_call, mu_law, phone_gateway

from omni_ws.audio.pcm import Samples
from omni_ws.engine.base import AudioOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.transport.telephony.call import BEGINS_SEC, EVERY_SEC, NOTE_SEC, NOTES, PACKET_SEC, PEAK, notes

pytestmark = pytest.mark.virtual_clock

#: Packets of one sound.
PACKETS = round(len(NOTES) * NOTE_SEC / PACKET_SEC)
LOUD, SOFT = 0.25, 1.3 * PEAK


def turn() -> bytes:
    """A turn of the caller, pcm16 at 8 kHz."""
    return bytes(96 * 16) + loud(320, khz=8) + bytes(640 * 16)


def thinking(gate: asyncio.Event) -> ScriptedEngine:
    return ScriptedEngine([gate.wait, AudioOutput(np.full(24_000, LOUD, np.float32), 24_000)])


def samples(pcm16: bytes) -> Samples:
    return np.frombuffer(pcm16, "<i2").astype(np.float32) / np.float32(32768)


def now() -> float:
    return asyncio.get_running_loop().time()


async def packets_within(call: AsteriskCall, seconds: float) -> int:
    """How many packets of audio come within a time."""
    before = len(call.times)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while await call.receive() is not None:
                pass
    return len(call.times) - before


def test_it_is_soft_and_does_not_click() -> None:
    sound = notes(8000)
    assert len(sound) == 1600
    assert 20 * np.log10(np.abs(sound).max()) == pytest.approx(-40, abs=0.5)
    assert np.abs(np.diff(sound)).max() < PEAK / 3
    assert np.abs(sound[[0, 799, 800, -1]]).max() < PEAK / 100


async def test_it_begins_after_two_seconds_and_ends_with_the_first_audio() -> None:
    gate = asyncio.Event()
    options: dict[str, Any] = {"telephony": {"audiosocket_port": 0}}
    async with live_server(thinking(gate), **options) as server, asterisk_call(inline(server)) as call:
        await call.identify()
        await call.speak(turn())
        begin = now()
        await call.hear(20 * (2 * PACKETS + 3))
        begins = [call.times[0], call.times[PACKETS], call.times[2 * PACKETS]]
        assert begins[0] - begin == pytest.approx(BEGINS_SEC, abs=0.1)
        assert np.diff(begins) == pytest.approx([EVERY_SEC, EVERY_SEC], abs=0.01)
        assert np.diff(call.times[:PACKETS]) == pytest.approx(PACKET_SEC, abs=0.005)
        assert 0.5 * PEAK < np.abs(samples(call.heard)).max() < SOFT
        gate.set()  # in the middle of a sound
        before = len(call.heard)
        await call.hear(1000)
        levels = np.abs(samples(call.heard[before:]).reshape(-1, 160)).max(axis=1)
        softly = int(np.sum(levels < SOFT))
        assert softly <= 1
        assert levels[softly:] == pytest.approx(LOUD, abs=0.1)
        assert await packets_within(call, 60) <= 1


async def test_it_comes_as_media_and_is_none_of_an_answer() -> None:
    gate = asyncio.Event()
    async with (
        live_server(thinking(gate), telephony={"enabled": True}) as server,
        phone_gateway(inline(server)) as phone,
    ):
        await phone.start()
        speech = mu_law(turn(), rate=8000)
        for place in range(0, len(speech), 160):
            await phone.media(speech[place : place + 160])
        begin = now()
        sound = [await phone.until("media", "mark") for _ in range(PACKETS)]
        assert now() - begin == pytest.approx(BEGINS_SEC + (PACKETS - 1) * PACKET_SEC, abs=0.1)
        assert {message["event"] for message in sound} == {"media"}
        gate.set()
        assert (await phone.until("media", "mark"))["event"] == "mark"  # of the answer, which begins at once


async def test_speech_ends_it() -> None:
    gate = asyncio.Event()
    options: dict[str, Any] = {"telephony": {"audiosocket_port": 0}}
    async with live_server(thinking(gate), **options) as server, asterisk_call(inline(server)) as call:
        await call.identify()
        await call.speak(turn())
        await call.hear(40)
        await call.speak(turn()[: 16 * 400])
        assert await packets_within(call, 20) <= 2
        gate.set()


async def test_it_can_be_switched_off() -> None:
    gate = asyncio.Event()
    options: dict[str, Any] = {"telephony": {"audiosocket_port": 0, "thinking_sound": False}}
    async with live_server(thinking(gate), **options) as server, asterisk_call(inline(server)) as call:
        await call.identify()
        await call.speak(turn())
        assert await packets_within(call, 20) == 0
        gate.set()
