"""FileCutter: finds the borders between audio files that follow one another in a stream, without decoding.

Some clients send each half second as a WAV file of its own, or one recording after the other. To support a further kind
of file, add its first bytes to ``kind_of_head`` (``core/file_heads.py``), a Walker, and a decoder.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from enum import Enum, auto
from functools import partial
from typing import Final, TypeAlias

from omni_ws.core.file_heads import (
    BEGINS_STREAM,
    FIRST_BYTES,
    HEAD_BYTES,
    WINDOW_BYTES,
    FileKind,
    Look,
    Step,
    adts_frame_bytes,
    id3_bytes,
    kind_of_head,
    mpeg_frame_bytes,
    two_adts_frames,
    two_mpeg_frames,
)

#: The signatures of tags after a file: ID3v1, APEv2 (by its header), Lyrics3.
_TAGS = _ID3V1, _APE, _LYRICS = b"TAG", b"APETAGEX", b"LYRICSBEGIN"
_ID3V1_BYTES: Final = 128
_APE_HEAD_BYTES: Final = 32
_LYRICS_ENDS: Final = (b"LYRICS200", b"LYRICSEND")
_MAX_LYRICS_BYTES: Final = 1 << 16
#: The most candidates for the head of a new file that are examined within the frames of one FLAC file. Each takes
#: milliseconds, and they hardly ever occur by chance.
MAX_FLAC_LOOKS: Final = 16


class FileMark(Enum):
    """An event in a stream of files; the other events are a FileKind and bytes, see FileEvent."""

    #: A file of unknown kind begins, such as the middle of an MP3 file.
    BEGINS = auto()
    ENDS = auto()
    #: After the end of a file come bytes that are neither padding, nor a tag, nor another file.
    STRAY = auto()


#: A FileKind: a file of that kind begins. Bytes: the next bytes of the current file.
FileEvent: TypeAlias = FileKind | FileMark | bytes


class FileCutter:
    """Cuts a stream into files. Call ``feed`` for each piece, then ``finish``.

    A file ends behind its last element, or at the head of another file that follows an element. A file whose container
    does not give its length also ends before a chunk of the client that begins with the head of another file.
    ``named`` is the kind of the first file according to the client.
    """

    def __init__(self, named: FileKind) -> None:
        self._named = named
        self._begun = False
        #: The walker of the current file; None between files.
        self._walker: Walker | None = None
        #: The offset of the current file in the stream.
        self._file_at = -1
        #: The bytes of the current element (chunk, page, frame …) that are still to come.
        self._skip = 0
        #: The bytes between two files, for example of a tag, that are still to be dropped.
        self._drop = 0
        #: Whether the current file has no more borders that can be found: only the beginning of a chunk can end it.
        self._is_open = False
        #: Whether the current file is damaged, and no whole element was found after the damage yet.
        self._is_lost = False
        #: Whether the next bytes are stray: they are dropped up to the head of the next file.
        self._is_astray = False
        #: Whether FileMark.STRAY was reported, which happens once.
        self._told = False
        self._window = bytearray()
        #: The offset of the window in the stream, and the offsets of the client's chunks that begin in the window.
        self._at = 0
        self._chunks: deque[int] = deque()
        #: The last bytes of FLAC frames, and how often a head was looked for within the frames of this file.
        self._tail = bytearray()
        self._looks = 0

    def feed(self, data: bytes, *, begins_chunk: bool = True) -> Iterator[FileEvent]:
        """Yield the events that ``data`` completes. ``begins_chunk``: ``data`` is the start of a client's chunk."""
        may_begin = begins_chunk and data[:1] in FIRST_BYTES and not (self._walker is None or self._walker.has_length)
        if not self._window and self._skip > len(data) and not may_begin:
            self._skip -= len(data)
            self._at += len(data)
            self._chunks.clear()
            yield data
            return
        if begins_chunk:
            self._chunks.append(self._at + len(self._window))
        self._window += data
        yield from self._walk(final=False)

    def finish(self) -> Iterator[FileEvent]:
        """End the input and with it the current file; yield the last events."""
        yield from self._walk(final=True)
        yield from self._end_file()

    def _walk(self, *, final: bool) -> Iterator[FileEvent]:
        more = True
        while more and self._window:
            before = len(self._window)
            if self._drop:
                self._drop -= len(self._take(min(self._drop, before)))
            elif self._skip:
                more = yield from self._pass_element(final=final)
            elif self._is_open or self._is_lost or self._is_astray:
                more = yield from self._pass(final=final)
            elif self._walker is None:
                more = yield from self._between(final=final)
            else:
                more = yield from self._step(self._walker, final=final)

    def _take(self, size: int) -> bytes:
        taken = bytes(self._window[:size])
        del self._window[:size]
        self._at += size
        while self._chunks and self._chunks[0] < self._at:
            self._chunks.popleft()
        return taken

    # At a border between elements

    def _step(self, walker: Walker, *, final: bool) -> Generator[FileEvent, None, bool]:
        window = bytes(self._window[:WINDOW_BYTES])
        kind = kind_of_head(window, final=final)
        if isinstance(kind, FileKind) and walker.allows(kind, window):
            yield from self._end_file()
            return True
        step = walker.step(window)
        match step:
            case Look.MORE:
                if not final:
                    return False
                yield self._take(len(self._window))
            case Look.OPEN:
                self._is_open = True
            case Look.END:
                if kind is Look.MORE or (not final and any(tag.startswith(window) for tag in _TAGS)):
                    return False
                yield from self._end_or_lose(walker, window)
            case _:
                self._skip = step
        return True

    def _end_or_lose(self, walker: Walker, window: bytes) -> Iterator[FileEvent]:
        if walker.resume(window) is None or window.startswith((b"\0", *_TAGS)):
            yield from self._end_file()
        else:
            self._is_lost = True

    def _between(self, *, final: bool) -> Generator[FileEvent, None, bool]:
        window = bytes(self._window[:WINDOW_BYTES])
        if not self._begun:
            return (yield from self._begin_first(window, final=final))
        kind = kind_of_head(window, final=final)
        if not isinstance(kind, FileKind) and (zeros := _padding_bytes(window, final=final)):
            self._take(zeros)
            return True
        if isinstance(kind, FileKind):
            yield from self._begin(kind)
            return True
        if kind is Look.MORE:
            return False
        tag = _tag_bytes(bytes(self._window[:_MAX_LYRICS_BYTES]), final=final)
        if tag is Look.MORE:
            return False
        if isinstance(tag, int):
            self._drop = tag
            return True
        yield from self._stray()
        self._is_astray = True
        self._take(1)
        return True

    def _begin_first(self, window: bytes, *, final: bool) -> Generator[FileEvent, None, bool]:
        named = self._named
        # A stream of MP3 may begin with any of its frames, or within one.
        is_mpeg = named is FileKind.MP3 and window[0] == 0xFF and not (len(window) > 1 and window[1] & 0xF6 == 0xF0)
        kind = named if is_mpeg else kind_of_head(window, final=final)
        if kind is Look.MORE:
            return False
        if kind is FileKind.MP3 and named in (FileKind.FLAC, FileKind.ADTS) and window[0] != 0xFF:
            kind = named  # a long tag may precede the first frame, too
        if isinstance(kind, FileKind):
            yield from self._begin(kind)
            return True
        self._begun = True
        self._walker = WALKERS[named]()
        self._is_lost = named in (FileKind.MP3, FileKind.ADTS)
        self._is_open = not self._is_lost
        yield FileMark.BEGINS
        return True

    def _begin(self, kind: FileKind) -> Iterator[FileEvent]:
        self._begun = True
        self._walker, self._file_at = WALKERS[kind](), self._at
        self._is_open = self._is_lost = self._is_astray = False
        self._tail.clear()
        self._looks = 0
        yield kind

    def _end_file(self) -> Iterator[FileEvent]:
        walker, self._walker = self._walker, None
        was_lost, self._is_open, self._is_lost = self._is_lost, False, False
        self._skip = 0
        if walker is None:
            return
        yield FileMark.ENDS
        if was_lost or (isinstance(walker, FlacWalker) and _has_stray_bytes(bytes(self._tail))):
            yield from self._stray()
        self._tail.clear()

    def _stray(self) -> Iterator[FileEvent]:
        if not self._told:
            self._told = True
            yield FileMark.STRAY

    def _pass_element(self, *, final: bool) -> Generator[FileEvent, None, bool]:
        """Pass on the rest of an element; return whether to continue with the next step.

        In a file of unknown length, stop before a chunk of the client that begins with the head of a file.
        """
        size, walker = min(self._skip, len(self._window)), self._walker
        if walker is not None and not walker.has_length:
            for at in [chunk - self._at for chunk in self._chunks if self._file_at < chunk < self._at + size]:
                head = bytes(self._window[at : at + WINDOW_BYTES])
                if head[:1] not in FIRST_BYTES:
                    continue
                kind = kind_of_head(head, final=final)
                if isinstance(kind, FileKind) and walker.allows(kind, head):
                    yield from self._pass_on(at)
                    yield from self._end_file()
                    yield from self._begin(kind)
                    return True
                if kind is Look.MORE:
                    self._skip -= at
                    yield from self._pass_on(at)
                    return False
        self._skip -= size
        yield from self._pass_on(size)
        return True

    # Within data that has no borders

    def _pass(self, *, final: bool) -> Generator[FileEvent, None, bool]:
        """Pass bytes on up to the head of a new file, or to the point at which a damaged file resumes.

        Return whether to continue with the next step.
        """
        window, walker = bytes(self._window), self._walker
        in_frames = isinstance(walker, FlacWalker)
        goes_on = walker.resume(window) if self._is_lost and walker is not None else None
        end = len(window) if goes_on is None else goes_on
        for at in self._candidates(window):
            if at > end:
                break
            kind = kind_of_head(window[at : at + WINDOW_BYTES], final=final)
            if kind is Look.MORE:
                yield from self._pass_on(at)
                return False
            if isinstance(kind, FileKind) and self._may_begin(at, window):
                yield from self._pass_on(at)
                yield from self._end_file()
                yield from self._begin(kind)
                return True
        if goes_on is not None and goes_on < len(window) and not final:
            yield from self._pass_on(goes_on)
            if walker is not None and isinstance(step := walker.step(bytes(self._window[:WINDOW_BYTES])), int):
                self._is_lost, self._skip = False, step
                return True
            return False
        kept = 0 if final or not in_frames else min(len(window), HEAD_BYTES - 1)
        yield from self._pass_on(len(window) - kept)
        return False

    def _candidates(self, window: bytes) -> list[int]:
        """Return the offsets in ``window`` at which new files may begin."""
        begun = {chunk - self._at for chunk in self._chunks}
        if isinstance(self._walker, FlacWalker):
            begun.update(FlacWalker.heads(window))
        return sorted(at for at in begun if self._at + at > self._file_at)

    def _may_begin(self, at: int, window: bytes) -> bool:
        if not isinstance(self._walker, FlacWalker) or self._at + at in self._chunks:
            return True
        self._looks += 1
        if self._looks > MAX_FLAC_LOOKS:
            return False
        return _has_stray_bytes(bytes(self._tail + window[:at])[-TAIL_BYTES:]) is False

    def _pass_on(self, size: int) -> Iterator[FileEvent]:
        if size <= 0:
            return
        data = self._take(size)
        if self._is_astray:
            return
        if isinstance(self._walker, FlacWalker):
            self._tail += data
            del self._tail[:-TAIL_BYTES]
        yield data


