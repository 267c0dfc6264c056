"""Encryption of what is stored, and the forms of ``sessions.store_key``."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

import pytest

from omni_ws.config.values import ConfigurationError
from omni_ws.service.store.records import (
    KEY_BYTES,
    RECORD_VERSION,
    SNAPSHOT_PLACE,
    Sealer,
    Unreadable,
    load_keys_of_store,
    packed,
    unpacked,
)

OLD, NEW = bytes(KEY_BYTES), bytes(range(KEY_BYTES))


def test_without_a_key_data_stay_as_they_are() -> None:
    sealer = Sealer()
    assert sealer.seal("sess_1")(b"said", 3) == b"said"
    assert sealer.open(sealer.form, "sess_1", b"said", 3) == b"said"
    assert sealer.form == str(RECORD_VERSION)


def test_what_is_sealed_is_opened_in_its_place_alone() -> None:
    sealer = Sealer([NEW])
    seal = sealer.seal("sess_1")
    sealed = seal(b"what was said", SNAPSHOT_PLACE)
    assert b"said" not in sealed
    assert sealed != seal(b"what was said", SNAPSHOT_PLACE)
    assert Sealer([NEW]).open(sealer.form, "sess_1", sealed, SNAPSHOT_PLACE) == b"what was said"
    damaged = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for session_id, data, place in (
        ("sess_2", sealed, SNAPSHOT_PLACE),
        ("sess_1", sealed, 0),
        ("sess_1", damaged, SNAPSHOT_PLACE),
        ("sess_1", sealed[:40], SNAPSHOT_PLACE),
        ("sess_1", b"", SNAPSHOT_PLACE),
    ):
        with pytest.raises(Unreadable):
            sealer.open(sealer.form, session_id, data, place)


@pytest.mark.parametrize("length", [0, 511, 512, 64 << 10, (64 << 10) + 1])
def test_what_is_neither_short_nor_long_is_compressed(length: int) -> None:
    data = b"field" * (length // 5) + b"x" * (length % 5)
    stored = packed(data)
    assert unpacked(stored) == data
    assert (len(stored) < length / 2) == (512 <= length <= 64 << 10)
    assert packed(data, compress=False) == b"p" + data


def test_what_earlier_servers_compressed_is_read() -> None:
    assert unpacked(b"z" + zlib.compress(bytes(1 << 20))) == bytes(1 << 20)


def test_what_is_damaged_or_inflates_to_more_is_unreadable() -> None:
    stored = packed(b"x" * 1000)
    bomb = b"z" + zlib.compress(bytes((1 << 20) + 1))
    for damaged in (b"", b"q", stored[:-1], stored[:3] + b"\xff" + stored[4:], bomb):
        with pytest.raises(Unreadable):
            unpacked(damaged)


def test_keys_are_replaced_one_after_the_other() -> None:
    old, both, new = Sealer([OLD]), Sealer([NEW, OLD]), Sealer([NEW])
    assert both.form == new.form != old.form
    assert both.reads(old.form)
    assert not new.reads(old.form)
    assert not Sealer().reads(old.form)
    assert not old.reads(Sealer().form)
    assert both.open(old.form, "sess_1", old.seal("sess_1")(b"x", 0), 0) == b"x"
    assert new.open(both.form, "sess_1", both.seal("sess_1")(b"x", 0), 0) == b"x"


def test_keys_come_from_the_setting_or_a_file(tmp_path: Path) -> None:
    old, new = (base64.b64encode(key).decode() for key in (OLD, NEW))
    assert load_keys_of_store(new) == [NEW]
    file = tmp_path / "keys"
    file.write_text(f"{new}\n{old}\n")
    assert load_keys_of_store(str(file)) == [NEW, OLD]


@pytest.mark.parametrize("length", [KEY_BYTES - 1, KEY_BYTES + 1])
def test_keys_have_their_length(length: int, tmp_path: Path) -> None:
    key = base64.b64encode(bytes(length)).decode()
    with pytest.raises(ConfigurationError, match="neither 32 bytes in base64") as raised:
        load_keys_of_store(key)
    assert key not in str(raised.value)
    file = tmp_path / "keys"
    for content in (key, "", f"{base64.b64encode(NEW).decode()}\nnonsense"):
        file.write_text(content)
        with pytest.raises(ConfigurationError, match="has a line that is not 32 bytes in base64"):
            load_keys_of_store(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="it is not text"):
        load_keys_of_store(str(file))
