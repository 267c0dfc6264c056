"""Recordings that somebody cut or changed, and those of clients that send absurd things: they can be seen and heard."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_server import live_server
from support.raw_http import call
from support.recordings import recordings

from omni_ws.calls import (
    files,
    lines,
)
from omni_ws.calls.lines import CallFolder
from omni_ws.wire.recording import MAX_AT_MS, decode_event

HEADER: dict[str, Any] = {
    "recording": "omni_ws",
    "version": 1,
    "kind": "websocket",
    "server": "1",
    "engine": "e",
    "model": "m",
    "started": "2026-01-01T00:00:00.000+00:00",
    "payloads": True,
}
AUDIO = base64.b64encode(b"\1\2" * 800).decode()
ABSURD = (1e308, -1e308, -5.0, 1e12)


def sound_line(**fields: Any) -> dict[str, Any]:
    return {"event": "sound", "at": 100, "by": "user", "format": "pcm16", "sample_rate": 8000, "audio": AUDIO} | fields


def sent(at: float = 100, **frame: Any) -> dict[str, Any]:
    return {"event": "out", "at": at, "connection": 0, "text": json.dumps(frame)}


def received(at: float = 100, **frame: Any) -> dict[str, Any]:
    return {"event": "in", "at": at, "connection": 0, "text": json.dumps(frame)}


def answer(**fields: Any) -> dict[str, Any]:
    return sent(type="output_chunk", request_id="r", sequence_id=1, modality="audio", payload=AUDIO, **fields)


def written(folder: Path, name: str, events: list[dict[str, Any]], **header: Any) -> Path:
    folder.chmod(0o700)
    path = folder / f"20260101T000000_{name}.ndjson"
    rows = [HEADER | {"id": name} | header, *events, {"event": "end", "at": 200}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def absurd_times() -> Iterator[list[dict[str, Any]]]:
    for value in ABSURD:
        yield [sound_line(), sound_line(at=value), sound_line(at=value, by="server", request_id="r")]
        yield [sent(at=value, type="backchannel", payload=AUDIO)]
        yield [sent(at=value, type="speech_started", certain=False), sent(at=value, type="speech_dismissed")]
        yield [
            answer(start_ms=value, words=[{"text": "w", "start_ms": value, "end_ms": value}]),
            received(type="output_ack", request_id="r", played_ms=value),
            sent(type="output_chunk", request_id="r", sequence_id=2, modality="text", text="x", final=True),
        ]
        yield [
            received(type="input_chunk", modality="audio", payload=AUDIO, sequence_id=0),
            sent(type="speech_started", request_id="r", audio_ms=value),
            sent(type="output_chunk", request_id="r", sequence_id=1, modality="transcript", text="hi"),
        ]
        yield [
            sent(type="output_chunk", request_id="r", sequence_id=1, modality="text", text="x", times={"ended": value}),
            {"event": "played", "at": 5, "request_id": "r", "played_ms": value},
        ]


def absurd_formats() -> Iterator[list[dict[str, Any]]]:
    for value in (0, -1, 1, 10**9, 1e308):
        if isinstance(value, int):
            yield [sound_line(sample_rate=value)]
        for name in ("sample_rate", "channels"):
            audio = {"format": "pcm16", name: value}
            yield [
                sent(type="session_created", input_audio=audio, output_audio=audio),
                received(type="input_chunk", modality="audio", payload=AUDIO, sequence_id=0),
                answer(**audio),
            ]


def absurd_frames() -> Iterator[list[dict[str, Any]]]:
    for number in (-1, 2**63, 2**64 - 1, 1e300):
        yield [received(type="input_chunk", modality="audio", payload=AUDIO, sequence_id=number)]
    for depth in (240, 300, 900, 50_000):
        for frame in ('{"type":"x","a":%s}', '{"type":"error","error":{"x":%s}}', '{"type":%s}'):
            text = frame % ("[" * depth + "]" * depth)
            yield [{"event": way, "at": 1, "connection": 0, "text": text} for way in ("in", "out")]
    yield [
        sent(type=5),
        received(type=None),
        answer(words=5),
        sent(type="error", error=5),
        sent(type="error", error={}),
    ]


async def all_of(folder: Path) -> None:
    """Each call in the folder is listed and has all its files."""
    async with live_server(record=folder) as server:
        listed = await call(server.port, "GET", "/calls")
        found = [entry["id"] for entry in listed.json()["calls"]]
        assert len(found) == len(recordings(folder)) > 1
        for name in found:
            for file in ("call.json", "sound.wav", "call.zip"):
                response = await call(server.port, "GET", f"/calls/{name}/{file}")
                assert response.status == 200, (name, file, response.body)


@pytest.mark.parametrize("many", [absurd_times, absurd_formats, absurd_frames])
async def test_absurd_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: Any) -> None:
    monkeypatch.setattr(files, "MAX_SOUND_SEC", 2)
    for number, events in enumerate(many()):
        written(tmp_path, f"sess_{number}", events, kind="webrtc" if events[0]["event"] == "sound" else "websocket")
    await all_of(tmp_path)


@pytest.mark.parametrize("started", ["1970-01-01T00:00:00+00:00", "9999-12-31T23:59:59", "2026-01-01"])
async def test_dates_that_a_zip_file_cannot_have(tmp_path: Path, started: str) -> None:
    for name in ("a", "b"):
        written(tmp_path, name, [sound_line()], kind="webrtc", started=started)
    await all_of(tmp_path)


def test_a_recording_of_no_date_is_none(tmp_path: Path) -> None:
    written(tmp_path, "a", [], started="yesterday")
    written(tmp_path, "b", [])
    assert [one.header.id for one in CallFolder(tmp_path).newest(5)] == ["b"]
    assert CallFolder(tmp_path).find("a") is None


@pytest.mark.parametrize("at", [0, MAX_AT_MS])
def test_times_of_lines(at: float) -> None:
    assert decode_event(json.dumps({"event": "end", "at": at}).encode()).at == at
    for beyond in (at - 1, at + 1):
        if not 0 <= beyond <= MAX_AT_MS:
            with pytest.raises(ValueError, match="at"):
                decode_event(json.dumps({"event": "end", "at": beyond}).encode())


@pytest.mark.parametrize("more", [0, 1])
def test_the_length_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    path = written(tmp_path, "a", [sound_line()])
    length = max(map(len, path.read_bytes().splitlines(keepends=True)))
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", length - more)
    found = CallFolder(tmp_path).find("a")
    assert found is not None
    assert len(list(found)) == (0 if more else 2)
