"""Encoding whole replies as mp3, flac, or Opus in ogg or webm."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

import av
import av.error
import numpy as np

from omni_ws.audio.pcm import bounded, pcm16_from_samples
from omni_ws.audio.samples import Samples
from omni_ws.core.audio_format import AudioEncoding, AudioFormat
from omni_ws.errors import UnsupportedFormat

_MP3_RATES = frozenset({8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000})
_OPUS_RATES = frozenset({8_000, 12_000, 16_000, 24_000, 48_000})


@dataclass(frozen=True, slots=True)
class _Codec:
    """``container`` and ``name`` are libav's; ``sample_rates`` None means any."""

    container: str
    name: str
    sample_rates: frozenset[int] | None
    max_channels: int
    #: Of the container: pages and clusters of a fifth of a second, so that bytes come while the audio is made.
    options: Mapping[str, str] = field(default_factory=dict)


_OPUS_IN_OGG = _Codec("ogg", "libopus", _OPUS_RATES, 2, {"page_duration": "200000"})
_CODECS = {
    AudioEncoding.MP3: _Codec("mp3", "libmp3lame", _MP3_RATES, 2),
    AudioEncoding.FLAC: _Codec("flac", "flac", None, 8),
    AudioEncoding.OPUS: _OPUS_IN_OGG,
    AudioEncoding.OGG: _OPUS_IN_OGG,
    AudioEncoding.WEBM: _Codec("webm", "libopus", _OPUS_RATES, 2, {"cluster_time_limit": "200"}),
}


class _Sink(Protocol):
    def write(self, data: bytes, /) -> int: ...


class _Pieces:
    """Collects what the muxer writes until it is taken. Cannot seek, so headers are written as for a stream."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes, /) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        taken = b"".join(self._parts)
        self._parts.clear()
        return taken


class CompressedEncoder:
    """Takes samples at the target's rate. With a ``sink`` that can seek, the header tells the true length."""

    def __init__(self, target: AudioFormat, sink: _Sink | None = None) -> None:
        codec = _servable_codec(target)
        self._target = target
        self._pieces = _Pieces()
        self._position = 0
        try:
            self._container = av.open(sink or self._pieces, "w", format=codec.container, options=dict(codec.options))
            stream = self._container.add_stream(codec.name, rate=target.sample_rate)
        except (av.error.FFmpegError, ValueError) as error:
            raise UnsupportedFormat(f"{target.encoding} cannot be encoded by this server") from error
        assert isinstance(stream, av.AudioStream)
        self._stream = stream
        self._layout = _layout(target.channels)
        self._stream.codec_context.layout = self._layout
        if codec.name != "flac":
            self._stream.codec_context.bit_rate = _bit_rate(target)

    def encode(self, samples: Samples) -> bytes:
        if len(samples):
            frame = self._frame(samples)
            frame.sample_rate = self._target.sample_rate
            frame.time_base = Fraction(1, self._target.sample_rate)
            frame.pts = self._position
            self._position += len(samples)
            self._container.mux(self._stream.encode(frame))
        return self._pieces.take()

    def flush(self) -> bytes:
        """The end of the file. Audio of no length has nothing but a header."""
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._pieces.take()

    def _frame(self, samples: Samples) -> av.AudioFrame:
        channels = self._target.channels
        if self._target.encoding is AudioEncoding.FLAC:
            # Lossless from here on: the same 16 bits that pcm16 would have.
            return av.AudioFrame.from_ndarray(
                np.repeat(pcm16_from_samples(samples), channels).reshape(1, -1), format="s16", layout=self._layout
            )
        return av.AudioFrame.from_ndarray(
            np.repeat(bounded(samples), channels).reshape(1, -1), format="flt", layout=self._layout
        )


def encode_compressed_file(samples: Samples, target: AudioFormat) -> bytes:
    file = io.BytesIO()
    encoder = CompressedEncoder(target, file)
    # A second at a time: libav's buffers are for frames, not for files.
    for start in range(0, len(samples), target.sample_rate):
        encoder.encode(samples[start : start + target.sample_rate])
    encoder.flush()
    return file.getvalue()


def _servable_codec(target: AudioFormat) -> _Codec:
    codec = _CODECS[target.encoding]
    if codec.sample_rates is not None and target.sample_rate not in codec.sample_rates:
        rates = ", ".join(map(str, sorted(codec.sample_rates)))
        raise UnsupportedFormat(
            f"{target.encoding} at {target.sample_rate} Hz cannot be encoded; possible are {rates}", param="sample_rate"
        )
    if target.channels > codec.max_channels:
        raise UnsupportedFormat(
            f"{target.encoding} with {target.channels} channels cannot be encoded; at most {codec.max_channels}",
            param="channels",
        )
    return codec


def _layout(channels: int) -> str:
    return {1: "mono", 2: "stereo", 3: "3.0", 4: "quad", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}[channels]


def _bit_rate(target: AudioFormat) -> int:
    """Bits per second at which speech loses nothing that could be heard; mp3's low rates allow no more than this."""
    if target.encoding is not AudioEncoding.MP3:
        return 64_000 * target.channels
    if target.sample_rate >= 32_000:
        return 128_000 * target.channels
    return 96_000 if target.sample_rate >= 16_000 else 64_000
