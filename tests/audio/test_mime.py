from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.audio.container import media_type, parse_audio_format, parse_audio_mime
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.errors import InvalidValue, UnsupportedFormat


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("audio/pcm", AudioFormat()),
        ("audio/pcm;rate=24000", AudioFormat(sample_rate=24000)),
        (' Audio/PCM ; Rate = 48000 ; channels="2" ', AudioFormat(sample_rate=48000, channels=2)),
        ("audio/pcm;bits=16;endianness=little-endian;x=y", AudioFormat()),
        ("audio/x-f32;rate=8000", AudioFormat(AudioEncoding.F32, 8000)),
        ("audio/f32", AudioFormat(AudioEncoding.F32)),
        ("audio/basic", AudioFormat(AudioEncoding.PCMU, 8000)),
        ("audio/pcmu", AudioFormat(AudioEncoding.PCMU, 8000)),
        ("audio/PCMA;rate=16000", AudioFormat(AudioEncoding.PCMA, 16000)),
        ("audio/wav", AudioFormat(AudioEncoding.WAV)),
        ("audio/x-wav", AudioFormat(AudioEncoding.WAV)),
        ("audio/wave", AudioFormat(AudioEncoding.WAV)),
        ("audio/mpeg", AudioFormat(AudioEncoding.MP3)),
        ("audio/mp3", AudioFormat(AudioEncoding.MP3)),
        ("audio/flac", AudioFormat(AudioEncoding.FLAC)),
        ("audio/x-flac", AudioFormat(AudioEncoding.FLAC)),
        ("audio/ogg", AudioFormat(AudioEncoding.OGG)),
        ("audio/ogg; codecs=opus", AudioFormat(AudioEncoding.OPUS)),
        ("audio/opus", AudioFormat(AudioEncoding.OPUS)),
        ("audio/webm;codecs=opus", AudioFormat(AudioEncoding.WEBM)),
    ],
)
def test_media_types(text: str, expected: AudioFormat) -> None:
    assert parse_audio_mime(text) == expected


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("audio/pcm;rate=7999", "rate"),
        ("audio/pcm;rate=192001", "rate"),
        ("audio/pcm;rate=-16000", "rate"),
        ("audio/pcm;rate=16k", "rate"),
        ("audio/pcm;rate=", "rate"),
        ("audio/pcm;rate", "rate"),
        ("audio/pcm;rate=1e4", "rate"),
        ("audio/pcm;rate=99999999999999999999", "rate"),
        ("audio/pcm;channels=0", "channels"),
        ("audio/pcm;channels=33", "channels"),
        ("audio/pcm;channels=two", "channels"),
    ],
)
def test_bad_parameters_are_named(text: str, param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse_audio_mime(text)
    assert caught.value.param == param


def test_parameters_in_parts_that_are_malformed() -> None:
    with pytest.raises(UnsupportedFormat, match="malformed"):
        parse_audio_mime("audio/pcm;rate*=utf-8''8000;rate*0=1")


def test_parameters_may_name_their_character_set() -> None:
    assert parse_audio_mime("audio/pcm; rate*=us-ascii'en'24000").sample_rate == 24_000
    assert parse_audio_mime("audio/ogg; codecs*=utf-8''opus").encoding is AudioEncoding.OPUS
    with pytest.raises(UnsupportedFormat):
        parse_audio_mime("audio/pcm; endian*=utf-8''big")
    with pytest.raises(InvalidValue):
        parse_audio_mime("audio/pcm; rate*=nonsense''16k")


@pytest.mark.parametrize("text", ["audio/pcm;rate=8000;channels=32", "audio/pcm;rate=192000;channels=1"])
def test_the_limits_themselves_are_fine(text: str) -> None:
    assert parse_audio_mime(text).encoding is AudioEncoding.PCM16


@pytest.mark.parametrize(
    "text",
    ["", "audio/", "audio/alac", "video/mp4", "audio/l16;rate=16000", "audio/pcm;bits=24", "audio/pcm;endian=big"],
)
def test_unknown_kinds_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedFormat):
        parse_audio_mime(text)


@pytest.mark.parametrize("encoding", list(AudioEncoding))
def test_answers_can_be_read_back(encoding: AudioEncoding) -> None:
    format = AudioFormat(encoding, 24000, 2)
    parsed = parse_audio_mime(media_type(format))
    assert parsed.encoding is encoding
    if format.is_raw:
        assert parsed == format


def test_wire_names_keep_rate_and_channels() -> None:
    default = AudioFormat(AudioEncoding.PCM16, 44100, 2)
    assert parse_audio_format("f32", default) == AudioFormat(AudioEncoding.F32, 44100, 2)
    assert parse_audio_format("audio/pcm", default) == default
    assert parse_audio_format("audio/pcm;rate=8000", default) == AudioFormat(AudioEncoding.PCM16, 8000, 2)
    # Registered types have the defaults of their registration.
    assert parse_audio_format("audio/pcmu", default) == AudioFormat(AudioEncoding.PCMU, 8000, 1)
    with pytest.raises(UnsupportedFormat, match="pcm24"):
        parse_audio_format("pcm24", default)


@pytest.mark.slow
@given(st.text(max_size=60), st.sampled_from(["", "audio/pcm;", "audio/pcm;rate="]))
def test_anything_is_understood_or_refused(text: str, beginning: str) -> None:
    with contextlib.suppress(InvalidValue, UnsupportedFormat):
        parse_audio_format(beginning + text, AudioFormat())
