"""``--engine vllm`` with an ordinary text model is a voice assistant: embedded parts do what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.live_server import live_server
from support.native_client import native_client
from support.speech_clips import clip_bytes

from omni_ws.config import EngineName, ServerConfig, VllmConfig
from omni_ws.engine_choice import create_engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("no_weights")]


def configured(model: Path, args: Any) -> ServerConfig:
    return ServerConfig(engine=EngineName.VLLM, vllm=VllmConfig(model=str(model), args=dict(args)))


async def test_a_text_model_gets_a_voice(tmp_path: Path) -> None:
    from support.tiny_models import ENGINE_ARGS, build_text_model

    engine = create_engine(configured(build_text_model(tmp_path / "tiny-text"), ENGINE_ARGS))
    assert engine.name == "vllm"
    assert engine.capabilities.token_sessions  # known before the start, when the ports open
    async with live_server(engine) as server, native_client(server) as client:
        assert client.created["parts"]["llm"] == {"name": "vllm", "model": "tiny-text"}
        assert client.created["parts"]["tts"] is not None
        assert {"audio", "text"} <= set(client.created["capabilities"]["output_modalities"])
        await client.configure(sampling={"max_tokens": 8}, modalities=["text"])
        await client.say("hello")
        answer = await client.answer()
        assert not answer.errors
        assert answer.final["usage"]["output_tokens"] == 8
        # What a model of random weights writes may not be speakable, so the voice reads something else.
        await client.configure(task="speech", modalities=["audio"])
        await client.say("good morning")
        assert (await client.answer()).audio


async def test_a_model_that_hears_hears_by_itself(tmp_path: Path) -> None:
    from support.tiny_models import MULTIMODAL_ARGS, build_audio_model

    engine = create_engine(configured(build_audio_model(tmp_path / "tiny-audio"), MULTIMODAL_ARGS))
    async with live_server(engine) as server, native_client(server) as client:
        assert client.created["parts"]["asr"] is None
        assert client.created["parts"]["tts"] is not None
        assert "transcript" not in client.created["capabilities"]["output_modalities"]
        await client.configure(sampling={"max_tokens": 4}, modalities=["text"])
        await client.chunk(clip_bytes("cards_001"), end=True)
        answer = await client.answer()
        assert not answer.errors
        assert answer.final["usage"]["input_audio_ms"] > 1000
