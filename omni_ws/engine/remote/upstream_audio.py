"""Audio of an upstream, in whatever pieces it comes, as samples at one rate."""

from __future__ import annotations

import base64
import binascii
from typing import Final

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.container import WavHeaderReader
from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import MAX_SAMPLE_RATE, MIN_SAMPLE_RATE, AudioEncoding, AudioFormat
from omni_ws.engine.base import AudioOutput
from omni_ws.errors import EngineFailed, OmniError

#: A piece may be a whole answer; it goes on in pieces of this length.
_OUTPUT_MS: Final = 500
_WAV: Final = b"RIFF"
#: What begins a compressed file, and would be noise if it were taken for samples.
_COMPRESSED: Final = (b"ID3", b"fLaC", b"OggS", b"\x1aE\xdf\xa3")


class UpstreamAudio:
    """Takes bare 16-bit samples, one wav stream, and pieces that each are a wav file of their own.

    ``sample_rate`` is that of bare samples. The first audio settles the rate of everything that comes out.
    """

    def __init__(self, *, sample_rate: int) -> None:
        self.output_ms = 0.0
        self._bare_rate = sample_rate
        self._rate: int | None = None
        self._base64 = ""
        self._decoder: AudioDecoder | None = None
        #: The beginning of a wav file whose header is not whole yet.
        self._header: WavHeaderReader | None = None
        self._head = bytearray()

    def feed_base64(self, text: str, *, sample_rate: int | None = None) -> list[AudioOutput]:
        """A piece of base64, padded or not, wherever it was cut. Raises EngineFailed for what is none."""
        text = self._base64 + text
        whole = len(text) - len(text) % 4
        self._base64 = text[whole:]
        return self.feed(_decoded_base64(text[:whole]), sample_rate=sample_rate)

    def feed(self, data: bytes, *, sample_rate: int | None = None) -> list[AudioOutput]:
        """``sample_rate``: of these samples, where the upstream says so. Raises EngineFailed for what is no audio."""
        if not data:
            return []
        try:
            return self._outputs(self._decoded(data, sample_rate))
        except OmniError as error:
            raise EngineFailed(f"the upstream sent audio that cannot be read: {error.message}") from error

    def flush(self) -> list[AudioOutput]:
        """What was held back, of base64 without padding and by the resampler; the end of the audio."""
        held, self._base64 = self._base64.rstrip("="), ""
        if len(held) == 1:
            raise EngineFailed("the upstream's audio ends in the middle of a sample")
        outputs = self.feed(_decoded_base64(held + "=" * (-len(held) % 4)))
        if self._header is not None:
            raise EngineFailed("the upstream's audio ends in the middle of its header")
        return outputs + self._outputs(self._close())

    def _decoded(self, data: bytes, sample_rate: int | None) -> list[Samples]:
        if self._header is None and data.startswith(_WAV):
            pieces = self._close()
            self._header, self._head = WavHeaderReader(), bytearray()
            return pieces + self._feed_header(data)
        if self._header is not None:
            return self._feed_header(data)
        if self._decoder is None:
            if data.startswith(_COMPRESSED):
                raise EngineFailed("it is neither 16-bit samples nor wav")
            self._open(AudioFormat(AudioEncoding.PCM16, sample_rate or self._bare_rate))
        assert self._decoder is not None
        return [self._decoder.decode(data)]

    def _feed_header(self, data: bytes) -> list[Samples]:
        assert self._header is not None
        self._header.feed(data)
        self._head += data
        if self._header.header is None:
            return []
        self._open(AudioFormat(AudioEncoding.WAV, self._header.header.sample_rate))
        head, self._head, self._header = bytes(self._head), bytearray(), None
        assert self._decoder is not None
        return [self._decoder.decode(head)]

    def _open(self, source: AudioFormat) -> None:
        if not MIN_SAMPLE_RATE <= source.sample_rate <= MAX_SAMPLE_RATE:
            raise EngineFailed(f"its sample rate is {source.sample_rate} Hz")
        self._rate = self._rate or source.sample_rate
        self._decoder = AudioDecoder(source, sample_rate=self._rate)

    def _close(self) -> list[Samples]:
        decoder, self._decoder = self._decoder, None
        return [] if decoder is None else [decoder.flush()]

    def _outputs(self, pieces: list[Samples]) -> list[AudioOutput]:
        outputs: list[AudioOutput] = []
        for samples in pieces:
            if len(samples) == 0:
                continue
            assert self._rate is not None
            self.output_ms += len(samples) * 1000 / self._rate
            step = self._rate * _OUTPUT_MS // 1000
            outputs += [
                AudioOutput(samples[start : start + step], self._rate) for start in range(0, len(samples), step)
            ]
        return outputs


def _decoded_base64(text: str) -> bytes:
    """Raises EngineFailed for what is none."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise EngineFailed("the upstream sent audio that is not base64") from None
