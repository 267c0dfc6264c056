from __future__ import annotations

import io
import math
import wave
from pathlib import Path

import av
import av.container
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_ws.audio.codec import AudioDecoder, AudioEncoder, encode_file
from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.errors import InvalidValue, UnsupportedFormat

SPEECH = Path(__file__).parent.parent / "data" / "goforward.wav"
UNCOMPRESSED = [AudioEncoding.PCM16, AudioEncoding.F32, AudioEncoding.PCMU, AudioEncoding.PCMA, AudioEncoding.WAV]
COMPRESSED = [AudioEncoding.WEBM, AudioEncoding.OGG, AudioEncoding.OPUS, AudioEncoding.MP3, AudioEncoding.FLAC]


def speech() -> Samples:
    with wave.open(str(SPEECH)) as file:
        pcm = file.readframes(file.getnframes())
    return np.frombuffer(pcm, dtype="<i2").astype(np.float32) / np.float32(32768)


def streamed(samples: Samples, target: AudioFormat, source_rate: int, chunk: int) -> bytes:
    encoder = AudioEncoder(target, source_rate=source_rate)
    pieces = [encoder.encode(samples[start : start + chunk]) for start in range(0, len(samples), chunk)]
    return b"".join([*pieces, encoder.flush()])


def decoded(data: bytes, source: AudioFormat, sample_rate: int) -> Samples:
    with AudioDecoder(source, sample_rate=sample_rate) as decoder:
        return np.concatenate([decoder.decode(data), decoder.flush()])


def test_pcm16_in_and_out_is_the_identity() -> None:
    data = SPEECH.read_bytes()[44:]
    samples = decoded(data, AudioFormat(), 16000)
    assert streamed(samples, AudioFormat(), 16000, 333) == data[: 2 * len(samples)]


@pytest.mark.slow
@given(
    encoding=st.sampled_from(UNCOMPRESSED),
    channels=st.integers(1, 3),
    rate=st.sampled_from([8000, 16000, 24000, 44100]),
    chunk=st.integers(1, 5000),
)
@settings(deadline=None, max_examples=60)
def test_cutting_makes_no_difference(encoding: AudioEncoding, channels: int, rate: int, chunk: int) -> None:
    samples = speech()[8000:12000]
    target = AudioFormat(encoding, rate, channels)
    cut, whole = (decoded(streamed(samples, target, 16000, size), target, rate) for size in (chunk, len(samples)))
    assert len(cut) == len(whole) == math.floor(len(samples) * rate / 16000 + 0.5)
    assert np.allclose(cut, whole, atol=1e-5 if encoding is AudioEncoding.F32 else 0.03)


@pytest.mark.parametrize("encoding", UNCOMPRESSED)
def test_channels_are_repeated(encoding: AudioEncoding) -> None:
    samples = np.array([0.25, -0.5], dtype=np.float32)
    mono = encode_file(samples, source_rate=16000, target=AudioFormat(encoding, 16000, 1))
    stereo = encode_file(samples, source_rate=16000, target=AudioFormat(encoding, 16000, 2))
    header = 44 if encoding is AudioEncoding.WAV else 0
    width = (len(mono) - header) // 2
    first, second = mono[header : header + width], mono[header + width :]
    assert stereo[header:] == first * 2 + second * 2


@pytest.mark.parametrize("encoding", UNCOMPRESSED)
def test_what_is_no_number_is_silence(encoding: AudioEncoding) -> None:
    samples = np.array([np.nan, np.inf, 0.5, 3.0], dtype=np.float32)
    target = AudioFormat(encoding)
    result = decoded(encode_file(samples, source_rate=16000, target=target), target, 16000)
    assert np.allclose(result, [0, 0, 0.5, 1], atol=0.03)


def test_a_wav_stream_begins_with_a_header_without_length() -> None:
    encoder = AudioEncoder(AudioFormat(AudioEncoding.WAV, 24000, 2), source_rate=24000)
    first = encoder.encode(np.zeros(10, dtype=np.float32))
    assert first[:4] == b"RIFF"
    assert first[40:44] == b"\xff" * 4
    assert len(first) == 44 + 40
    assert len(encoder.encode(np.zeros(10, dtype=np.float32))) == 40
    assert encoder.flush() == b""


def test_an_empty_wav_stream_has_its_header_all_the_same() -> None:
    assert len(AudioEncoder(AudioFormat(AudioEncoding.WAV), source_rate=16000).flush()) == 44


def test_a_wav_file_has_its_true_length() -> None:
    data = encode_file(speech(), source_rate=16000, target=AudioFormat(AudioEncoding.WAV, 24000, 2))
    with wave.open(io.BytesIO(data)) as file:
        assert file.getnframes() == math.floor(len(speech()) * 1.5 + 0.5)
        assert (file.getframerate(), file.getnchannels()) == (24000, 2)


