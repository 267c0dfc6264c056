"""What the start says about parts, and about servers of models beside it."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest
from support.scripted_engines import RetortEngine, ToneEngine, WordEngine

from omni_ws import server as server_module
from omni_ws.config import load
from omni_ws.engine.base import Engine
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.fake import EchoEngine
from omni_ws.engine.llm.auto_llm import AutoLlm, Found
from omni_ws.engine_choice import part_lines


def lines(engine: Engine, *argv: str) -> list[str]:
    return [*part_lines(engine, load(argv).config)]


def test_each_part_has_a_line_with_its_model() -> None:
    asr = WordEngine()
    asr.model = "en-us"
    engine = ComposedEngine(RetortEngine(), asr=asr, tts=ToneEngine())
    assert lines(engine, "--llm", "rules") == ["ASR: words (en-us)", "LLM: retort", "TTS: tone"]


def test_parts_that_nobody_wanted_are_said_to_be_missing() -> None:
    argv = ("--llm", "rules", "--asr", "none", "--tts", "none")
    assert lines(ComposedEngine(RetortEngine()), *argv) == [
        "ASR: none, as --asr says",
        "LLM: retort",
        "TTS: none, as --tts says",
    ]


def test_a_remote_engine_has_the_ears_of_its_upstream() -> None:
    assert lines(ComposedEngine(RetortEngine()), "--engine", "remote") == ["ASR: none", "LLM: retort", "TTS: none"]


def test_what_the_llm_does_by_itself_is_said() -> None:
    said = ["ASR: the LLM hears by itself", "LLM: fake", "TTS: the LLM speaks by itself"]
    assert lines(ComposedEngine(EchoEngine()), "--engine", "vllm") == said


def test_an_engine_that_is_a_whole_has_no_parts_to_tell() -> None:
    assert lines(EchoEngine()) == []


async def test_servers_of_models_are_suggested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def find() -> Found:
        return Found(lines=("Ollama is here",))

    stop = asyncio.Event()
    said: list[str] = []

    def announce(*arguments: Any) -> None:
        announced(*arguments)
        said.extend(record.getMessage() for record in caplog.records)
        stop.set()

    announced = server_module._announce
    monkeypatch.setattr(server_module, "_announce", announce)
    engine = ComposedEngine(AutoLlm(RetortEngine(), find=find, mind=None), asr=WordEngine())
    app = server_module.create_app(engine, load(("--llm", "rules", "--tts", "none", "--port", "0")).config)
    with caplog.at_level(logging.INFO, "omni_ws.server"):
        await server_module._serve_until(stop, asyncio.Event(), engine, app)
    assert "Ollama is here" in said
    parts = said.index("ASR: words")
    assert said[parts : parts + 3] == ["ASR: words", "LLM: retort", "TTS: none, as --tts says"]
    assert said[-1].startswith("to try it, open http://")


@pytest.mark.virtual_clock
async def test_a_start_that_waits_says_where_the_page_is(caplog: pytest.LogCaptureFixture) -> None:
    class AbsentEngine(EchoEngine):
        async def start(self) -> None:
            await asyncio.Event().wait()

    stop = asyncio.Event()
    app = server_module.create_app(AbsentEngine(), load(("--port", "0")).config)
    with caplog.at_level(logging.INFO, "omni_ws.server"):
        serving = asyncio.create_task(server_module._serve_until(stop, asyncio.Event(), AbsentEngine(), app))
        await asyncio.sleep(60)
        stop.set()
        await serving
    (line,) = [record.getMessage() for record in caplog.records if "open http://" in record.getMessage()]
    assert re.fullmatch(r"still starting; open http://127\.0\.0\.1:\d+ to see how it goes", line)
    # Scripts take the line with these words for the one that says that the server is ready.
    assert "in a browser" not in caplog.text
