"""A telephone call to the embedded engine: recorded speech over a narrow line, and an answer in a voice."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from support.embedded_engine import EmbeddedEngine
from support.live_server import live_server, read
from support.speech_clips import clip_bytes, silence
from support.telephones import PACKET, PhoneGateway, mu_law, phone_gateway

from omni_ws.config.model import VoiceChoice

pytestmark = [pytest.mark.slow, pytest.mark.real_time]


async def speak(gateway: PhoneGateway, pcm16: bytes) -> None:
    """As fast as a telephone does."""
    audio = mu_law(pcm16)
    for position in range(0, len(audio), PACKET):
        await gateway.media(audio[position : position + PACKET])
        await asyncio.sleep(0.02)


async def listen_and_play(gateway: PhoneGateway) -> None:
    """Plays what arrives in real time, until the connection closes."""

    async def play() -> None:
        while True:
            await asyncio.sleep(0.02)
            await gateway.play(20)

    playing = asyncio.create_task(play())
    try:
        await gateway.closed()
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)


async def test_a_question_and_its_answer(voice_choice: VoiceChoice) -> None:
    """Recognised from 8 kHz µ-law, answered in 8 kHz µ-law."""
    async with (
        live_server(EmbeddedEngine(voice=voice_choice), telephony={"enabled": True}) as server,
        phone_gateway(server, returns_marks=False) as gateway,
    ):
        await gateway.start()
        await server.until(lambda: server.sessions == 1)
        listening = asyncio.create_task(listen_and_play(gateway))
        await speak(gateway, silence(0.6) + clip_bytes("goforward"))
        while not any(message["mark"]["name"].endswith(":end") for message in gateway.seen("mark")):
            await speak(gateway, silence(0.1))
        while gateway.buffer:
            await speak(gateway, silence(0.1))
        requests = read(server).labels("requests_total")
        await gateway.stop()
        await listening
    assert not gateway.seen("clear")
    assert [one["finish_reason"] for one in requests if one["origin"] == "telephony"] == ["stop"]
    heard = gateway.heard_samples
    assert 1.0 < len(heard) / 8000 < 6.0
    assert np.sqrt(np.mean(heard**2)) > 0.02