@pytest.mark.parametrize("encoding", COMPRESSED)
@pytest.mark.parametrize("rate", [8000, 24000, 48000])
@pytest.mark.parametrize("whole", [True, False])
def test_compressed_round_trip(encoding: AudioEncoding, rate: int, whole: bool) -> None:
    target = AudioFormat(encoding, rate)
    data = encode_file(speech(), source_rate=16000, target=target) if whole else streamed(speech(), target, 16000, 320)
    result = decoded(data, target, 16000)
    # An MP3 stream cannot declare its encoder delay: up to 1105 + 1152 samples at its rate.
    spare = 2300 * 16000 / rate if encoding is AudioEncoding.MP3 else 2
    assert abs(len(result) - len(speech())) <= spare
    assert np.square(result).sum() == pytest.approx(np.square(speech()).sum(), rel=0.3)


@pytest.mark.parametrize(
    ("encoding", "container", "codec"),
    [
        (AudioEncoding.MP3, "mp3", "mp3"),
        (AudioEncoding.FLAC, "flac", "flac"),
        (AudioEncoding.OPUS, "ogg", "opus"),
        (AudioEncoding.OGG, "ogg", "opus"),
        (AudioEncoding.WEBM, "matroska", "opus"),
    ],
)
@pytest.mark.parametrize("channels", [1, 2])
def test_others_can_read_it(encoding: AudioEncoding, container: str, codec: str, channels: int) -> None:
    data = encode_file(speech(), source_rate=16000, target=AudioFormat(encoding, 24000, channels))
    with av.open(io.BytesIO(data)) as file:
        assert container in file.format.name
        assert isinstance(file, av.container.InputContainer)
        stream = file.streams.audio[0]
        assert stream.codec_context.name.removesuffix("float") == codec
        assert stream.codec_context.layout.nb_channels == channels
        assert file.duration == pytest.approx(len(speech()) / 16000 * 1_000_000, abs=100_000)


@pytest.mark.parametrize("encoding", COMPRESSED)
def test_bytes_come_while_the_audio_is_made(encoding: AudioEncoding) -> None:
    encoder = AudioEncoder(AudioFormat(encoding, 24000), source_rate=16000)
    half = b"".join(encoder.encode(speech()[start : start + 320]) for start in range(0, len(speech()) // 2, 320))
    rest = b"".join(
        encoder.encode(speech()[start : start + 320]) for start in range(len(speech()) // 2, len(speech()), 320)
    )
    assert len(half) > len(half + rest + encoder.flush()) / 5


@pytest.mark.parametrize("encoding", COMPRESSED)
def test_silence_of_no_length(encoding: AudioEncoding) -> None:
    assert isinstance(AudioEncoder(AudioFormat(encoding, 24000), source_rate=16000).flush(), bytes)


@pytest.mark.parametrize(
    ("target", "param"),
    [
        (AudioFormat(AudioEncoding.MP3, 96000), "sample_rate"),
        (AudioFormat(AudioEncoding.OPUS, 44100), "sample_rate"),
        (AudioFormat(AudioEncoding.WEBM, 22050), "sample_rate"),
        (AudioFormat(AudioEncoding.MP3, 24000, 3), "channels"),
        (AudioFormat(AudioEncoding.FLAC, 24000, 9), "channels"),
    ],
)
def test_what_a_codec_cannot_do_is_refused_by_name(target: AudioFormat, param: str) -> None:
    with pytest.raises(UnsupportedFormat) as caught:
        AudioEncoder(target, source_rate=24000)
    assert caught.value.param == param
    with pytest.raises(UnsupportedFormat):
        encode_file(speech(), source_rate=16000, target=target)


@pytest.mark.parametrize("encoding", [AudioEncoding.M4A, AudioEncoding.MP4, AudioEncoding.MOV])
def test_formats_for_input_only(encoding: AudioEncoding) -> None:
    with pytest.raises(UnsupportedFormat, match="input only"):
        AudioEncoder(AudioFormat(encoding, 24000), source_rate=16000)


@pytest.mark.parametrize("encoding", [*UNCOMPRESSED, *COMPRESSED, AudioEncoding.AAC])
def test_after_the_end(encoding: AudioEncoding) -> None:
    encoder = AudioEncoder(AudioFormat(encoding, 24000), source_rate=16000)
    encoder.encode(speech()[:1000])
    encoder.flush()
    assert encoder.flush() == b""
    with pytest.raises(ValueError, match="already flushed"):
        encoder.encode(speech()[:1000])


def test_rates_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidValue):
        AudioEncoder(AudioFormat(sample_rate=7999), source_rate=16000)
    with pytest.raises(InvalidValue):
        AudioEncoder(AudioFormat(), source_rate=192_001)
    with pytest.raises(InvalidValue):
        encode_file(speech(), source_rate=16000, target=AudioFormat(channels=33))
