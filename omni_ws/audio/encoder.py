"""AudioEncoder: encodes an engine's samples in the format that the client requested."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omni_ws.audio import g711
from omni_ws.audio.pcm import as_pcm16, as_samples, bounded, pcm16_from_samples
from omni_ws.audio.resample import StreamResampler
from omni_ws.audio.samples import Pcm16, Samples
from omni_ws.audio.wav import wav_header
from omni_ws.core.chunks import AudioEncoding, AudioFormat, checked_channels, checked_sample_rate

if TYPE_CHECKING:
    from omni_ws.audio.compressed_encoder import CompressedEncoder


class AudioEncoder:
    """Resamples one stream of mono samples from ``source_rate`` (Hz) and encodes it as ``target``.

    Further channels of the target are copies of the one. A WAV stream begins with a header of unknown length; ``ogg``
    contains Opus, as ``opus`` does. Raises UnsupportedFormat when the target is not supported.
    """

    def __init__(self, target: AudioFormat, *, source_rate: int) -> None:
        checked_sample_rate(target.sample_rate)
        checked_channels(target.channels)
        checked_sample_rate(source_rate)
        self.target = target
        self._compressed = _compressed_encoder(target)
        self._resampler = StreamResampler(source_rate, target.sample_rate, "LQ" if self._compressed is None else "HQ")
        self._header = b""
        if target.encoding is AudioEncoding.WAV:
            self._header = wav_header(sample_rate=target.sample_rate, channels=target.channels, data_bytes=None)
        self._ended = False
        #: Whether nothing but the conversion to 16 bits is to be done.
        self._converts_only = (
            source_rate == target.sample_rate and target.encoding is AudioEncoding.PCM16 and target.channels == 1
        )

    def encode(self, samples: Samples | Pcm16) -> bytes:
        """Encode ``samples``; returns the bytes that are complete, which may be none."""
        if self._ended:
            raise ValueError("the encoder is already flushed")
        if self._converts_only:
            return as_pcm16(samples).tobytes()
        return self._encoded(self._resampler.process(as_samples(samples)))

    def flush(self) -> bytes:
        """End the stream; returns its last bytes. A second call returns none."""
        if self._ended:
            return b""
        self._ended = True
        rest = self._encoded(self._resampler.flush())
        return rest if self._compressed is None else rest + self._compressed.flush()

    def _encoded(self, samples: Samples) -> bytes:
        if self._compressed is not None:
            return self._compressed.encode(samples)
        payload = _raw_bytes(samples, self.target)
        if self._header:
            payload, self._header = self._header + payload, b""
        return payload


def encode_file(samples: Samples, *, source_rate: int, target: AudioFormat) -> bytes:
    """Return a whole file, with its true length in the header where the format has a field for it."""
    checked_sample_rate(target.sample_rate)
    checked_channels(target.channels)
    resampler = StreamResampler(checked_sample_rate(source_rate), target.sample_rate, "HQ")
    resampled = np.concatenate([resampler.process(samples), resampler.flush()])
    if target.encoding is AudioEncoding.WAV or target.is_raw:
        payload = _raw_bytes(resampled, target)
        if target.is_raw:
            return payload
        header = wav_header(sample_rate=target.sample_rate, channels=target.channels, data_bytes=len(payload))
        return header + payload
    from omni_ws.audio.compressed_encoder import encode_compressed_file

    return encode_compressed_file(resampled, target)


def _compressed_encoder(target: AudioFormat) -> CompressedEncoder | None:
    if target.is_raw or target.encoding is AudioEncoding.WAV:
        return None
    # Imported on use: libav takes long to load.
    from omni_ws.audio.compressed_encoder import CompressedEncoder

    return CompressedEncoder(target)


def _raw_bytes(samples: Samples, target: AudioFormat) -> bytes:
    """Encode samples as a raw encoding; for WAV, as 16-bit samples."""
    if target.channels > 1:
        samples = np.repeat(samples, target.channels)
    match target.encoding:
        case AudioEncoding.F32:
            return bounded(samples).astype("<f4", copy=False).tobytes()
        case AudioEncoding.PCMU:
            return g711.encode_mu_law(pcm16_from_samples(samples))
        case AudioEncoding.PCMA:
            return g711.encode_a_law(pcm16_from_samples(samples))
        case _:
            return pcm16_from_samples(samples).tobytes()
