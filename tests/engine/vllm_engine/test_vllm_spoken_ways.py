"""The same spoken question to compositions with parts on vLLM, by each way in; LLM and Whisper have real weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.embedded_engine import ears
from support.live_server import live_server
from support.spoken_ways import WAYS

from omni_ws.config import ServerConfig, VllmConfig
from omni_ws.config.model import VoiceChoice
from omni_ws.config.part_settings import AsrConfig, LlmConfig, TtsConfig
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.tts.synthesis_engine import SynthesisEngine
from omni_ws.engine_choice import create_engine
from omni_ws.engine_choice.parts import llm_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

SMOLLM2_ARGS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 128 << 20,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "use_tqdm_on_load": False,
}


async def test_between_embedded_ears_and_an_embedded_voice() -> None:
    from support.real_models import smollm2

    config = ServerConfig(llm=LlmConfig(use=f"vllm:{smollm2()}"), vllm=VllmConfig(args=SMOLLM2_ARGS))
    engine = ComposedEngine(llm_of(config), asr=ears(), tts=SynthesisEngine(VoiceChoice.ESPEAK))
    async with live_server(engine) as server:
        for ask in WAYS.values():
            (await ask(server)).check()


async def test_between_whisper_and_a_talker(tmp_path: Path) -> None:
    """The Talker has random weights: what it says are no words, but there is as much of it as there is text."""
    from support.real_models import smollm2, whisper_tiny_en
    from support.tiny_codec import build_codec, write_talker_profile
    from support.tiny_models import ENGINE_ARGS, MULTIMODAL_ARGS, build_talker

    profile = write_talker_profile(tmp_path / "tiny.toml", build_codec(tmp_path / "codec"))
    config = ServerConfig(
        asr=AsrConfig(use=f"vllm:{whisper_tiny_en()}", args={**MULTIMODAL_ARGS, "max_model_len": 448}),
        llm=LlmConfig(use=f"vllm:{smollm2()}"),
        tts=TtsConfig(use=f"talker:{build_talker(tmp_path / 'talker')}"),
        vllm=VllmConfig(args=SMOLLM2_ARGS, talker_profile=str(profile), talker_args=dict(ENGINE_ARGS)),
    )
    async with live_server(create_engine(config)) as server:
        for name, ask in WAYS.items():
            answer = await ask(server)
            if answer.heard is not None:
                assert "forward" in answer.heard.lower(), (name, answer.heard)
            assert answer.text, name
            assert len(answer.audio) > 4000, name
