"""A server on a machine where Whisper cannot be had: it says so, answers text, and refuses speech."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.live_server import LiveServer, live_server, scrape
from support.native_client import native_client
from support.raw_http import post, raw_client, request
from support.speech_clips import clip_bytes

from omni_ws.config import load
from omni_ws.engine.asr import whisper
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine_choice import (
    advice,
    create_engine,
    part_lines,
    turn_lines,
)
from omni_ws.errors import EngineFailed
from omni_ws.installing import fetch_command

pytestmark = pytest.mark.usefixtures("no_weights")

WHY = "No audio input: ASR (whisper): the weights of Whisper tiny.en are not here; fetch them with: " + fetch_command(
    "whisper-tiny-en"
)


def created(*argv: str) -> ComposedEngine:
    engine = create_engine(load(argv).config)
    assert isinstance(engine, ComposedEngine)
    return engine


@pytest.fixture
async def server() -> AsyncIterator[LiveServer]:
    async with live_server(created("--llm", "rules", "--embedded.voice", "none")) as running:
        yield running


@pytest.mark.parametrize(
    "argv", [("--engine", "embedded"), ("--llm", "rules"), ("--asr", "embedded", "--llm", "rules")]
)
async def test_the_start_says_what_is_missing_and_what_gets_it(argv: tuple[str, ...]) -> None:
    config = load(argv).config
    engine = created(*argv, "--embedded.voice", "none")
    await engine.start()
    try:
        assert next(part_lines(engine, config)) == "ASR: none"
        assert engine.describe()[0] == WHY
        assert engine.shortcomings == (WHY,)
        assert advice(engine, config) == WHY
        assert [*turn_lines(engine, ("server_vad",))] == []
        assert engine.parts["asr"] is None
    finally:
        await engine.stop()


async def test_one_that_is_named_does_not_start_without_it() -> None:
    engine = created("--asr", "whisper", "--tts", "none")
    with pytest.raises(EngineFailed, match=r"^ASR \(whisper\): the weights of Whisper tiny\.en are not"):
        await engine.start()
    assert engine.shortcomings == ()


async def test_what_breaks_at_the_start_is_no_reason_to_refuse_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(model: str) -> str:
        raise RuntimeError("secret")

    monkeypatch.setattr(whisper, "whisper_problem", breaks)
    engine = created("--tts", "none")
    await engine.start()
    (line,) = engine.shortcomings
    assert line.startswith("No audio input: ASR (whisper): the engine failed")
    assert "secret" not in line
    await engine.stop()


async def test_health_and_metrics_tell(server: LiveServer) -> None:
    async with raw_client(server.port) as client:
        await client.send(request("GET", "/health"))
        health = (await client.response()).json()
    assert (health["status"], health["parts"]["asr"], health["stages"]) == ("ok", None, ["llm"])
    assert (await scrape(server)).value("part_up", part="asr") == 0


async def test_text_is_answered_and_audio_is_refused(server: LiveServer) -> None:
    async with native_client(server) as client:
        able = client.created["capabilities"]
        assert "audio" not in able["input_modalities"]
        assert "transcribe" not in able["tasks"]
        assert (able["turn_detection"], able["turn_detection_types"]) == (False, [])
        await client.chunk(clip_bytes("goforward"), end=True)
        assert (await client.error())["code"] == "unsupported_modality"
        await client.say("what is three plus four")
        assert (await client.answer()).text == "That makes 7."


async def test_an_open_microphone_is_refused_and_the_session_goes_on(server: LiveServer) -> None:
    async with native_client(server) as client:
        await client.send("session_config", turn_detection={"type": "server_vad"})
        error = await client.error()
        assert (error["code"], error["param"]) == ("unsupported_parameter", "turn_detection")
        await client.say("what is three plus four")
        assert (await client.answer()).text == "That makes 7."


async def test_speech_by_http_is_refused(server: LiveServer) -> None:
    session = await post(server.port, "/v1/streaming_input/sessions", {"task": "transcribe"})
    assert (session.status, session.error["code"]) == (400, "unsupported_parameter")
