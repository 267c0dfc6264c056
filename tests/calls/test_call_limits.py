"""The limits of what is shown of a call: at each, and one past it."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from support.call_sound import noise, tracks
from support.speech_clips import as_pcm16

from omni_ws.calls import (
    files,
    reading,
)
from omni_ws.calls.files import describe
from omni_ws.calls.lines import CallFolder, CallLines
from omni_ws.calls.reading import CallReading, FrameList, Story
from omni_ws.wire.recording import (
    EndedLine,
    HeaderLine,
    ReceivedLine,
    SentLine,
    SoundLine,
    encode_line,
)

HEADER = HeaderLine(
    recording="omni_ws",
    version=1,
    kind="webrtc",
    id="sess_1",
    server="1",
    engine="e",
    model="m",
    started="2026-01-01T00:00:00.000+00:00",
    payloads=True,
)


def told_text(number: int, text: str = "x") -> SentLine:
    return SentLine(
        at=float(number), connection=0, text=orjson.dumps({"type": "t", "n": number, "text": text}).decode()
    )


@pytest.mark.parametrize("more", [0, 1])
def test_frames_of_a_list(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    monkeypatch.setattr(reading, "MAX_FRAMES", 5)
    found = FrameList()
    for number in range(5 + more):
        found.add(told_text(number), {"type": "t", "n": number})
    assert (len(found.entries), found.left_out) == (5, more)


@pytest.mark.parametrize("more", [0, 1])
def test_bytes_of_a_list(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    one = len(orjson.dumps({"at_ms": 0.0, "side": "server", "event": "out", "frame": {"type": "t"}}))
    monkeypatch.setattr(reading, "MAX_BYTES", 3 * one)
    found = FrameList()
    for _ in range(3 + more):
        found.add(told_text(0), {"type": "t"})
    assert (len(found.entries), found.left_out) == (3, more)


@pytest.mark.parametrize("more", [0, 1])
def test_bytes_of_one_frame(more: int) -> None:
    found = FrameList()
    frame = {"type": "t", "text": ""}
    empty = len(orjson.dumps({"at_ms": 0.0, "side": "server", "event": "out", "frame": frame}))
    frame["text"] = "x" * (reading.MAX_FRAME_BYTES - empty + more)
    found.add(told_text(0), frame)
    shown = {"type": "t"} if more else frame
    assert found.entries[0]["frame"] == shown


def test_sound_in_a_row_is_one_entry() -> None:
    found = FrameList()
    for number in range(4):
        sound_line = SoundLine(at=number, by="user", format="pcm16", sample_rate=8000, audio=b"ab")
        found.add(sound_line, {})
    found.add(ReceivedLine(at=9, connection=0, text="{}"), {})
    first, second = found.entries
    assert (first["count"], first["bytes"], first["until_ms"]) == (4, 8, 3)
    assert second["side"] == "client"


@pytest.mark.parametrize("more", [0, 1])
def test_turns_and_texts(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    monkeypatch.setattr(reading, "MAX_TURNS", 3)
    monkeypatch.setattr(reading, "MAX_TEXT", 10)
    monkeypatch.setattr(reading, "MAX_WORDS", 2)
    found = Story()
    word = {"text": "w", "start_ms": 0, "end_ms": 1}
    for number in range(3 + more):
        frame = {"type": "output_chunk", "request_id": f"req_{number}", "modality": "text", "text": "x" * (10 + more)}
        found.tell(0, frame)
    words = {
        "type": "output_chunk",
        "request_id": "req_0",
        "modality": "transcript",
        "text": "w",
        "words": [word] * (2 + more),
    }
    found.tell(0, words)
    assert (len(found.turns), found.left_out) == (3, more)
    assert {turn.said for turn in found.turns.values()} == {"x" * 10}
    assert len(found.turns["req_0"].heard_words) == 2


@pytest.mark.parametrize("more_ms", [0, 20])
def test_the_length_of_the_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more_ms: int) -> None:
    monkeypatch.setattr(files, "MAX_SOUND_SEC", 1)
    path = tmp_path / "20260101T000000_sess_1.ndjson"
    audio = as_pcm16(noise(1, 1 + more_ms / 1000, 8000))
    end = 1000.0 + more_ms
    line = SoundLine(at=end, by="user", format="pcm16", sample_rate=8000, audio=audio)
    path.write_bytes(encode_line(HEADER) + encode_line(line) + encode_line(EndedLine(at=end)))
    left, right, rate = tracks(CallLines(path))
    assert (len(left), len(right), rate) == (8000, 8000, 8000)
    assert describe(CallReading(CallLines(path)))["sound"] == {"duration_ms": 1000}


def test_the_newest_calls_are_listed(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"2026010{number + 1}T000000_sess_{number}.ndjson").write_bytes(encode_line(HEADER))
    (tmp_path / "20270101T000000_sess_9.ndjson").write_bytes(b"no recording\n")
    found = [lines.path.stem for lines in CallFolder(tmp_path).newest(3)]
    assert [name[-1] for name in found] == ["3", "2", "1"]
    assert len(CallFolder(tmp_path).newest(4)) == 4
    assert CallFolder(tmp_path / "none").newest(3) == []


def test_a_format_for_each_piece_of_sound(tmp_path: Path) -> None:
    path = tmp_path / "20260101T000000_sess_1.ndjson"
    rates = range(8000, 8000 + 2**15 + 2)
    rows = (SoundLine(at=0, by="user", format="pcm16", sample_rate=rate, audio=b"ab") for rate in rates)
    path.write_bytes(encode_line(HEADER) + b"".join(map(encode_line, rows)))
    call = CallReading(CallLines(path))
    assert [call.source(ref).audio.sample_rate for ref in range(len(rates))] == [*rates]
