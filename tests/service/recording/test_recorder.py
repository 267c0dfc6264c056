"""The recorder: off the event loop, bounded, and never in a session's way."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.live_server import live_server
from support.patience import PATIENCE_SEC
from support.recordings import lines, recordings

from omni_ws.service import recording as recording_module
from omni_ws.service.recording import (
    BUFFER_BYTES,
    NO_ROOM,
    TOO_SLOW,
    Recorder,
    RecordingFolder,
)

MESSAGE = b'{"type":"ping","t":"%b"}' % (b"x" * 1000)


class StuckFolder(RecordingFolder):
    """A disk that does not answer until it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, max_bytes=1 << 30, max_age=0)
        self.prepare()
        self.answers = threading.Event()
        self.is_asked = threading.Event()

    def create(self, name: str, data: bytes) -> None:
        self.is_asked.set()
        assert self.answers.wait(PATIENCE_SEC)
        super().create(name, data)


class FullDisk(RecordingFolder):
    """After the first write, and until it is cleared, there is no space."""

    is_full = True

    def __init__(self, path: Path) -> None:
        super().__init__(path, max_bytes=1 << 30, max_age=0)
        self.has_failed = threading.Event()

    def _write(self, *arguments: object) -> None:
        if self.is_full and self.total:
            self.has_failed.set()
            raise OSError(28, "No space left on device")
        super()._write(*arguments)  # type: ignore[arg-type]


@contextmanager
def recorder(
    path: Path,
    *,
    folder: RecordingFolder | None = None,
    max_bytes: int = 1 << 30,
    capacity: int = 1 << 24,
    **choice: Any,
) -> Iterator[Recorder]:
    if folder is None:
        folder = RecordingFolder(path, max_bytes=max_bytes, max_age=0)
    folder.prepare()
    made = Recorder(folder, engine="fake", model=lambda: "fake", capacity=capacity, **choice)
    try:
        yield made
    finally:
        made.close()


