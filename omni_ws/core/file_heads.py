"""Detects the kinds of audio and image files by their first bytes (their heads).

Sources: IBM/Microsoft, "Multimedia Programming Interface", and EBU Tech 3306 and ITU-R BS.2088 (RIFF, RF64, BW64);
RFC 3533 (Ogg); RFC 9639 (FLAC); ISO/IEC 11172-3, 2.4.2.3, and 13818-3 (MPEG audio); ISO/IEC 13818-7, 6.2 (ADTS);
id3.org (ID3v2); RFC 8794 (EBML); ISO/IEC 14496-12, 4.2 and 4.3 (MP4).
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Final, TypeAlias

from omni_ws.core.chunks import AudioEncoding


class FileKind(StrEnum):
    """The kinds of audio and video files that a stream may hold."""

    WAV = "wav"
    OGG = "ogg"
    FLAC = "flac"
    MP3 = "mp3"
    ADTS = "aac"
    MATROSKA = "matroska"
    ISO = "mp4"


class Look(Enum):
    """The reason why a file's bytes show neither its kind nor the end of its next element (a frame, a page, a box)."""

    MORE = "that depends on bytes that have not arrived"
    OPEN = "no border of this file can be found any more"
    END = "no further element of this file"


#: The length of an element in bytes, or the reason why there is no whole element.
Step: TypeAlias = int | Look

#: This many bytes suffice for all heads but those of MPEG audio and ADTS, and for what follows an ID3 tag.
HEAD_BYTES: Final = 12
#: The longest window that is examined: two frames of MPEG audio, or of ADTS.
WINDOW_BYTES: Final = 8192 + 16
#: The first four bytes of a RIFF file.
RIFF_MAGIC: Final = (b"RIFF", b"RF64", b"BW64")
_EBML_MAGIC: Final = b"\x1a\x45\xdf\xa3"
_MAGIC: Final = (*RIFF_MAGIC, b"OggS", b"fLaC", b"ID3", _EBML_MAGIC)
#: The first byte of each head, but for those of MPEG audio and ADTS frames.
FIRST_BYTES: Final = frozenset({b"\0", *(magic[:1] for magic in _MAGIC)})
#: The flag of an Ogg page that begins a stream.
BEGINS_STREAM: Final = 2
#: The type of the first box of an MP4 file, which lists brands of four bytes.
_FTYP: Final = b"ftyp"
_MAX_FTYP_BYTES: Final = 4096

