"""AudioDecoder and AudioEncoder: convert audio of any format to samples at an engine's rate, and back."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from omni_ws.audio.container import WavHeaderReader, wav_header
from omni_ws.audio.files import FileCutter, FileEvent, FileMark
from omni_ws.audio.pcm import (
    NO_SAMPLES,
    Pcm16,
    SampleLayout,
    Samples,
    SourceBlock,
    StreamResampler,
    WholeFrames,
    as_pcm16,
    as_samples,
    bounded,
    encode_a_law,
    encode_mu_law,
    mixed_down,
    pcm16_from_samples,
    resampled,
    samples_from_bytes,
)
from omni_ws.core.chunks import AudioEncoding, AudioFormat, checked_channels, checked_sample_rate
from omni_ws.core.file_heads import ENCODINGS, FileKind
from omni_ws.core.quota import Room
from omni_ws.errors import UnsupportedFormat

if TYPE_CHECKING:
    from omni_ws.audio.compressed import CompressedEncoder

# Decoding

_RAW_LAYOUTS = {
    AudioEncoding.PCM16: SampleLayout.S16,
    AudioEncoding.F32: SampleLayout.F32,
    AudioEncoding.PCMU: SampleLayout.MU_LAW,
    AudioEncoding.PCMA: SampleLayout.A_LAW,
}
#: The kind of file for each format that is a file format.
_KINDS = {
    AudioEncoding.WAV: FileKind.WAV,
    AudioEncoding.OPUS: FileKind.OGG,
    AudioEncoding.OGG: FileKind.OGG,
    AudioEncoding.WEBM: FileKind.MATROSKA,
    AudioEncoding.MP3: FileKind.MP3,
    AudioEncoding.FLAC: FileKind.FLAC,
    AudioEncoding.AAC: FileKind.ADTS,
    AudioEncoding.MOV: FileKind.ISO,
    AudioEncoding.M4A: FileKind.ISO,
    AudioEncoding.MP4: FileKind.ISO,
}
#: The limit against decompression bombs. Speech takes more than 500 bytes a second in every codec; silence takes fewer,
#: so each call may return ten more minutes.
_BURST_ALLOWANCE_SECONDS = 600
_MIN_BYTES_PER_SECOND = 500


class _SourceDecoder(Protocol):
    """Decodes bytes to mono samples at the source's own rate."""

    def decode(self, data: bytes) -> Iterator[SourceBlock]: ...
    def flush(self) -> Iterator[SourceBlock]: ...
    def close(self) -> None: ...


