"""`omni-ws mcp` by the reference client of MCP: its tools, their limits, and who may call them over HTTP."""

from __future__ import annotations

import base64
import io
import os
import re
import socket
import sys
import wave
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from mcp import ClientSession, MCPError
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from support.commands import run_here, running
from support.live_server import LiveServer, live_server
from support.scripted_engines import HearingEngine
from support.sound_card import SOUND_LIBRARY
from support.speech_clips import clip_bytes, silence

from omni_ws.client.audio import Pcm16, write_wav
from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput
from omni_ws.mcp_server.command import main

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
KEY = "a key of some length"
SPOKEN = np.full(2400, 0.1, np.float32)
pytestmark = pytest.mark.slow


def speaker(**changes: Any) -> HearingEngine:
    """An engine that says a tenth of a second of sound to every text, and hears three words."""
    script = [TextOutput("Five."), AudioOutput(SPOKEN, 24_000)]
    return HearingEngine(script, heard=[TranscriptOutput("ten of clubs")], **changes)


@asynccontextmanager
async def by_pipes(url: str, log: Path, *arguments: str, **environ: str) -> AsyncIterator[ClientSession]:
    command = ["-m", "omni_ws", "mcp", "--url", url, *arguments]
    started = StdioServerParameters(command=sys.executable, args=command, env={**os.environ, **environ})
    with log.open("w") as errors:
        async with stdio_client(started, errors) as streams, ClientSession(*streams) as session:
            await session.initialize()
            yield session


async def told(session: ClientSession, tool: str, **arguments: Any) -> list[Any]:
    """The content of a successful call: texts, and the bytes of sound."""
    result = await session.call_tool(tool, arguments)
    assert not result.is_error, result.content
    content: list[Any] = result.content
    return [one.text if one.type == "text" else base64.b64decode(one.data) for one in content]


async def refused(session: ClientSession, tool: str, **arguments: Any) -> tuple[str, str]:
    """The code and the message of an error of a tool."""
    result = await session.call_tool(tool, arguments)
    assert result.is_error, result.content
    content: list[Any] = result.content
    error = result.structured_content["error"]
    assert [one.text for one in content] == [f"{error['code']}: {error['message']}"]
    return error["code"], error["message"]


def wav_of(path: Path, seconds: float) -> str:
    write_wav(path, Pcm16(bytes(2 * round(8000 * seconds)), 8000))
    return path.name


async def test_what_is_allowed_is_done_and_what_is_not_is_refused_by_name(tmp_path: Path) -> None:
    """Without --mic and --files, and without a sound card."""
    missing = tmp_path / "missing"
    missing.mkdir()
    (missing / "sounddevice.py").write_text("raise ImportError(__name__)\n")
    path, log, engine = os.pathsep.join([str(missing), str(ROOT)]), tmp_path / "log", speaker()
    async with live_server(engine) as server, by_pipes(server.websocket_url, log, PYTHONPATH=path) as session:
        tools = (await session.list_tools()).tools
        assert [tool.name for tool in tools] == ["speak", "listen", "converse"]
        assert tools[0].input_schema["properties"]["text"]["maxLength"] == 5000
        words, sound = await told(session, "speak", text="Good morning.")
        assert re.search(r"0\.1 s of speech, not played: .*pip install 'omni-ws\[talk\]'", words)
        with wave.open(io.BytesIO(sound)) as wav:
            assert (wav.getframerate(), wav.getnframes()) == (24_000, 2400)
        assert [request.task for request in engine.requests] == ["speech"]
        assert (await told(session, "converse", message="two plus three", play=False))[0] == "Five."
        answer, _, why = await told(session, "converse", message="two plus three")
        assert (answer, why.startswith("(not played: ")) == ("Five.", True)
        assert len(await told(session, "speak", text="x" * 5000, play=False)) == 2
        for arguments in ({"text": "x" * 5001}, {"text": ""}, {}, {"text": "x", "loud": True}):
            assert (await refused(session, "speak", **arguments))[0] == "invalid_value"
        code, message = await refused(session, "listen", seconds=60)
        assert (code, "--mic" in message) == ("unsupported_parameter", True)
        assert "--mic" in (await refused(session, "converse", question="Who are you?"))[1]
        code, message = await refused(session, "listen", seconds=61)
        assert (code, message.startswith("seconds: ")) == ("invalid_value", True)
        assert "--files" in (await refused(session, "listen", file="goforward.wav"))[1]
        for both in ({}, {"question": "a", "message": "b"}):
            assert "either a question" in (await refused(session, "converse", **both))[1]
        with pytest.raises(MCPError, match="no tool shout"):
            await session.call_tool("shout", {})
        code, message = await refused(session, "converse", question="Who are you?", play=False)
        assert (code, "always played" in message) == ("invalid_value", True)
        assert len(engine.requests) == 4
    assert "microphone" not in log.read_text()


