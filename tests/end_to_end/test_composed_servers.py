"""Compositions as people start them: real programs, real ports, the lines that they print."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.commands import run_command, run_here
from support.patience import PATIENCE_SEC
from support.raw_http import post
from support.real_models import fetched, smollm2_file
from support.speech_clips import clip_bytes

from omni_ws.cli import main
from omni_ws.client import connect

pytestmark = [pytest.mark.slow, pytest.mark.real_time]


@dataclass
class Started:
    port: int
    said: list[str]
    pid: int

    @property
    def parts(self) -> list[str]:
        return [line for line in self.said if line.startswith(("ASR: ", "LLM: ", "TTS: "))]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


@asynccontextmanager
async def serve(*argv: str) -> AsyncIterator[Started]:
    """``omni-ws serve`` with what it said up to the line with its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omni_ws", "serve", "--port", "0", *argv), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    said: list[str] = []
    reading: asyncio.Task[bytes] | None = None
    try:
        async with asyncio.timeout(PATIENCE_SEC):
            while not said or "in a browser" not in said[-1]:
                line = (await process.stderr.readline()).decode()
                assert line, said
                said.append(line.partition(": ")[2].rstrip())
        reading = asyncio.create_task(process.stderr.read())  # else its log would fill the pipe
        (port,) = re.findall(r":(\d+) in a browser", said[-1])
        yield Started(int(port), said, process.pid)
        process.terminate()
        async with asyncio.timeout(PATIENCE_SEC):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if reading is not None:
            await reading


async def test_three_servers_are_the_parts_of_a_fourth() -> None:
    """ASR in the fourth, a server that answers, and one that speaks."""
    fetched("whisper-tiny-en")
    async with (
        serve("--engine", "fake", "--fake.reply", "Forward it is.") as answering,
        serve("--llm", "rules", "--asr", "none", "--tts", "espeak") as speaking,
        serve("--asr", "whisper", "--llm", answering.url, "--tts", speaking.url) as server,
    ):
        asr, llm, tts = speaking.parts
        assert (asr, llm, tts[:14]) == ("ASR: none, as --asr says", "LLM: rules", "TTS: espeak-ng")
        assert server.parts == ["ASR: whisper (tiny.en)", "LLM: remote (fake)", "TTS: remote (rules)"]
        async with connect(f"ws://127.0.0.1:{server.port}/v1/streaming_input") as session:
            parts = session.created.parts
            assert parts.asr is not None
            assert parts.asr.name == "whisper"
            await session.send_audio(clip_bytes("goforward"), end=True)
            answer = await session.answer()
        assert (answer.transcript.strip(), answer.text) == ("Go forward 10 meters.", "Forward it is.")
        assert len(answer.audio) > 16_000


async def test_a_server_that_only_speaks() -> None:
    async with serve("--llm", "rules", "--asr", "none", "--tts", "espeak") as server:
        said = await post(server.port, "/v1/audio/speech", {"input": "Good morning.", "response_format": "pcm"})
        assert said.status == 200
        assert len(said.body) > 16_000
        refused = await post(server.port, "/v1/streaming_input/sessions", {"task": "transcribe"})
        assert refused.error["code"] == "unsupported_parameter"


def children_of(process: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def command_of(process: int) -> str:
    """The command line of a process; empty for one that has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except FileNotFoundError:
        return ""


async def test_a_language_model_inside() -> None:
    smollm2_file()
    async with serve("--llm", "smollm2", "--asr", "none", "--tts", "none", "--llm.threads", "1") as server:
        assert server.parts[1] == "LLM: gguf (SmolLM2-135M-Instruct)"
        assert any(line.startswith("SmolLM2 is a very small model ") for line in server.said)
        config = {"sampling": {"temperature": 0, "max_tokens": 8}}
        async with connect(f"ws://127.0.0.1:{server.port}/v1/streaming_input", config=config) as session:
            assert (await session.ask_text("What is the capital of France?")).text
        (model,) = children_of(server.pid)
        assert "omni_ws.engine.llm.gguf_server" in command_of(model)
    assert command_of(model) == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--llm", "llamacpp", "--port", "8080"), "llama.cpp's server listens on port 8080"),
        (("--llm", "gpt"), "llm.use = 'gpt' (command line --llm.use): unknown; known are auto, embedded,"),
        (("--engine", "fake"), "--engine names the whole engine, and --asr a part of one"),
    ],
)
def test_a_composition_that_is_no_configuration(argv: tuple[str, ...], message: str) -> None:
    ended = run_here(main, "serve", "--port", "0", "--asr", "none", *argv)
    assert ended.status == 2
    assert ended.errors.splitlines()[-1].startswith(f"omni-ws serve: error: {message}")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--llm", "http://127.0.0.1:9/v1", "--remote.start-timeout-sec", "0"),
            "LLM (remote): no upstream can be used: 127.0.0.1:9: ",
        ),
        (
            ("--llm", "rules", "--tts", "http://127.0.0.1:9/v1", "--remote.start-timeout-sec", "0"),
            "TTS (remote): no upstream can be used: 127.0.0.1:9: ",
        ),
        (("--llm", "rules", "--tts", "espeak", "--tts.voice", "nobody"), "TTS (synthesis): espeak-ng"),
    ],
)
async def test_a_composition_that_cannot_start(argv: tuple[str, ...], message: str) -> None:
    ended = await run_command(*(sys.executable, "-m", "omni_ws", "serve", "--port", "0", "--asr", "none", *argv))
    assert ended.status == 1
    assert ended.errors.splitlines()[-1].startswith(f"omni-ws serve: error: {message}")
