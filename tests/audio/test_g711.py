"""Comparison with libav's G.711, and with values from the tables of the recommendation."""

from __future__ import annotations

import av
import numpy as np
import pytest

from omni_ws.audio import pcm

ALL_CODES = bytes(range(256))
ALL_PCM16 = np.arange(-32768, 32768, dtype=np.int32).astype(np.int16)


def libav_decoded(codec: str, data: bytes) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    context = av.CodecContext.create(codec, "r")
    assert isinstance(context, av.AudioCodecContext)
    context.sample_rate, context.layout = 8000, "mono"
    frames = context.decode(av.Packet(data))
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])


def libav_encoded(codec: str, pcm16: np.ndarray[tuple[int], np.dtype[np.int16]]) -> bytes:
    context = av.CodecContext.create(codec, "w")
    assert isinstance(context, av.AudioCodecContext)
    context.sample_rate, context.layout, context.format = 8000, "mono", "s16"
    frame = av.AudioFrame.from_ndarray(pcm16.reshape(1, -1), format="s16", layout="mono")
    frame.sample_rate = 8000
    return b"".join(bytes(packet) for packet in [*context.encode(frame), *context.encode(None)])


def test_every_code_decodes_as_libav_decodes_it() -> None:
    mu_law = pcm.decode_mu_law(ALL_CODES) * 32768
    a_law = pcm.decode_a_law(ALL_CODES) * 32768
    assert np.array_equal(mu_law, libav_decoded("pcm_mulaw", ALL_CODES))
    assert np.array_equal(a_law, libav_decoded("pcm_alaw", ALL_CODES))


def test_known_codes() -> None:
    # Full scale, silence, and the smallest step, from tables 1a/1b and 2a/2b of the recommendation.
    assert (pcm.decode_mu_law(b"\x80\x00\xff\x7f\xfe") * 32768).tolist() == [32124, -32124, 0, 0, 8]
    assert (pcm.decode_a_law(b"\xaa\x2a\xd5\x55") * 32768).tolist() == [32256, -32256, 8, -8]


def test_encoding_undoes_decoding() -> None:
    decoded = (pcm.decode_mu_law(ALL_CODES) * 32768).astype(np.int16)
    # Mu-law has two zeros; the negative one decodes to the positive.
    assert pcm.encode_mu_law(decoded) == ALL_CODES.replace(b"\x7f", b"\xff")
    decoded = (pcm.decode_a_law(ALL_CODES) * 32768).astype(np.int16)
    assert pcm.encode_a_law(decoded) == ALL_CODES


def test_mu_law_decision_values() -> None:
    """The intervals of table 2a: sixteen per segment, with a step that doubles from segment to segment."""
    borders: list[int] = []
    value = -1
    for segment in range(8):
        for _ in range(16):
            value += 2 << segment
            borders.append(value)
    borders.pop()  # 8159 is virtual
    assert borders[15] == 31
    assert borders[-1] == 7903
    magnitudes = np.where(ALL_PCM16 < 0, ~ALL_PCM16, ALL_PCM16) >> 2
    expected = np.searchsorted(borders, magnitudes, side="right")
    codes = np.frombuffer(pcm.encode_mu_law(ALL_PCM16), dtype=np.uint8)
    assert np.array_equal(~codes & 0x7F, expected)
    assert np.array_equal(codes & 0x80 == 0, ALL_PCM16 < 0)


def test_a_law_decision_values() -> None:
    """The intervals of table 1a: the first two segments have the same step."""
    borders: list[int] = []
    value = 0
    for segment in (0, 0, 1, 2, 3, 4, 5, 6):
        for _ in range(16):
            value += 2 << segment
            borders.append(value)
    assert borders.pop() == 4096  # virtual
    magnitudes = np.where(ALL_PCM16 < 0, ~ALL_PCM16, ALL_PCM16) >> 3
    expected = np.searchsorted(borders, magnitudes, side="right")
    codes = np.frombuffer(pcm.encode_a_law(ALL_PCM16), dtype=np.uint8) ^ 0x55
    assert np.array_equal(codes & 0x7F, expected)
    assert np.array_equal(codes & 0x80 == 0, ALL_PCM16 < 0)


@pytest.mark.parametrize("law", ["mu", "a"])
def test_libav_hears_the_same(law: str) -> None:
    """At most one step of difference: libav rounds to the nearest value, the recommendation has decision values."""
    encode, toggle = (pcm.encode_mu_law, 0x7F) if law == "mu" else (pcm.encode_a_law, 0x55)
    ours = np.frombuffer(encode(ALL_PCM16), dtype=np.uint8)
    theirs = np.frombuffer(libav_encoded("pcm_mulaw" if law == "mu" else "pcm_alaw", ALL_PCM16), dtype=np.uint8)
    steps = ((ours ^ toggle) & 0x7F).astype(int) - ((theirs ^ toggle) & 0x7F).astype(int)
    assert np.abs(steps).max() == 1
    assert np.mean(ours != theirs) < 0.02


@pytest.mark.parametrize("law", ["mu", "a"])
def test_encoding_is_monotonic_and_symmetric(law: str) -> None:
    encode, decode = (pcm.encode_mu_law, pcm.decode_mu_law) if law == "mu" else (pcm.encode_a_law, pcm.decode_a_law)
    values = decode(encode(ALL_PCM16))
    assert (np.diff(values) >= 0).all()
    # One's complement: -1 - x mirrors x.
    assert np.array_equal(values, -values[::-1])
