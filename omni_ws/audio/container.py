"""Audio containers: media types, WAV headers, and readers for files that arrive in pieces or are buffered whole."""

from __future__ import annotations

import io
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import Generic, Protocol, TypeVar

from omni_ws.audio.pcm import SampleLayout
from omni_ws.core.chunks import AudioEncoding, AudioFormat, checked_channels, checked_sample_rate
from omni_ws.core.file_heads import RIFF_MAGIC
from omni_ws.core.quota import UNLIMITED, Room
from omni_ws.errors import InvalidValue, UnsupportedFormat

# Media types, as in ``Content-Type`` and the ``format`` of a chunk.
#
# Sources: RFC 9110 section 8.3.1 (syntax), RFC 2586 (L16), RFC 4856 (PCMU, PCMA), RFC 7845 (Opus in Ogg), RFC 2046 and
# RFC 3551 (``audio/basic``), RFC 2231 (parameters that name their character set).

_ENCODINGS = {
    "audio/pcm": AudioEncoding.PCM16,
    "audio/x-pcm": AudioEncoding.PCM16,
    "audio/pcm16": AudioEncoding.PCM16,
    "audio/f32": AudioEncoding.F32,
    "audio/x-f32": AudioEncoding.F32,
    "audio/basic": AudioEncoding.PCMU,
    "audio/pcmu": AudioEncoding.PCMU,
    "audio/pcma": AudioEncoding.PCMA,
    "audio/wav": AudioEncoding.WAV,
    "audio/x-wav": AudioEncoding.WAV,
    "audio/wave": AudioEncoding.WAV,
    "audio/vnd.wave": AudioEncoding.WAV,
    "audio/opus": AudioEncoding.OPUS,
    "audio/ogg": AudioEncoding.OGG,
    "audio/webm": AudioEncoding.WEBM,
    "audio/mpeg": AudioEncoding.MP3,
    "audio/mp3": AudioEncoding.MP3,
    "audio/flac": AudioEncoding.FLAC,
    "audio/x-flac": AudioEncoding.FLAC,
    "audio/aac": AudioEncoding.AAC,
    "audio/x-aac": AudioEncoding.AAC,
    "audio/aacp": AudioEncoding.AAC,
    "audio/x-hx-aac-adts": AudioEncoding.AAC,
    "audio/mp4": AudioEncoding.MP4,
    "audio/x-mp4": AudioEncoding.MP4,
    "audio/m4a": AudioEncoding.M4A,
    "audio/x-m4a": AudioEncoding.M4A,
    "audio/quicktime": AudioEncoding.MOV,
    "audio/mov": AudioEncoding.MOV,
}
_MEDIA_TYPES = {
    AudioEncoding.PCM16: "audio/pcm",
    AudioEncoding.F32: "audio/x-f32",
    AudioEncoding.PCMU: "audio/pcmu",
    AudioEncoding.PCMA: "audio/pcma",
    AudioEncoding.WAV: "audio/wav",
    AudioEncoding.OPUS: "audio/ogg;codecs=opus",
    AudioEncoding.OGG: "audio/ogg",
    AudioEncoding.WEBM: "audio/webm",
    AudioEncoding.MP3: "audio/mpeg",
    AudioEncoding.FLAC: "audio/flac",
    AudioEncoding.AAC: "audio/aac",
    AudioEncoding.M4A: "audio/x-m4a",
    AudioEncoding.MP4: "audio/mp4",
    AudioEncoding.MOV: "audio/quicktime",
}
#: The registrations of the G.711 types default to 8,000 Hz mono.
_TELEPHONE = frozenset({AudioEncoding.PCMU, AudioEncoding.PCMA})
_TELEPHONE_RATE = 8_000
#: The parameters with which some clients give the sample width.
_SAMPLE_BITS_PARAMETERS = ("bits", "bit", "bitdepth", "bit-depth", "bit_depth")
_SAMPLE_BITS = {AudioEncoding.PCM16: 16, AudioEncoding.F32: 32, AudioEncoding.PCMU: 8, AudioEncoding.PCMA: 8}


