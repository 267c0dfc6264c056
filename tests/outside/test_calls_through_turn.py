"""Calls over WebRTC that only a TURN server can carry: coturn, between two networks without a route.

``make test-outside`` installs it; elsewhere, and without root, these tests are skipped.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from aiortc import RTCIceServer
from support.live_server import LiveServer, live_server
from support.native_client import PATIENCE_SEC
from support.outside import tool
from support.speech_clips import at_24k, clip_bytes, silence
from support.turn_relay import (
    PASSWORD,
    PORT,
    RELAY_BY_CALLER,
    RELAY_BY_SERVER,
    SERVER,
    USER,
    from_beyond,
    turn_relay,
)
from support.webrtc_client import WebrtcCaller, post_offer

from omni_ws.engine.base import AudioOutput, TextOutput
from omni_ws.engine.fake import ScriptedEngine

TONE = (0.25 * np.sin(2 * np.pi * 440 * np.arange(24_000) / 24_000)).astype(np.float32)
LOUD = 1000

pytestmark = [pytest.mark.slow, pytest.mark.real_time]


#: The server's side of it.
WEBRTC = {"ice_servers": (f"turn:{RELAY_BY_SERVER}:{PORT}",), "ice_username": USER, "ice_credential": PASSWORD}


@pytest.fixture(autouse=True)
def _outside() -> None:
    tool("OUTSIDE_PYTHON")


def engine() -> ScriptedEngine:
    return ScriptedEngine((TextOutput("Go on. "), AudioOutput(TONE, 24_000)))


async def call_from_beyond(
    server: LiveServer, talk: Callable[[WebrtcCaller], Awaitable[None]], *ice_servers: RTCIceServer
) -> str:
    """The answer to the offer of a caller beyond the relay, which then does ``talk``.

    Offer and answer are carried over by hand: there is no way for HTTP either.
    """
    here = asyncio.get_running_loop()

    async def call() -> str:
        with socket.socket(type=socket.SOCK_DGRAM) as direct, pytest.raises(OSError, match="unreachable"):
            direct.connect((SERVER, PORT))
        caller = WebrtcCaller(*ice_servers)
        try:
            crossing = asyncio.run_coroutine_threadsafe(post_offer(server, await caller.offer()), here)
            answer = await asyncio.wrap_future(crossing)
            await caller.accept(answer)
            await caller.until("session.created")
            await talk(caller)
        finally:
            await caller.close()
        return answer.text

    return await from_beyond(call)


async def spoken_turn(caller: WebrtcCaller) -> None:
    caller.microphone.say(at_24k(clip_bytes("cards_001") + silence(1.0)))
    await caller.until("input_audio_buffer.speech_stopped")
    await caller.until("output_audio_buffer.stopped")
    loud = np.abs(np.concatenate(caller.heard).astype(np.int32)) > LOUD
    assert loud.sum() / 48 > 700  # ms


@pytest.mark.parametrize("transport", ["udp", "tcp"])
async def test_a_caller_brings_its_turn_server(transport: str, tmp_path: Path) -> None:
    url = f"turn:{RELAY_BY_CALLER}:{PORT}?transport={transport}"
    turn = RTCIceServer(urls=url, username=USER, credential=PASSWORD)
    async with turn_relay(tmp_path, address=RELAY_BY_SERVER), live_server(engine()) as server:
        answer = await call_from_beyond(server, spoken_turn, turn)
        assert " typ relay" not in answer
        await server.check_empty()


async def test_the_server_has_a_turn_server(tmp_path: Path) -> None:
    async with turn_relay(tmp_path, address=RELAY_BY_CALLER), live_server(engine(), webrtc=WEBRTC) as server:
        answer = await call_from_beyond(server, spoken_turn)
        assert re.search(rf" {RELAY_BY_CALLER} \d+ typ relay ", answer)
        await server.check_empty()


async def test_a_turn_server_that_ends_holds_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library asks it for a minute to release the address of a call that was hung up."""
    monkeypatch.setattr("omni_ws.transport.webrtc.call.CLOSE_TIMEOUT_SEC", 0.1)
    async with turn_relay(tmp_path, address=RELAY_BY_CALLER) as coturn, live_server(engine(), webrtc=WEBRTC) as server:
        here = asyncio.get_running_loop()

        async def end_both(path: str) -> None:
            coturn.kill()
            await coturn.wait()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_SEC) as http:
                assert (await http.post(f"{path}/hangup")).status_code == 200
            assert server.sessions == 0

        async def talk(caller: WebrtcCaller) -> None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(end_both(caller.location), here))

        await call_from_beyond(server, talk)
