"""The same spoken question to compositions of embedded and remote parts, by each way in."""

from __future__ import annotations

import pytest
from pydantic import SecretStr
from support.embedded_engine import ears
from support.live_server import live_server
from support.real_models import KEY, llama_cpp_server
from support.voices import need
from support.ways_in import WAYS

from omni_ws.config import ServerConfig
from omni_ws.config.model import VoiceChoice
from omni_ws.config.parts import LlmConfig
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.engine_choice import llm_of

pytestmark = [pytest.mark.slow]


async def check_all_ways(llm: LlmConfig) -> None:
    """Ask a server whose LLM is given, between ears and a voice that need no weights."""
    tts = SpeechEngine(VoiceProcess(need(VoiceChoice.ESPEAK)))
    async with live_server(ComposedEngine(llm_of(ServerConfig(llm=llm)), asr=ears(), tts=tts)) as server:
        for ask in WAYS.values():
            (await ask(server)).check()


async def test_rules() -> None:
    await check_all_ways(LlmConfig(use="rules"))


async def test_a_server_of_other_people() -> None:
    with llama_cpp_server() as port:
        await check_all_ways(LlmConfig(use=f"http://127.0.0.1:{port}/v1", api_key=SecretStr(KEY)))
