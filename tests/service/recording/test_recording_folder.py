"""The folder of the recordings: private, and never larger or older than it may be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from support.exhausted import full_disk

from omni_ws.config.values import ConfigurationError
from omni_ws.service.recording import (
    NoRoom,
    RecordingFolder,
)

FIRST, SECOND, THIRD = (f"20260101T00000{second}_sess_a.ndjson" for second in (1, 2, 3))


def folder(path: Path, *, max_bytes: int = 100, max_age: float = 0, now: float = 0) -> RecordingFolder:
    made = RecordingFolder(path, max_bytes=max_bytes, max_age=max_age, wall_clock=lambda: now)
    made.prepare()
    return made


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


def test_folder_and_files_are_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down"
    folder(path).create(FIRST, b"x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / FIRST).stat().st_mode) == 0o600


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(ConfigurationError, match="accessible to other users \\(mode 750\\)"):
        folder(tmp_path)
    tmp_path.chmod(0o700)
    folder(tmp_path)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigurationError, match="record: "):
        folder(file)


def test_the_oldest_make_room_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "notes.ndjson").write_bytes(b"x" * 1000)
    one = folder(tmp_path)
    for name in (FIRST, SECOND):
        one.create(name, b"x" * 50)
        one.finish(name)
    assert one.total == 100
    one.create(THIRD, b"x")
    assert names(tmp_path) == [SECOND, THIRD, "notes.ndjson"]
    assert one.total == 51


def test_what_is_being_written_stays_and_leaves_no_room(tmp_path: Path) -> None:
    one = folder(tmp_path / "r")
    one.create(FIRST, b"x" * 60)
    one.append(FIRST, b"x" * 40)
    with pytest.raises(NoRoom):
        one.append(FIRST, b"x")
    with pytest.raises(NoRoom):
        one.create(SECOND, b"x")
    one.append(FIRST, b"x", even_beyond=True)
    assert one.total == 101


def test_what_is_too_old_goes_also_what_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "r"
    old = folder(path, now=1000)
    for name in (FIRST, SECOND):
        old.create(name, b"x")
    os.utime(path / FIRST, (900, 900))
    os.utime(path / SECOND, (901, 901))
    new = folder(path, max_age=100, now=1001)
    new.remove_old()
    assert names(path) == [SECOND]
    assert new.total == 1


def test_a_write_that_fails_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = folder(tmp_path / "r")
    one.create(FIRST, b"whole\n")
    real = os.write
    left = [3]

    def full(descriptor: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        written = real(descriptor, data[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        one.append(FIRST, b"half\n")
    assert (tmp_path / "r" / FIRST).read_bytes() == b"whole\n"
    assert one.total == 6


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_disk(tmp_path / "full", monkeypatch) as full:
        with pytest.raises(ConfigurationError, match=r"cannot write to .*full: No space left on device"):
            folder(full)
        assert [name for name in names(full) if name != "filling"] == []


def test_a_disk_that_becomes_full_gets_no_empty_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_disk(tmp_path / "full", monkeypatch) as full:
        one = RecordingFolder(full, max_bytes=100, max_age=0)
        with pytest.raises(OSError, match="No space left on device"):
            one.create(FIRST, b"x")
        assert [name for name in names(full) if name != "filling"] == []
        assert one.total == 0
        one.remove_old()


def test_a_recording_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    one = folder(tmp_path / "r")
    (tmp_path / "r" / FIRST).write_bytes(b"another's")
    with pytest.raises(FileExistsError):
        one.create(FIRST, b"x")
    assert (tmp_path / "r" / FIRST).read_bytes() == b"another's"
