"""AudioDecoder: decodes a client's audio, in any supported format, to samples at an engine's rate."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

import numpy as np

from omni_ws.audio.pcm import SampleLayout, mixed_down, samples_from_bytes
from omni_ws.audio.resample import NO_SAMPLES, StreamResampler
from omni_ws.audio.samples import Samples, SourceBlock
from omni_ws.audio.wav import WavHeaderReader
from omni_ws.audio.whole_frames import WholeFrames
from omni_ws.core.audio_format import AudioEncoding, AudioFormat, checked_channels, checked_sample_rate
from omni_ws.errors import UnsupportedFormat

_RAW_LAYOUTS = {
    AudioEncoding.PCM16: SampleLayout.S16,
    AudioEncoding.F32: SampleLayout.F32,
    AudioEncoding.PCMU: SampleLayout.MU_LAW,
    AudioEncoding.PCMA: SampleLayout.A_LAW,
}
#: The limit against decompression bombs. Speech takes more than 500 bytes a second in every codec; silence takes
#: fewer, so each call may return ten minutes on top.
_BURST_ALLOWANCE_SECONDS = 600
_MIN_BYTES_PER_SECOND = 500


class _SourceDecoder(Protocol):
    """Decodes bytes to mono samples at the source's own rate."""

    def decode(self, data: bytes) -> Iterator[SourceBlock]: ...
    def flush(self) -> Iterator[SourceBlock]: ...
    def close(self) -> None: ...


class AudioDecoder:
    """Decodes one audio stream incrementally, mixes it down to mono and resamples it to ``sample_rate`` (Hz).

    The samples do not depend on how the bytes are cut. An incomplete sample at the end of the input is dropped. Every
    call raises UnsupportedFormat for input that is not in the format of ``source``, and so does every call after that.

    Compressed audio occupies a thread until ``close``, which the context manager and the garbage collector call too.
    """

    def __init__(self, source: AudioFormat, *, sample_rate: int) -> None:
        checked_sample_rate(source.sample_rate)
        checked_channels(source.channels)
        self.source = source
        self.sample_rate = checked_sample_rate(sample_rate)
        #: The duration of the input decoded so far, in milliseconds.
        self.consumed_ms = 0.0
        self._decoder = _source_decoder(source)
        #: The same for raw audio at ``sample_rate``, which has to be converted and nothing else.
        self._raw: _RawDecoder | None = None
        if isinstance(self._decoder, _RawDecoder) and source.sample_rate == sample_rate:
            self._raw = self._decoder
        self._resampler: StreamResampler | None = None
        self._failure: UnsupportedFormat | None = None
        self._ended = False

    def decode(self, data: bytes) -> Samples:
        """Return the samples that ``data`` completes.

        Raises UnsupportedFormat for more audio than as many bytes of speech can hold; ``pieces`` has no such limit.
        """
        if self._raw is not None:
            return self._decode_raw(data, self._raw)
        limit = int(self.sample_rate * (_BURST_ALLOWANCE_SECONDS + len(data) / _MIN_BYTES_PER_SECOND))
        return self._joined(self.pieces(data), limit)

    def pieces(self, data: bytes) -> Iterator[Samples]:
        """Yield what ``decode`` returns, in bounded memory. The iterator has to be exhausted before the next call."""
        if self._failure is not None:
            raise self._failure
        if self._raw is not None:
            if len(samples := self._decode_raw(data, self._raw)):
                yield samples
            return
        self._check_open()
        for block in self._guarded(self._decoder.decode(data)):
            yield from self._resampled(block)

    def _check_open(self) -> None:
        if self._ended:
            raise ValueError("the decoder is already flushed")

    def _decode_raw(self, data: bytes, decoder: _RawDecoder) -> Samples:
        self._check_open()
        samples = decoder.samples(data)
        self.consumed_ms += len(samples) * 1000 / self.sample_rate
        return samples

    def flush(self) -> Samples:
        """End the input; returns the samples that the decoder still held. A second call returns none."""
        return self._joined(self.last_pieces(), int(self.sample_rate * _BURST_ALLOWANCE_SECONDS))

    def close(self) -> None:
        """Release the decoder's thread. Idempotent."""
        self._ended = True
        self._decoder.close()

    def __enter__(self) -> AudioDecoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def last_pieces(self) -> Iterator[Samples]:
        """Yield what ``flush`` returns, in bounded memory."""
        if self._failure is not None:
            raise self._failure
        if self._ended:
            return
        self._ended = True
        try:
            for block in self._guarded(self._decoder.flush()):
                yield from self._resampled(block)
        finally:
            self._decoder.close()
        if self._resampler is not None:
            yield self._clipped(self._resampler.flush())

    def _guarded(self, blocks: Iterator[SourceBlock]) -> Iterator[SourceBlock]:
        """Record a failure, and release the thread, while passing ``blocks`` on."""
        try:
            yield from blocks
        except UnsupportedFormat as failure:
            self._failure = failure
            self._decoder.close()
            raise

    def _resampled(self, block: SourceBlock) -> Iterator[Samples]:
        samples, source_rate = block
        self.consumed_ms += len(samples) * 1000 / source_rate
        if self._resampler is not None and self._resampler.source_rate != source_rate:
            # The parts of a chained Ogg file may differ in sample rate.
            yield self._clipped(self._resampler.flush())
            self._resampler = None
        if self._resampler is None:
            self._resampler = StreamResampler(source_rate, self.sample_rate)
        yield self._clipped(self._resampler.process(samples))

    def _clipped(self, samples: Samples) -> Samples:
        """Clip resampled audio, since resampling overshoots near full scale."""
        if self._resampler is None or self._resampler.source_rate == self.sample_rate:
            return samples
        return np.clip(samples, -1.0, 1.0, out=samples) if len(samples) else NO_SAMPLES

    def _joined(self, pieces: Iterator[Samples], limit: int) -> Samples:
        """Concatenate ``pieces``. Raises UnsupportedFormat when they exceed ``limit`` samples."""
        kept: list[Samples] = []
        count = 0
        for piece in pieces:
            if len(piece):
                kept.append(piece)
                count += len(piece)
            if count > limit:
                self._failure = UnsupportedFormat(
                    f"{self.source.encoding}: the decoded audio is too long for its compressed size"
                )
                self._decoder.close()
                raise self._failure
        if len(kept) == 1:
            return kept[0]
        return np.concatenate(kept) if kept else NO_SAMPLES


