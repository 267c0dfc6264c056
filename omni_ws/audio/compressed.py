"""Compressed audio by libav: files and streams in containers, and Opus packets without a container."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, Final, TypeVar

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
    HeldMp4,
)
from omni_ws.audio.pcm import Samples, SourceBlock, bounded, mixed_down, pcm16_from_samples
from omni_ws.core.chunks import AudioEncoding, AudioFormat, checked_channels, checked_sample_rate
from omni_ws.core.quota import UNLIMITED, Room
from omni_ws.errors import InvalidFrame, InvalidValue, UnsupportedFormat

Frame = TypeVar("Frame")

# Decoding

#: libav's names of containers by signature, which takes precedence over the client's name for the format.
_MAGIC = {b"OggS": "ogg", b"\x1a\x45\xdf\xa3": "matroska", b"fLaC": "flac"}
_MAGIC_BYTES = 4
_MP4: Final = "mov"
_ISO: Final = frozenset({AudioEncoding.MP4, AudioEncoding.M4A, AudioEncoding.MOV})
#: The largest MP4 file with its index at the end: an hour of speech; and the largest one if there is no budget.
MAX_HELD_BYTES: Final = 64 << 20
MAX_UNACCOUNTED_BYTES: Final = 4 << 20
#: The demuxer's read size: 40 ms of Opus at 24 kbit/s, which bounds the latency that reading in blocks adds.
_BLOCK_BYTES = 128


class CompressedDecoder:
    """Decodes one WebM, Ogg, MP3, FLAC, AAC, MP4 or QuickTime file as its bytes arrive, in a thread of its own.

    The thread starts with the fourth byte, which completes the signature (for MP4, with the index), and ends at the end
    of the input, after an error, or with ``close``, which the garbage collector calls, too. An MP4 file whose index
    comes last is buffered, charged to ``room``, and decoded at its end in the caller's thread.

    Every call raises UnsupportedFormat for input that cannot be decoded; for MP4, also the errors of ``room``.
    """

    def __init__(self, encoding: AudioEncoding, room: Room | None) -> None:
        self._encoding = encoding
        self._head = b""
        self._reader: ContainerReader[SourceBlock] | None = None
        if encoding in _ISO:
            held = HeldMp4(MAX_UNACCOUNTED_BYTES if room is None else MAX_HELD_BYTES, room or UNLIMITED)
            self._reader = self._open(_MP4, held)

    def decode(self, data: bytes) -> Iterator[SourceBlock]:
        """Yield the audio that ``data`` completes. To be exhausted before the next call."""
        if self._reader is None:
            self._head += data
            if len(self._head) < _MAGIC_BYTES:
                return
            self._reader = self._open(_container_name(self._head, self._encoding))
            data, self._head = self._head, b""
        yield from self._reader.feed(data)

    def flush(self) -> Iterator[SourceBlock]:
        """End the input and yield the rest of the audio."""
        if self._reader is None:
            if self._head:
                raise UnsupportedFormat(f"{self._encoding}: the input ended before any audio")
            return
        yield from self._reader.finish()

    def close(self) -> None:
        """End the thread, and drop buffered input. Idempotent."""
        if self._reader is not None:
            self._reader.close()

    def _open(self, container: str, held: HeldMp4 | None = None) -> ContainerReader[SourceBlock]:
        return ContainerReader(
            partial(_blocks, container, self._encoding),
            cost=lambda block: len(block.samples),
            burst=BURST_SAMPLES,
            block_bytes=_BLOCK_BYTES,
            name=f"decode-{self._encoding}",
            held=held,
        )


def _container_name(head: bytes, encoding: AudioEncoding) -> str:
    """Return libav's name of the container, by its signature or, for formats without one, by ``encoding``."""
    magic = head[:_MAGIC_BYTES]
    if magic in _MAGIC:
        return _MAGIC[magic]
    if encoding is AudioEncoding.AAC:
        return "aac"
    # ID3 tags may precede both FLAC and MP3. MP3 has no signature: a stream may begin at any of its frames.
    if encoding is AudioEncoding.FLAC and magic.startswith(b"ID3"):
        return "flac"
    if encoding is AudioEncoding.MP3 or magic.startswith(b"ID3"):
        return "mp3"
    raise UnsupportedFormat(f"the input is not a valid {encoding} file")


