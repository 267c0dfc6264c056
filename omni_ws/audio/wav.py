"""RIFF WAVE headers: an incremental reader, and a writer.

Sources: Microsoft/IBM, "Multimedia Programming Interface and Data Specifications 1.0"; mmreg.h for the format codes;
EBU Tech 3306 for RF64; ITU-R BS.2088 for BW64.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from omni_ws.audio.pcm import SampleLayout
from omni_ws.core.chunks import checked_channels, checked_sample_rate
from omni_ws.core.file_heads import RIFF_MAGIC
from omni_ws.errors import InvalidValue, UnsupportedFormat

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
#: The sizes that writers of streams give for data of unknown length.
_UNKNOWN_SIZES = (0, _MAX_SIZE)
#: The bytes of a written header that the RIFF chunk's size includes.
_HEADER_AFTER_RIFF = 36
#: The limit for a ``fmt `` or ``ds64`` chunk, which has a few dozen bytes.
_MAX_KEPT_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class WavHeader:
    """The format of a WAV file. ``data_bytes`` is None when the samples extend to the end of the file."""

    layout: SampleLayout
    sample_rate: int
    channels: int
    data_bytes: int | None


class WavHeaderReader:
    """Reads a header from input that arrives in pieces.

    ``feed`` is called until ``header`` is set; ``rest`` then holds the bytes after the header. Chunks other than ``fmt
    ``, ``ds64`` and ``data`` are skipped without being buffered.
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
        """Add input. Raises UnsupportedFormat as soon as it cannot be a supported WAV file."""
        self._buffer += data
        while self.header is None and self._step():
            pass

    def _step(self) -> bool:
        """Consume one element of the header; returns False when more input is needed."""
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
    # The container size of a sample decides, not its valid bits, which are the upper ones.
    sample_bytes, remainder = divmod(block_bytes, channels)
    layout = _LAYOUTS.get((code, sample_bytes))
    if layout is None or remainder or bits > 8 * sample_bytes:
        raise UnsupportedFormat(
            f"unsupported wav format: code 0x{code:04x}, {bits} bits, blocks of {block_bytes} bytes"
        )
    return WavHeader(layout, sample_rate, channels, None)


def wav_header(*, sample_rate: int, channels: int, data_bytes: int | None) -> bytes:
    """Return the 44-byte header of a file with 16-bit samples.

    ``data_bytes`` is the size of the samples, or None when it is not known yet, as in a stream. An unknown
    size is written as the largest that the 32-bit field holds, and so is a size beyond that.
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
