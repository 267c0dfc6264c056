"""Walkers: where the elements of a file end (chunks, pages, frames), by kind of file, without decoding them.

Sources: IBM/Microsoft, "Multimedia Programming Interface", and EBU Tech 3306 (RIFF, RF64); RFC 3533 (Ogg); RFC 9639
(FLAC); ISO/IEC 11172-3, 2.4.2.3, and 13818-3 (MPEG audio); ISO/IEC 13818-7, 6.2 (ADTS); id3.org (ID3v2); RFC 8794 and
RFC 9559 (EBML, Matroska); ISO/IEC 14496-12, 4.2, and Apple, "QuickTime File Format" (MP4, MOV).
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable
from typing import Final, Protocol

from omni_ws.core.file_heads import (
    BEGINS_STREAM,
    FileKind,
    Look,
    Step,
    adts_frame_bytes,
    id3_bytes,
    mpeg_frame_bytes,
    two_adts_frames,
    two_mpeg_frames,
)


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
    rb"fLaC[\x00\x80]\x00\x00\x22|OggS\x00[\x02\x06]|(?:RIFF|RF64|BW64)....WAVE|\x1a\x45\xdf\xa3|ID3[\x02-\x04]\x00"
    rb"|\x00\x00[\x00-\x0f].ftyp",
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


class _FrameWalker(abc.ABC):
    """Tags, then frames. Recordings that were cut out of a stream begin in the middle of one."""

    #: The format, the bytes of a frame's header, its first two bytes, and the longest frame with the next header.
    kind: FileKind
    header_bytes: int
    sync: re.Pattern[bytes]
    two_headers: int

    def __init__(self) -> None:
        self._has_frames = False

    @property
    def has_length(self) -> bool:
        return False

    @abc.abstractmethod
    def _frame_bytes(self, window: bytes) -> int:
        """The length of the frame that begins here; 0 where none does."""

    @abc.abstractmethod
    def _two_frames(self, window: bytes) -> bool | Look:
        """Whether a frame and the header of another begin here, or may once more has arrived."""

    def _without_frame(self, window: bytes) -> Look:
        """What it is where no frame begins."""
        return Look.END

    def step(self, window: bytes) -> Step:
        if window.startswith(b"ID3"):
            return id3_bytes(window)
        if len(window) < self.header_bytes:
            return Look.MORE if window[:1] == b"\xff" or b"ID3".startswith(window) else Look.END
        if not (size := self._frame_bytes(window)):
            return self._without_frame(window)
        self._has_frames = True
        return size

    def allows(self, kind: FileKind, window: bytes) -> bool:
        return self._has_frames and (kind is not self.kind or window[0] != 0xFF)

    def resume(self, window: bytes) -> int | None:
        for found in self.sync.finditer(window):
            at = found.start()
            if self._two_frames(window[at : at + self.two_headers]):
                return at
        return len(window) - (window[-1:] == b"\xff")


class Mp3Walker(_FrameWalker):
    """MPEG audio."""

    kind = FileKind.MP3
    header_bytes = 4
    sync = re.compile(rb"\xff[\xe2-\xff]")
    two_headers = 2881 + 4  # 160 kbit/s at 8 kHz, with padding

    def _frame_bytes(self, window: bytes) -> int:
        return mpeg_frame_bytes(window)

    def _two_frames(self, window: bytes) -> bool | Look:
        return two_mpeg_frames(window, final=False)

    def _without_frame(self, window: bytes) -> Look:
        is_free = window[0] == 0xFF and window[1] & 0xE0 == 0xE0 and window[1] >> 1 & 3 and window[2] >> 4 == 0
        return Look.OPEN if is_free else Look.END


class AdtsWalker(_FrameWalker):
    """AAC in ADTS."""

    kind = FileKind.ADTS
    header_bytes = 7
    sync = re.compile(rb"\xff[\xf0\xf1\xf8\xf9]")
    two_headers = (1 << 13) + 7

    def _frame_bytes(self, window: bytes) -> int:
        return adts_frame_bytes(window)

    def _two_frames(self, window: bytes) -> bool | Look:
        return two_adts_frames(window, final=False)


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


#: Boxes that stand side by side in a file; any other that begins before there is sound is passed over, too.
_BOXES: Final = frozenset(
    {b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"free", b"skip", b"wide", b"uuid", b"mfra", b"sidx", b"ssix"}
    | {b"meta", b"emsg", b"prft", b"pnot", b"udta", b"PICT", b"pdin", b"imda"}
)
_BOX_NAME: Final = re.compile(rb"[ -~\xa9]{4}")


class IsoWalker:
    """Boxes. A file has an index (``moov``) and media data; one that browsers record goes on with fragments."""

    def __init__(self) -> None:
        self._has_index = False
        self._has_media = False
        self._is_fragmented = False
        self._is_endless = False

    @property
    def has_length(self) -> bool:
        return not (self._is_fragmented or self._is_endless)

    @property
    def _is_whole(self) -> bool:
        return self._has_index and self._has_media

    def step(self, window: bytes) -> Step:
        if self._is_endless:
            return Look.OPEN
        if len(window) < 8:
            return Look.MORE
        size, name = int.from_bytes(window[:4], "big"), window[4:8]
        if name not in _BOXES and (self._is_whole or not _BOX_NAME.fullmatch(name)):
            return Look.END
        if size == 1:
            if len(window) < 16:
                return Look.MORE
            size = int.from_bytes(window[8:16], "big")
        if size == 0 and name == b"mdat":
            self._is_endless = self._has_media = True
            return 8
        if size < 8:
            return Look.END
        self._has_index |= name == b"moov"
        self._is_fragmented |= name == b"moof"
        self._has_media |= name == b"mdat"
        return size

    def allows(self, kind: FileKind, window: bytes) -> bool:
        return self._is_whole

    def resume(self, window: bytes) -> int | None:
        return None


WALKERS: Final[dict[FileKind, Callable[[], Walker]]] = {
    FileKind.WAV: WavWalker,
    FileKind.OGG: OggWalker,
    FileKind.FLAC: FlacWalker,
    FileKind.MP3: Mp3Walker,
    FileKind.ADTS: AdtsWalker,
    FileKind.MATROSKA: MatroskaWalker,
    FileKind.ISO: IsoWalker,
}