class AudioDecoder:
    """Decodes one audio stream incrementally, mixes it down to mono and resamples it to ``sample_rate`` (Hz).

    If ``source`` is a file format, the stream may hold several files one after the other, each of any file format,
    which its first bytes tell. Their audio is joined into one stream. ``take_stray`` reports bytes that belong to none
    of the files.

    The samples do not depend on how the bytes are cut into calls. An incomplete sample at the end of the input is
    dropped. For input that is not in the format of ``source``, the call and every later call raise UnsupportedFormat.

    An MP4 file whose index comes last is buffered until its end, and charged to ``room``; without a room it has to be
    small. Other compressed audio occupies a thread until ``close``; the end of a ``with`` block and the garbage
    collector call ``close``, too.
    """

    def __init__(self, source: AudioFormat, *, sample_rate: int, room: Room | None = None) -> None:
        checked_sample_rate(source.sample_rate)
        checked_channels(source.channels)
        self.source = source
        self.sample_rate = checked_sample_rate(sample_rate)
        self._decoder: _SourceDecoder
        #: The same as ``_decoder`` if the source is raw audio at ``sample_rate``, which is only converted to float32.
        self._raw: _RawDecoder | None = None
        #: The same as ``_decoder`` if the source is a file format.
        self._files: _FileStream | None = None
        if source.is_raw:
            raw = _RawDecoder(_RAW_LAYOUTS[source.encoding], source.sample_rate, source.channels)
            self._decoder, self._raw = raw, raw if source.sample_rate == sample_rate else None
        else:
            self._decoder = self._files = _FileStream(source.encoding, room)
        self._resampler: StreamResampler | None = None
        self._failure: UnsupportedFormat | None = None
        self._ended = False

    def decode(self, data: bytes, *, begins_chunk: bool = True) -> Samples:
        """Return the samples that ``data`` completes. ``begins_chunk``: ``data`` is the start of a client's chunk.

        Raises UnsupportedFormat if the audio is far longer than speech of ``len(data)`` bytes can be; ``pieces`` has no
        such limit.
        """
        if self._raw is not None:
            return self._decode_raw(data, self._raw)
        limit = int(self.sample_rate * (_BURST_ALLOWANCE_SECONDS + len(data) / _MIN_BYTES_PER_SECOND))
        return self._joined(self.pieces(data, begins_chunk=begins_chunk), limit)

    def pieces(self, data: bytes, *, begins_chunk: bool = True) -> Iterator[Samples]:
        """Yield the samples that ``decode`` would return, in bounded memory. To be exhausted before the next call."""
        if self._failure is not None:
            raise self._failure
        if self._raw is not None:
            if len(samples := self._decode_raw(data, self._raw)):
                yield samples
            return
        self._check_open()
        files = self._files
        blocks = self._decoder.decode(data) if files is None else files.decode(data, begins_chunk=begins_chunk)
        for block in self._guarded(blocks):
            yield from self._resampled(block)

    def take_stray(self) -> UnsupportedFormat | None:
        """Return an error if bytes outside of any file, but for padding and tags, were dropped since the last call."""
        if self._files is None or not self._files.take_stray():
            return None
        return UnsupportedFormat(
            f"{self.source.encoding}: bytes behind the end of a file are no audio, and were dropped", param="payload"
        )

    @property
    def unpacks(self) -> bool:
        """Whether compressed audio is being decoded now."""
        return self._files is not None and self._files.unpacks

    def _check_open(self) -> None:
        if self._ended:
            raise ValueError("the decoder is already flushed")

    def _decode_raw(self, data: bytes, decoder: _RawDecoder) -> Samples:
        self._check_open()
        return decoder.samples(data)

    def flush(self) -> Samples:
        """End the input; return the samples that the decoder still held. A second call returns none."""
        return self._joined(self.last_pieces(), int(self.sample_rate * _BURST_ALLOWANCE_SECONDS))

    def close(self) -> None:
        """Release the decoder's thread, and drop what it held; it takes no more input. Idempotent."""
        self._ended = True
        self._decoder.close()

    def __enter__(self) -> AudioDecoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def last_pieces(self) -> Iterator[Samples]:
        """Yield the samples that ``flush`` would return, in bounded memory."""
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
        """Yield ``blocks``; if the iterator raises, record the failure and release the thread."""
        try:
            yield from blocks
        except UnsupportedFormat as failure:
            self._failure = failure
            self._decoder.close()
            raise

    def _resampled(self, block: SourceBlock) -> Iterator[Samples]:
        samples, source_rate = block
        if self._resampler is not None and self._resampler.source_rate != source_rate:
            # The parts of a chained Ogg file, and successive files, may differ in sample rate.
            yield self._clipped(self._resampler.flush())
            self._resampler = None
        if self._resampler is None:
            self._resampler = StreamResampler(source_rate, self.sample_rate)
        yield self._clipped(self._resampler.process(samples))

    def _clipped(self, samples: Samples) -> Samples:
        """Clip resampled audio to ±1.0: resampling overshoots near full scale."""
        if self._resampler is None or self._resampler.source_rate == self.sample_rate:
            return samples
        return np.clip(samples, -1.0, 1.0, out=samples) if len(samples) else NO_SAMPLES

    def _joined(self, pieces: Iterator[Samples], limit: int) -> Samples:
        """Concatenate ``pieces``. Raises UnsupportedFormat if they exceed ``limit`` samples."""
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