def parse_audio_mime(content_type: str, *, default: AudioFormat | None = None) -> AudioFormat:
    """Parse a media type such as ``audio/pcm;rate=16000;channels=2``. Unknown parameters are ignored.

    If rate or channels are missing, they are those of ``default`` (16,000 Hz mono without it), or 8,000 Hz mono for
    G.711. Raises InvalidValue or UnsupportedFormat, naming the parameter.
    """
    default = default or AudioFormat()
    media, parameters = _split(content_type)
    encoding = _encoding(media, parameters)
    if encoding in _TELEPHONE:
        default = AudioFormat(encoding, _TELEPHONE_RATE, 1)
    _check_sample_layout(encoding, parameters)
    rate, channels = default.sample_rate, default.channels
    if "rate" in parameters:
        rate = checked_sample_rate(_integer("rate", parameters["rate"]), param="rate")
    if "channels" in parameters:
        channels = checked_channels(_integer("channels", parameters["channels"]), param="channels")
    return AudioFormat(encoding, rate, channels)


def parse_audio_format(text: str, default: AudioFormat) -> AudioFormat:
    """Parse the ``format`` of a chunk: a wire name (``pcm16``) or a media type.

    If rate or channels are missing, they are those of ``default``. Raises as ``parse_audio_mime`` does.
    """
    if "/" in text:
        return parse_audio_mime(text, default=default)
    try:
        return replace(default, encoding=AudioEncoding(text))
    except ValueError:
        known = ", ".join(AudioEncoding)
        raise UnsupportedFormat(f"unknown audio format {text!r}; supported: {known}", param="format") from None


def media_type(format: AudioFormat) -> str:
    """Return the media type for ``Content-Type``; for a raw format it has rate and channels as parameters."""
    name = _MEDIA_TYPES[format.encoding]
    if not format.is_raw:
        return name
    return f"{name};rate={format.sample_rate};channels={format.channels}"


def _split(content_type: str) -> tuple[str, dict[str, str]]:
    message = Message()
    message["content-type"] = " ".join(content_type.split())
    media = content_type.partition(";")[0].strip().lower()
    try:
        raw_parameters = message.get_params(failobj=[])
    except TypeError:  # parts of a parameter (RFC 2231) with and without a number
        raise UnsupportedFormat(f"malformed audio type {media!r}", param="format") from None
    return media, {name.lower(): collapse_rfc2231_value(value) for name, value in raw_parameters[1:]}


def _encoding(media: str, parameters: dict[str, str]) -> AudioEncoding:
    if media == "audio/l16":
        raise UnsupportedFormat(
            "audio/l16 (big-endian) is not supported; send little-endian samples as audio/pcm", param="format"
        )
    encoding = _ENCODINGS.get(media)
    if encoding is None:
        raise UnsupportedFormat(f"unknown audio type {media!r}", param="format")
    if encoding is AudioEncoding.OGG and parameters.get("codecs", "").lower() == "opus":
        return AudioEncoding.OPUS
    return encoding


def _check_sample_layout(encoding: AudioEncoding, parameters: dict[str, str]) -> None:
    """Raise UnsupportedFormat for parameters that contradict the encoding: the audio would be decoded to noise."""
    expected = _SAMPLE_BITS.get(encoding)
    for name in _SAMPLE_BITS_PARAMETERS:
        if expected is not None and name in parameters and _integer(name, parameters[name]) != expected:
            raise UnsupportedFormat(f"{name} of {encoding} must be {expected}, got {parameters[name]}", param=name)
    for name in ("endianness", "endian"):
        if expected is not None and parameters.get(name, "little").lower().startswith("big"):
            raise UnsupportedFormat("big-endian samples are not supported", param=name)


def _integer(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) <= 9):
        raise InvalidValue(f"{name} must be a whole number, got {value[:32]!r}", param=name)
    return int(value)


