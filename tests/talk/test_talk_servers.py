"""Which server `omni-ws talk` talks to: the one on the default port, its own, or another of the Realtime API."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.commands import Ended, run_here, running
from support.live_server import live_server
from support.patience import PATIENCE_SEC
from support.scripted_engines import HearingEngine, long_answer
from support.sound_card import SOUND_LIBRARY
from support.speech_clips import clip_bytes, silence
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as websockets_server

from omni_ws.client.audio import read_wav
from omni_ws.config.keys import ApiKey, digest
from omni_ws.engine.base import TextOutput, TranscriptOutput
from omni_ws.scenarios.servers import own_server
from omni_ws.talk import command
from omni_ws.talk.command import main
from omni_ws.talk.conversation import realtime_url

ROOT = Path(__file__).parents[2]
CLIP = ROOT / "tests" / "data" / "cards_001.wav"


async def talk(*arguments: str, **environ: str) -> Ended:
    return await asyncio.to_thread(run_here, main, *arguments, environ=environ)


@pytest.fixture
def default_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port, which is the default port during the test."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    monkeypatch.setattr(command, "DEFAULT_URL", f"ws://127.0.0.1:{port}/v1/streaming_input")
    return port


@pytest.mark.slow
async def test_without_a_server_one_runs_as_long_as_the_talk(
    default_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    (tmp_path / "queue.py").write_text("raise SystemExit('a file of the user, and no module of the server')\n")
    monkeypatch.chdir(tmp_path)

    @asynccontextmanager
    async def noted(settings: dict[str, Any]) -> AsyncIterator[str]:
        async with own_server(settings) as authority:
            started.append(authority)
            yield authority

    monkeypatch.setattr(command, "own_server", noted)
    monkeypatch.setenv("OMNI_WS_ENGINE", "fake")
    ended = await talk("--text", "hello big world", OMNI_WS_ENGINE="fake")
    assert (ended.status, ended.output.splitlines()[0]) == (0, "reply: hello big world")
    assert "one starts, and ends with this command" in ended.errors
    host, port = started[0].split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


async def test_the_server_on_the_default_port_is_taken(default_port: int) -> None:
    async with live_server(port=default_port):
        ended = await talk("--text", "hello")
    assert (ended.status, ended.errors, ended.output.splitlines()[0]) == (0, "", "reply: hello")


async def test_a_setting_that_hinders_its_own_server_is_told(default_port: int) -> None:
    ended = await talk("--text", "hello", OMNI_WS_PORT="many")
    assert (ended.status, "OMNI_WS_PORT" in ended.errors) == (2, True)


@pytest.mark.parametrize(
    ("given", "opened"),
    [
        ("https://host", "wss://host/v1/realtime?model=gpt-realtime"),
        ("http://host:8080/v1/", "ws://host:8080/v1/realtime?model=gpt-realtime"),
        ("wss://host/v1/realtime?model=other", "wss://host/v1/realtime?model=other"),
        ("wss://host/openai/v1/realtime?api-version=2", "wss://host/openai/v1/realtime?api-version=2"),
    ],
)
def test_the_address_of_a_realtime_server(given: str, opened: str) -> None:
    assert realtime_url(given) == opened


@pytest.mark.parametrize("option", ["--url", "--realtime"])
@pytest.mark.parametrize(
    "url", ["ws://[::1", "ws://host:port", "ws://host:99999", "ws://host:0", "ws://a..b", "ftp://x"]
)
async def test_an_address_that_is_none(option: str, url: str) -> None:
    ended = await talk("--text", "x", option, url)
    assert (ended.status, ended.errors.startswith("omni-ws talk: invalid_value: ")) == (1, True)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"type": "error", "error": {"code": "no_quota", "message": "no more"}}, "error: no_quota: no more"),
        ({"type": "response.output_audio.delta", "response_id": "r", "item_id": "i", "delta": "AAAA"}, "not of the"),
    ],
)
async def test_a_realtime_server_that_does_not_answer_as_it_should(event: dict[str, Any], words: str) -> None:
    """Typed turns from a pipe, each of which waits for the answer to the one before, end."""

    async def serve(websocket: ServerConnection) -> None:
        await websocket.send(json.dumps({"type": "session.created", "session": {"model": "m"}}))
        async for message in websocket:
            match json.loads(message)["type"]:
                case "session.update":
                    await websocket.send('{"type": "session.updated"}')
                case "response.create":
                    await websocket.send(json.dumps(event))

    async with websockets_server(serve, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        command = (sys.executable, "-m", "omni_ws", "talk", "--text", "--realtime", f"http://127.0.0.1:{port}")
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        async with running(*command, **pipes) as process, asyncio.timeout(PATIENCE_SEC):
            told = b"".join(await process.communicate(b"one\ntwo\n")).decode()
    assert (words in told, "Traceback" in told) == (True, False), told


async def test_a_question_to_the_realtime_api(tmp_path: Path) -> None:
    """A file, whose answer is saved as it was spoken; and a voice that is not there."""
    reply = tmp_path / "reply.wav"
    engine = HearingEngine(heard=[TranscriptOutput("ten of clubs"), *long_answer()[:21]])
    async with live_server(engine) as server:
        url = f"http://127.0.0.1:{server.port}"
        asked = ("--realtime", url, "--json", "--file", str(CLIP), "--fast", "--save", str(reply))
        ended = await talk(*asked)
        assert ended.status == 0, ended.errors
        told = {entry["type"]: entry for entry in map(json.loads, ended.output.splitlines())}
        assert told["transcript"]["text"] == "ten of clubs"
        assert told["final"]["finish_reason"] == "stop"
        assert read_wav(reply).duration_ms == pytest.approx(2000, abs=1)
        refused = await talk("--realtime", url, "--text", "x", "--voice", "nobody")
        assert (refused.status, "invalid_value" in refused.errors) == (1, True)


async def test_the_key_of_a_realtime_server() -> None:
    keys = (ApiKey(name="one", key_sha256=digest("open sesame")),)
    async with live_server(keys=keys) as server:
        asked = ("--realtime", f"http://127.0.0.1:{server.port}", "--text", "hello")
        refused = await talk(*asked, OMNI_WS_API_KEY="open sesame")
        assert (refused.status, "OPENAI_API_KEY" in refused.errors) == (5, True)
        assert (await talk(*asked, OPENAI_API_KEY="open sesame")).output.startswith("reply: hello")


@pytest.mark.parametrize("option", ["--url", "--realtime"])
async def test_a_key_that_no_header_can_have_is_not_quoted(option: str) -> None:
    key = "open sesame\nX: y"
    async with live_server() as server:
        asked = ("--text", "hello", option, f"http://127.0.0.1:{server.port}")
        refused = await talk(*asked, OMNI_WS_API_KEY=key, OPENAI_API_KEY=key)
    assert (refused.status, "line break" in refused.errors, "sesame" in refused.errors) == (5, True, False)


@asynccontextmanager
async def microphone(tmp_path: Path, recording: bytes, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    (tmp_path / "sounddevice.py").write_text(SOUND_LIBRARY)
    (tmp_path / "recording.raw").write_bytes(recording)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "RECORDING": str(tmp_path / "recording.raw"),
    }
    pipes: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omni_ws", "talk", "--json", *arguments), **pipes, env=environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until(process: asyncio.subprocess.Process, kind: str, seen: list[dict[str, Any]]) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_SEC):
        while not seen or seen[-1]["type"] != kind:
            seen.append(json.loads(await process.stdout.readline()))


@pytest.mark.slow
@pytest.mark.real_time
async def test_speech_interrupts_an_answer_of_the_realtime_api(tmp_path: Path) -> None:
    engine = HearingEngine()
    engine.heard_in_turn = iter(
        [(TranscriptOutput("ten of clubs"), *long_answer()), (TranscriptOutput("go"), TextOutput("Yes?"))]
    )
    recording = silence(0.5) + clip_bytes("cards_001") + silence(3) + clip_bytes("goforward") + silence(60)
    async with live_server(engine) as server:
        arguments = ("--realtime", f"http://127.0.0.1:{server.port}", "--no-cancel-echo")
        # The card of this test records at 16 kHz, and the API takes 24.
        async with microphone(tmp_path, recording, *arguments) as process:
            seen: list[dict[str, Any]] = []
            for _ in range(2):
                await until(process, "speech_stopped", seen)
                seen.append({"type": "after"})
            await server.until(lambda: len(engine.requests) == 2)
            await process.communicate(b"q\n")
            assert process.returncode == 0
    kinds = [one["type"] for one in seen if one["type"] in ("speech_started", "speech_stopped")]
    assert kinds == ["speech_started", "speech_stopped"] * 2
    (said,) = (message.text for message in engine.requests[1].history if message.role == "assistant")
    assert 1 <= len(said.split()) <= 60


@pytest.mark.slow
def test_ctrl_c_leaves_quietly() -> None:
    """With everything that it has started; SIGTERM does the same."""
    environment = os.environ | {"OMNI_WS_ENGINE": "fake"}
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, "-c", _ON_A_FREE_PORT],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert "parts" in process.stdout.readline()
        process.send_signal(number)
        assert process.wait(PATIENCE_SEC) == 130
        _, errors = process.communicate()
        assert re.fullmatch(r"no server on the default port[^\n]*\n", errors), errors


#: The command with typed turns, where nothing is on the default port.
_ON_A_FREE_PORT = """
import socket, sys
from omni_ws.talk import command
with socket.create_server(("127.0.0.1", 0)) as taken:
    command.DEFAULT_URL = f"ws://127.0.0.1:{taken.getsockname()[1]}/v1/streaming_input"
sys.exit(command.main(["--text"]))
"""
