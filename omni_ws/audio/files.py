"""Files one after the other in one stream: where each of them ends, and what stands behind it.

Clients send each half second as a WAV file of its own, or one recording after the other. ``FileCutter`` finds the
borders without decoding anything. A further kind of file takes a head in ``kind_of_head`` (``core/file_heads.py``), a
Walker (``file_walkers.py``), and a decoder.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from omni_ws.audio.file_walkers import WALKERS, FlacWalker, Walker
from omni_ws.audio.flac_frames import TAIL_BYTES, frame_ends
from omni_ws.core.file_heads import FIRST_BYTES, HEAD_BYTES, WINDOW_BYTES, FileKind, Look, kind_of_head

#: Tags behind a file: ID3v1, APEv2 (by its header), Lyrics3.
_TAGS = _ID3V1, _APE, _LYRICS = b"TAG", b"APETAGEX", b"LYRICSBEGIN"
_ID3V1_BYTES: Final = 128
_APE_HEAD_BYTES: Final = 32
_LYRICS_ENDS: Final = (b"LYRICS200", b"LYRICSEND")
_MAX_LYRICS_BYTES: Final = 1 << 16
#: What looks like a head within the frames of FLAC is looked at so often a file, and then no more: each look takes
#: milliseconds, and chance makes hardly any.
MAX_FLAC_LOOKS: Final = 16


@dataclass(frozen=True, slots=True)
class FileBegins:
    """A file begins; ``kind`` is None where no head says which, as in the middle of MP3."""

    kind: FileKind | None


@dataclass(frozen=True, slots=True)
class FileBytes:
    """The next bytes of the file."""

    data: bytes


@dataclass(frozen=True, slots=True)
class FileEnds:
    """The file has ended."""


@dataclass(frozen=True, slots=True)
class StrayBytes:
    """Behind the end of a file are bytes that are neither padding, nor a tag, nor another file."""


FileEvent: TypeAlias = FileBegins | FileBytes | FileEnds | StrayBytes


class FileCutter:
    """Cuts a stream into files. ``feed`` it chunk by chunk, then ``finish``.

    A file of which its container does not tell the length ends with the input, or where another begins with a chunk.
    ``named`` is the kind that the client says that the first file has.
    """

    def __init__(self, named: FileKind) -> None:
        self._named = named
        self._begun = False
        #: The walker of the current file; None between files.
        self._walker: Walker | None = None
        #: Where it begins in the stream.
        self._file_at = -1
        #: Bytes of the current element that are still to come.
        self._skip = 0
        #: The same of what is dropped between files.
        self._drop = 0
        #: Whether borders cannot be found any more, but where a chunk begins.
        self._is_open = False
        #: Whether damage in the file is passed over, and nothing good was found behind it.
        self._is_lost = False
        #: Whether stray bytes are passed over, which were told.
        self._is_astray = False
        self._told = False
        self._window = bytearray()
        #: Where in the stream the window begins, and where chunks do in it.
        self._at = 0
        self._chunks: deque[int] = deque()
        #: The end of FLAC's frames, and how often a head was looked for within them.
        self._tail = bytearray()
        self._looks = 0

    def feed(self, data: bytes, *, begins_chunk: bool = True) -> Iterator[FileEvent]:
        """Yield what ``data`` is, as far as that is known. ``begins_chunk``: a chunk of the client begins with it."""
        may_begin = begins_chunk and data[:1] in FIRST_BYTES and not (self._walker is None or self._walker.has_length)
        if not self._window and self._skip > len(data) and not may_begin:
            self._skip -= len(data)
            self._at += len(data)
            self._chunks.clear()
            yield FileBytes(data)
            return
        if begins_chunk:
            self._chunks.append(self._at + len(self._window))
        self._window += data
        yield from self._walk(final=False)

    def finish(self) -> Iterator[FileEvent]:
        """End the input, and the file with it."""
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

    # at a border

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
                yield FileBytes(self._take(len(self._window)))
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
            kind = named  # a long tag may stand before it, too
        if isinstance(kind, FileKind):
            yield from self._begin(kind)
            return True
        self._begun = True
        self._walker = WALKERS[named]()
        self._is_lost = named in (FileKind.MP3, FileKind.ADTS)
        self._is_open = not self._is_lost
        yield FileBegins(None)
        return True

    def _begin(self, kind: FileKind) -> Iterator[FileEvent]:
        self._begun = True
        self._walker, self._file_at = WALKERS[kind](), self._at
        self._is_open = self._is_lost = self._is_astray = False
        self._tail.clear()
        self._looks = 0
        yield FileBegins(kind)

    def _end_file(self) -> Iterator[FileEvent]:
        walker, self._walker = self._walker, None
        was_lost, self._is_open, self._is_lost = self._is_lost, False, False
        self._skip = 0
        if walker is None:
            return
        yield FileEnds()
        if was_lost or (isinstance(walker, FlacWalker) and _has_stray_bytes(bytes(self._tail))):
            yield from self._stray()
        self._tail.clear()

    def _stray(self) -> Iterator[FileEvent]:
        if not self._told:
            self._told = True
            yield StrayBytes()

    def _pass_element(self, *, final: bool) -> Generator[FileEvent, None, bool]:
        """Pass an element on, up to a new file that begins with a chunk where the file before has no length."""
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

    # where borders cannot be found

    def _pass(self, *, final: bool) -> Generator[FileEvent, None, bool]:
        """Pass bytes on up to a new file, or to where a damaged one goes on."""
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
        """Where new files may begin in ``window``."""
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
        yield FileBytes(data)


def _has_stray_bytes(tail: bytes) -> bool | None:
    """Whether other bytes than padding and tags follow the last frame of FLAC; None where no frame is whole."""
    ends = frame_ends(tail)
    if not ends:
        return None
    return not any((rest := tail[end:].lstrip(b"\0")) == b"" or rest.startswith(_TAGS) for end in ends)


def _padding_bytes(window: bytes, *, final: bool) -> int:
    """How many zeros at the beginning of ``window`` are padding: an MP4 file begins with some, too."""
    zeros = len(window) - len(window.lstrip(b"\0"))
    return next((at for at in range(max(0, zeros - 3), zeros) if kind_of_head(window[at:], final=final)), zeros)


def _tag_bytes(window: bytes, *, final: bool) -> int | Look | None:
    """The length of the tag that begins here, Look.MORE, or None for no tag."""
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
