"""Whatever audio a client sends, made into samples at the rate that an engine wants."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

import numpy as np

from omni_ws.audio.pcm import SampleLayout, mixed_down, samples_from_bytes
from omni_ws.audio.resample import NO_SAMPLES, StreamResampler
from omni_ws.audio.samples import Samples, SourceBlock
from omni_ws.audio.wav import WavHeaderReader
from omni_ws.core.audio_format import AudioEncoding, AudioFormat, checked_channels, checked_sample_rate
from omni_ws.errors import UnsupportedFormat

_RAW_LAYOUTS = {
    AudioEncoding.PCM16: SampleLayout.S16,
    AudioEncoding.F32: SampleLayout.F32,
    AudioEncoding.PCMU: SampleLayout.MU_LAW,
    AudioEncoding.PCMA: SampleLayout.A_LAW,
}
#: Speech takes more than 500 bytes a second in every codec here; only silence takes fewer, and the allowance lets ten
#: minutes of it through. What unfolds to more in one call is taken for a bomb.
_BURST_ALLOWANCE_SECONDS = 600
_MIN_BYTES_PER_SECOND = 500


class _SourceDecoder(Protocol):
    """Bytes to mono samples at the source's own rate."""

    def decode(self, data: bytes) -> Iterator[SourceBlock]: ...
    def flush(self) -> Iterator[SourceBlock]: ...
    def close(self) -> None: ...


class AudioDecoder:
    """One stream of ``source`` audio, decoded, mixed down and resampled to ``sample_rate`` as it comes.

    Where the bytes are cut has no influence on the samples; part of a sample at the end of the input is dropped.
    Compressed audio holds a thread: ``close`` it (or use it as a context manager; dropping it works too).
    Every call raises UnsupportedFormat for input that is not what ``source`` says.
    """

    def __init__(self, source: AudioFormat, *, sample_rate: int) -> None:
        checked_sample_rate(source.sample_rate)
        checked_channels(source.channels)
        self.source = source
        self.sample_rate = checked_sample_rate(sample_rate)
        #: Input decoded so far, in milliseconds of its own time line.
        self.consumed_ms = 0.0
        self._decoder = _source_decoder(source)
        self._resampler: StreamResampler | None = None
        self._failure: UnsupportedFormat | None = None
        self._ended = False

    def decode(self, data: bytes) -> Samples:
        """Whole; refuses bytes that unfold to more than speech can. ``pieces`` is for inputs of any size."""
        limit = int(self.sample_rate * (_BURST_ALLOWANCE_SECONDS + len(data) / _MIN_BYTES_PER_SECOND))
        return self._joined(self.pieces(data), limit)

    def pieces(self, data: bytes) -> Iterator[Samples]:
        """The same in bounded memory, however much the bytes unfold to. To be exhausted before the next call."""
        if self._failure is not None:
            raise self._failure
        if self._ended:
            raise ValueError("the decoder's input has ended")
        for block in self._guarded(self._decoder.decode(data)):
            yield from self._resampled(block)

    def flush(self) -> Samples:
        """What was held back; the input ends here. A second call gives nothing."""
        return self._joined(self.last_pieces(), int(self.sample_rate * _BURST_ALLOWANCE_SECONDS))

    def close(self) -> None:
        """Idempotent."""
        self._ended = True
        self._decoder.close()

    def __enter__(self) -> AudioDecoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def last_pieces(self) -> Iterator[Samples]:
        """``flush``, in bounded memory."""
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
            yield self._tidied(self._resampler.flush())

    def _guarded(self, blocks: Iterator[SourceBlock]) -> Iterator[SourceBlock]:
        """A stream that failed stays failed, and holds no thread."""
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
            # Chained files may change their rate.
            yield self._tidied(self._resampler.flush())
            self._resampler = None
        if self._resampler is None:
            self._resampler = StreamResampler(source_rate, self.sample_rate)
        yield self._tidied(self._resampler.process(samples))

    def _tidied(self, samples: Samples) -> Samples:
        """Resampling overshoots at full scale."""
        if self._resampler is None or self._resampler.source_rate == self.sample_rate:
            return samples
        return np.clip(samples, -1.0, 1.0, out=samples) if len(samples) else NO_SAMPLES

    def _joined(self, pieces: Iterator[Samples], limit: int) -> Samples:
        kept: list[Samples] = []
        count = 0
        for piece in pieces:
            if len(piece):
                kept.append(piece)
                count += len(piece)
            if count > limit:
                self._failure = UnsupportedFormat(f"{self.source.encoding}: unfolds to an unreasonable length of audio")
                self._decoder.close()
                raise self._failure
        if len(kept) == 1:
            return kept[0]
        return np.concatenate(kept) if kept else NO_SAMPLES


class _RawDecoder:
    """Bare samples; carries the part of a channel frame that a cut left over."""

    def __init__(self, layout: SampleLayout, sample_rate: int, channels: int) -> None:
        self._layout = layout
        self._sample_rate = sample_rate
        self._channels = channels
        self._frame_bytes = layout.sample_bytes * channels
        self._carry = b""

    def decode(self, data: bytes) -> Iterator[SourceBlock]:
        if self._carry:
            data = self._carry + data
        whole = len(data) - len(data) % self._frame_bytes
        self._carry = bytes(data[whole:])
        if whole:
            interleaved = samples_from_bytes(data[:whole], self._layout)
            yield SourceBlock(mixed_down(interleaved, self._channels), self._sample_rate)

    def flush(self) -> Iterator[SourceBlock]:
        self._carry = b""
        return iter(())

    def close(self) -> None:
        self._carry = b""


class _WavDecoder:
    """A header, then bare samples; what follows their announced end is ignored."""

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
            raise UnsupportedFormat("wav: the input ends inside the header")
        return iter(())

    def close(self) -> None:
        if self._raw is not None:
            self._raw.close()


def _source_decoder(source: AudioFormat) -> _SourceDecoder:
    if source.encoding in _RAW_LAYOUTS:
        return _RawDecoder(_RAW_LAYOUTS[source.encoding], source.sample_rate, source.channels)
    if source.encoding is AudioEncoding.WAV:
        return _WavDecoder()
    # libav is loaded by those who need it.
    from omni_ws.audio.compressed_decoder import CompressedDecoder

    return CompressedDecoder(source.encoding)
