"""A caller's packets as one stream of audio: losses, padding, and senders that begin anew. The clock is virtual."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

pytest.importorskip("aiortc")

from omni_ws.audio.compressed import PACKET_BYTES, SAMPLE_RATE, OpusPacketEncoder
from omni_ws.metrics import Metrics
from omni_ws.transport.webrtc.call import MAX_AHEAD_SEC, CallMicrophone

pytestmark = pytest.mark.virtual_clock

TICKS = 960


@dataclass
class Packet:
    sequence_number: int
    timestamp: int
    payload: bytes
    ssrc: int = 1


class Caller:
    def __init__(self) -> None:
        self.heard: list[tuple[float, bytes]] = []
        self.metrics = Metrics()
        self.microphone = CallMicrophone(self._hear, self.metrics)
        self._encoder = OpusPacketEncoder()
        self._begun = asyncio.get_running_loop().time()

    def _hear(self, audio: bytes) -> None:
        self.heard.append((asyncio.get_running_loop().time() - self._begun, audio))

    async def send(self, sequence: int, timestamp: int, *, padding: bool = False, ssrc: int = 1) -> None:
        payload = b"" if padding else self._encoder.encode(bytes(PACKET_BYTES))
        self.microphone.add(Packet(sequence % 65_536, timestamp, payload, ssrc))
        await asyncio.sleep(0.02)

    @property
    def heard_ms(self) -> float:
        return sum(len(audio) for _, audio in self.heard) / 2 / SAMPLE_RATE * 1000

    def count(self, outcome: str) -> float:
        return float(self.metrics.webrtc_packets.labels(outcome)._value.get())


async def test_padding_delays_nobody() -> None:
    """Senders measure the network with packets of padding alone. They are numbered, and nothing is missing."""
    caller = Caller()
    for number in range(10):
        await caller.send(number, number * TICKS - (TICKS if number > 5 else 0), padding=number == 5)
    assert [round(when, 2) for when, _ in caller.heard] == [0.0, 0.02, 0.04, 0.06, 0.08, 0.12, 0.14, 0.16, 0.18]
    assert caller.count("lost") == caller.count("reordered") == 0
    assert caller.metrics.webrtc_concealed_seconds._value.get() == 0


async def test_a_loss_before_padding_is_concealed() -> None:
    caller = Caller()
    for number in (0, 1, 3, 4):  # 2 is lost, 3 is padding
        await caller.send(number, (number if number < 3 else number - 1) * TICKS, padding=number == 3)
    await asyncio.sleep(0.3)
    assert caller.count("lost") == 1
    assert caller.metrics.webrtc_concealed_seconds._value.get() == pytest.approx(0.02)
    assert caller.heard_ms == pytest.approx(80, abs=2)


@pytest.mark.parametrize("ssrc", [1, 2])
@pytest.mark.parametrize("first", [8_000, 10_490, 60_000])
async def test_a_stream_that_begins_anew_is_heard_from_its_first_packet(first: int, ssrc: int) -> None:
    """Nothing is filled in between the streams, whatever the time stamps seem to say."""
    caller = Caller()
    for number in range(50):
        await caller.send(10_450 + number, number * TICKS)
    for number in range(50):
        await caller.send(first + number, 49 * TICKS + 48_000 * 5 + number * TICKS, ssrc=ssrc)
    await asyncio.sleep(0.3)
    assert caller.heard_ms == pytest.approx(2_000, abs=3)  # each decoder is a little late


async def test_a_caller_is_heard_no_longer_than_the_call_lasts() -> None:
    """Packets without end, and time stamps that leap: what is beyond the pace is dropped, and made of nothing."""
    caller = Caller()
    encoder = OpusPacketEncoder()
    payload = encoder.encode(bytes(PACKET_BYTES))
    for number in range(1000):
        caller.microphone.add(Packet(number, number * TICKS, payload))
    assert MAX_AHEAD_SEC * 1000 - 200 <= caller.heard_ms <= MAX_AHEAD_SEC * 1000
    heard, dropped = caller.heard_ms, caller.count("dropped")
    for number in range(1000, 1100):
        caller.microphone.add(Packet(number, number * TICKS + (number - 999) * 9 * 48_000, payload))
    assert caller.heard_ms == heard
    assert caller.count("dropped") == dropped + 100


async def test_pauses_in_which_nothing_is_sent_cost_no_speech() -> None:
    caller = Caller()
    timestamp = 0
    for turn in range(4):
        for number in range(10):
            await caller.send(10 * turn + number, timestamp)
            timestamp += TICKS
        await asyncio.sleep(9)
        timestamp += 9 * 48_000
    assert caller.count("dropped") == 0
    assert caller.heard_ms == pytest.approx(4 * 200 + 3 * 9000, abs=100)
