"""Recordings that are truncated, corrupted or of another kind: refused with file and line."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from support.commands import run_command
from support.recordings import replay

from omni_ws.replay import (
    RecordingError,
    read_recording,
)

HEADER = (
    b'{"recording":"omni_ws","version":1,"kind":"websocket","id":"sess_1","server":"0.1.0","engine":"fake",'
    b'"model":"fake","started":"2026-01-01T00:00:00.000+00:00","payloads":true}\n'
)
OPEN = b'{"event":"open","at":0.1,"connection":0,"target":"/v1/streaming_input"}\n'
SAID = b'{"event":"in","at":1,"connection":0,"text":"{}"}\n'
END = b'{"event":"end","at":2}\n'
WHOLE = HEADER + OPEN + SAID + END


def write(folder: Path, data: bytes) -> Path:
    path = folder / "recording.ndjson"
    path.write_bytes(data)
    return path


def test_a_whole_one(tmp_path: Path) -> None:
    recording = read_recording(write(tmp_path, WHOLE))
    assert recording.header.id == "sess_1"
    assert len(recording.events) == 2


@pytest.mark.parametrize(
    ("data", "line", "problem"),
    [
        (b"", 1, "empty"),
        (b"hello\n", 1, "not a recording"),
        (b"[]\n", 1, "not a recording"),
        (b'{"type":"ping"}\n', 1, "not a recording"),
        (WHOLE.replace(b'"version":1', b'"version":2'), 1, "version 2; this program reads version 1"),
        (WHOLE.replace(b'"kind":"websocket"', b'"kind":"letter"'), 1, "letter"),
        (WHOLE.replace(b'"kind":"websocket"', b'"kind":"live"'), 1, "the Live API, which cannot be replayed"),
        (HEADER.replace(b"true", b"false") + OPEN + END, 1, "without payloads"),
        (HEADER + END, 3, "the recording has no connection"),
        (HEADER + OPEN, 3, "no end"),
        (HEADER + OPEN + SAID[:20], 3, "breaks off within this line"),
        (HEADER + OPEN + SAID[:20] + b"\n" + END, 3, "truncated"),
        (HEADER + OPEN + b"\n" + END, 3, "truncated"),
        (HEADER + OPEN + SAID.replace(b'"in"', b'"inn"') + END, 3, "inn"),
        (HEADER + OPEN + SAID.replace(b'"at":1', b'"at":"soon"') + END, 3, "at"),
        (HEADER + OPEN + SAID.replace(b',"text":"{}"', b"") + END, 3, "must have content"),
        (HEADER + OPEN + SAID.replace(b"{}", b"\xff") + END, 3, "UTF-8|utf-8"),
        (HEADER + OPEN + SAID.replace(b'"connection":0', b'"connection":7') + END, 3, "no connection 7"),
        (HEADER + OPEN + OPEN + END, 3, "connection 0 where 1 is next"),
        (HEADER + OPEN + SAID.replace(b'"in"', b'"out"') + END, 3, "not a frame of a server"),
        (WHOLE + SAID, 5, "after the end"),
        (HEADER + OPEN + b'{"event":"cut","at":2,"reason":"the disk is too slow"}\n', 3, "cut here: the disk is too"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, data: bytes, line: int, problem: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(RecordingError, match=problem) as raised:
        read_recording(path)
    assert str(raised.value).startswith(f"{path}:{line}: ")


def test_every_cut_of_a_recording_is_an_error_and_no_crash(tmp_path: Path) -> None:
    for size in range(len(WHOLE) - 1):
        with pytest.raises(RecordingError):
            read_recording(write(tmp_path, WHOLE[:size]))


def test_what_there_is_can_be_taken_on_demand(tmp_path: Path) -> None:
    for data in (HEADER + OPEN + SAID, HEADER + OPEN + SAID + END[:5], WHOLE.replace(END, b"")):
        assert len(read_recording(write(tmp_path, data), incomplete=True).events) == 2


async def test_the_command_ends_with_2_and_the_line(tmp_path: Path) -> None:
    """In a process, as users start it; other tests run it in a thread."""
    path = write(tmp_path, HEADER + OPEN + b"garbage\n" + END)
    command = (sys.executable, "-m", "omni_ws", "replay", str(path), str(tmp_path / "nothing"))
    replayed = await run_command(*command)
    assert replayed.status == 2
    assert replayed.errors.startswith(f"omni-ws replay: error: {path}:3: ")
    assert not replayed.output


async def test_without_a_server_the_command_says_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    replayed = await replay(write(tmp_path, WHOLE), "--url", f"ws://127.0.0.1:{port}")
    assert replayed.status == 1
    assert f"no server answers at 127.0.0.1:{port}; start one ('make serve')" in replayed.output


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("x", "--speed", "0"),
        ("x", "--speed", "nan"),
        ("x", "--copies", "0"),
        ("x", "--url", "8080"),
        ("x", "--url", "ws://127.0.0.1:1/elsewhere"),
        ("x", "--compare", "a bit"),
    ],
)
async def test_bad_command_lines_end_with_2(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    replayed = await replay(*(write(tmp_path, WHOLE) if one == "x" else one for one in arguments))
    assert replayed.status == 2
    assert "error:" in replayed.errors