def _has_stray_bytes(tail: bytes) -> bool | None:
    """Return whether ``tail`` has more than padding and tags after its last whole FLAC frame; None without a frame."""
    ends = frame_ends(tail)
    if not ends:
        return None
    return not any((rest := tail[end:].lstrip(b"\0")) == b"" or rest.startswith(_TAGS) for end in ends)


def _padding_bytes(window: bytes, *, final: bool) -> int:
    """Return how many zeros at the beginning of ``window`` are padding, not the zeros that begin an MP4 file."""
    zeros = len(window) - len(window.lstrip(b"\0"))
    return next((at for at in range(max(0, zeros - 3), zeros) if kind_of_head(window[at:], final=final)), zeros)


def _tag_bytes(window: bytes, *, final: bool) -> int | Look | None:
    """Return the length of the tag with which ``window`` begins; None without a tag; Look.MORE to see more bytes."""
    if window.startswith(_ID3V1):
        return _ID3V1_BYTES
    if window.startswith(_APE):
        if len(window) < 16:
            return len(window) if final else Look.MORE
        return _APE_HEAD_BYTES + int.from_bytes(window[12:16], "little")
    if window.startswith(_LYRICS):
        ends = [found + len(end) for end in _LYRICS_ENDS if (found := window.find(end)) > 0]
        if ends:
            return min(ends)
        return Look.MORE if len(window) < _MAX_LYRICS_BYTES and not final else len(window)
    if not final and any(tag.startswith(window) for tag in _TAGS):
        return Look.MORE
    return None


