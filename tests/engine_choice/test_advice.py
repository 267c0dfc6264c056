"""What a server tells its users would make its parts better."""

from __future__ import annotations

import pytest
from support.live_server import live_server
from support.part_engines import RetortEngine, WordEngine

from omni_ws.client import connect
from omni_ws.config import load
from omni_ws.engine.base import Engine
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.fake import EchoEngine
from omni_ws.engine.llm.rules_engine import RulesEngine
from omni_ws.engine_choice.available import advice

RULES = ComposedEngine(RulesEngine(), asr=WordEngine())


def told(engine: Engine, *argv: str, suggested: tuple[str, ...] = ()) -> str | None:
    return advice(engine, load(argv).config, suggested)


def test_where_rules_answer_a_model_is_advised() -> None:
    said = told(RULES)
    assert said is not None
    assert said.startswith("To talk with a language model instead of rules, start the server with --llm ollama")
    # Naming another part says nothing about this one.
    assert told(RULES, "--asr", "none") == said


def test_a_server_of_models_that_was_found_is_named() -> None:
    assert told(RULES, suggested=("Ollama is here", "LM Studio is, too")) == "Ollama is here"


@pytest.mark.parametrize(
    ("engine", "argv"),
    [
        (RULES, ("--llm", "rules")),
        (RULES, ("--engine", "embedded")),
        (RULES, ("--host", "0.0.0.0")),
        (ComposedEngine(RetortEngine()), ()),
        (EchoEngine(), ("--engine", "fake")),
    ],
    ids=["chosen", "chosen as a whole", "users elsewhere", "a model", "no parts"],
)
def test_nothing_is_advised_that_nobody_wants_or_can_do(engine: Engine, argv: tuple[str, ...]) -> None:
    assert told(engine, *argv, suggested=("Ollama is here",)) is None


async def test_every_session_is_told() -> None:
    async with live_server() as server:
        for said in ("Ollama is here", None):
            server.app.sessions.advice = said
            async with connect(server.websocket_url) as session:
                assert session.created.advice == said
