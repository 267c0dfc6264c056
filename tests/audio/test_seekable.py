from __future__ import annotations

import struct

import pytest

from omni_ws.audio.container import BufferedFile, Mp4Boxes, Mp4Order
from omni_ws.errors import UnsupportedFormat


def box(kind: bytes, size: int = 24) -> bytes:
    return struct.pack(">I4s", size, kind) + bytes(size - 8)


def wide_box(kind: bytes, size: int = 24) -> bytes:
    return struct.pack(">I4sQ", 1, kind, size) + bytes(size - 16)


@pytest.mark.parametrize(
    ("data", "order"),
    [
        (b"", Mp4Order.UNKNOWN),
        (box(b"ftyp"), Mp4Order.UNKNOWN),
        (box(b"ftyp") + box(b"moov"), Mp4Order.STREAM),
        (box(b"ftyp") + box(b"free") + box(b"mdat"), Mp4Order.INDEX_LAST),
        (wide_box(b"ftyp") + box(b"moof"), Mp4Order.STREAM),
        (box(b"ftyp") + struct.pack(">I4sQ", 0, b"mdat", 0), Mp4Order.INDEX_LAST),
        (box(b"ftyp") + struct.pack(">I4s", 1000, b"free") + bytes(500), Mp4Order.UNKNOWN),
    ],
)
def test_order(data: bytes, order: Mp4Order) -> None:
    assert Mp4Boxes().order(memoryview(data)) is order


@pytest.mark.parametrize("size", [0, 7])
def test_a_box_of_no_size_is_damage(size: int) -> None:
    with pytest.raises(UnsupportedFormat):
        Mp4Boxes().order(memoryview(struct.pack(">I4s", size, b"free") + bytes(20)))


def test_a_file_is_kept_up_to_its_limit() -> None:
    file = BufferedFile(10)
    file.append(b"12345")
    file.append(b"67890")
    assert bytes(file.view()) == b"1234567890"
    with pytest.raises(UnsupportedFormat, match="10 bytes"):
        file.append(b"x")
    assert file.seekable().read() == b"1234567890"
    assert file.take() == b""