# The walkers: where the elements of a file end (chunks, pages, frames), by kind of file
#
# Sources: IBM/Microsoft, "Multimedia Programming Interface", and EBU Tech 3306 (RIFF, RF64); RFC 3533 (Ogg); RFC 9639
# (FLAC); ISO/IEC 11172-3, 2.4.2.3, and 13818-3 (MPEG audio); ISO/IEC 13818-7, 6.2 (ADTS); id3.org (ID3v2); RFC 8794 and
# RFC 9559 (EBML, Matroska); ISO/IEC 14496-12, 4.2, and Apple, "QuickTime File Format" (MP4, MOV).


class Walker(ABC):
    """Finds the elements (chunks, pages, frames) of one file, one by one. ``window`` begins where an element does."""

    @property
    def has_length(self) -> bool:
        """Whether the file gives its length. If not, it ends before a chunk that begins with the head of a file."""
        return False

    @abstractmethod
    def step(self, window: bytes) -> Step:
        """Move past the next element and return its length; if there is no whole one, return why (Look)."""

    @abstractmethod
    def allows(self, kind: FileKind, window: bytes) -> bool:
        """Return whether a new file begins with ``window``, which looks like the head of a file of this kind."""

    def resume(self, window: bytes) -> int | None:
        """Return the offset in ``window`` at which the file may continue after damage; None if the damage ends it."""
        return None


