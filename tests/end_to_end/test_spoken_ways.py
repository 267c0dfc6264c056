"""The same spoken question to compositions of embedded and remote parts, by each way in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pydantic import SecretStr
from support.live_server import LiveServer, live_server
from support.llama_cpp_serve import KEY, llama_cpp_server
from support.spoken_ways import WAYS

from omni_ws.config import ServerConfig
from omni_ws.config.part_settings import AsrConfig, LlmConfig, TtsConfig
from omni_ws.engine_choice import create_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@asynccontextmanager
async def composed(llm: LlmConfig) -> AsyncIterator[LiveServer]:
    """A server whose LLM is given, between ears and a voice that need no weights."""
    config = ServerConfig(asr=AsrConfig(use="pocketsphinx"), llm=llm, tts=TtsConfig(use="espeak"))
    async with live_server(create_engine(config)) as server:
        yield server


@pytest.mark.parametrize("way", WAYS)
async def test_rules(way: str) -> None:
    async with composed(LlmConfig(use="rules")) as server:
        (await WAYS[way](server)).check()


@pytest.mark.parametrize("way", WAYS)
async def test_a_server_of_other_people(way: str) -> None:
    with llama_cpp_server() as port:
        async with composed(LlmConfig(use=f"http://127.0.0.1:{port}/v1", api_key=SecretStr(KEY))) as server:
            (await WAYS[way](server)).check()