# Headers of RIFF WAVE
#
# Sources: Microsoft/IBM, "Multimedia Programming Interface and Data Specifications 1.0"; mmreg.h for the format codes;
# EBU Tech 3306 for RF64; ITU-R BS.2088 for BW64.

_PCM, _FLOAT, _A_LAW, _MU_LAW, _EXTENSIBLE = 0x0001, 0x0003, 0x0006, 0x0007, 0xFFFE
_EXTENSIBLE_GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")
_LAYOUTS = {
    (_PCM, 1): SampleLayout.U8,
    (_PCM, 2): SampleLayout.S16,
    (_PCM, 3): SampleLayout.S24,
    (_PCM, 4): SampleLayout.S32,
    (_FLOAT, 4): SampleLayout.F32,
    (_FLOAT, 8): SampleLayout.F64,
    (_A_LAW, 1): SampleLayout.A_LAW,
    (_MU_LAW, 1): SampleLayout.MU_LAW,
}
_MAX_SIZE = 0xFFFFFFFF
#: The sizes that writers of streams give to data of unknown length.
_UNKNOWN_SIZES = (0, _MAX_SIZE)
#: The bytes of a written header that the RIFF chunk's size includes.
_HEADER_AFTER_RIFF = 36
#: The limit for a ``fmt `` or ``ds64`` chunk, which has a few dozen bytes.
_MAX_KEPT_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class WavHeader:
    """The format of a WAV file. ``data_bytes`` is None if the samples extend to the end of the file."""

    layout: SampleLayout
    sample_rate: int
    channels: int
    data_bytes: int | None


class WavHeaderReader:
    """Parses a WAV header that arrives in pieces.

    ``feed`` is called until ``header`` is set; ``take_rest`` then returns the bytes after the header. RIFF chunks other
    than ``fmt ``, ``ds64`` and ``data`` are skipped without being buffered.
    """

    def __init__(self) -> None:
        self.header: WavHeader | None = None
        self.rest = b""
        self._buffer = bytearray()
        self._skip = 0
        self._seen_riff = False
        self._format: WavHeader | None = None
        self._data_bytes_64: int | None = None

    def feed(self, data: bytes) -> None:
        """Add input. Raises UnsupportedFormat as soon as the input cannot be a supported WAV file."""
        self._buffer += data
        while self.header is None and self._step():
            pass

    def _step(self) -> bool:
        """Consume one element of the header; return False if more input is needed."""
        if self._skip:
            dropped = min(self._skip, len(self._buffer))
            del self._buffer[:dropped]
            self._skip -= dropped
            return self._skip == 0
        if not self._seen_riff:
            return self._read_riff()
        return self._read_chunk()

    def _read_riff(self) -> bool:
        magic = bytes(self._buffer[:4])
        if not any(known.startswith(magic) for known in RIFF_MAGIC):
            raise UnsupportedFormat("not a wav file: it has no RIFF header")
        if len(self._buffer) < 12:
            return False
        if self._buffer[8:12] != b"WAVE":
            raise UnsupportedFormat("not a wav file: its RIFF type is not WAVE")
        del self._buffer[:12]
        self._seen_riff = True
        return True

    def _read_chunk(self) -> bool:
        if len(self._buffer) < 8:
            return False
        name, size = bytes(self._buffer[:4]), struct.unpack_from("<I", self._buffer, 4)[0]
        if name == b"data":
            self._begin_data(size)
            return True
        if name in (b"fmt ", b"ds64"):
            if size > _MAX_KEPT_CHUNK:
                raise UnsupportedFormat(
                    f"invalid wav header: a {name.decode().strip()} chunk of {size} bytes is too long"
                )
            if len(self._buffer) < 8 + size:
                return False
            self._read_kept_chunk(name, bytes(self._buffer[8 : 8 + size]))
        # Chunks are padded to an even number of bytes.
        del self._buffer[:8]
        self._skip = size + (size & 1)
        return True

    def _read_kept_chunk(self, name: bytes, body: bytes) -> None:
        if name == b"fmt ":
            self._format = _parse_format(body)
        elif len(body) >= 16:
            self._data_bytes_64 = struct.unpack_from("<Q", body, 8)[0]

    def take_rest(self) -> bytes:
        """Remove and return the bytes after the header."""
        rest, self.rest = self.rest, b""
        return rest

    def _begin_data(self, size: int) -> None:
        if self._format is None:
            raise UnsupportedFormat("invalid wav header: the data chunk precedes the fmt chunk")
        data_bytes: int | None = None if size in _UNKNOWN_SIZES else size
        if size == _MAX_SIZE and self._data_bytes_64:
            data_bytes = self._data_bytes_64
        self.rest = bytes(self._buffer[8:])
        self._buffer.clear()
        self.header = WavHeader(self._format.layout, self._format.sample_rate, self._format.channels, data_bytes)