_RIFF_HEAD_BYTES: Final = 12
_MAX_SIZE: Final = 0xFFFFFFFF
#: Sizes from this one on (18 hours of speech) count as unknown: a writer of a stream cannot know its length, and writes
#: 0 or the largest number that fits.
_ENDLESS_BYTES: Final = 0x7FFF_F000
_MAX_DS64_BYTES: Final = 4096
#: The chunks that writers append to the samples, even beyond the size of the RIFF chunk.
_TRAILING_CHUNKS: Final = frozenset(
    {b"LIST", b"id3 ", b"ID3 ", b"bext", b"iXML", b"cue ", b"smpl", b"inst", b"fact", b"JUNK", b"junk", b"PAD "}
    | {b"FLLR", b"PEAK", b"DISP", b"_PMX", b"axml", b"acid", b"plst", b"labl", b"note", b"afsp", b"SAUR"}
)


class WavWalker(Walker):
    """Walks through the RIFF chunks of a WAV file. Samples of unknown length extend to the end of the input."""

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
        # A file without samples may be followed by another file.
        return kind is FileKind.WAV if self._is_endless else self._has_samples


_PAGE_HEAD_BYTES: Final = 27
_ENDS_STREAM: Final = 4


class OggWalker(Walker):
    """Walks through Ogg pages. The file ends with its last stream, or before a page that begins new streams."""

    def __init__(self) -> None:
        self._open: set[bytes] = set()
        self._has_data = False
        self._has_ended = False

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


