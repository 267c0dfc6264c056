"""The example with a tool, as a program: a model that calls it, and what it does with bad calls."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.live_server import live_server
from support.patience import PATIENCE_SEC
from support.scripted_engines import ReadingEngine, ToolCallingEngine, WordEngine
from tool_client import MAX_ROUNDS, local_time, run_tool

from omni_ws.client.audio import Pcm16, read_wav, write_wav
from omni_ws.core.chunks import ToolCall
from omni_ws.engine.composed.engine import ComposedEngine

PROGRAM = Path(__file__).parents[2] / "examples" / "tool_client.py"
NOON = datetime(2031, 7, 4, 12, 0, tzinfo=UTC)


async def tool_client(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PROGRAM),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "OMNI_WS_API_KEY"},
    )
    output, complaints = await asyncio.wait_for(process.communicate(stdin.encode()), PATIENCE_SEC)
    assert process.returncode is not None
    return process.returncode, output.decode(), complaints.decode()


@pytest.fixture
async def llm() -> ToolCallingEngine:
    return ToolCallingEngine()


@pytest.fixture
async def url(llm: ToolCallingEngine) -> AsyncIterator[str]:
    async with live_server(ComposedEngine(llm, asr=WordEngine(), tts=ReadingEngine())) as server:
        yield f"ws://127.0.0.1:{server.port}"


@pytest.mark.parametrize(
    ("city", "time"),
    [
        ("Paris", "Europe/Paris: Friday, 04 July 2031, 14:00"),
        (" new york ", "America/New_York: Friday, 04 July 2031, 08:00"),
        ("Tokyo, Japan", "Asia/Tokyo: Friday, 04 July 2031, 21:00"),
        ("Atlantis", "no time zone is known for Atlantis"),
        ("", "no time zone is known for "),
    ],
)
def test_the_time_in_a_city(city: str, time: str) -> None:
    assert local_time(city, NOON) == time


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("local_time", '{"city": "Paris"}', "Europe/Paris: Friday, 04 July 2031, 14:00"),
        ("local_time", '{"city": ', "the arguments must be a JSON object with a city"),
        ("local_time", "[]", "the arguments must be a JSON object with a city"),
        ("local_time", "{}", "the arguments must be a JSON object with a city"),
        ("rain", '{"city": "Paris"}', "there is no tool rain"),
    ],
)
def test_a_bad_call_has_a_result_that_says_so(name: str, arguments: str, result: str) -> None:
    assert run_tool(ToolCall("call_1", name, arguments), NOON) == result


async def test_a_question_that_needs_the_tool(url: str, llm: ToolCallingEngine, tmp_path: Path) -> None:
    reply = tmp_path / "reply.wav"
    status, output, complaints = await tool_client("What time is it?", "--url", url, "--save", str(reply))
    assert (status, output.count("It is Europe/Paris: ")) == (0, 1)
    assert 'local_time {"city":"Paris"} → Europe/Paris' in complaints
    assert llm.requests[0].tools[0]["function"]["name"] == "local_time"
    assert read_wav(reply).duration_ms > 0


async def test_questions_line_by_line(url: str) -> None:
    status, output, _ = await tool_client("--url", url, stdin="What time is it?\n\nAnd now?")
    assert (status, len(output.splitlines())) == (0, 2)


async def test_a_spoken_question(url: str, llm: ToolCallingEngine, tmp_path: Path) -> None:
    question = tmp_path / "question.wav"
    write_wav(question, Pcm16(b"time.   " * 400, 16_000))  # a WordEngine hears what the bytes spell
    status, output, _ = await tool_client("--file", str(question), "--url", url)
    assert (status, output.count("It is Europe/Paris: ")) == (0, 1)


async def test_a_model_that_calls_without_end_is_stopped() -> None:
    llm = ToolCallingEngine()
    llm.restless = True
    async with live_server(llm) as server:
        status, output, _ = await tool_client("Go on", "--url", f"ws://127.0.0.1:{server.port}")
    assert (status, output.strip(), len(llm.requests)) == (0, "", MAX_ROUNDS + 1)


async def test_problems_have_a_message_and_a_status(url: str, tmp_path: Path) -> None:
    assert (await tool_client("Hello", "--url", "ws://127.0.0.1:1"))[0] == 4
    status, _, complaints = await tool_client("--file", str(tmp_path / "none.wav"), "--url", url)
    assert (status, complaints.startswith("tool_client: ")) == (2, True)


async def test_a_server_without_tools_says_so() -> None:
    async with live_server() as server:
        status, _, complaints = await tool_client("Hello", "--url", f"ws://127.0.0.1:{server.port}")
    assert status == 1
    assert "tools are not supported by this engine" in complaints
