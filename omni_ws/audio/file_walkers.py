"""Walkers: where the elements of a file end (chunks, pages, frames), by kind of file, without decoding them.

Sources: IBM/Microsoft, "Multimedia Programming Interface", and EBU Tech 3306 (RIFF, RF64); RFC 3533 (Ogg); RFC 9639
(FLAC); ISO/IEC 11172-3, 2.4.2.3, and 13818-3 (MPEG audio); id3.org (ID3v2); RFC 8794 and RFC 9559 (EBML, Matroska).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Final, Protocol, TypeAlias


class FileKind(StrEnum):
    """The kinds of files that a stream may hold, by the heads with which they begin."""

    WAV = "wav"
    OGG = "ogg"
    FLAC = "flac"
    MP3 = "mp3"
    MATROSKA = "matroska"


class Look(Enum):
    """What a look at a border finds, besides an element."""

    MORE = "that depends on bytes that have not arrived"
    OPEN = "no border of this file can be found any more"
    END = "no further element of this file"


#: The length of an element in bytes, or what there is instead.
Step: TypeAlias = int | Look


class Walker(Protocol):
    """Walks through one file, element by element. ``window`` begins at the border between two."""

    @property
    def has_length(self) -> bool:
        """Whether the file tells its length. Without it, a head with which a chunk begins ends it anywhere."""

    def step(self, window: bytes) -> Step: ...

    def allows(self, kind: FileKind, window: bytes) -> bool:
        """Whether the head of this kind that ``window`` begins with is a new file."""
        ...

    def resume(self, window: bytes) -> int | None:
        """Return where the file may go on behind damage; None where it never does: it has ended."""
        ...


#: Head and type of a RIFF file.
RIFF_MAGIC: Final = (b"RIFF", b"RF64", b"BW64")
_RIFF_HEAD_BYTES: Final = 12
_MAX_SIZE: Final = 0xFFFFFFFF
#: Writers of streams, which do not know the length, give 0 or the largest one that they know. So many bytes are 18
#: hours of speech.
_ENDLESS_BYTES: Final = 0x7FFF_F000
_MAX_DS64_BYTES: Final = 4096
#: What writers put behind the samples, whatever the size of the RIFF chunk says.
_TRAILING_CHUNKS: Final = frozenset(
    {
        b"LIST",
        b"id3 ",
        b"ID3 ",
        b"bext",
        b"iXML",
        b"cue ",
        b"smpl",
        b"inst",
        b"fact",
        b"JUNK",
        b"junk",
        b"PAD ",
        b"FLLR",
    }
    | {b"PEAK", b"DISP", b"_PMX", b"axml", b"acid", b"plst", b"labl", b"note", b"afsp", b"SAUR"}
)


class WavWalker:
    """RIFF chunks. The samples may have no length; then nothing ends them."""

    def __init__(self) -> None:
        self._at = 0
        self._end: int | None = None
        self._long_data: int | None = None
        self._has_samples = False
        self._is_endless = False
        self._is_padded = False

    @property
    def has_length(self) -> bool:
        return not self._is_endless

    def step(self, window: bytes) -> Step:
        size = self._element(window)
        if not isinstance(size, Look):
            self._at += size
        return size

    def _element(self, window: bytes) -> Step:
        if self._is_endless:
            return Look.OPEN
        if self._at == 0:
            if len(window) < _RIFF_HEAD_BYTES:
                return Look.MORE
            size = int.from_bytes(window[4:8], "little")
            self._end = None if size >= _ENDLESS_BYTES else 8 + size
            return _RIFF_HEAD_BYTES
        if self._is_padded:
            self._is_padded = False
            if window[:1] == b"\0":
                return 1
        if len(window) < 8:
            return Look.MORE
        name, size = window[:4], int.from_bytes(window[4:8], "little")
        if self._has_samples:
            whole = 8 + size + (size & 1)
            fits = self._end is not None and self._at + 8 + size <= self._end
            return whole if (fits and name.isascii()) or name in _TRAILING_CHUNKS else Look.END
        if name == b"data":
            return self._samples(size)
        if name == b"ds64" and size <= _MAX_DS64_BYTES:
            if len(window) < 8 + 16:
                return Look.MORE
            self._long_data = int.from_bytes(window[16:24], "little")
        return 8 + size + (size & 1)

    def _samples(self, size: int) -> int:
        self._has_samples = True
        if size == _MAX_SIZE and self._long_data:
            size = self._long_data
        if size == 0 or (size >= _ENDLESS_BYTES and not self._long_data):
            self._is_endless = True
            return 8
        self._is_padded = bool(size & 1)
        return 8 + size

    def allows(self, kind: FileKind, window: bytes) -> bool:
        # A file without any samples may be followed by another.
        return kind is FileKind.WAV if self._is_endless else self._has_samples

    def resume(self, window: bytes) -> int | None:
        return None


_PAGE_HEAD_BYTES: Final = 27
BEGINS_STREAM: Final = 2
_ENDS_STREAM: Final = 4


class OggWalker:
    """Pages. The file ends where all of its streams have, or where a page begins a new one behind others."""

    def __init__(self) -> None:
        self._open: set[bytes] = set()
        self._has_data = False
        self._has_ended = False

    @property
    def has_length(self) -> bool:
        return False

    def step(self, window: bytes) -> Step:
        if not window.startswith(b"OggS"):
            return Look.MORE if b"OggS".startswith(window) else Look.END
        if len(window) < _PAGE_HEAD_BYTES or len(window) < _PAGE_HEAD_BYTES + window[26]:
            return Look.MORE
        flags, stream = window[5], window[14:18]
        if self._has_ended and not flags & BEGINS_STREAM:
            return Look.END
        if flags & BEGINS_STREAM:
            self._open.add(stream)
        else:
            self._has_data = True
        if flags & _ENDS_STREAM:
            self._open.discard(stream)
            self._has_ended = not self._open
        return _PAGE_HEAD_BYTES + window[26] + sum(window[_PAGE_HEAD_BYTES : _PAGE_HEAD_BYTES + window[26]])

    def allows(self, kind: FileKind, window: bytes) -> bool:
        return self._has_data or (kind is not FileKind.OGG and not self._open)

    def resume(self, window: bytes) -> int | None:
        if self._has_ended:
            return None
        found = window.find(b"OggS\0")
        return max(0, len(window) - 4) if found < 0 else found


#: Heads that FLAC's frames do not contain by chance.
_HEADS: Final = re.compile(
    rb"fLaC[\x00\x80]\x00\x00\x22|OggS\x00[\x02\x06]|(?:RIFF|RF64|BW64)....WAVE|\x1a\x45\xdf\xa3|ID3[\x02-\x04]\x00",
    re.DOTALL,
)


class FlacWalker:
    """Metadata, then frames that have no length. A file ends where a head stands behind a whole frame."""

    def __init__(self) -> None:
        self._begun = False
        self._has_metadata = False

    @property
    def has_length(self) -> bool:
        return False

    def step(self, window: bytes) -> Step:
        if self._has_metadata:
            return Look.OPEN
        if len(window) < 4:
            return Look.MORE
        if not self._begun:
            if window.startswith(b"ID3"):
                return id3_bytes(window)
            if not window.startswith(b"fLaC"):
                return Look.OPEN
            self._begun = True
            return 4
        self._has_metadata = bool(window[0] & 0x80)
        return 4 + int.from_bytes(window[1:4], "big")

    def allows(self, kind: FileKind, window: bytes) -> bool:
        return self._has_metadata

    def resume(self, window: bytes) -> int | None:
        return None

    @staticmethod
    def heads(window: bytes) -> list[int]:
        return [found.start() for found in _HEADS.finditer(window)]


_BIT_RATES: Final = {
    (3, 3): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (3, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (3, 1): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 3): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_SAMPLE_RATES: Final = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
_MPEG_SYNC: Final = re.compile(rb"\xff[\xe2-\xff]")
#: The longest frame (160 kbit/s at 8 kHz, with padding), and the header of the next.
_TWO_MPEG_HEADERS: Final = 2881 + 4


def mpeg_frame_bytes(window: bytes) -> int:
    """The length of the frame of MPEG audio that begins here; 0 where none does, or its length is free."""
    if len(window) < 4 or window[0] != 0xFF or window[1] & 0xE0 != 0xE0:
        return 0
    version, layer = window[1] >> 3 & 3, window[1] >> 1 & 3
    rate, sampling, padding = window[2] >> 4, window[2] >> 2 & 3, window[2] >> 1 & 1
    if version == 1 or layer == 0 or rate in (0, 15) or sampling == 3:
        return 0
    table = _BIT_RATES[3, layer] if version == 3 else _BIT_RATES[2, 3 if layer == 3 else 2]
    bits, samples = table[rate - 1] * 1000, _SAMPLE_RATES[version][sampling]
    if layer == 3:
        return (12 * bits // samples + padding) * 4
    return (72 if layer == 1 and version != 3 else 144) * bits // samples + padding


def two_mpeg_frames(window: bytes, *, final: bool) -> bool | Look:
    """Whether one frame stands behind another here: the bits of one header are found in any data."""
    if len(window) < 4:
        return False if final else Look.MORE
    size = mpeg_frame_bytes(window)
    if not size:
        return False
    behind = window[size : size + 4]
    if len(behind) < 4:
        return len(window) >= size if final else Look.MORE
    same = behind[0] == 0xFF and (behind[1] ^ window[1]) & 0xFE == 0 and (behind[2] ^ window[2]) & 0x0C == 0
    return same and mpeg_frame_bytes(behind) > 0


def id3_bytes(window: bytes) -> Step:
    """The length of the tag (ID3v2) that begins here."""
    if len(window) < 10:
        return Look.MORE
    if not 2 <= window[3] <= 4 or window[4] == 0xFF or max(window[6:10]) > 0x7F:
        return Look.END
    size = window[6] << 21 | window[7] << 14 | window[8] << 7 | window[9]
    return 10 + size + (10 if window[5] & 0x10 else 0)


class Mp3Walker:
    """Tags, then frames. Recordings that were cut out of a stream begin in the middle of one."""

    def __init__(self) -> None:
        self._has_frames = False

    @property
    def has_length(self) -> bool:
        return False

    def step(self, window: bytes) -> Step:
        if window.startswith(b"ID3"):
            return id3_bytes(window)
        if len(window) < 4:
            return Look.MORE if window[:1] == b"\xff" or b"ID3".startswith(window) else Look.END
        size = mpeg_frame_bytes(window)
        if size:
            self._has_frames = True
            return size
        is_free = window[0] == 0xFF and window[1] & 0xE0 == 0xE0 and window[1] >> 1 & 3 and window[2] >> 4 == 0
        return Look.OPEN if is_free else Look.END

    def allows(self, kind: FileKind, window: bytes) -> bool:
        return self._has_frames and window[0] != 0xFF

    def resume(self, window: bytes) -> int | None:
        for found in _MPEG_SYNC.finditer(window):
            at = found.start()
            if two_mpeg_frames(window[at : at + _TWO_MPEG_HEADERS], final=False):  # or more has to arrive
                return at
        return len(window) - (window[-1:] == b"\xff")


_EBML, _SEGMENT, _CLUSTER, _VOID = 0x1A45DFA3, 0x18538067, 0x1F43B675, 0xEC
#: Further elements of a segment, and of its clusters.
_INSIDE: Final = frozenset(
    {0x114D9B74, 0x1549A966, 0x1654AE6B, 0x1C53BB6B, 0x1941A469, 0x1043A770, 0x1254C367, _CLUSTER, _VOID, 0xBF}
    | {0xE7, 0xA3, 0xA0, 0xA7, 0xAB, 0xAF, 0x5854}
)


class MatroskaWalker:
    """Elements of EBML. A segment and its clusters, which may have no length, are walked through inside."""

    def __init__(self) -> None:
        self._at = 0
        self._end: int | None = None
        self._has_segment = False

    @property
    def has_length(self) -> bool:
        return self._end is not None

    def step(self, window: bytes) -> Step:
        if self._has_segment and self._end is not None and self._at >= self._end:
            return Look.END
        if not window or len(window) < (width := _vint_bytes(window[0])):
            return Look.MORE
        name = int.from_bytes(window[:width], "big")
        if name not in _INSIDE and name not in (_EBML, _SEGMENT):
            return Look.END
        if len(window) <= width or len(window) < width + (more := _vint_bytes(window[width])):
            return Look.MORE
        value = int.from_bytes(window[width : width + more], "big") & (1 << 7 * more) - 1
        is_unknown = value == (1 << 7 * more) - 1
        step = width + more
        if name == _SEGMENT:
            self._has_segment = True
            self._end = None if is_unknown else self._at + step + value
        elif name != _CLUSTER:
            if is_unknown:
                return Look.OPEN
            step += value
        self._at += step
        return step

    def allows(self, kind: FileKind, window: bytes) -> bool:
        return self._has_segment and (kind is FileKind.MATROSKA or self._end is None or self._at >= self._end)

    def resume(self, window: bytes) -> int | None:
        if self._end is not None:
            return None
        found = window.find(b"\x1f\x43\xb6\x75")
        return max(0, len(window) - 3) if found < 0 else found


def _vint_bytes(first: int) -> int:
    """The length of a number of EBML by its first byte."""
    return 9 - first.bit_length()


WALKERS: Final[dict[FileKind, Callable[[], Walker]]] = {
    FileKind.WAV: WavWalker,
    FileKind.OGG: OggWalker,
    FileKind.FLAC: FlacWalker,
    FileKind.MP3: Mp3Walker,
    FileKind.MATROSKA: MatroskaWalker,
}
