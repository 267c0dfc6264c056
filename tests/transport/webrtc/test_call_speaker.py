"""The track of a call: when its packets go, on a clock of the test's own."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from omni_ws.audio.compressed import PACKET_BYTES, OpusPacketDecoder
from omni_ws.transport.webrtc.call import CallSpeaker


@pytest.mark.virtual_clock
async def test_after_a_pause_three_packets_go_at_once_and_the_others_by_the_clock() -> None:
    speaker = CallSpeaker(lambda response_id: None, lambda response_id: None)
    clock = asyncio.get_running_loop().time
    ends = []
    for pause in (1.0, 5.0):
        await asyncio.sleep(pause)
        began = clock()
        speaker.say(f"resp_{pause}", bytes(6 * PACKET_BYTES))
        packets = [(await speaker.recv(), clock() - began) for _ in range(6)]
        assert [late for _, late in packets] == pytest.approx([0, 0, 0, 0.02, 0.04, 0.06])
        stamps = [packet.pts for packet, _ in packets if packet.pts is not None]
        assert stamps == list(range(stamps[0], stamps[0] + 6 * 960, 960))
        ends += [stamps[0], stamps[-1]]
    assert ends == sorted(ends)  # time stamps never go back
    speaker.stop()


@pytest.mark.virtual_clock
async def test_what_is_sent_is_lowered_and_raised_without_a_packet_less() -> None:
    speaker = CallSpeaker(lambda response_id: None, lambda response_id: None)
    decoder = OpusPacketDecoder()
    tone = (8000 * np.sin(np.arange(24_000) / 9)).astype("<i2").tobytes()
    speaker.say("resp_a", tone)

    async def level(packets: int) -> float:
        """The level of the next packets, without the first two: a codec and a ramp take their time."""
        heard = [decoder.decode(bytes(await speaker.recv())) for _ in range(packets)]
        return float(np.sqrt(np.mean(np.frombuffer(b"".join(heard[2:]), "<i2").astype(float) ** 2)))

    full = await level(15)
    speaker.duck(True)
    lowered = await level(15)
    speaker.duck(False)
    assert 20 * np.log10(lowered / full) == pytest.approx(-15, abs=1)
    assert await level(15) == pytest.approx(full, rel=0.05)
    assert speaker._playout.waiting == 5 * PACKET_BYTES
    speaker.stop()
