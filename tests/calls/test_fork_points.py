"""What a fork takes from a recording: history with tools, configuration, the user's own sound, and what it refuses."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from omni_ws.calls import forking
from omni_ws.calls.forking import ForkPoint, fork_point
from omni_ws.calls.lines import CallLines
from omni_ws.calls.reading import CallReading
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.errors import OmniError
from omni_ws.wire.frames import encode_input

HEADER = {
    "recording": "omni_ws", "version": 1, "kind": "websocket", "id": "sess_a", "server": "0.1.0", "engine": "fake",
    "model": "fake", "started": "2026-01-02T03:04:05.000+00:00", "payloads": True,
}  # fmt: skip


class Made:
    """A recording that is written frame by frame, 100 ms apart."""

    def __init__(self) -> None:
        self.at = 0.0
        self.lines: list[dict[str, Any]] = [{"event": "open", "at": 0.0, "connection": 0, "target": "/"}]
        self.numbers = self.outputs = self.requests = 0
        self.frame("out", type="session_created", input_audio={"format": "pcm16", "sample_rate": 16_000})

    def frame(self, event: str, **fields: Any) -> None:
        self.at += 100
        text = orjson.dumps(fields).decode()
        self.lines.append({"event": event, "at": self.at, "connection": 0, "text": text})

    def chunk(self, **fields: Any) -> int:
        self.frame("in", type="input_chunk", sequence_id=self.numbers, **fields)
        self.numbers += 1
        return self.numbers - 1

    def binary(self, modality: Modality, payload: bytes, *, end: bool = False) -> int:
        chunk = InputChunk(modality, payload, sequence_id=self.numbers, end_of_input=end)
        content = base64.b64encode(encode_input(chunk)).decode()
        self.at += 100
        self.lines.append({"event": "in", "at": self.at, "connection": 0, "binary": content})
        self.numbers += 1
        return self.numbers - 1

    def answer(self, *outputs: dict[str, Any], trigger: str = "end_of_input", asked_by: int | None = None) -> None:
        named = {"request_id": f"req_{self.requests}"}
        self.requests += 1
        self.frame("out", type="response_started", trigger=trigger, sequence_id=asked_by, **named)
        for fields in (*outputs, {"modality": "text", "final": True, "finish_reason": "stop"}):
            self.frame("out", type="output_chunk", sequence_id=self.outputs, **named, **fields)
            self.outputs += 1

    def point(self, folder: Path, number: int, **changes: Any) -> ForkPoint:
        path = folder / "20260102T030405_sess_a.ndjson"
        path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in (HEADER, *self.lines)))
        return fork_point(CallReading(CallLines(path)), number, changes)


def text(said: str) -> dict[str, Any]:
    return {"modality": "text", "text": said}


def sound(value: int, ms: int) -> str:
    return base64.b64encode(np.full(16 * ms, value, "<i2").tobytes()).decode()


def test_calls_of_tools_with_their_results_are_history(tmp_path: Path) -> None:
    made = Made()
    made.answer(asked_by=made.chunk(text="Weather?", end_of_input=True))  # without a word
    made.answer(
        text("Let me see."),
        {"modality": "tool_call", "index": 0, "id": "call_1", "name": "weather", "arguments": "{}"},
        {"modality": "tool_call", "index": 1, "id": "call_2", "name": "time", "arguments": "{}"},
        asked_by=made.chunk(text="In Paris.", end_of_input=True),
    )
    made.answer(text("18."), asked_by=made.chunk(role="tool", tool_call_id="call_1", text="18 °", end_of_input=True))
    made.answer(asked_by=made.chunk(text="Thanks.", end_of_input=True))
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert made.point(tmp_path, 4).history == [
        {"role": "user", "content": "Weather?"},
        {"role": "user", "content": "In Paris."},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},  # the other has no result
        {"role": "tool", "tool_call_id": "call_1", "content": "18 °"},
        {"role": "assistant", "content": "18."},
    ]


def test_the_configuration_is_that_of_the_turn_without_what_begins_a_call(tmp_path: Path) -> None:
    made = Made()
    server = {"type": "mcp", "server_label": "a", "server_url": "https://a.example"}
    function = {"type": "function", "function": {"name": "weather"}}
    made.frame(
        "in", type="session_config", voice="amber", greeting="Hi.", turn_detection={"type": "server_vad"},
        input_audio={"format": "pcmu", "sample_rate": 8000, "language": "de"}, tools=[server, function],
        sampling={"temperature": 0.5, "seed": 1}, instructions="Be kind.",
    )  # fmt: skip
    made.answer(text("Hi."), trigger="greeting")
    made.frame("in", type="session_config", sampling={"seed": None})
    made.answer(asked_by=made.chunk(text="Hello.", end_of_input=True))
    made.frame("in", type="session_config", instructions="Later.")
    assert made.point(tmp_path, 2, voice="blue").config == {
        "voice": "blue",
        "instructions": "Be kind.",
        "sampling": {"temperature": 0.5},
        "tools": [function],
        "input_audio": {"language": "de", "format": "pcm16", "sample_rate": 16_000, "channels": 1},
        "output_audio": {"format": "pcm16", "sample_rate": 24_000},
    }
    with pytest.raises(OmniError, match="no input of the user"):
        made.point(tmp_path, 1)


@pytest.mark.parametrize("ends", ["end_of_input", "finish"])
def test_without_turn_detection_the_sound_is_that_between_two_ends_of_input(tmp_path: Path, ends: str) -> None:
    made = Made()
    for value in (1000, 2000, 3000):
        number = made.chunk(modality="audio", payload=sound(value, 100), format="pcm16")
        if ends == "finish":
            made.frame("in", type="finish")
        else:
            number = made.chunk(modality="audio", payload="", end_of_input=True)
        made.answer(text("Yes."), asked_by=number if ends == "end_of_input" else None)
    for turn, value in ((1, 1000), (2, 2000), (3, 3000)):
        samples = np.frombuffer(made.point(tmp_path, turn).sound, "<i2")
        middle = samples[len(samples) // 4 : -len(samples) // 4]
        assert np.abs(middle.astype(int) - value).max() < 100, turn


def test_with_an_open_microphone_what_is_no_speech_is_of_no_turn(tmp_path: Path) -> None:
    made = Made()
    spoken = {"turn_id": "turn_1", "request_id": "req_0"}
    made.frame("out", type="session_updated", turn_detection={"type": "server_vad", "prefix_padding_ms": 0})
    for value in (1000, 2000, 1000):
        made.chunk(modality="audio", payload=sound(value, 500))
    made.frame("out", type="speech_started", audio_ms=500, **spoken)
    made.frame("out", type="speech_stopped", audio_ms=800, **spoken)
    made.answer(text("Yes."), trigger="end_of_speech")
    made.chunk(modality="audio", payload=sound(1000, 500))
    made.answer(text("No."), asked_by=made.chunk(text="And now?", end_of_input=True))
    made.chunk(modality="audio", payload=sound(1000, 500))
    made.frame("out", type="session_updated", turn_detection=None)  # by a button from here on
    made.chunk(modality="audio", payload=sound(3000, 100))
    made.answer(text("So."), asked_by=made.chunk(modality="audio", payload="", end_of_input=True))
    first, typed, held = (made.point(tmp_path, turn) for turn in (1, 2, 3))
    assert len(first.sound) / 32 == 500  # with 200 ms behind it
    assert (typed.text, typed.sound) == ("And now?", b"")
    samples = np.frombuffer(held.sound, "<i2")
    assert len(samples) / 16 == 100
    assert np.abs(samples[400:-400].astype(int) - 3000).max() < 100


def test_text_and_pictures_in_binary_frames_count(tmp_path: Path) -> None:
    made = Made()
    typed = "Grüße, wer bist du?".encode()
    made.binary(Modality.TEXT, typed[:3])  # within a character
    made.answer(text("Ich bin's."), asked_by=made.binary(Modality.TEXT, typed[3:], end=True))
    made.chunk(text="What is ")
    made.binary(Modality.IMAGE, b"png")
    made.answer(text("A cat."), asked_by=made.chunk(text="this?", end_of_input=True))
    assert made.point(tmp_path, 1).text == typed.decode()
    with pytest.raises(OmniError, match="pictures"):
        made.point(tmp_path, 2)


def test_pictures_are_refused_in_their_own_turn_alone(tmp_path: Path) -> None:
    made = Made()
    made.chunk(modality="image", payload="AAAA", format="image/png")
    made.answer(asked_by=made.chunk(text="What is it?", end_of_input=True))
    made.answer(asked_by=made.chunk(text="Really?", end_of_input=True))
    with pytest.raises(OmniError, match="pictures"):
        made.point(tmp_path, 1)
    assert made.point(tmp_path, 2).text == "Really?"


def test_a_turn_may_be_as_long_as_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    made.chunk(modality="audio", payload=sound(1000, 1000), format="pcm16")
    made.answer(asked_by=made.chunk(modality="audio", payload="", end_of_input=True))
    monkeypatch.setattr(forking, "MAX_SPOKEN_SEC", 1)
    assert made.point(tmp_path, 1).sound
    monkeypatch.setattr(forking, "MAX_SPOKEN_SEC", 0.999)
    with pytest.raises(OmniError, match="longer than"):
        made.point(tmp_path, 1)


def test_of_a_long_history_the_latest_items_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    for number in range(4):
        made.answer(text(f"a{number}"), asked_by=made.chunk(text=f"q{number}", end_of_input=True))
    monkeypatch.setattr(forking, "MAX_HISTORY_ITEMS", 3)
    assert [item["content"] for item in made.point(tmp_path, 4).history] == ["a1", "q2", "a2"]
    monkeypatch.setattr(forking, "MAX_HISTORY_BYTES", 60)
    assert [item["content"] for item in made.point(tmp_path, 4).history] == ["a2"]