_BIT_RATES: Final = {
    (3, 3): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (3, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (3, 1): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 3): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_SAMPLE_RATES: Final = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
#: The length of an ADTS frame header without its checksum, and the number of sampling rates that have an index.
_ADTS_HEADER_BYTES: Final = 7
_ADTS_RATES: Final = 13


#: The audio format of each kind of file.
ENCODINGS: Final = {
    FileKind.WAV: AudioEncoding.WAV,
    FileKind.OGG: AudioEncoding.OGG,
    FileKind.FLAC: AudioEncoding.FLAC,
    FileKind.MP3: AudioEncoding.MP3,
    FileKind.ADTS: AudioEncoding.AAC,
    FileKind.MATROSKA: AudioEncoding.WEBM,
    FileKind.ISO: AudioEncoding.MP4,
}


def encoding_by_head(data: bytes) -> AudioEncoding | None:
    """Return the audio format of a whole file by its head; None for an unknown head."""
    kind = kind_of_head(data, final=True)
    return ENCODINGS[kind] if isinstance(kind, FileKind) else None


def kind_of_head(window: bytes, *, final: bool) -> FileKind | Look | None:
    """Return the kind of the file that begins with ``window``; None if it is unknown.

    Returns Look.MORE if the kind depends on further bytes; not with ``final``, which means that none will come.
    """
    kind = _kind_of_head(window, final=final)
    return None if kind is Look.MORE and final else kind


def _kind_of_head(window: bytes, *, final: bool) -> FileKind | Look | None:
    magic = window[:4]
    if magic in RIFF_MAGIC:
        if len(window) < HEAD_BYTES:
            return Look.MORE if b"WAVE".startswith(window[8:]) else None
        return FileKind.WAV if window[8:12] == b"WAVE" else None
    if magic == b"OggS":
        if len(window) < 6:
            return Look.MORE
        return FileKind.OGG if window[4] == 0 and window[5] & BEGINS_STREAM else None
    if magic == b"fLaC":
        return FileKind.FLAC
    if magic == _EBML_MAGIC:
        return FileKind.MATROSKA
    if window[:1] == b"\0":
        return _iso(window)
    if magic[:3] == b"ID3":
        return _behind_tag(window, final=final)
    if window[:1] == b"\xff":
        is_adts = len(window) > 1 and window[1] & 0xF6 == 0xF0
        found = (two_adts_frames if is_adts else two_mpeg_frames)(window, final=final)
        return found if isinstance(found, Look) else ((FileKind.ADTS if is_adts else FileKind.MP3) if found else None)
    return Look.MORE if any(known.startswith(magic) for known in _MAGIC) else None


def _iso(window: bytes) -> FileKind | Look | None:
    size = int.from_bytes(window[:4].ljust(4, b"\0"), "big")
    if size > _MAX_FTYP_BYTES or not _FTYP.startswith(window[4:8]):
        return None
    if len(window) < 8:
        return Look.MORE
    return FileKind.ISO if size >= 16 else None


def _behind_tag(window: bytes, *, final: bool) -> FileKind | Look | None:
    """Return the kind of a file that begins with an ID3 tag, by the header that follows the tag.

    MP3 if that header lies beyond the window.
    """
    size = id3_bytes(window)
    if isinstance(size, Look):
        return None if size is Look.END else size
    if len(window) < size + _ADTS_HEADER_BYTES and size + _ADTS_HEADER_BYTES <= WINDOW_BYTES and not final:
        return Look.MORE
    behind = window[size : size + _ADTS_HEADER_BYTES]
    if behind.startswith(b"fLaC"):
        return FileKind.FLAC
    return FileKind.ADTS if adts_frame_bytes(behind) else FileKind.MP3


def mpeg_frame_bytes(window: bytes) -> int:
    """Return the length in bytes of the MPEG audio frame at the beginning of ``window``.

    0 if no frame begins there, or if the frame's header does not tell its length (free format).
    """
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
    """Return whether ``window`` begins with two MPEG audio frames: one header alone may occur in any data.

    Returns Look.MORE if that depends on further bytes. With ``final`` none will come, and one frame suffices if no
    header fits after it.
    """
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
    """Return the length in bytes of the ID3v2 tag with which ``window`` begins, by the tag's header of ten bytes.

    Look.MORE if the header is incomplete, Look.END if it is invalid.
    """
    if len(window) < 10:
        return Look.MORE
    if not 2 <= window[3] <= 4 or window[4] == 0xFF or max(window[6:10]) > 0x7F:
        return Look.END
    size = window[6] << 21 | window[7] << 14 | window[8] << 7 | window[9]
    return 10 + size + (10 if window[5] & 0x10 else 0)


def without_head(data: bytes, encoding: AudioEncoding) -> bytes:
    """Return the first bytes of a stream that this server encodes without what precedes its sound.

    The rest goes on another stream of the same format. ``data`` has the whole head. AAC has none, and Ogg streams may
    follow one another.
    """
    match encoding:
        case AudioEncoding.WAV:
            return data[data.index(b"data") + 8 :]
        case AudioEncoding.FLAC:
            begin, is_last = len(b"fLaC"), False
            while not is_last:
                is_last = data[begin] >= 0x80
                begin += 4 + int.from_bytes(data[begin + 1 : begin + 4])
            return data[begin:]
        case AudioEncoding.MP3:
            tag = id3_bytes(data) if data.startswith(b"ID3") else 0
            return data[tag:] if isinstance(tag, int) else data
        case _:
            return data


def adts_frame_bytes(window: bytes) -> int:
    """Return the length in bytes of the ADTS frame at the beginning of ``window``; 0 if no frame begins there."""
    if len(window) < _ADTS_HEADER_BYTES or window[0] != 0xFF or window[1] & 0xF6 != 0xF0:
        return 0
    size = (window[3] & 3) << 11 | window[4] << 3 | window[5] >> 5
    header = _ADTS_HEADER_BYTES if window[1] & 1 else _ADTS_HEADER_BYTES + 2
    return size if size > header and window[2] >> 2 & 15 < _ADTS_RATES else 0


def two_adts_frames(window: bytes, *, final: bool) -> bool | Look:
    """Return whether ``window`` begins with two ADTS frames; see ``two_mpeg_frames``."""
    if len(window) < _ADTS_HEADER_BYTES:
        return False if final else Look.MORE
    size = adts_frame_bytes(window)
    if not size:
        return False
    behind = window[size : size + _ADTS_HEADER_BYTES]
    if len(behind) < _ADTS_HEADER_BYTES:
        return len(window) >= size if final else Look.MORE
    return adts_frame_bytes(behind) > 0 and (behind[2] ^ window[2]) & 0xFC == 0


def sniff_image(data: bytes) -> str | None:
    """Return the media type of an image by its signature (12 bytes suffice); None if it is unknown."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    # Two bytes of signature are weak evidence; the reserved field of the header, which is zero, makes it safe.
    if data.startswith(b"BM") and data[6:10] == b"\0\0\0\0":
        return "image/bmp"
    return None