class _RawDecoder:
    """Decodes raw samples; buffers an incomplete frame (one sample of each channel) for the next call."""

    def __init__(self, layout: SampleLayout, sample_rate: int, channels: int) -> None:
        self._layout = layout
        self._sample_rate = sample_rate
        self._channels = channels
        self._frames = WholeFrames(layout.sample_bytes * channels)

    def decode(self, data: bytes) -> Iterator[SourceBlock]:
        if len(samples := self.samples(data)):
            yield SourceBlock(samples, self._sample_rate)

    def samples(self, data: bytes) -> Samples:
        """Return the mono samples that ``data`` completes."""
        return mixed_down(samples_from_bytes(self._frames.take(data), self._layout), self._channels)

    def flush(self) -> Iterator[SourceBlock]:
        self._frames.drop()
        return iter(())

    def close(self) -> None:
        self._frames.drop()


class _WavDecoder:
    """Decodes WAV: reads the header, then raw samples. Input after their announced end is ignored."""

    def __init__(self) -> None:
        self._reader = WavHeaderReader()
        self._raw: _RawDecoder | None = None
        self._remaining: int | None = None
        self._received = 0

    def decode(self, data: bytes) -> Iterator[SourceBlock]:
        self._received += len(data)
        if self._raw is None:
            self._reader.feed(data)
            header = self._reader.header
            if header is None:
                return
            data, self._reader.rest = self._reader.rest, b""
            self._raw = _RawDecoder(header.layout, header.sample_rate, header.channels)
            self._remaining = header.data_bytes
        if self._remaining is not None:
            data = data[: self._remaining]
            self._remaining -= len(data)
        yield from self._raw.decode(data)

    def flush(self) -> Iterator[SourceBlock]:
        if self._raw is None and self._received:
            raise UnsupportedFormat("wav: the input ended inside the header")
        return iter(())

    def close(self) -> None:
        if self._raw is not None:
            self._raw.close()


def _source_decoder(source: AudioFormat) -> _SourceDecoder:
    if source.encoding in _RAW_LAYOUTS:
        return _RawDecoder(_RAW_LAYOUTS[source.encoding], source.sample_rate, source.channels)
    if source.encoding is AudioEncoding.WAV:
        return _WavDecoder()
    # Imported on use: libav takes long to load.
    from omni_ws.audio.compressed_decoder import CompressedDecoder

    return CompressedDecoder(source.encoding)