def _parse_format(body: bytes) -> WavHeader:
    """Parse the body of a ``fmt `` chunk."""
    if len(body) < 16:
        raise UnsupportedFormat("invalid wav header: the fmt chunk is too short")
    code, channels, sample_rate, _, block_bytes, bits = struct.unpack_from("<HHIIHH", body)
    if code == _EXTENSIBLE:
        if len(body) < 40 or body[26:40] != _EXTENSIBLE_GUID_TAIL:
            raise UnsupportedFormat("invalid wav header: unknown extensible format")
        code = struct.unpack_from("<H", body, 24)[0]
    try:
        checked_channels(channels)
        checked_sample_rate(sample_rate)
    except InvalidValue as error:
        raise UnsupportedFormat(f"wav: {error.message}") from error
    # The container size of a sample decides, not its valid bits, which are the most significant ones.
    sample_bytes, remainder = divmod(block_bytes, channels)
    layout = _LAYOUTS.get((code, sample_bytes))
    if layout is None or remainder or bits > 8 * sample_bytes:
        raise UnsupportedFormat(
            f"unsupported wav format: code 0x{code:04x}, {bits} bits, blocks of {block_bytes} bytes"
        )
    return WavHeader(layout, sample_rate, channels, None)


def wav_header(*, sample_rate: int, channels: int, data_bytes: int | None) -> bytes:
    """Return the 44-byte header of a WAV file with 16-bit samples.

    ``data_bytes`` is the size of the samples; None if it is not known yet, as in a stream. An unknown size, and one
    above the range of the 32-bit field, is written as the largest value of the field.
    """
    if data_bytes is None or data_bytes > _MAX_SIZE - _HEADER_AFTER_RIFF:
        data_size = riff_size = _MAX_SIZE
    else:
        data_size, riff_size = data_bytes, data_bytes + _HEADER_AFTER_RIFF
    block_bytes = 2 * channels
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", riff_size, b"WAVE"),
        *(b"fmt ", 16, _PCM, channels, sample_rate, sample_rate * block_bytes, block_bytes, 16),
        *(b"data", data_size),
    )


# Files that arrive in pieces

T = TypeVar("T")

#: Options of libav: use the stream parameters of the header, instead of probing seconds of input.
STREAMING_OPTIONS = {"probesize": "32", "analyzeduration": "0"}
#: An option of ``av.open``: metadata in unknown character sets is replaced instead of raising an error.
LENIENT_METADATA = "replace"

#: The most samples that a decoder's thread may decode ahead of its consumer. The longest FLAC block has as many.
BURST_SAMPLES = 1 << 16
#: The memory of these samples (float32), doubled because the block that exceeds the limit may be as large again.
BURST_BYTES = 8 * BURST_SAMPLES