def _blocks(container_name: str, encoding: AudioEncoding, source: ByteSource) -> Iterator[SourceBlock]:
    """Demux and decode ``source``; in the decoder thread if the input is still arriving."""
    options = {} if isinstance(source, io.BytesIO) else STREAMING_OPTIONS
    try:
        with av.open(
            source, "r", format=container_name, options=options, metadata_errors=LENIENT_METADATA
        ) as container:
            if not container.streams.audio:
                raise UnsupportedFormat(f"{encoding}: the file has no audio stream")
            stream = container.streams.audio[0]
            context: Any = stream.codec_context
            if context is None:
                raise UnsupportedFormat(f"{encoding}: the codec of the file is not supported")
            for frame in usable_frames(container.demux(stream), context.decode, str(encoding)):
                yield _block(frame, encoding)
    except (av.error.FFmpegError, ValueError, LookupError) as error:
        # PyAV raises ValueError and LookupError for some damaged headers.
        raise UnsupportedFormat(f"{encoding}: decoding failed; the data may be corrupt") from error


#: The number of undecodable packets that are always tolerated: a few are common in recordings cut out of a stream. From
#: this number on they must not outnumber the others.
_BROKEN_PACKETS_ALLOWED = 8


def usable_frames(packets: Iterable[Any], decode: Callable[[Any], Iterable[Frame]], what: str) -> Iterator[Frame]:
    """Yield the frames of ``packets``, and skip packets that cannot be decoded.

    Raises UnsupportedFormat for a stream without frames, and if the skipped packets outnumber the frames; while they
    are few, this is checked only at the end of the stream.
    """
    good = broken = 0
    for packet in packets:
        try:
            frames = decode(packet)
        except av.error.InvalidDataError as error:
            broken += 1
            if broken >= _BROKEN_PACKETS_ALLOWED and broken > good:
                raise UnsupportedFormat(f"{what}: the data is corrupt") from error
            continue
        for frame in frames:
            good += 1
            yield frame
    if good == 0 or broken > good:
        raise UnsupportedFormat(f"{what}: no usable packet; the data may be corrupt")


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


# Encoding

_MP3_RATES = frozenset({8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000})
_AAC_RATES = _MP3_RATES | {64_000, 88_200, 96_000}
_OPUS_RATES = frozenset({8_000, 12_000, 16_000, 24_000, 48_000})


@dataclass(frozen=True, slots=True)
class _Codec:
    """A codec and its container, by libav's names, with the rates and channels that it supports.

    ``sample_rates`` is None if any rate is supported.
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


class _Pieces:
    """A buffer for the bytes that the muxer writes, until they are taken.

    It is not seekable, so the muxer writes headers of unknown length, as for a stream.
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
    """Encodes one stream of samples at the target's rate: to MP3, FLAC, AAC, or Opus in Ogg or WebM.

    Without ``sink``, ``encode`` and ``flush`` return the bytes. A ``sink`` gets the bytes instead; it is seekable, so
    the header gets the true length. Raises UnsupportedFormat for an unsupported target.
    """

    def __init__(self, target: AudioFormat, sink: io.BytesIO | None = None) -> None:
        codec = _servable_codec(target)
        self._target = target
        self._pieces = _Pieces()
        self._position = 0
        try:
            self._container = av.open(sink or self._pieces, "w", format=codec.container, options=dict(codec.options))
            self._layout = _layout(target.channels)
            bit_rate = 0 if codec.name == "flac" else _bit_rate(target)
            stream = self._container.add_stream(
                codec.name, rate=target.sample_rate, layout=self._layout, bit_rate=bit_rate
            )
        except (av.error.FFmpegError, ValueError) as error:
            raise UnsupportedFormat(f"this server has no encoder for {target.encoding}") from error
        assert isinstance(stream, av.AudioStream)
        self._stream = stream

    def encode(self, samples: Samples) -> bytes:
        """Encode ``samples``; return the bytes that are complete, possibly none."""
        if len(samples):
            frame = self._frame(samples)
            frame.sample_rate = self._target.sample_rate
            frame.time_base = Fraction(1, self._target.sample_rate)
            frame.pts = self._position
            self._position += len(samples)
            self._container.mux(self._stream.encode(frame))
        return self._pieces.take()

    def flush(self) -> bytes:
        """Return the rest of the file. A file without audio consists of its header."""
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._pieces.take()

    def _frame(self, samples: Samples) -> av.AudioFrame:
        """Return the samples as a frame of libav, with the same samples in each channel of the target."""
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
    """Return a whole file of ``samples`` at the target's rate, with its true length in the header.

    Raises UnsupportedFormat for an unsupported target.
    """
    file = io.BytesIO()
    encoder = CompressedEncoder(target, file)
    # In frames of a second, because libav copies each frame into its buffers as a whole.
    for start in range(0, len(samples), target.sample_rate):
        encoder.encode(samples[start : start + target.sample_rate])
    encoder.flush()
    return file.getvalue()