def test_a_session_is_written_in_order_and_ended(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with recorder(path) as one:
        recording = one.begin("websocket", key="phones", name="sess_1")
        assert recording is not None
        connection = recording.connection()
        connection.opened("/v1/streaming_input", subprotocol=None, last_output=None)
        connection.received(b'{"type":"finish"}', is_text=True)
        connection.received(b"\xff", is_text=True)
        connection.sent(b"\x01\x02", is_text=False)
        recording.finish()
        connection.closed("client", 1000)
    (file,) = recordings(path)
    assert file.name.endswith("_sess_1.ndjson")
    header, *events = lines(file)
    assert (header["recording"], header["version"], header["key"], header["payloads"]) == ("omni_ws", 1, "phones", True)
    assert [event["event"] for event in events] == ["open", "in", "in", "out", "close", "end"]
    assert events[1]["text"] == '{"type":"finish"}'
    assert events[2]["bad_text"] == "/w=="
    assert events[3]["binary"] == "AQI="
    times = [event["at"] for event in events]
    assert times == sorted(times)


def test_the_recording_of_a_session_ends_with_its_last_connection(tmp_path: Path) -> None:
    with recorder(tmp_path / "r") as one:
        recording = one.begin("websocket", key=None, name="sess_1")
        assert recording is not None
        first, second = recording.connection(), recording.connection()
        first.closed("lost", 1006)
        first.closed("server", 1012)  # is closed already: nothing
        recording.finish()
        second.sent(b"{}", is_text=True)
        second.closed("client", 1000)
        second.sent(b"{}", is_text=True)  # after the end: nothing
    events = [line["event"] for line in lines(recordings(tmp_path / "r")[0])[1:]]
    assert events == ["close", "out", "close", "end"]


def test_who_is_recorded(tmp_path: Path) -> None:
    with recorder(tmp_path / "a", keys={"phones"}) as one:
        assert one.begin("http", key=None, name="a") is None
        assert one.begin("http", key="web", name="b") is None
        assert one.begin("http", key="phones", name="c") is not None
    with recorder(tmp_path / "b", fraction=0) as one:
        assert all(one.begin("http", key=None, name="a") is None for _ in range(100))
    with recorder(tmp_path / "c", fraction=0.5) as one:
        begun = sum(one.begin("http", key=None, name=f"n{n}") is not None for n in range(1000))
        assert 400 < begun < 600


def test_payloads_can_be_left_out(tmp_path: Path) -> None:
    with recorder(tmp_path / "r", payloads=False) as one:
        recording = one.begin("websocket", key=None, name="sess_1")
        assert recording is not None
        connection = recording.connection()
        said = {"type": "input_chunk", "sequence_id": 3, "text": "my name is Rumpelstiltskin", "unheard_of": "secret"}
        connection.received(orjson.dumps(said), is_text=True)
        connection.received(b"\x01\x01\x02\x00" + bytes(8) + b"loud", is_text=False)
        connection.received(b"no frame, secret", is_text=True)
        connection.received(b"a piece of a secret body")
        connection.received(b'{"x":%b"secret"%b}' % (b'{"y":' * 400, b"}" * 400), is_text=True)
        error = {"type": "error", "error": {"code": "invalid_value", "message": "no voice is called secret"}}
        connection.sent(orjson.dumps(error), is_text=True)
        connection.closed("client")
        recording.finish()
    (file,) = recordings(tmp_path / "r")
    text = file.read_text()
    assert "Rumpelstiltskin" not in text
    assert "secret" not in text
    header, chunk, binary, bad, piece, deep, failed, *_ = lines(file)
    assert header["payloads"] is False
    fields = orjson.loads(chunk["text"])
    assert (fields["sequence_id"], fields["text"]["size"], len(fields["text"]["sha256"])) == (3, 26, 64)
    assert (binary["binary"], binary["size"]) == ("AQECAAAAAAAAAAAA", 4)
    assert (bad["size"], piece["size"]) == (16, 24)
    assert deep["size"] == 2414
    assert orjson.loads(failed["text"])["error"]["code"] == "invalid_value"


def test_a_disk_that_is_too_slow_cuts_the_recording_and_nothing_else(tmp_path: Path) -> None:
    folder = StuckFolder(tmp_path / "r")
    with recorder(tmp_path / "r", folder=folder, capacity=20_000) as one:
        recording = one.begin("websocket", key=None, name="sess_1")
        assert recording is not None
        assert folder.is_asked.wait(PATIENCE_SEC)
        connection = recording.connection()
        for _ in range(100):  # none of which waits
            connection.sent(MESSAGE, is_text=True)
        folder.answers.set()
        connection.closed("client")
        recording.finish()
    (file,) = recordings(tmp_path / "r")
    *before, last = lines(file)[1:]
    assert (last["event"], last["reason"]) == ("cut", TOO_SLOW)
    assert {line["event"] for line in before} == {"out"}
    assert 10 < len(before) < 20


def test_a_full_disk_cuts_the_recording_after_a_whole_line(tmp_path: Path) -> None:
    folder = FullDisk(tmp_path / "r")
    with recorder(tmp_path / "r", folder=folder) as one:
        recording = one.begin("websocket", key=None, name="sess_1")
        assert recording is not None
        connection = recording.connection()
        for _ in range(3 * BUFFER_BYTES // len(MESSAGE)):
            connection.sent(MESSAGE, is_text=True)
        assert folder.has_failed.wait(PATIENCE_SEC)
        folder.is_full = False
        connection.closed("client")
        recording.finish()
    (file,) = recordings(tmp_path / "r")
    assert lines(file)[-1]["event"] == "cut"
    assert "No space" in lines(file)[-1]["reason"]


def size_of(path: Path) -> int:
    size = 0
    for file in os.scandir(path) if path.exists() else ():
        with contextlib.suppress(FileNotFoundError):
            size += os.stat(file.path).st_size
    return size


def test_the_limit_holds_under_load(tmp_path: Path) -> None:
    """And the newest stay."""
    limit = 300_000
    folder = RecordingFolder(tmp_path / "r", max_bytes=limit, max_age=0)
    most = 0
    with recorder(tmp_path / "r", folder=folder) as one:
        for session in range(40):
            recording = one.begin("websocket", key=None, name=f"sess_{session}")
            assert recording is not None
            connection = recording.connection()
            for _ in range(50):
                connection.sent(MESSAGE, is_text=True)
                most = max(most, size_of(tmp_path / "r"))
            connection.closed("client")
            recording.finish()
    assert size_of(tmp_path / "r") == folder.total <= limit
    assert most <= limit + BUFFER_BYTES
    assert any(file.name.endswith("_sess_39.ndjson") for file in recordings(tmp_path / "r"))


def test_one_recording_that_fills_the_limit_is_cut(tmp_path: Path) -> None:
    with recorder(tmp_path / "r", max_bytes=200_000) as one:
        recording = one.begin("websocket", key=None, name="sess_1")
        assert recording is not None
        connection = recording.connection()
        for _ in range(400):
            connection.sent(MESSAGE, is_text=True)
    (file,) = recordings(tmp_path / "r")
    assert file.stat().st_size <= 200_000 + 200
    assert (lines(file)[-1]["event"], lines(file)[-1]["reason"]) == ("cut", NO_ROOM)


def test_what_is_open_when_the_server_ends_is_ended(tmp_path: Path) -> None:
    with recorder(tmp_path / "r") as one:
        recording = one.begin("session", key=None, name="http_1")
        assert recording is not None
        recording.connection().requested("GET", "/", {})
    assert lines(recordings(tmp_path / "r")[0])[-1]["event"] == "end"
    assert one.begin("http", key=None, name="late") is None


@pytest.mark.parametrize("name", ["recorder"])
def test_no_thread_is_left(tmp_path: Path, name: str) -> None:
    with recorder(tmp_path / "r") as one:
        one.begin("http", key=None, name="a")
        assert any(thread.name == name for thread in threading.enumerate())
    assert not any(thread.name == name for thread in threading.enumerate())


def an_old_recording(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    old = folder / "20250101T000000_sess_1.ndjson"
    old.write_bytes(b"x")
    os.utime(old, (1, 1))
    return old


@pytest.mark.real_time
async def test_a_server_without_sessions_removes_what_is_too_old(tmp_path: Path) -> None:
    old = an_old_recording(tmp_path / "r")
    async with live_server(record=tmp_path / "r") as server:
        await server.until(lambda: not old.exists())


def test_what_gets_too_old_during_a_session_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "SWEEP_SEC", 0.1)
    folder = RecordingFolder(tmp_path / "r", max_bytes=1 << 30, max_age=3600)
    with recorder(tmp_path / "r", folder=folder) as one:
        begun = one.begin("websocket", key=None, name="sess_2")
        assert begun is not None
        connection, swept = begun.connection(), threading.Event()
        monkeypatch.setattr(folder, "remove_old", swept.set)
        for _ in range(200):  # more often than once in SWEEP_SEC
            connection.received(MESSAGE, is_text=True)
            if swept.wait(0.02):
                break
        assert swept.is_set()
