"""Without ``--llm`` a server takes what serves a model on this machine, and otherwise answers by rules."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.live_server import LiveServer, live_server
from support.native_client import native_client
from support.raw_http import call
from support.scripted_upstream import OllamaServer, says

from omni_ws import engine_choice
from omni_ws.cli import main
from omni_ws.config import ServerConfig, load
from omni_ws.config.parts import LOCAL_PORTS
from omni_ws.engine_choice import (
    LocalServer,
    create_engine,
    part_lines,
)

pytestmark = pytest.mark.usefixtures("no_weights")

PARTS = ("--asr", "none", "--tts", "none", "--port", "0")


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")  # which is for OpenAI alone


@asynccontextmanager
async def beside_ollama(
    patch: pytest.MonkeyPatch, *argv: str, another_user: bool = False
) -> AsyncIterator[tuple[LiveServer, OllamaServer]]:
    """A server that was started beside an Ollama."""
    async with OllamaServer(models=("llama3.2:latest",), replies=[says("Foxes", " are red.")]).serve() as ollama:
        patch.setitem(LOCAL_PORTS, "ollama", ollama.port)
        patch.setattr(engine_choice, "LOCAL_SERVERS", (LocalServer("Ollama", ollama.port, "ollama"),))
        patch.setattr(engine_choice, "LOOK_SEC", 60)
        owners = {ollama.port: {os.getuid() + 1 if another_user else os.getuid()}}
        patch.setattr(engine_choice, "listener_owners", lambda: owners)
        patch.setattr("omni_ws.engine.llm.auto_llm.FOUND_SEC", 60)
        async with live_server(create_engine(load((*PARTS, *argv)).config)) as server:
            yield server, ollama


async def test_a_server_of_this_machine_answers_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    async with beside_ollama(monkeypatch) as (server, ollama), native_client(server) as client:
        assert client.created["parts"]["llm"] == {"name": "remote", "model": "llama3.2:latest"}
        health = (await call(server.port, "GET", "/health")).json()
        assert health["parts"]["llm"] == {"name": "remote", "model": "llama3.2:latest"}
        config = load(PARTS).config
        assert "LLM: remote (llama3.2:latest)" in part_lines(server.engine, config)
        line = "Ollama on this machine answers, with llama3.2:latest; for rules alone: --llm rules, "
        line += "or make serve LLM=rules"
        assert server.engine.describe()[0] == line
        await client.say("tell me about foxes")
        assert (await client.answer()).text == "Foxes are red."
        # Rules answer what they know exactly.
        await client.say("what is three plus four")
        assert (await client.answer()).text == "That makes 7."
        assert [one["model"] for one in ollama.requests] == ["llama3.2:latest"]
        assert {headers["authorization"] for headers in ollama.headers} == {None}


@pytest.mark.parametrize("argv", [("--llm", "rules"), ("--llm", "auto")])
async def test_it_is_taken_only_where_the_llm_may_be_chosen(
    argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with beside_ollama(monkeypatch, *argv) as (server, ollama):
        llm = (await call(server.port, "GET", "/health")).json()["parts"]["llm"]
        assert llm["name"] == ("remote" if "auto" in argv else "rules")
        assert bool(ollama.headers) is ("auto" in argv)


async def test_nothing_is_looked_for_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    async with beside_ollama(monkeypatch) as (server, ollama):
        llm = (await call(server.port, "GET", "/health")).json()["parts"]["llm"]
        assert llm["name"] == "rules"
        assert llm["coming"]["why"].endswith("with CI in the environment none is chosen")
        assert ollama.headers == []


async def test_several_workers_look_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with beside_ollama(monkeypatch, "--workers", "2") as (server, ollama):
        llm = (await call(server.port, "GET", "/health")).json()["parts"]["llm"]
        assert llm["name"] == "rules"
        assert llm["coming"]["why"].endswith("several workers choose none")
        assert ollama.headers == []


async def test_what_another_user_serves_gets_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    async with beside_ollama(monkeypatch, another_user=True) as (server, ollama), native_client(server) as client:
        assert client.created["parts"]["llm"]["name"] == "rules"
        await client.say("tell me about foxes")
        await client.answer()
        assert ollama.requests == []
        line = "Ollama on this machine serves llama3.2:latest (another user of this machine runs it): to talk with it, "
        assert server.engine.describe()[0] == f"{line}start with --llm ollama"


def test_it_starts_where_no_package_of_a_model_is_installed() -> None:
    script = (
        "import asyncio, sys\n"
        "sys.modules.update(dict.fromkeys(('httpx', 'xllamacpp')))\n"
        "from omni_ws.config import load\n"
        "from omni_ws.engine_choice import create_engine\n"
        f"engine = create_engine(load({PARTS!r}).config)\n"
        "async def live():\n"
        "    await engine.start()\n"
        "    print(engine.llm_part.coming.state)\n"
        "    await engine.stop()\n"
        "asyncio.run(live())\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "offered\n"), ended.stderr


@pytest.mark.parametrize(
    ("argv", "fetches"),
    [((), False), (("--fetch",), True), (("--fetch", "--no-fetch"), False), (("--llm", "rules", "--fetch"), False)],
)
def test_the_flag_lets_the_running_server_fetch_a_model(
    argv: tuple[str, ...], fetches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ServerConfig] = []

    async def serve(config: ServerConfig, *, listening: Callable[[int], object] | None) -> int:
        served.append(config)
        await asyncio.sleep(0)
        return 0

    monkeypatch.setattr("omni_ws.server.serve", serve)
    monkeypatch.setattr("omni_ws.tools.weights.fetch_for_start", lambda config: None)
    assert main(["serve", *PARTS, *argv], {}) == 0
    assert [config.llm.fetch for config in served] == [fetches]


def test_a_key_is_for_no_server_that_is_found(capsys: Any) -> None:
    assert main(["serve", *PARTS, "--llm", "auto", "--llm.api-key", "secret"], {}) == 2
    assert "llm.api_key means nothing beside --llm auto" in capsys.readouterr().err