#: Heads that do not occur in FLAC frames by chance.
_HEADS_IN_FLAC: Final = re.compile(
    rb"fLaC[\x00\x80]\x00\x00\x22|OggS\x00[\x02\x06]|(?:RIFF|RF64|BW64)....WAVE|\x1a\x45\xdf\xa3|ID3[\x02-\x04]\x00"
    rb"|\x00\x00[\x00-\x0f].ftyp",
    re.DOTALL,
)


class FlacWalker(Walker):
    """Walks through FLAC: metadata, then frames without a length. The file ends where the head of another follows."""

    def __init__(self) -> None:
        self._begun = False
        self._has_metadata = False

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

    @staticmethod
    def heads(window: bytes) -> list[int]:
        return [found.start() for found in _HEADS_IN_FLAC.finditer(window)]


class FrameWalker(Walker):
    """Walks through the tags and frames of MP3 or ADTS. A recording of a stream may begin in the middle of a frame."""

    def __init__(
        self,
        kind: FileKind,
        *,
        header_bytes: int,
        sync: re.Pattern[bytes],
        two_headers: int,
        frame_bytes: Callable[[bytes], int],
        two_frames: Callable[..., bool | Look],
    ) -> None:
        """Set the parameters of the format.

        ``sync`` matches the first two bytes of a frame header, which has ``header_bytes`` bytes.

        ``two_headers`` is the length of the longest frame plus the next header; ``frame_bytes`` returns the length of
        the frame with which a window begins, 0 for none; ``two_frames`` returns whether a window begins with two.
        """
        self._kind = kind
        self._header_bytes = header_bytes
        self._sync = sync
        self._two_headers = two_headers
        self._frame_bytes = frame_bytes
        self._two_frames = two_frames
        self._has_frames = False

    def step(self, window: bytes) -> Step:
        if window.startswith(b"ID3"):
            return id3_bytes(window)
        if len(window) < self._header_bytes:
            return Look.MORE if window[:1] == b"\xff" or b"ID3".startswith(window) else Look.END
        if size := self._frame_bytes(window):
            self._has_frames = True
            return size
        return Look.OPEN if self._kind is FileKind.MP3 and _has_free_bit_rate(window) else Look.END

    def allows(self, kind: FileKind, window: bytes) -> bool:
        return self._has_frames and (kind is not self._kind or window[0] != 0xFF)

    def resume(self, window: bytes) -> int | None:
        for found in self._sync.finditer(window):
            at = found.start()
            if self._two_frames(window[at : at + self._two_headers], final=False):
                return at
        return len(window) - (window[-1:] == b"\xff")


def _has_free_bit_rate(window: bytes) -> bool:
    """Return whether ``window`` begins with an MPEG audio frame whose header gives no bit rate, and so no length."""
    return window[0] == 0xFF and window[1] & 0xE0 == 0xE0 and bool(window[1] >> 1 & 3) and window[2] >> 4 == 0


_mp3_walker: Final = partial(
    FrameWalker,
    FileKind.MP3,
    header_bytes=4,
    sync=re.compile(rb"\xff[\xe2-\xff]"),
    two_headers=2881 + 4,  # 160 kbit/s at 8 kHz, with padding
    frame_bytes=mpeg_frame_bytes,
    two_frames=two_mpeg_frames,
)
_adts_walker: Final = partial(
    FrameWalker,
    FileKind.ADTS,
    header_bytes=7,
    sync=re.compile(rb"\xff[\xf0\xf1\xf8\xf9]"),
    two_headers=(1 << 13) + 7,
    frame_bytes=adts_frame_bytes,
    two_frames=two_adts_frames,
)


