"""The dialect of vLLM's clients on ``/v1/realtime``, in the order of events of the example that vLLM ships."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest
from support.embedded_engine import EmbeddedEngine
from support.live_server import LiveServer, live_server
from support.speech_clips import WORDS, clip_bytes
from websockets.asyncio.client import ClientConnection, connect

from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import FinishReason, OutputModality, Task, Usage
from omni_ws.engine.base import EngineCapabilities, Finished, TextOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.errors import EngineFailed

PIECE = 4096
COMMIT = "input_audio_buffer.commit"
APPEND = "input_audio_buffer.append"


@asynccontextmanager
async def vllm_client(server: LiveServer) -> AsyncIterator[ClientConnection]:
    """A connection that has been greeted."""
    async with connect(f"ws://127.0.0.1:{server.port}/v1/realtime", proxy=None, ping_interval=None) as connection:
        created = await receive(connection)
        assert created["type"] == "session.created"
        assert created["id"].startswith("sess_")
        assert isinstance(created["created"], int)
        yield connection


async def receive(connection: ClientConnection) -> dict[str, Any]:
    event: dict[str, Any] = orjson.loads(await connection.recv())
    return event


async def send(connection: ClientConnection, kind: str, **fields: Any) -> None:
    await connection.send(orjson.dumps({"type": kind, **fields}).decode())


async def append(connection: ClientConnection, audio: bytes) -> None:
    for start in range(0, len(audio), PIECE):
        await send(connection, APPEND, audio=base64.b64encode(audio[start : start + PIECE]).decode())


async def transcription(connection: ClientConnection) -> tuple[list[str], dict[str, Any]]:
    """The deltas up to ``transcription.done``, and that."""
    deltas: list[str] = []
    while (event := await receive(connection))["type"] == "transcription.delta":
        deltas.append(event["delta"])
    assert event["type"] == "transcription.done", event
    return deltas, event


class Listener(ScriptedEngine):
    """Says the same of every utterance."""

    def __init__(self, *script: Any) -> None:
        ended = Finished(FinishReason.STOP, Usage(input_tokens=5, output_tokens=2))
        super().__init__(script or (TextOutput("go"), TextOutput(" forward"), ended))


@pytest.mark.slow
@pytest.mark.parametrize("model", [True, False], ids=["model first", "commit first"])
async def test_speech_is_transcribed(model: bool) -> None:
    async with (
        live_server(EmbeddedEngine(voice=VoiceChoice.ESPEAK)) as server,
        vllm_client(server) as connection,
    ):
        if model:
            await send(connection, "session.update", model="voxtral")
        await send(connection, COMMIT)
        for clip in ("goforward", "cards_001"):
            await append(connection, clip_bytes(clip))
            await send(connection, COMMIT, final=True)
            deltas, done = await transcription(connection)
            assert done["text"].split() == "".join(deltas).split() == WORDS[clip].split()


async def test_what_is_asked_of_the_engine_and_answered() -> None:
    engine = Listener()
    async with live_server(engine) as server, vllm_client(server) as connection:
        await send(connection, "session.update", model="voxtral")
        await send(connection, COMMIT)
        for _ in range(2):
            await append(connection, bytes(3200))
            await send(connection, COMMIT, final=True)
            deltas, done = await transcription(connection)
            assert deltas == ["go", " forward"]
            assert done["text"] == "go forward"
            assert done["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    request = engine.requests[-1]
    assert (request.task, request.modalities) == (Task.TRANSCRIBE, frozenset({OutputModality.TEXT}))
    assert (request.input_audio.encoding, request.input_audio.sample_rate) == ("pcm16", 16_000)
    assert request.history == ()


async def test_an_utterance_without_audio() -> None:
    engine = Listener()
    async with live_server(engine) as server, vllm_client(server) as connection:
        await send(connection, COMMIT, final=True)
        deltas, done = await transcription(connection)
    assert (deltas, done["text"]) == ([], "")
    assert done["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    assert not engine.requests


async def test_errors_have_the_form_of_the_dialect() -> None:
    async with live_server(Listener(), strict_model_names=True) as server, vllm_client(server) as connection:
        await send(connection, COMMIT)
        for event, code in (
            ({"type": "response.create"}, "unknown_event"),
            ({"type": APPEND, "audio": "no base64!"}, "invalid_audio"),
            ({"type": "session.update", "model": "gpt-unknown"}, "model_not_found"),
            ({"type": "session.update"}, "invalid_event"),
        ):
            await connection.send(orjson.dumps(event).decode())
            error = await receive(connection)
            assert (error["type"], error["code"]) == ("error", code)
            assert isinstance(error["error"], str)
        await connection.send("{")
        assert (await receive(connection))["code"] == "invalid_json"
        await append(connection, bytes(320))
        await send(connection, COMMIT, final=True)
        assert (await transcription(connection))[1]["text"] == "go forward"


async def test_an_engine_that_fails() -> None:
    engine = Listener(TextOutput("go"), EngineFailed("it broke"))
    async with live_server(engine) as server, vllm_client(server) as connection:
        await send(connection, COMMIT)
        await append(connection, bytes(320))
        await send(connection, COMMIT, final=True)
        assert (await receive(connection))["delta"] == "go"
        error = await receive(connection)
        assert (error["type"], error["code"]) == ("error", "engine_failed")


async def test_an_engine_that_does_not_transcribe() -> None:
    class Speaker(Listener):
        @property
        def capabilities(self) -> EngineCapabilities:
            return replace(super().capabilities, tasks=frozenset({Task.CHAT}))

    async with live_server(Speaker()) as server, vllm_client(server) as connection:
        for kind in (COMMIT, APPEND):
            await send(connection, kind)
            error = await receive(connection)
            assert (error["type"], error["code"]) == ("error", "unsupported_parameter")
            assert isinstance(error["error"], str)


@pytest.mark.parametrize(
    "first",
    [
        {"type": "session.update", "session": {"type": "realtime"}, "model": "x"},
        {"type": "session.update", "session": {"type": "realtime"}},
        {"type": COMMIT, "event_id": "event_1"},
        {"type": APPEND, "audio": ""},
    ],
)
async def test_clients_of_openai_are_told_apart(first: dict[str, Any]) -> None:
    async with live_server(Listener()) as server, vllm_client(server) as connection:
        await connection.send(orjson.dumps(first).decode())
        await send(connection, COMMIT, final=True)
        while (event := await receive(connection))["type"] != "error":
            pass
    assert event["error"]["code"] == "input_audio_buffer_commit_empty"