def _servable_codec(target: AudioFormat) -> _Codec:
    """Return the codec for ``target``. Raises UnsupportedFormat, naming the parameter, if no codec supports it."""
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
    """Return libav's name of the usual layout for the given number of channels."""
    return {1: "mono", 2: "stereo", 3: "3.0", 4: "quad", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}[channels]


def _bit_rate(target: AudioFormat) -> int:
    """Return a bit rate, in bit/s, that is transparent for speech and that the format allows at its sample rate."""
    if target.encoding is AudioEncoding.AAC:
        return min(64_000, 4 * target.sample_rate) * target.channels
    if target.encoding is not AudioEncoding.MP3:
        return 64_000 * target.channels
    if target.sample_rate >= 32_000:
        return 128_000 * target.channels
    return 96_000 if target.sample_rate >= 16_000 else 64_000


# Opus packets without a container, as in RTP (RFC 7587): decoded to and encoded from pcm16, 24 kHz, mono

SAMPLE_RATE: Final = 24_000
#: The audio in a packet that is sent: 20 ms.
PACKET_SAMPLES: Final = SAMPLE_RATE // 50
PACKET_BYTES: Final = 2 * PACKET_SAMPLES
#: The longest packet is 120 ms, at most (RFC 6716, 3.2.1).
MAX_PACKET_BYTES: Final = 1500
#: The bits of a packet's first byte that give the mode and the length of its frames. The other bits give the number of
#: frames: 0 for one.
_CONFIG_BITS: Final = 0xFC
#: The packet that stands for a lost one before the first packet has arrived: 20 ms of silence.
_SILENT: Final = b"\xf8"


class OpusPacketDecoder:
    """Decodes the Opus packets of one stream in order, and conceals the lost ones.

    libav has no call for a lost packet. libopus takes a packet with an empty frame for a lost one (RFC 6716, 3.1): it
    extends the sound before, and fades it out. Forward error correction would need a call that libav does not have.
    """

    def __init__(self) -> None:
        self._codec = av.CodecContext.create("libopus", "r")
        self._resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
        self._lost = _SILENT
        #: The duration of the last packet in seconds.
        self.seconds = 0.0
        self._decoded_seconds = 0.0

    def decode(self, packet: bytes) -> bytes:
        """Return the audio of a packet as mono 16-bit samples. Raises InvalidFrame if the packet is not Opus."""
        if not 0 < len(packet) <= MAX_PACKET_BYTES:
            raise InvalidFrame("an RTP packet holds no Opus")
        audio = self._decoded(packet)
        self._lost = bytes([packet[0] & _CONFIG_BITS])
        self.seconds = self._decoded_seconds
        return audio

    def conceal(self) -> bytes:
        """Return audio in place of a lost packet, as long as one frame of the packet before."""
        return self._decoded(self._lost)

    def _decoded(self, packet: bytes) -> bytes:
        try:
            frames = self._codec.decode(av.Packet(packet))
        except av.error.FFmpegError:
            raise InvalidFrame("an RTP packet holds no Opus") from None
        self._decoded_seconds = sum(frame.samples / frame.sample_rate for frame in frames)
        made = [even for frame in frames for even in self._resampler.resample(frame)]
        return b"".join(np.ascontiguousarray(frame.to_ndarray()).tobytes() for frame in made)


class OpusPacketEncoder:
    """Encodes pieces of 20 ms as Opus packets. Each packet repeats the one before in few bits, in case of its loss."""

    def __init__(self) -> None:
        codec = self._codec = av.CodecContext.create("libopus", "w")
        codec.sample_rate = SAMPLE_RATE
        codec.format, codec.layout = "s16", "mono"
        codec.bit_rate = 32_000
        codec.time_base = Fraction(1, SAMPLE_RATE)
        codec.options = {
            "application": "voip",
            "frame_duration": "20",
            "fec": "1",
            "packet_loss": "5",
            "compression_level": "5",
        }

    def encode(self, audio: bytes) -> bytes:
        """Return the packet for PACKET_BYTES of audio."""
        frame = av.AudioFrame.from_ndarray(np.frombuffer(audio, "<i2")[None, :], format="s16", layout="mono")
        frame.sample_rate = SAMPLE_RATE
        return b"".join(bytes(packet) for packet in self._codec.encode(frame))
