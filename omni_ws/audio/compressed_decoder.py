"""CompressedDecoder: decodes WebM, Ogg, Opus, MP3, FLAC and AAC as the bytes arrive; Mp4Decoder: MP4 files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import av
import av.error
import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.container import (
    BURST_SAMPLES,
    LENIENT_METADATA,
    STREAMING_OPTIONS,
    ByteSource,
    ContainerReader,
    PacketTally,
)
from omni_ws.audio.pcm import bounded, mixed_down
from omni_ws.audio.samples import SourceBlock
from omni_ws.core.chunks import AudioEncoding, checked_channels, checked_sample_rate
from omni_ws.core.quota import UNLIMITED, Room
from omni_ws.errors import InvalidValue, UnsupportedFormat
from omni_ws.media.seekable import BufferedFile, Mp4Boxes, Mp4Order

#: libav's names of the containers, by signature. The signature wins over the client's name for the format.
_MAGIC = {b"OggS": "ogg", b"\x1a\x45\xdf\xa3": "matroska", b"fLaC": "flac"}
_MAGIC_BYTES = 4
_MP4: Final = "mov"
#: The largest MP4 file with its index at the end: an hour of speech. Less is held where nobody accounts for it.
MAX_HELD_BYTES: Final = 64 << 20
MAX_UNACCOUNTED_BYTES: Final = 4 << 20
#: The demuxer's read size: 40 ms of Opus at 24 kbit/s, which bounds the latency that reading in blocks adds.
_BLOCK_BYTES = 128


class CompressedDecoder:
    """Decodes one stream of compressed audio in its container, in a thread of its own.

    The thread starts with the fourth byte, which completes the signature, and ends at the end of the input, with an
    error, or with ``close``; dropping the object closes it too. Every call raises UnsupportedFormat for input that
    cannot be decoded.
    """

    def __init__(self, encoding: AudioEncoding) -> None:
        self._encoding = encoding
        self._head = b""
        self._reader: ContainerReader[SourceBlock] | None = None

    def decode(self, data: bytes) -> Iterator[SourceBlock]:
        """Yield the audio that ``data`` completes. The iterator has to be exhausted before the next call."""
        if self._reader is None:
            self._head += data
            if len(self._head) < _MAGIC_BYTES:
                return
            self._reader = self._open(_container_name(self._head, self._encoding))
            data, self._head = self._head, b""
        self._reader.push(data)
        yield from self._reader.pieces()

    def flush(self) -> Iterator[SourceBlock]:
        """End the input and yield the rest of the audio."""
        if self._reader is None:
            if self._head:
                raise UnsupportedFormat(f"{self._encoding}: the input ended before any audio")
            return
        self._reader.end_input()
        yield from self._reader.pieces()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._reader is not None:
            self._reader.close()

    def _open(self, container: str) -> ContainerReader[SourceBlock]:
        return ContainerReader(
            partial(_blocks, container, self._encoding),
            cost=lambda block: len(block.samples),
            burst=BURST_SAMPLES,
            block_bytes=_BLOCK_BYTES,
            name=f"decode-{self._encoding}",
        )


class Mp4Decoder:
    """Decodes one MP4 or QuickTime file as it arrives, or at its end if its index comes last."""

    def __init__(self, encoding: AudioEncoding, room: Room | None) -> None:
        self._encoding = encoding
        self._boxes = Mp4Boxes()
        self._order = Mp4Order.UNKNOWN
        self._held = BufferedFile(MAX_UNACCOUNTED_BYTES if room is None else MAX_HELD_BYTES, room or UNLIMITED)
        self._stream: CompressedDecoder | None = None

    def decode(self, data: bytes) -> Iterator[SourceBlock]:
        """Yield the audio that ``data`` completes. The iterator has to be exhausted before the next call."""
        if self._stream is None:
            self._held.append(data)
            if self._order is Mp4Order.UNKNOWN:
                self._order = self._boxes.order(self._held.view())
            if self._order is not Mp4Order.STREAM:
                return
            self._stream, data = CompressedDecoder(self._encoding), self._held.take()
        yield from self._stream.decode(data)

    def flush(self) -> Iterator[SourceBlock]:
        """End the input and yield the rest of the audio."""
        if self._stream is not None:
            yield from self._stream.flush()
            return
        try:
            yield from _blocks(_MP4, self._encoding, self._held.seekable(), options={})
        finally:
            self._held.close()

    def close(self) -> None:
        """Release what it holds. Idempotent."""
        self._held.close()
        if self._stream is not None:
            self._stream.close()


def _container_name(head: bytes, encoding: AudioEncoding) -> str:
    """Return libav's name of the container, by its signature or, for formats without one, by ``encoding``."""
    magic = head[:_MAGIC_BYTES]
    if magic in _MAGIC:
        return _MAGIC[magic]
    if encoding in (AudioEncoding.MP4, AudioEncoding.M4A, AudioEncoding.MOV):
        return _MP4
    if encoding is AudioEncoding.AAC:
        return "aac"
    # ID3 tags may precede both FLAC and MP3. MP3 has no signature: a stream may begin at any of its frames.
    if encoding is AudioEncoding.FLAC and magic.startswith(b"ID3"):
        return "flac"
    if encoding is AudioEncoding.MP3 or magic.startswith(b"ID3"):
        return "mp3"
    raise UnsupportedFormat(f"the input is not a valid {encoding} file")


def _blocks(
    container_name: str, encoding: AudioEncoding, source: ByteSource, options: Mapping[str, str] = STREAMING_OPTIONS
) -> Iterator[SourceBlock]:
    """Demux and decode ``source``, in the decoder thread where it is still arriving."""
    tally = PacketTally(str(encoding))
    try:
        with av.open(
            source, "r", format=container_name, options=dict(options), metadata_errors=LENIENT_METADATA
        ) as container:
            if not container.streams.audio:
                raise UnsupportedFormat(f"{encoding}: the file has no audio stream")
            stream = container.streams.audio[0]
            context: Any = stream.codec_context
            if context is None:
                raise UnsupportedFormat(f"{encoding}: the codec of the file is not supported")
            for packet in container.demux(stream):
                try:
                    frames = context.decode(packet)
                except av.error.InvalidDataError as error:
                    tally.count_broken(error)
                    continue
                for frame in frames:
                    tally.count_good()
                    yield _block(frame, encoding)
    except (av.error.FFmpegError, ValueError, LookupError) as error:
        # PyAV raises ValueError and LookupError for some damaged headers.
        raise UnsupportedFormat(f"{encoding}: decoding failed; the data may be corrupt") from error
    tally.check_at_end()


def _block(frame: av.AudioFrame, encoding: AudioEncoding) -> SourceBlock:
    """Convert a decoded frame to mono float32 at its own sample rate."""
    channels = frame.layout.nb_channels
    try:
        checked_sample_rate(frame.sample_rate)
        checked_channels(channels)
    except InvalidValue as error:
        raise UnsupportedFormat(f"{encoding}: {error.message}") from error
    values: NDArray[Any] = frame.to_ndarray()
    if values.dtype.kind == "u":
        samples = (values.astype(np.float32) - np.float32(128)) * np.float32(1 / 128)
    elif values.dtype.kind == "i":
        samples = values.astype(np.float32) * np.float32(2.0 ** (1 - 8 * values.dtype.itemsize))
    else:
        samples = bounded(values)
    if frame.format.is_planar:
        samples = samples.T
    return SourceBlock(mixed_down(np.ascontiguousarray(samples).reshape(-1), channels), frame.sample_rate)
