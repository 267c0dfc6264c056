"""CompressedEncoder: encodes MP3, FLAC, AAC, and Opus in Ogg or WebM."""

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
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.errors import UnsupportedFormat

_MP3_RATES = frozenset({8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000})
_AAC_RATES = _MP3_RATES | {64_000, 88_200, 96_000}
_OPUS_RATES = frozenset({8_000, 12_000, 16_000, 24_000, 48_000})


@dataclass(frozen=True, slots=True)
class _Codec:
    """A codec and its container by libav's names, with the rates and channels that it supports.

    ``sample_rates`` is None where any rate is supported.
    """

    container: str
    name: str
    sample_rates: frozenset[int] | None
    max_channels: int
    #: Options of the container. Pages and clusters of 200 ms bound the delay that muxing adds to a stream.
    options: Mapping[str, str] = field(default_factory=dict)


_OPUS_IN_OGG = _Codec("ogg", "libopus", _OPUS_RATES, 2, {"page_duration": "200000"})
_CODECS = {
    AudioEncoding.MP3: _Codec("mp3", "libmp3lame", _MP3_RATES, 2),
    AudioEncoding.FLAC: _Codec("flac", "flac", None, 8),
    AudioEncoding.AAC: _Codec("adts", "aac", _AAC_RATES, 2),
    AudioEncoding.OPUS: _OPUS_IN_OGG,
    AudioEncoding.OGG: _OPUS_IN_OGG,
    AudioEncoding.WEBM: _Codec("webm", "libopus", _OPUS_RATES, 2, {"cluster_time_limit": "200"}),
}


class _Sink(Protocol):
    def write(self, data: bytes, /) -> int: ...


class _Pieces:
    """Buffers what the muxer writes until it is taken.

    It cannot seek, so the muxer writes headers of unknown length, as for a stream.
    """

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
    """Encodes one stream of samples at the target's rate and muxes it into its container.

    Without ``sink``, ``encode`` and ``flush`` return the bytes; with it they return nothing, and a sink that can seek
    gets a header with the true length. Raises UnsupportedFormat when the target is not supported.
    """

    def __init__(self, target: AudioFormat, sink: _Sink | None = None) -> None:
        codec = _servable_codec(target)
        self._target = target
        self._pieces = _Pieces()
        self._position = 0
        try:
            self._container = av.open(sink or self._pieces, "w", format=codec.container, options=dict(codec.options))
            stream = self._container.add_stream(codec.name, rate=target.sample_rate)
        except (av.error.FFmpegError, ValueError) as error:
            raise UnsupportedFormat(f"this server has no encoder for {target.encoding}") from error
        assert isinstance(stream, av.AudioStream)
        self._stream = stream
        self._layout = _layout(target.channels)
        self._stream.codec_context.layout = self._layout
        if codec.name != "flac":
            self._stream.codec_context.bit_rate = _bit_rate(target)

    def encode(self, samples: Samples) -> bytes:
        """Encode ``samples``; returns the bytes that are complete, which may be none."""
        if len(samples):
            frame = self._frame(samples)
            frame.sample_rate = self._target.sample_rate
            frame.time_base = Fraction(1, self._target.sample_rate)
            frame.pts = self._position
            self._position += len(samples)
            self._container.mux(self._stream.encode(frame))
        return self._pieces.take()

    def flush(self) -> bytes:
        """Return the rest of the file. A file without audio consists of a header."""
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._pieces.take()

    def _frame(self, samples: Samples) -> av.AudioFrame:
        """Return the samples as libav's frame, the one channel repeated for each of the target's."""
        channels = self._target.channels
        if self._target.encoding is AudioEncoding.FLAC:
            # FLAC is lossless, so the samples are quantised here, in the same way as for pcm16.
            return av.AudioFrame.from_ndarray(
                np.repeat(pcm16_from_samples(samples), channels).reshape(1, -1), format="s16", layout=self._layout
            )
        return av.AudioFrame.from_ndarray(
            np.repeat(bounded(samples), channels).reshape(1, -1), format="flt", layout=self._layout
        )


def encode_compressed_file(samples: Samples, target: AudioFormat) -> bytes:
    """Return a whole file at the target's rate, with its true length in the header."""
    file = io.BytesIO()
    encoder = CompressedEncoder(target, file)
    # In frames of a second, because libav copies each frame into its buffers as a whole.
    for start in range(0, len(samples), target.sample_rate):
        encoder.encode(samples[start : start + target.sample_rate])
    encoder.flush()
    return file.getvalue()


def _servable_codec(target: AudioFormat) -> _Codec:
    """Return the codec for ``target``. Raises UnsupportedFormat, naming the parameter, when it cannot encode that."""
    codec = _CODECS.get(target.encoding)
    if codec is None:
        raise UnsupportedFormat(f"{target.encoding} is for input only", param="format")
    if codec.sample_rates is not None and target.sample_rate not in codec.sample_rates:
        rates = ", ".join(map(str, sorted(codec.sample_rates)))
        raise UnsupportedFormat(
            f"{target.encoding} does not support {target.sample_rate} Hz; supported: {rates}", param="sample_rate"
        )
    if target.channels > codec.max_channels:
        raise UnsupportedFormat(
            f"{target.encoding} supports at most {codec.max_channels} channels, got {target.channels}",
            param="channels",
        )
    return codec


def _layout(channels: int) -> str:
    """Return libav's name of the usual layout for this many channels."""
    return {1: "mono", 2: "stereo", 3: "3.0", 4: "quad", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}[channels]


def _bit_rate(target: AudioFormat) -> int:
    """Return a bit rate, in bit/s, at which speech is transparent and which the format allows at this sample rate."""
    if target.encoding is AudioEncoding.AAC:
        return min(64_000, 4 * target.sample_rate) * target.channels
    if target.encoding is not AudioEncoding.MP3:
        return 64_000 * target.channels
    if target.sample_rate >= 32_000:
        return 128_000 * target.channels
    return 96_000 if target.sample_rate >= 16_000 else 64_000
