"""Frames of FLAC, which have no length: where the last one of some bytes may end (RFC 9639, 9.1 and 9.3)."""

from __future__ import annotations

import re
from typing import Final

#: No frame is looked for further back: 18 KB hold one of 4,608 samples in stereo.
TAIL_BYTES: Final = 1 << 16

_SYNC: Final = re.compile(rb"\xff[\xf8\xf9]")
#: The shortest frame: a header of six bytes, a constant subframe of two, the checksum.
_MIN_FRAME_BYTES: Final = 10


def _table(polynomial: int, bits: int) -> list[int]:
    top, mask = 1 << (bits - 1), (1 << bits) - 1
    table = []
    for byte in range(256):
        value = byte << (bits - 8)
        for _ in range(8):
            value = (value << 1 ^ polynomial) & mask if value & top else value << 1
        table.append(value)
    return table


_CRC8: Final = _table(0x07, 8)
_CRC16: Final = _table(0x8005, 16)


def _has_header(data: bytes) -> bool:
    """Whether a frame begins here: only a header that is right has the checksum at its end."""
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
    """Return where the last frame in ``tail`` may end: its checksum is right there, once in 65,536 by chance."""
    starts = [found.start() for found in _SYNC.finditer(tail) if _has_header(tail[found.start() : found.start() + 20])]
    if not starts:
        return []
    ends: list[int] = []
    checksum = 0
    for position, byte in enumerate(tail[starts[-1] :], starts[-1] + 1):
        checksum = (checksum << 8 & 0xFFFF) ^ _CRC16[checksum >> 8 ^ byte]
        if checksum == 0 and position - starts[-1] >= _MIN_FRAME_BYTES:
            ends.append(position)
    return ends