_EBML, _SEGMENT, _CLUSTER, _VOID = 0x1A45DFA3, 0x18538067, 0x1F43B675, 0xEC
#: The other elements in a segment and in its clusters.
_INSIDE: Final = frozenset(
    {0x114D9B74, 0x1549A966, 0x1654AE6B, 0x1C53BB6B, 0x1941A469, 0x1043A770, 0x1254C367, _CLUSTER, _VOID, 0xBF}
    | {0xE7, 0xA3, 0xA0, 0xA7, 0xAB, 0xAF, 0x5854}
)


class MatroskaWalker(Walker):
    """Walks through EBML elements. It enters segments and clusters, which may have no length."""

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
    """Return the length of an EBML number by its first byte."""
    return 9 - first.bit_length()


#: The boxes at the top level of a file. Before any media data, unknown boxes are skipped, too.
_BOXES: Final = frozenset(
    {b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"free", b"skip", b"wide", b"uuid", b"mfra", b"sidx", b"ssix"}
    | {b"meta", b"emsg", b"prft", b"pnot", b"udta", b"PICT", b"pdin", b"imda"}
)
_BOX_NAME: Final = re.compile(rb"[ -~\xa9]{4}")


class IsoWalker(Walker):
    """Walks through MP4 boxes. A file has an index (``moov``) and media data; recordings of browsers have fragments."""

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


WALKERS: Final[dict[FileKind, Callable[[], Walker]]] = {
    FileKind.WAV: WavWalker,
    FileKind.OGG: OggWalker,
    FileKind.FLAC: FlacWalker,
    FileKind.MP3: _mp3_walker,
    FileKind.ADTS: _adts_walker,
    FileKind.MATROSKA: MatroskaWalker,
    FileKind.ISO: IsoWalker,
}


# Frames of FLAC, which have no length (RFC 9639, 9.1 and 9.3)

#: The bytes in which the last frame is looked for: a frame of 4,608 samples in stereo has 18 KB.
TAIL_BYTES: Final = 1 << 16
_FLAC_SYNC: Final = re.compile(rb"\xff[\xf8\xf9]")
#: The shortest frame: a header of six bytes, a constant subframe of two, the checksum.
_MIN_FLAC_FRAME_BYTES: Final = 10


def _checksums(polynomial: int, bits: int) -> list[int]:
    """Return the table for a cyclic redundancy check, by byte."""
    top, mask = 1 << (bits - 1), (1 << bits) - 1
    table = []
    for byte in range(256):
        value = byte << (bits - 8)
        for _ in range(8):
            value = (value << 1 ^ polynomial) & mask if value & top else value << 1
        table.append(value)
    return table


_CRC8: Final = _checksums(0x07, 8)
_CRC16: Final = _checksums(0x8005, 16)


def _has_flac_header(data: bytes) -> bool:
    """Return whether ``data`` begins with a FLAC frame: with a header whose checksum is valid."""
    if len(data) < 6 or data[2] >> 4 == 0 or data[2] & 0x0F == 0x0F or data[3] >> 4 > 10 or data[3] & 1:
        return False
    number = 1 if data[4] < 0x80 else 8 - (~data[4] & 0xFF).bit_length()
    size = 4 + max(1, number) + {6: 1, 7: 2}.get(data[2] >> 4, 0) + {12: 1, 13: 2, 14: 2}.get(data[2] & 0x0F, 0)
    if len(data) <= size:
        return False
    checksum = 0
    for byte in data[:size]:
        checksum = _CRC8[checksum ^ byte]
    return checksum == data[size]


def frame_ends(tail: bytes) -> list[int]:
    """Return the offsets at which the last frame in ``tail`` may end: those with a valid checksum before them."""
    syncs = [found.start() for found in _FLAC_SYNC.finditer(tail)]
    starts = [start for start in syncs if _has_flac_header(tail[start : start + 20])]
    if not starts:
        return []
    ends: list[int] = []
    checksum = 0
    for position, byte in enumerate(tail[starts[-1] :], starts[-1] + 1):
        checksum = (checksum << 8 & 0xFFFF) ^ _CRC16[checksum >> 8 ^ byte]
        if checksum == 0 and position - starts[-1] >= _MIN_FLAC_FRAME_BYTES:
            ends.append(position)
    return ends
