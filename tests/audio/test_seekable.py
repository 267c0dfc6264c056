from __future__ import annotations

import struct

import pytest

from omni_ws.audio.container import HeldMp4
from omni_ws.errors import UnsupportedFormat

LIMIT = 1 << 20


def box(kind: bytes, size: int = 24) -> bytes:
    return struct.pack(">I4s", size, kind) + bytes(size - 8)


def wide_box(kind: bytes, size: int = 24) -> bytes:
    return struct.pack(">I4sQ", 1, kind, size) + bytes(size - 16)


@pytest.mark.parametrize("begin", [box(b"ftyp") + box(b"moov"), wide_box(b"ftyp") + box(b"moof")])
def test_a_file_whose_index_comes_first_is_given_on_at_once(begin: bytes) -> None:
    assert HeldMp4(LIMIT).begin(begin) == begin


@pytest.mark.parametrize(
    ("begin", "rest"),
    [
        (b"", b""),
        (box(b"ftyp"), b""),
        (box(b"ftyp") + struct.pack(">I4s", 1000, b"free") + bytes(500), bytes(492)),
    ],
)
def test_a_file_is_held_until_its_index_comes(begin: bytes, rest: bytes) -> None:
    file = HeldMp4(LIMIT)
    assert file.begin(begin) is None
    assert file.begin(rest) is None
    assert file.begin(box(b"moov")) == begin + rest + box(b"moov")


@pytest.mark.parametrize(
    "begin",
    [box(b"ftyp") + box(b"free") + box(b"mdat"), box(b"ftyp") + struct.pack(">I4sQ", 0, b"mdat", 0)],
)
def test_a_file_whose_index_comes_last_is_held_to_its_end(begin: bytes) -> None:
    file = HeldMp4(LIMIT)
    assert file.begin(begin) is None
    assert file.begin(box(b"moov")) is None
    assert file.whole().read() == begin + box(b"moov")


@pytest.mark.parametrize("size", [0, 7])
def test_a_box_of_no_size_is_damage(size: int) -> None:
    with pytest.raises(UnsupportedFormat):
        HeldMp4(LIMIT).begin(struct.pack(">I4s", size, b"free") + bytes(20))


def test_a_file_is_kept_up_to_its_limit() -> None:
    file = HeldMp4(10)
    assert file.begin(b"12345") is None
    assert file.begin(b"67890") is None
    with pytest.raises(UnsupportedFormat, match="10 bytes"):
        file.begin(b"x")
    assert file.whole().read() == b"1234567890"
    assert file.whole().read() == b""
