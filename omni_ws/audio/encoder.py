"""Samples made into the audio that a client asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omni_ws.audio import g711
from omni_ws.audio.pcm import bounded, pcm16_from_samples
from omni_ws.audio.resample import StreamResampler
from omni_ws.audio.samples import Samples
from omni_ws.audio.wav import wav_header
from omni_ws.core.audio_format import AudioEncoding, AudioFormat, checked_channels, checked_sample_rate

if TYPE_CHECKING:
    from omni_ws.audio.compressed_encoder import CompressedEncoder


class AudioEncoder:
    """One stream of samples at ``source_rate``, resampled, encoded, its one channel repeated for each of the target's.

    A wav stream begins with a header of unknown length. ``ogg`` holds Opus, as ``opus`` does. Raises
    UnsupportedFormat at once where the target cannot be served.
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

    def encode(self, samples: Samples) -> bytes:
        """What is ready; empty while the resampler or the codec holds everything back."""
        if self._ended:
            raise ValueError("the encoder's input has ended")
        return self._encoded(self._resampler.process(samples))

    def flush(self) -> bytes:
        """What was held back, and the end of the file. A second call gives nothing."""
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
    """A whole reply. Where the format has room for it, the header tells the true length."""
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
    # libav is loaded by those who need it.
    from omni_ws.audio.compressed_encoder import CompressedEncoder

    return CompressedEncoder(target)


def _raw_bytes(samples: Samples, target: AudioFormat) -> bytes:
    """Of the encodings that are nothing but samples; wav holds pcm16."""
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