class ByteSource(Protocol):
    """The input of a pull parser: the part of a file's interface that libav needs."""

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes, blocking until there are any; ``b""`` at the end of the input."""
        ...


class _Exchange(Generic[T]):
    """The state that a parser thread and its caller share.

    It has no reference to the ContainerReader, so that the thread does not keep the reader alive.
    """

    def __init__(self, cost: Callable[[T], int], burst: int, block_bytes: int) -> None:
        self._changed = threading.Condition()
        self._block_bytes = block_bytes
        self._cost = cost
        self._burst = burst
        self._input = bytearray()
        self._output: deque[T] = deque()
        self._output_cost = 0
        self._input_ended = False
        #: Whether the parser is blocked waiting for input.
        self._starving = False
        self._abandoned = False
        self._finished = False
        self._error: BaseException | None = None

    # Called from the parser thread

    def read(self, size: int, /) -> bytes:
        """Return a block of input, blocking until there is one."""
        # Always a full block, except at the end, so that libav's behaviour does not depend on how the input is cut: a
        # demuxer that seeks back over its header loses its position after a very short read.
        wanted = min(size, self._block_bytes)
        with self._changed:
            while not (len(self._input) >= wanted or self._input_ended or self._abandoned):
                self._starving = True
                self._changed.notify_all()
                self._changed.wait()
            self._starving = False
            # An abandoned parser gets the end of the input, because libav would print an exception raised here.
            block = bytes(self._input[:wanted])
            # Deleting the head of a bytearray does not move the rest.
            del self._input[:wanted]
            return block

    def run(self, parse: Callable[[ByteSource], Iterator[T]]) -> None:
        """Run the parser. This is the thread's target."""
        try:
            for item in parse(self):
                if not self._emit(item):
                    break
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def _emit(self, item: T) -> bool:
        """Queue a result, blocking while the queue is full. Return whether more results are wanted."""
        with self._changed:
            self._output.append(item)
            self._output_cost += self._cost(item)
            while self._output_cost >= self._burst and not self._abandoned:
                self._changed.notify_all()
                self._changed.wait()
            return not self._abandoned

    # Called by the owner

    def push(self, data: bytes) -> None:
        """Add input, which is ignored after the parser has finished."""
        with self._changed:
            if data and not self._finished:
                self._input += data
                self._starving = False
                self._changed.notify_all()

    def end_input(self) -> None:
        """Let the parser reach the end of the input."""
        with self._changed:
            self._input_ended = True
            self._starving = False
            self._changed.notify_all()

    def abandon(self) -> None:
        """Let the parser end without further results."""
        with self._changed:
            self._abandoned = True
            self._input.clear()
            self._changed.notify_all()

    def next_batch(self) -> deque[T]:
        """Return the parser's next results; none if it needs more input or has finished.

        Raises the parser's exception after its last results.
        """
        with self._changed:
            while not (self._starving or self._finished or self._output_cost >= self._burst):
                self._changed.wait()
            batch, self._output = self._output, deque()
            self._output_cost = 0
            self._changed.notify_all()
            if not batch and self._error is not None:
                raise self._error
            return batch