class _FileStream:
    """Decodes a stream of successive files."""

    def __init__(self, encoding: AudioEncoding, room: Room | None) -> None:
        self._encoding = encoding
        self._room = room
        self._cutter = FileCutter(_KINDS[encoding])
        self._file: _SourceDecoder | None = None
        self._stray = False

    @property
    def unpacks(self) -> bool:
        return self._file is not None and not isinstance(self._file, _WavDecoder)

    def take_stray(self) -> bool:
        """Return whether bytes were dropped since the last call."""
        stray, self._stray = self._stray, False
        return stray

    def decode(self, data: bytes, *, begins_chunk: bool = True) -> Iterator[SourceBlock]:
        return self._decoded(self._cutter.feed(data, begins_chunk=begins_chunk))

    def flush(self) -> Iterator[SourceBlock]:
        return self._decoded(self._cutter.finish())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _decoded(self, events: Iterator[FileEvent]) -> Iterator[SourceBlock]:
        for event in events:
            match event:
                case FileKind() | FileMark.BEGINS:
                    kind = None if event is FileMark.BEGINS else event
                    self._file = _file_decoder(self._encoding, kind, self._room)
                case bytes():
                    assert self._file is not None
                    yield from self._file.decode(event)
                case FileMark.ENDS:
                    ended, self._file = self._file, None
                    assert ended is not None
                    try:
                        yield from ended.flush()
                    finally:
                        ended.close()
                case FileMark.STRAY:
                    self._stray = True


def _file_decoder(named: AudioEncoding, kind: FileKind | None, room: Room | None) -> _SourceDecoder:
    """Return the decoder for a file of this kind; if ``kind`` is None, of the format ``named`` by the client."""
    encoding = named if kind is None or _KINDS[named] is kind else ENCODINGS[kind]
    if encoding is AudioEncoding.WAV:
        return _WavDecoder()
    # Imported on use: libav takes long to load.
    from omni_ws.audio.compressed import CompressedDecoder

    return CompressedDecoder(encoding, room)


class _WavDecoder:
    """Decodes one WAV file: its header, then raw samples. Bytes after the samples are ignored."""

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
            data = self._reader.take_rest()
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


# Encoding


class AudioEncoder:
    """Resamples one stream of mono samples from ``source_rate`` (Hz) and encodes it as ``target``.

    All channels of the target get the same samples. The header of a WAV stream gives the length as unknown; ``ogg``
    contains Opus, as ``opus`` does. Raises UnsupportedFormat for an unsupported target.
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
        #: Whether the samples only have to be converted to 16 bits.
        self._converts_only = (
            source_rate == target.sample_rate and target.encoding is AudioEncoding.PCM16 and target.channels == 1
        )

    def encode(self, samples: Samples | Pcm16) -> bytes:
        """Encode ``samples``; return the bytes that are complete, which may be none."""
        if self._ended:
            raise ValueError("the encoder is already flushed")
        if self._converts_only:
            return as_pcm16(samples).tobytes()
        return self._encoded(self._resampler.process(as_samples(samples)))

    def flush(self) -> bytes:
        """End the stream; return its last bytes. A second call returns none."""
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
    """Return ``samples``, at ``source_rate`` (Hz), as a whole file or, for a raw ``target``, as bare samples.

    The header has the true length if the format has a field for it. Raises UnsupportedFormat for an unsupported target.
    """
    checked_sample_rate(target.sample_rate)
    checked_channels(target.channels)
    samples = resampled(samples, checked_sample_rate(source_rate), target.sample_rate, "HQ")
    if target.encoding is AudioEncoding.WAV or target.is_raw:
        payload = _raw_bytes(samples, target)
        if target.is_raw:
            return payload
        header = wav_header(sample_rate=target.sample_rate, channels=target.channels, data_bytes=len(payload))
        return header + payload
    from omni_ws.audio.compressed import encode_compressed_file

    return encode_compressed_file(samples, target)


def _compressed_encoder(target: AudioFormat) -> CompressedEncoder | None:
    if target.is_raw or target.encoding is AudioEncoding.WAV:
        return None
    # Imported on use: libav takes long to load.
    from omni_ws.audio.compressed import CompressedEncoder

    return CompressedEncoder(target)


def _raw_bytes(samples: Samples, target: AudioFormat) -> bytes:
    """Encode samples in a raw encoding; for WAV, as 16-bit samples."""
    if target.channels > 1:
        samples = np.repeat(samples, target.channels)
    match target.encoding:
        case AudioEncoding.F32:
            return bounded(samples).astype("<f4", copy=False).tobytes()
        case AudioEncoding.PCMU:
            return encode_mu_law(pcm16_from_samples(samples))
        case AudioEncoding.PCMA:
            return encode_a_law(pcm16_from_samples(samples))
        case _:
            return pcm16_from_samples(samples).tobytes()
