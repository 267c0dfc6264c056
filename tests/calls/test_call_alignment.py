"""The sound of calls of ten minutes against what their clients played, by a clock that jumps, over real sockets."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.call_sound import RATE, NoiseEngine, Truth, noise, only_call, told, tracks
from support.inline_workers import inline
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client
from support.speech_clips import as_pcm16
from support.telephones import SOCKET_PACKET, AsteriskCall, PhoneGateway, asterisk_call, phone_gateway

from omni_ws.audio.pcm import SampleLayout, decode_mu_law, encode_mu_law, samples_from_bytes

#: What a call of ten minutes is made of: turns that begin every so often, all answers but the last interrupted.
TURNS = 6
EVERY_SEC = 100.0
ANSWER_SEC = 12.0
INTERRUPTED_SEC = 5.13
#: The same on the telephone, where every 20 ms count.
PHONE_ANSWER_SEC = 6.0
PHONE_INTERRUPTED_SEC = 3.14
#: Less than any wait: a timer may fire so much early.
TICK = 1e-6
#: What the sound may differ from what was heard.
ALIGNED_MS = 20


class Speaker:
    """The loudspeaker of a native client: it begins a while after the first sound, and reports how far it is."""

    def __init__(self, client: NativeClient, truth: Truth, began: float, *, delay_sec: float) -> None:
        self._client, self._truth, self._began, self._delay = client, truth, began, delay_sec
        self._loop = asyncio.get_running_loop()
        self._request: str | None = None
        self._samples = bytearray()
        self._from = 0.0

    def take(self, frame: dict[str, Any]) -> None:
        if frame.get("modality") != "audio":
            return
        if frame["request_id"] != self._request:
            self._request, self._samples = frame["request_id"], bytearray()
            self._from = self._loop.time() + self._delay
        self._samples += base64.b64decode(frame["payload"])

    @property
    def played_ms(self) -> float:
        return max(0.0, min((self._loop.time() - self._from) * 1000, len(self._samples) / 48))

    async def report(self) -> None:
        if self._request is not None and self.played_ms:
            await self._client.send("output_ack", request_id=self._request, played_ms=round(self.played_ms))

    async def stop(self, *, reports: bool) -> None:
        """Play no more, and note what was played."""
        played = samples_from_bytes(bytes(self._samples), SampleLayout.S16)[: round(self.played_ms * RATE / 1000)]
        self._truth.add(self._from - self._began, played)
        if reports:
            await self.report()
        self._request = None


async def speak(client: NativeClient, truth: Truth, began: float, seed: int) -> None:
    """A second of the user, in real time, which asks for an answer."""
    loop = asyncio.get_running_loop()
    samples = noise(1000 + seed, 1.0, 16_000)
    truth.add(loop.time() - began, samples, 16_000)
    for start in range(0, 16_000, 320):
        await asyncio.sleep(0.02)
        await client.chunk(as_pcm16(samples[start : start + 320]), end=start == 15_680, modality="audio")


@pytest.mark.virtual_clock
@pytest.mark.parametrize(("reports", "delay_sec"), [(True, 0.15), (False, 0.0)])  # without reports nobody could know
async def test_a_native_call_of_ten_minutes(tmp_path: Path, *, reports: bool, delay_sec: float) -> None:
    user, played = Truth(), Truth()
    async with live_server(NoiseEngine(ANSWER_SEC), record=tmp_path / "calls") as server:
        began = asyncio.get_running_loop().time()
        async with native_client(server) as client:
            await client.configure(modalities=["text", "audio"], input_audio={"sample_rate": 16_000})
            speaker = Speaker(client, played, began, delay_sec=delay_sec)
            for turn in range(TURNS):
                await _turn(client, speaker, user, began, turn, reports=reports)
    left, right, rate = tracks(only_call(tmp_path / "calls"))
    assert rate == RATE
    assert len(left) > 500 * rate
    check(user, left, rate, seconds=TURNS)
    check(played, right, rate, seconds=(TURNS - 1) * (INTERRUPTED_SEC - 0.2) + ANSWER_SEC)
    call = told(tmp_path / "calls")
    assert [("cut_ms" in turn["answer"]) for turn in call["turns"]] == [True] * (TURNS - 1) + [False]
    for turn, (at, samples) in zip(call["turns"], played.parts, strict=True):
        assert turn["answer"]["start_ms"] == pytest.approx(1000 * at, abs=ALIGNED_MS)
        assert turn["answer"]["end_ms"] == pytest.approx(1000 * (at + len(samples) / RATE), abs=ALIGNED_MS)


async def _turn(client: NativeClient, speaker: Speaker, user: Truth, began: float, turn: int, *, reports: bool) -> None:
    loop = asyncio.get_running_loop()
    begins = loop.time()
    await speak(client, user, began, turn)
    ends = loop.time() + (INTERRUPTED_SEC if turn < TURNS - 1 else ANSWER_SEC + 1)
    next_report = loop.time() + 0.2
    while loop.time() < ends - TICK:
        try:
            async with asyncio.timeout_at(min(next_report, ends)):
                speaker.take(await client.receive())
        except TimeoutError:
            next_report += 0.2
            if reports:
                await speaker.report()
    await speaker.stop(reports=reports and turn < TURNS - 1)
    if turn < TURNS - 1:
        await client.send("cancel")
        await until(begins + EVERY_SEC)


def check(truth: Truth, track: Any, rate: int, *, seconds: float) -> None:
    """All that was heard is in the track, within ALIGNED_MS of when it was, and nothing else is."""
    assert sum(len(samples) for _, samples in truth.parts) / RATE >= seconds - 0.01
    offsets = truth.offsets_ms(track, rate)
    assert len(offsets) >= 2 * int(seconds) - 2 * TURNS
    print(f"offsets {min(offsets):.2f} to {max(offsets):.2f} ms of {len(offsets)}")
    assert max(map(abs, offsets)) < ALIGNED_MS
    assert truth.strays(track, rate, margin_sec=ALIGNED_MS / 1000) == []


@pytest.mark.virtual_clock
async def test_a_call_of_ten_minutes_over_a_telephone_gateway(tmp_path: Path) -> None:
    user, played = Truth(), Truth()
    settings = {"enabled": True, "thinking_sound": False}
    async with live_server(NoiseEngine(PHONE_ANSWER_SEC), record=tmp_path / "calls", telephony=settings) as server:
        loop = asyncio.get_running_loop()
        async with phone_gateway(inline(server), returns_marks=False) as gateway:
            await gateway.start()
            await server.until(lambda: server.sessions == 1)
            began = loop.time()
            reading = asyncio.create_task(_read_all(gateway))
            for turn in range(TURNS):
                await _gateway_turn(server, gateway, user, played, began, turn)
            await gateway.stop()
            await gateway.connection.wait_closed()
            reading.cancel()
    left, right, rate = tracks(only_call(tmp_path / "calls"))
    assert rate == 8000
    assert len(left) > 500 * rate
    check(user, left, rate, seconds=TURNS)
    check(
        played, right, rate, seconds=(TURNS - 1) * (PHONE_INTERRUPTED_SEC - 0.5 + PHONE_ANSWER_SEC) + PHONE_ANSWER_SEC
    )


async def _gateway_turn(
    server: LiveServer, gateway: PhoneGateway, user: Truth, played: Truth, began: float, turn: int
) -> None:
    """The caller speaks, and is answered; a key cuts that, and is answered itself, up to the end."""
    loop = asyncio.get_running_loop()
    begins = loop.time()
    await _say_by_gateway(gateway, user, began, turn)
    await _hear_by_gateway(gateway, played, began, PHONE_INTERRUPTED_SEC if turn < TURNS - 1 else PHONE_ANSWER_SEC + 1)
    if turn < TURNS - 1:
        await gateway.send("dtmf", dtmf={"track": "inbound_track", "digit": "1"})
        await server.until(lambda: not gateway.buffer)
        await _hear_by_gateway(gateway, played, began, PHONE_ANSWER_SEC + 3)
        await until(begins + EVERY_SEC)


async def _hear_by_gateway(gateway: PhoneGateway, played: Truth, began: float, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds
    while loop.time() < ends - TICK:
        ms = _sounds(gateway, played, loop.time() - began)
        await asyncio.sleep(0.02)
        await gateway.play(ms)


async def _read_all(gateway: PhoneGateway) -> None:
    while True:
        await gateway.receive()


def _sounds(gateway: PhoneGateway, truth: Truth, at: float) -> int:
    """Note what is heard of the buffer in the next 20 ms. Returns how long that is, in ms."""
    heard = b"".join(entry for entry in gateway.buffer if isinstance(entry, bytes))[:160]
    if heard:
        truth.add(at, decode_mu_law(heard), 8000)
    return len(heard) // 8


async def _say_by_gateway(gateway: PhoneGateway, truth: Truth, began: float, seed: int) -> None:
    """A second of the caller, in real time."""
    spoken = encode_mu_law(np.frombuffer(as_pcm16(noise(2000 + seed, 1.0, 8000)), "<i2"))
    truth.add(asyncio.get_running_loop().time() - began, decode_mu_law(spoken), 8000)
    spoken += b"\xff" * 8 * 700
    for start in range(0, len(spoken), 160):
        await asyncio.sleep(0.02)
        await gateway.media(spoken[start : start + 160])


@pytest.mark.virtual_clock
async def test_a_call_of_ten_minutes_over_audiosocket(tmp_path: Path) -> None:
    user, played = Truth(), Truth()
    engine = NoiseEngine(PHONE_ANSWER_SEC)
    loop = asyncio.get_running_loop()
    settings = {"audiosocket_port": 0, "thinking_sound": False}
    async with (
        live_server(engine, record=tmp_path / "calls", telephony=settings) as server,
        asterisk_call(inline(server)) as call,
    ):
        await call.identify()
        await server.until(lambda: server.sessions == 1)
        began = loop.time()
        hearing = asyncio.create_task(_hear_by_asterisk(call, played, began))
        for turn in range(TURNS):
            begins = loop.time()
            spoken = noise(3000 + turn, 1.0, 8000)
            user.add(begins - began, spoken, 8000)
            data = as_pcm16(spoken) + bytes(16 * 700)
            for start in range(0, len(data), SOCKET_PACKET):
                await asyncio.sleep(0.02)
                await call.send(0x10, data[start : start + SOCKET_PACKET])
            await asyncio.sleep(PHONE_INTERRUPTED_SEC)
            if turn < TURNS - 1:
                await call.press("1")
                await until(begins + EVERY_SEC)
        await asyncio.sleep(PHONE_ANSWER_SEC)
        await call.send(0x00)
        await hearing
    left, right, rate = tracks(only_call(tmp_path / "calls"))
    assert rate == 8000
    assert len(left) > 500 * rate
    check(user, left, rate, seconds=TURNS)
    check(played, right, rate, seconds=5 * (PHONE_INTERRUPTED_SEC - 0.5 + PHONE_ANSWER_SEC) + PHONE_ANSWER_SEC)


async def _hear_by_asterisk(call: AsteriskCall, played: Truth, began: float) -> None:
    """Hear what comes until the call ends; a frame plays when it comes."""
    while (received := await call.receive()) is not None:
        if received[0] == 0x10:
            samples = samples_from_bytes(received[1], SampleLayout.S16)
            played.add(call.times[-1] - began, samples, 8000)


async def until(when: float) -> None:
    """Sleep until then, in steps that are shorter than any time-out."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    for passed in range(0, int(when - begin) + 1, 30):
        await asyncio.sleep(min(30.0, when - begin - passed))