async def test_files_of_the_folder_are_heard_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    folder.mkdir()
    outside = tmp_path / "outside.wav"
    wav_of(outside, 1)
    (folder / "link.wav").symlink_to(outside)
    (folder / "text.wav").write_text("no sound")
    log, allowed = tmp_path / "log", ("--files", str(folder))
    async with live_server(speaker()) as server, by_pipes(server.websocket_url, log, *allowed) as session:
        assert await told(session, "listen", file=wav_of(folder / "minute.wav", 60)) == ["ten of clubs"]
        code, message = await refused(session, "listen", file=wav_of(folder / "longer.wav", 60.1))
        assert (code, "60 s of sound" in message) == ("payload_too_large", True)
        for name in ("link.wav", "../outside.wav", str(outside), "nothing.wav", ".", "a\0b"):
            assert "there is no file" in (await refused(session, "listen", file=name))[1]
        assert "not a WAV file" in (await refused(session, "listen", file="text.wav"))[1]


@pytest.mark.real_time
async def test_a_person_is_asked_aloud_and_heard(tmp_path: Path) -> None:
    (tmp_path / "sounddevice.py").write_text(SOUND_LIBRARY)
    recording = tmp_path / "recording.raw"
    recording.write_bytes(silence(0.3) + clip_bytes("cards_001") + silence(30))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    log = tmp_path / "log"
    engine = speaker()
    async with (
        live_server(engine) as server,
        by_pipes(server.websocket_url, log, "--mic", PYTHONPATH=path, RECORDING=str(recording)) as session,
    ):
        assert await told(session, "speak", text="Hello.") == ["0.1 s of speech, played on the loudspeaker"]
        assert await told(session, "converse", question="Which card?") == ["ten of clubs"]
        assert log.read_text().splitlines()[-2:] == [
            "omni-ws mcp: the microphone is open",
            "omni-ws mcp: the microphone is closed",
        ]
        requests = len(engine.requests)
        recording.write_bytes(b"")
        assert await told(session, "listen", seconds=0.2) == ["(nothing was said in 0.2 s)"]
        assert len(engine.requests) == requests


@asynccontextmanager
async def over_http(server: LiveServer) -> AsyncIterator[str]:
    """The address of the MCP server."""
    command = (sys.executable, "-m", "omni_ws", "mcp", "--url", server.websocket_url, "--port", "0")
    environment = {**os.environ, "OMNI_WS_MCP_KEY": KEY}
    async with running(*command, env=environment, stderr=-1, at_once=False) as process:
        assert process.stderr is not None
        line = (await process.stderr.readline()).decode()
        found = re.fullmatch(r"omni-ws mcp: (http://127\.0\.0\.1:\d+/mcp)\n", line)
        assert found, line
        yield found[1]
    assert process.returncode == 130


async def test_http_needs_the_key_and_its_own_name(tmp_path: Path) -> None:
    asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    accepts = {"Accept": "application/json, text/event-stream"}
    async with live_server(speaker()) as server, over_http(server) as url:
        async with httpx2.AsyncClient(trust_env=False) as client:

            async def status(**headers: str) -> int:
                response = await client.post(url, json=asked, headers={**accepts, **headers})
                if response.status_code == 401:
                    assert response.json()["error"]["code"] == "unauthenticated"
                return response.status_code

            right = {"Authorization": f"Bearer {KEY}"}
            assert await status() == 401
            assert await status(Authorization=f"Bearer {KEY}s") == 401
            assert await status(**right, Host="evil.example") == 421
            assert await status(**right, Origin="https://evil.example") == 403
            large = await client.post(url, content=b"{" * 200_000, headers={**accepts, **right})
            assert large.status_code in (400, 413)
        client = httpx2.AsyncClient(headers=right, trust_env=False)
        async with (
            client,
            streamable_http_client(url, http_client=client) as streams,
            ClientSession(*streams) as session,
        ):
            await session.initialize()
            assert len((await session.list_tools()).tools) == 3
            assert (await told(session, "converse", message="two plus three", play=False))[0] == "Five."
            assert (await refused(session, "listen"))[0] == "unsupported_parameter"


async def test_a_voice_server_that_is_not_there_is_an_error_of_the_tool(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"ws://127.0.0.1:{taken.getsockname()[1]}"
    async with by_pipes(url, tmp_path / "log") as session:
        code, message = await refused(session, "speak", text="x", play=False)
        assert (code, "cannot reach" in message) == ("engine_failed", True)


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["--port", "0"], {}, "needs a key"),
        (["--port", "0"], {"OMNI_WS_MCP_KEY": KEY[:15]}, "needs a key of 16 characters"),
        (["--port", "0", "--key-file", "no/such/file"], {}, "No such file"),
        (["--port", "65536"], {"OMNI_WS_MCP_KEY": KEY}, "--port 65536: a port is a number up to 65535"),
        (["--port", "-1"], {"OMNI_WS_MCP_KEY": KEY}, "--port -1: a port is a number up to 65535"),
        (["--key-file", __file__], {}, "--key-file goes with --port"),
        (["--files", __file__], {}, "not a folder"),
    ],
)
def test_wrong_usage(arguments: Sequence[str], environ: dict[str, str], words: str) -> None:
    ended = run_here(main, *arguments, environ=environ)
    assert (ended.status, words in ended.errors) == (2, True), ended.errors
