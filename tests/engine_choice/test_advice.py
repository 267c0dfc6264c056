"""What a server tells its users would make its parts better."""

from __future__ import annotations

from functools import partial

import pytest
from support.live_server import live_server
from support.scripted_engines import RetortEngine, WordEngine

from omni_ws.client import connect
from omni_ws.config import load
from omni_ws.engine.base import Engine
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.fake import EchoEngine
from omni_ws.engine.llm.auto_llm import AutoLlm, Found
from omni_ws.engine.llm.rules_engine import RulesEngine
from omni_ws.engine_choice import advice


async def find() -> Found:
    return Found(lines=("Ollama is here", "LM Studio is, too"))


async def told(llm: Engine, *argv: str) -> str | None:
    engine = ComposedEngine(llm, asr=WordEngine())
    await engine.start()
    try:
        return advice(engine, load(argv).config)
    finally:
        await engine.stop()


async def test_a_server_of_models_that_was_found_and_is_not_used_is_named() -> None:
    assert await told(AutoLlm(RulesEngine(), find=find, mind=None)) == "Ollama is here"
    assert await told(AutoLlm(RulesEngine(), find=find, mind=None), "--host", "0.0.0.0") is None  # for users elsewhere


@pytest.mark.parametrize("llm", [RulesEngine(), RetortEngine(), EchoEngine()], ids=["rules", "a model", "a whole"])
async def test_nothing_is_advised_where_the_llm_was_chosen(llm: Engine) -> None:
    assert await told(llm) is None


async def test_every_session_is_told() -> None:
    async with live_server() as server:
        for said in ("Ollama is here", None):
            server.app.sessions.advise = partial(str, said) if said else lambda: None
            async with connect(server.websocket_url) as session:
                assert session.created.advice == said
