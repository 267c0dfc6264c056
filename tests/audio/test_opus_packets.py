"""Opus packets, lost and found."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_ws.audio.compressed import (
    MAX_PACKET_BYTES,
    PACKET_BYTES,
    PACKET_SAMPLES,
    SAMPLE_RATE,
    OpusPacketDecoder,
    OpusPacketEncoder,
)
from omni_ws.errors import InvalidFrame

TONE = (8000 * np.sin(2 * np.pi * 200 * np.arange(SAMPLE_RATE) / SAMPLE_RATE)).astype("<i2")


def encoded() -> list[bytes]:
    encoder, audio = OpusPacketEncoder(), TONE.tobytes()
    return [encoder.encode(audio[start : start + PACKET_BYTES]) for start in range(0, len(audio), PACKET_BYTES)]


def level(audio: bytes) -> float:
    samples: NDArray[np.int16] = np.frombuffer(audio, "<i2")
    return float(np.abs(samples.astype(np.int32)).max())


def test_each_packet_is_20_ms_there_and_back() -> None:
    decoder = OpusPacketDecoder()
    pieces = []
    for packet in encoded():
        pieces.append(decoder.decode(packet))
        assert decoder.seconds == 0.02
    samples = np.frombuffer(b"".join(pieces), "<i2")
    assert abs(len(samples) - len(TONE)) < PACKET_SAMPLES
    spectrum = np.abs(np.fft.rfft(samples[PACKET_SAMPLES:].astype(float)))
    assert np.argmax(spectrum) * SAMPLE_RATE / (len(samples) - PACKET_SAMPLES) == pytest.approx(200, abs=3)


def test_a_lost_packet_goes_on_as_before_and_fades() -> None:
    decoder = OpusPacketDecoder()
    for packet in encoded()[:20]:
        last = level(decoder.decode(packet))
    concealed = [decoder.conceal() for _ in range(8)]
    assert {len(piece) for piece in concealed} == {PACKET_BYTES}
    levels = [level(piece) for piece in concealed]
    assert levels[0] > 0.8 * last
    assert levels[-1] < 0.1 * last
    assert decoder.seconds == 0.02


def test_a_loss_before_the_first_packet_is_silence() -> None:
    assert level(OpusPacketDecoder().conceal()) == 0


@pytest.mark.parametrize("packet", [b"", bytes(MAX_PACKET_BYTES + 1), b"\x03", b"\xff" * 40])
def test_what_is_no_opus(packet: bytes) -> None:
    decoder = OpusPacketDecoder()
    with pytest.raises(InvalidFrame):
        decoder.decode(packet)
    assert decoder.decode(encoded()[0])
