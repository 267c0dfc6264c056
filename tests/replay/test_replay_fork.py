"""``omni-ws replay --from-turn``: another answer to one turn of a recorded call."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.call_sound import NoiseEngine, noise
from support.live_server import LiveServer, live_server
from support.made_calls import Said, write_call
from support.recordings import recordings, replay
from support.speech_clips import as_pcm16

from omni_ws.config.keys import ApiKey, digest

TALK = (
    Said("My name is Ada.", "Nice to meet you, Ada.\x1b[2J"),
    Said("Tell me a story.", "Once upon a time there was a keeper.", heard=4),
    Said("What is my name?", "I do not know."),
)


def made(folder: Path, **fields: Any) -> Path:
    write_call(folder, TALK, **fields)
    (path,) = recordings(folder)
    return path


def url(server: LiveServer) -> str:
    return f"ws://127.0.0.1:{server.port}"


async def test_both_answers_are_told_and_saved(tmp_path: Path) -> None:
    path, engine = made(tmp_path / "calls"), NoiseEngine(0.5)
    async with live_server(engine) as server:
        again = await replay(
            path, "--url", url(server), "--from-turn", "3", "--instructions", "Be short.", "--speed", "max",
            "--save", tmp_path / "sound", "--format", "json",
        )  # fmt: skip
        assert again.status == 0, again.errors
        report = again.report
        assert report["recorded"]["text"] == "I do not know."
        assert report["now"] == {"text": "This is noise 1.", "tool_calls": "", "audio_ms": 500}
        [request] = engine.requests
        assert request.instructions == "Be short."
        assert [(one.role, one.text) for one in request.history] == [
            ("user", "My name is Ada."),
            ("assistant", "Nice to meet you, Ada.\x1b[2J"),
            ("user", "Tell me a story."),
            ("assistant", "Once upon a time"),
        ]
        await server.check_empty()
        text = await replay(path, "--url", url(server), "--from-turn", "1", "--speed", "max")
        assert text.status == 0
        assert "User: My name is Ada." in text.output
        assert "\x1b" not in text.output  # what would control the terminal
        assert any("Nice to meet you, Ada." in line and "This is noise 2." in line for line in text.output.splitlines())
    with wave.open(str(tmp_path / "sound" / "turn-3-now.wav")) as file:
        assert (file.getnchannels(), file.getframerate()) == (1, 24_000)
        played = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        assert np.abs(played.astype(int) - np.frombuffer(as_pcm16(noise(1, 0.5)), "<i2")).max() <= 1
    with wave.open(str(tmp_path / "sound" / "turn-3-recorded.wav")) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        assert len(samples) / 24_000 == pytest.approx(report["recorded"]["audio_ms"] / 1000, abs=0.001)
        assert np.abs(samples).max() > 1000


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--from-turn", "4"], "this call has 3 turns"),
        (["--from-turn", "0"], "above 0"),
        (["--from-turn", "1", "--llm", "rules", "--url", "ws://127.0.0.1:1"], "--url is a server that runs"),
        (["--voice", "amber"], "--voice goes with --from-turn"),
    ],
)
async def test_wrong_usage_says_what_is_wrong(tmp_path: Path, more: list[str], says: str) -> None:
    ended = await replay(made(tmp_path / "calls"), *more)
    assert ended.status == 2
    assert says in ended.errors


async def test_calls_that_cannot_be_forked_are_named(tmp_path: Path) -> None:
    bare = made(tmp_path / "bare", payloads=False)
    other = made(tmp_path / "other")
    other.write_bytes(other.read_bytes().replace(b'"kind":"websocket"', b'"kind":"realtime"', 1))
    for path, says in ((bare, "record_payloads"), (other, "kind realtime"), (tmp_path / "none", "No such file")):
        ended = await replay(path, "--from-turn", "1")
        assert (ended.status, says in ended.errors) == (2, True), ended.errors
    both = await replay(bare, other, "--from-turn", "1")
    assert (both.status, "one recording" in both.errors) == (2, True)


async def test_what_the_server_refuses_is_told(tmp_path: Path) -> None:
    path = made(tmp_path / "calls")
    keys = (ApiKey(name="user", key_sha256=digest("user-key")),)
    async with live_server(NoiseEngine(0.1), keys=keys) as server:
        refused = await replay(path, "--url", url(server), "--from-turn", "1")
        assert (refused.status, "401" in refused.errors) == (1, True), refused.errors
        voice = await replay(path, "--url", url(server), "--from-turn", "1", "--voice", "nobody", "--api-key=user-key")
        assert (voice.status, "(voice)" in voice.errors) == (1, True), voice.errors
        port = server.port
    gone = await replay(path, "--url", f"ws://127.0.0.1:{port}", "--from-turn", "1")
    assert (gone.status, "no server answers" in gone.errors) == (1, True), gone.errors


async def test_answers_that_cannot_be_saved_are_told(tmp_path: Path) -> None:
    path = made(tmp_path / "calls")
    async with live_server(NoiseEngine(0.1)) as server:
        ended = await replay(path, "--url", url(server), "--from-turn", "1", "--speed", "max", "--save", path)
    assert (ended.status, "This is noise 1." in ended.output, "File exists" in ended.errors) == (2, True, True)


@pytest.mark.slow
async def test_a_server_is_started_with_another_model(tmp_path: Path) -> None:
    """The rules know the name from the history that the recording has."""
    ended = await replay(
        made(tmp_path / "calls"), "--from-turn", "3", "--speed", "max", "--patience", "60", "--format", "json",
        "--serve-args", "--engine fake",
    )  # fmt: skip
    assert ended.status == 0, ended.errors
    assert ended.report["history_items"] == 4
