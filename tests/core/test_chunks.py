from __future__ import annotations

import pytest

from omni_ws.core.chunks import (
    DEFAULT_INPUT_AUDIO,
    MAX_CHANNELS,
    NOMINAL_COMPRESSED_BYTES_PER_SECOND,
    AudioEncoding,
    AudioFormat,
    InputChunk,
    Usage,
    checked_channels,
    checked_sample_rate,
)
from omni_ws.errors import InvalidValue


def test_an_end_is_an_empty_chunk() -> None:
    end = InputChunk.end()
    assert (end.payload, end.end_of_input, end.sequence_id) == (b"", True, None)


def test_usage_adds_up() -> None:
    assert Usage(input_tokens=2, output_tokens=3).total_tokens == 5


# Formats of audio.


@pytest.mark.parametrize(
    ("encoding", "bytes_per_second", "raw"),
    [
        (AudioEncoding.PCM16, 2 * 24_000 * 2, True),
        (AudioEncoding.F32, 4 * 24_000 * 2, True),
        (AudioEncoding.PCMU, 24_000 * 2, True),
        (AudioEncoding.PCMA, 24_000 * 2, True),
        (AudioEncoding.WAV, 2 * 24_000 * 2, False),
        (AudioEncoding.OPUS, NOMINAL_COMPRESSED_BYTES_PER_SECOND, False),
        (AudioEncoding.WEBM, NOMINAL_COMPRESSED_BYTES_PER_SECOND, False),
        (AudioEncoding.MP3, NOMINAL_COMPRESSED_BYTES_PER_SECOND, False),
        (AudioEncoding.FLAC, NOMINAL_COMPRESSED_BYTES_PER_SECOND, False),
        (AudioEncoding.OGG, NOMINAL_COMPRESSED_BYTES_PER_SECOND, False),
    ],
)
def test_lengths(encoding: AudioEncoding, bytes_per_second: int, raw: bool) -> None:
    audio = AudioFormat(encoding, 24_000, 2)
    assert audio.bytes_per_second == bytes_per_second
    assert audio.is_raw is raw
    assert audio.duration_ms(bytes_per_second) == 1000
    assert audio.duration_ms(0) == 0


def test_input_is_pcm16_mono_at_16_khz_by_default() -> None:
    assert AudioFormat(AudioEncoding.PCM16, 16_000, 1) == DEFAULT_INPUT_AUDIO


@pytest.mark.parametrize("rate", [8_000, 192_000])
def test_sample_rates_at_the_limits(rate: int) -> None:
    assert checked_sample_rate(rate) == rate


@pytest.mark.parametrize("rate", [7_999, 192_001, 0, -1])
def test_sample_rates_past_the_limits(rate: int) -> None:
    with pytest.raises(InvalidValue, match=str(rate)) as caught:
        checked_sample_rate(rate, param="rate")
    assert caught.value.param == "rate"


@pytest.mark.parametrize("channels", [1, MAX_CHANNELS])
def test_channels_at_the_limits(channels: int) -> None:
    assert checked_channels(channels) == channels


@pytest.mark.parametrize("channels", [0, MAX_CHANNELS + 1])
def test_channels_past_the_limits(channels: int) -> None:
    with pytest.raises(InvalidValue) as caught:
        checked_channels(channels)
    assert caught.value.param == "channels"