class ContainerReader(Generic[T]):
    """Runs a pull parser such as libav's demuxer (``parse``) in a thread, and feeds it with input as it arrives.

    A pull parser reads from a file, and blocks until there is data. Here the parser and the caller alternate strictly:
    ``feed`` returns when the parser has consumed all input so far and waits for more. The output therefore depends only
    on the bytes, never on timing.

    The thread starts with the first input and ends with the parser, or with ``close``. It also ends when the reader is
    dropped, so ``parse`` must not refer to the owner of the reader.

    ``cost`` returns the cost of a result, in the unit of ``burst``; the parser blocks while the waiting results cost
    ``burst`` or more. The parser reads ``block_bytes`` at a time: an incomplete block waits for more input. With
    ``held`` the input is an MP4 file; if its index comes last, ``finish`` parses the whole file in the caller's thread.
    """

    def __init__(
        self,
        parse: Callable[[ByteSource], Iterator[T]],
        *,
        cost: Callable[[T], int],
        burst: int,
        block_bytes: int,
        name: str,
        held: HeldMp4 | None = None,
    ) -> None:
        self._parse = parse
        #: The MP4 file while it is buffered; None once it is known that its index comes first, and for other files.
        self._held = held
        self._exchange: _Exchange[T] = _Exchange(cost, burst, block_bytes)
        self._thread = threading.Thread(target=self._exchange.run, args=(parse,), name=name, daemon=True)
        self._finalizer = weakref.finalize(self, self._exchange.abandon)
        self._started = False

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield the results that ``data`` completes. Raises the parser's exception after the last of them.

        To be exhausted before the next call. Input is ignored after the parser has finished.
        """
        if self._held is not None:
            begun = self._held.begin(data)
            if begun is None:
                return
            self._held, data = None, begun
        self._exchange.push(data)
        yield from self._results()

    def finish(self) -> Iterator[T]:
        """End the input, and yield the last results; see ``feed``."""
        if self._held is not None:
            try:
                yield from self._parse(self._held.whole())
            finally:
                self._held.close()
            return
        self._exchange.end_input()
        yield from self._results()

    def _results(self) -> Iterator[T]:
        if not self._started and self._finalizer.alive:
            self._started = True
            self._thread.start()
        while self._started and (batch := self._exchange.next_batch()):
            while batch:
                yield batch.popleft()  # drops the reference: results are large

    def close(self) -> None:
        """End the thread and wait for it; drop buffered input. Idempotent."""
        if self._held is not None:
            self._held.close()
        self._finalizer()
        if self._started:
            self._thread.join()
        self._started = False


# MP4 files, which can only be decoded as a whole if their index (``moov``) follows the media data (``mdat``)


class HeldMp4:
    """Buffers an arriving MP4 file until its index precedes the media data, or else until the end of the file.

    At most ``max_bytes`` are held, and charged to ``room`` until they are returned or ``close`` drops them.
    """

    def __init__(self, max_bytes: int, room: Room = UNLIMITED) -> None:
        self._max_bytes = max_bytes
        self._room = room
        self._reserved = 0
        self._data = bytearray()
        #: The offset of the next top-level box (ISO/IEC 14496-12, section 4.2).
        self._box_at = 0
        #: Whether the media data came before the index.
        self._index_is_last = False

    def begin(self, data: bytes) -> bytes | None:
        """Add bytes. If the index came first, return all bytes so far: the file can be decoded as it arrives.

        Otherwise return None: the file is still buffered. Raises UnsupportedFormat for a damaged box and above
        ``max_bytes``, and the errors of ``Room.take``.
        """
        if len(self._data) + len(data) > self._max_bytes:
            raise UnsupportedFormat(
                f"an mp4 with its index at the end must not exceed {self._max_bytes} bytes; "
                "write the index first (faststart)"
            )
        self._room.take(len(data))
        self._reserved += len(data)
        self._data += data
        if not self._index_is_first():
            return None
        taken = bytes(self._data)
        self.close()
        return taken

    def _index_is_first(self) -> bool:
        """Walk through the boxes. Return True at an index before the media data, False if no index has arrived yet."""
        while not self._index_is_last and self._box_at + 16 <= len(self._data):
            size, kind = struct.unpack_from(">I4s", self._data, self._box_at)
            if kind in (b"moov", b"moof"):
                return True
            self._index_is_last = kind == b"mdat"
            if size == 1:
                size = struct.unpack_from(">Q", self._data, self._box_at + 8)[0]
            if size < 8 and not self._index_is_last:
                raise UnsupportedFormat("corrupt mp4")
            self._box_at += size
        return False

    def whole(self) -> io.BytesIO:
        """Return the whole file, which has ended. Its bytes stay charged to ``room`` until ``close``."""
        taken, self._data = bytes(self._data), bytearray()
        return io.BytesIO(taken)

    def close(self) -> None:
        """Drop the bytes and release their memory in ``room``. Idempotent."""
        reserved, self._reserved, self._data = self._reserved, 0, bytearray()
        self._room.give(reserved)
