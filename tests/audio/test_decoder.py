"""Raw samples and WAV; formats that libav decodes have their own tests."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import wave
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_ws.audio import pcm
from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.container import wav_header
from omni_ws.audio.pcm import Samples, pcm16_from_samples
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.errors import InvalidValue, UnsupportedFormat

SPEECH = Path(__file__).parent.parent / "data" / "goforward.wav"

TO_BYTES: dict[AudioEncoding, Callable[[Samples], bytes]] = {
    AudioEncoding.PCM16: lambda samples: pcm16_from_samples(samples).tobytes(),
    AudioEncoding.F32: lambda samples: samples.astype("<f4").tobytes(),
    AudioEncoding.PCMU: lambda samples: pcm.encode_mu_law(pcm16_from_samples(samples)),
    AudioEncoding.PCMA: lambda samples: pcm.encode_a_law(pcm16_from_samples(samples)),
    AudioEncoding.WAV: lambda samples: (
        wav_header(sample_rate=16000, channels=1, data_bytes=2 * len(samples)) + pcm16_from_samples(samples).tobytes()
    ),
}


def speech() -> Samples:
    with wave.open(str(SPEECH)) as file:
        pcm = file.readframes(file.getnframes())
    return np.frombuffer(pcm, dtype="<i2").astype(np.float32) / np.float32(32768)


def decoded(data: bytes, source: AudioFormat, *, sample_rate: int = 16000, cuts: list[int] | None = None) -> Samples:
    decoder = AudioDecoder(source, sample_rate=sample_rate)
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts or []), len(data)]
    parts = [decoder.decode(data[a:b]) for a, b in pairwise(borders)]
    return np.concatenate([*parts, decoder.flush()])


@given(
    encoding=st.sampled_from(list(TO_BYTES)),
    channels=st.integers(1, 3),
    sample_rate=st.sampled_from([8000, 16000, 24000]),
    cuts=st.lists(st.integers(0, 4000), max_size=20),
    drop=st.integers(0, 5),
)
@settings(deadline=None)
def test_cutting_makes_no_difference(
    encoding: AudioEncoding, channels: int, sample_rate: int, cuts: list[int], drop: int
) -> None:
    samples = np.random.default_rng(3).uniform(-1, 1, 900).astype(np.float32)
    data = TO_BYTES[encoding](samples)
    data = data[: len(data) - drop]
    source = AudioFormat(encoding, 16000, channels)
    whole = decoded(data, source, sample_rate=sample_rate)
    cut = decoded(data, source, sample_rate=sample_rate, cuts=cuts)
    assert cut.dtype == np.float32
    assert np.array_equal(cut, whole) if sample_rate == 16000 else np.allclose(cut, whole, atol=1e-6)
    assert len(cut) == len(whole)


@pytest.mark.parametrize("encoding", list(TO_BYTES))
def test_speech_comes_out_as_it_went_in(encoding: AudioEncoding) -> None:
    samples = speech()
    result = decoded(TO_BYTES[encoding](samples), AudioFormat(encoding))
    tolerance = 0.02 if encoding in (AudioEncoding.PCMU, AudioEncoding.PCMA) else 0
    assert np.abs(result - samples).max() <= tolerance


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 192000])
@pytest.mark.parametrize("channels", [1, 2, 32])
def test_any_rate_and_channel_count(rate: int, channels: int) -> None:
    frames = rate // 5 + 3
    tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(frames) / rate)).astype(np.float32)
    data = pcm16_from_samples(np.repeat(tone, channels)).tobytes()
    result = decoded(data, AudioFormat(AudioEncoding.PCM16, rate, channels), cuts=list(range(0, len(data), 641)))
    assert len(result) == math.floor(frames * 16000 / rate + 0.5)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(result)) / 16000)
    assert np.abs(result - expected)[400:-400].max() < 0.02


def test_channels_are_mixed_to_their_mean() -> None:
    data = np.array([1000, 3000, -1000, -2000], dtype="<i2").tobytes()
    result = decoded(data, AudioFormat(AudioEncoding.PCM16, 16000, 2))
    assert (result * 32768).tolist() == [2000.0, -1500.0]


def test_half_a_sample_at_the_end_is_dropped() -> None:
    decoder = AudioDecoder(AudioFormat(channels=2), sample_rate=16000)
    assert len(decoder.decode(b"\0" * 7)) == 1
    assert len(decoder.decode(b"\0")) == 1
    assert len(decoder.decode(b"\0" * 3)) == 0
    assert len(decoder.flush()) == 0


def test_what_is_no_number_becomes_silence() -> None:
    data = np.array([np.nan, np.inf, -np.inf, 0.5, 9.0, -9.0], dtype="<f4").tobytes()
    source = AudioFormat(AudioEncoding.F32)
    assert decoded(data, source).tolist() == [0.0, 0.0, 0.0, 0.5, 1.0, -1.0]
    assert np.isfinite(decoded(data, source, sample_rate=48000)).all()


def test_resampling_full_scale_stays_in_range() -> None:
    square = np.sign(np.sin(np.arange(4000) / 7)).astype(np.float32)
    result = decoded(square.astype("<f4").tobytes(), AudioFormat(AudioEncoding.F32), sample_rate=44100)
    assert np.abs(result).max() <= 1.0


def test_nothing_in_nothing_out() -> None:
    for encoding in AudioEncoding:
        with AudioDecoder(AudioFormat(encoding), sample_rate=16000) as decoder:
            assert len(decoder.decode(b"")) == 0
            assert len(decoder.flush()) == 0
            assert len(decoder.flush()) == 0
            with pytest.raises(ValueError, match="already flushed"):
                decoder.decode(b"1")


@pytest.mark.parametrize("kind", ["rate", "channels", "target"])
@pytest.mark.parametrize("outside", [False, True])
def test_limits(kind: str, outside: bool) -> None:
    source = AudioFormat(sample_rate=192_000 + outside) if kind == "rate" else AudioFormat()
    if kind == "channels":
        source = AudioFormat(channels=32 + outside)
    target = 8000 - outside if kind == "target" else 16000
    if outside:
        with pytest.raises(InvalidValue):
            AudioDecoder(source, sample_rate=target)
    else:
        AudioDecoder(source, sample_rate=target)


def wav(code: int, bits: int, data: bytes, *, size: int | None = None, rate: int = 16000, channels: int = 1) -> bytes:
    block = channels * bits // 8
    header = b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<IHHIIHH", 16, code, channels, rate, rate * block, block, bits)
    return header + b"LIST\x03\0\0\0abc\0" + b"data" + struct.pack("<I", len(data) if size is None else size) + data


def test_wav_of_24_bits() -> None:
    values = [-(2**23), -1, 0, 1, 2**22, 2**23 - 1]
    data = wav(1, 24, b"".join(value.to_bytes(3, "little", signed=True) for value in values))
    for cuts in ([], list(range(len(data)))):
        result = decoded(data, AudioFormat(AudioEncoding.WAV), cuts=cuts)
        assert (result * 2**23).round().tolist() == [-(2**23), -1, 0, 1, 2**22, 2**23 - 1]


def test_wav_names_its_own_rate_and_channels() -> None:
    data = wav(1, 16, bytes(8 * 480), rate=48000, channels=4)
    assert len(decoded(data, AudioFormat(AudioEncoding.WAV, 8000, 1))) == 160


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 1000])
def test_wav_of_unknown_or_exaggerated_size_goes_on_to_the_end(size: int) -> None:
    assert len(decoded(wav(1, 16, bytes(500), size=size), AudioFormat(AudioEncoding.WAV))) == 250


def test_what_follows_the_wav_samples_is_ignored() -> None:
    data = wav(1, 16, bytes(100)) + b"LIST\x04\0\0\0zzzz"
    for cuts in ([], list(range(len(data)))):
        result = decoded(data, AudioFormat(AudioEncoding.WAV), cuts=cuts)
        assert len(result) == 50
        assert not result.any()


def test_wav_that_ends_too_early_is_refused() -> None:
    decoder = AudioDecoder(AudioFormat(AudioEncoding.WAV), sample_rate=16000)
    decoder.decode(wav(1, 16, b"")[:30])
    with pytest.raises(UnsupportedFormat, match="header"):
        decoder.flush()


def test_a_failed_stream_stays_failed() -> None:
    decoder = AudioDecoder(AudioFormat(AudioEncoding.WAV), sample_rate=16000)
    for _ in range(2):
        with pytest.raises(UnsupportedFormat, match="RIFF"):
            decoder.decode(b"no wav file")
    with pytest.raises(UnsupportedFormat, match="RIFF"):
        decoder.flush()


def test_bare_samples_do_not_load_libav() -> None:
    program = (
        "import sys; from omni_ws.audio.codec import AudioDecoder; from omni_ws.audio.codec import AudioEncoder;"
        "from omni_ws.core.chunks import AudioFormat;"
        "AudioDecoder(AudioFormat(), sample_rate=16000).decode(bytes(9));"
        "AudioEncoder(AudioFormat(), source_rate=16000);"
        "assert not {'av', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
