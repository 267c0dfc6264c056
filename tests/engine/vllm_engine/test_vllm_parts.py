"""A spoken question to three models on vLLM, as parts of one server; LLM and Whisper have real weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.live_server import live_server
from support.native_client import native_client
from support.ways_in import by_websocket

from omni_ws.config import ServerConfig, VllmConfig
from omni_ws.config.parts import AsrConfig, LlmConfig, TtsConfig
from omni_ws.engine_choice import create_engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SMOLLM2_ARGS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 128 << 20,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "use_tqdm_on_load": False,
}


async def test_an_llm_between_whisper_and_a_talker(tmp_path: Path) -> None:
    """As on one GPU, where each is told its share: here each has its cache.

    The Talker has random weights: what it says are no words, but there is as much of it as there is text.
    """
    from support.real_models import smollm2, whisper_tiny_en
    from support.tiny_models import ENGINE_ARGS, MULTIMODAL_ARGS, build_codec, build_talker, write_talker_profile

    profile = write_talker_profile(tmp_path / "tiny.toml", build_codec(tmp_path / "codec"))
    config = ServerConfig(
        asr=AsrConfig(use=f"vllm:{whisper_tiny_en()}", args={**MULTIMODAL_ARGS, "max_model_len": 448}),
        llm=LlmConfig(use=f"vllm:{smollm2()}"),
        tts=TtsConfig(use=f"talker:{build_talker(tmp_path / 'talker')}"),
        vllm=VllmConfig(args=SMOLLM2_ARGS, talker_profile=str(profile), talker_args=dict(ENGINE_ARGS)),
    )
    async with live_server(create_engine(config)) as server:
        assert server.engine.capabilities.stages == ("asr", "thinker", "talker", "code2wav")
        async with native_client(server) as client:
            assert client.created["parts"] == {
                "asr": {"name": "vllm", "model": whisper_tiny_en().name},
                "llm": {"name": "vllm", "model": smollm2().name},
                "tts": {"name": "talker", "model": "talker"},
            }
            await client.configure(task="speech", modalities=["audio"])
            await client.say("good morning")
            assert (await client.answer()).audio
        answer = await by_websocket(server)
        assert answer.heard is not None
        assert "forward" in answer.heard.lower()
        assert answer.text
        assert len(answer.audio) > 4000
