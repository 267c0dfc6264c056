"""`omni-ws talk`: output, files, exit status."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_here
from support.patience import PATIENCE_SEC

from omni_ws.client.audio import Pcm16, read_wav, write_wav
from omni_ws.config.keys import configured_keys
from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.engine.fake import EchoEngine
from omni_ws.server import create_app, listen
from omni_ws.talk.command import main

CLIP = Path(__file__).parents[1] / "data" / "cards_001.wav"
TONE = Pcm16(b"".join((n * 97 % 20_000 - 10_000).to_bytes(2, "little", signed=True) for n in range(7200)), 24_000)


@dataclass(frozen=True, slots=True)
class Ended:
    status: int
    output: str
    complaints: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.splitlines()]

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self.objects if entry["type"] == kind]


async def talk(*arguments: str, stdin: bytes = b"", environ: dict[str, str] | None = None) -> Ended:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMNI_WS_API_KEY", "OPENAI_API_KEY")
    } | (environ or {})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omni_ws", "talk"),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    output, complaints = await asyncio.wait_for(process.communicate(stdin), PATIENCE_SEC)
    assert process.returncode is not None
    return Ended(process.returncode, output.decode(), complaints.decode())


async def _serve(**config: Any) -> AsyncIterator[str]:
    configuration = ServerConfig(**{"port": 0, "engine": EngineName.FAKE, **config})
    engine = EchoEngine()
    await engine.start()
    async with listen(create_app(engine, configuration, configured_keys(configuration))) as server:
        yield f"ws://127.0.0.1:{server.port}"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async for address in _serve():
        yield address


@pytest.fixture
async def locked_url() -> AsyncIterator[str]:
    async for address in _serve(api_key="open sesame"):
        yield address


@pytest.fixture
def tone(tmp_path: Path) -> Path:
    path = tmp_path / "tone.wav"
    write_wav(path, TONE)
    return path


@pytest.fixture
def bare_python(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python that has the base package alone."""
    folder = tmp_path / "missing"
    folder.mkdir()
    for name in ("sounddevice", "rich"):
        (folder / f"{name}.py").write_text("raise ImportError(__name__)\n")
    return {"PYTHONPATH": str(folder)}


async def test_text_as_json_without_extras(url: str, bare_python: dict[str, str]) -> None:
    ended = await talk("--url", url, "--text", "hello big world", "--json", environ=bare_python)
    assert (ended.status, ended.complaints) == (0, "")
    assert [entry["type"] for entry in ended.objects] == ["session", *["text"] * 3, "final", "latency"]
    assert "".join(entry["text"] for entry in ended.of_type("text")) == "hello big world"
    (final,) = ended.of_type("final")
    assert final["finish_reason"] == "stop"
    assert final["usage"]["output_tokens"] == 3
    (latency,) = ended.of_type("latency")
    assert (latency["first_audio_ms"], latency["first_text_ms"] >= 0) == (None, True)


async def test_text_in_plain_lines(url: str, bare_python: dict[str, str]) -> None:
    ended = await talk("--url", url, "--text", "hello big world", environ=bare_python)
    assert ended.status == 0
    reply, latency = ended.output.splitlines()
    assert reply == "reply: hello big world"
    assert latency.startswith("latency: first text ")


async def test_an_answer_does_not_control_the_terminal(url: str) -> None:
    ended = await talk("--url", url, "--text", "one\x1b]0;title\x07 two\x9b2J\nthree")
    assert ended.status == 0
    assert ended.output.startswith("reply: one]0;title two2J\nthree\n")


async def test_an_argument_that_is_not_utf_8_is_sent_with_replacements(url: str) -> None:
    ended = await talk("--url", url, "--text", os.fsdecode(b"gr\xfcn"))
    assert (ended.status, ended.output.splitlines()[0]) == (0, "reply: gr\ufffdn")


async def test_a_file_as_fast_as_it_goes_is_saved_as_it_was(url: str, tone: Path, tmp_path: Path) -> None:
    reply = tmp_path / "reply.wav"
    ended = await talk("--url", url, "--file", str(tone), "--fast", "--save", str(reply), "--json")
    assert (ended.status, ended.complaints) == (0, "")
    assert read_wav(reply) == TONE
    assert sum(entry["bytes"] for entry in ended.of_type("audio")) == len(TONE.samples)
    assert ended.of_type("saved")
    (latency,) = ended.of_type("latency")
    assert isinstance(latency["first_audio_ms"], int)


@pytest.mark.slow
async def test_a_file_at_its_own_pace(url: str) -> None:
    """The engine answers while it listens: the first sound comes long before the end of the file."""
    ended = await talk("--url", url, "--file", str(CLIP), "--json")
    assert ended.status == 0
    (latency,) = ended.of_type("latency")
    duration_ms = read_wav(CLIP).duration_ms
    assert -duration_ms < latency["first_audio_ms"] < -duration_ms / 4
    (final,) = ended.of_type("final")
    assert final["usage"]["input_audio_ms"] == pytest.approx(duration_ms, abs=1)


async def test_raw_samples_from_standard_input(url: str, tmp_path: Path) -> None:
    reply = tmp_path / "reply.wav"
    arguments = ["--raw", "--rate", "24000", "--save", str(reply), "--json"]
    ended = await talk("--url", url, *arguments, stdin=TONE.samples)
    assert ended.status == 0
    assert read_wav(reply) == TONE


async def test_no_sound_is_no_question(url: str, tmp_path: Path) -> None:
    write_wav(tmp_path / "empty.wav", Pcm16(b"", 16_000))
    for source in (("--raw",), ("--file", str(tmp_path / "empty.wav"))):
        ended = await talk("--url", url, *source)
        assert (ended.status, ended.complaints) == (1, "omni-ws talk: empty_input: there is no sound to send\n")


async def test_settings_from_the_command_line(url: str) -> None:
    settings = ["--config", "sampling.max_tokens=2", "--config", "instructions=Be brief.", "--voice", "echo"]
    ended = await talk("--url", url, "--text", "a b c d", "--task", "speech", *settings, "--json")
    assert ended.status == 0
    assert "".join(entry["text"] for entry in ended.of_type("text")) == "a b"
    assert ended.of_type("final")[0]["finish_reason"] == "length"


async def test_a_setting_of_the_sound_is_sent_beside_its_format(url: str, tone: Path) -> None:
    ended = await talk("--url", url, "--file", str(tone), "--fast", "--config", "input_audio.language=no language")
    assert (ended.status, "input_audio.language" in ended.complaints) == (1, True)


@pytest.mark.slow
async def test_the_key(locked_url: str) -> None:
    arguments = ["--url", locked_url, "--text", "x", "--json"]
    refused = await talk(*arguments)
    assert refused.status == 5
    assert "OMNI_WS_API_KEY" in refused.complaints
    assert "Traceback" not in refused.complaints
    assert (await talk(*arguments, environ={"OMNI_WS_API_KEY": "wrong"})).status == 5
    assert (await talk(*arguments, environ={"OMNI_WS_API_KEY": "open sesame"})).status == 0
    assert (await talk(*arguments, "--key-env", "MINE", environ={"MINE": "open sesame"})).status == 0


async def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ended = await talk("--url", f"ws://127.0.0.1:{port}", "--text", "x")
    assert ended.status == 4
    assert "cannot reach" in ended.complaints
    assert "Traceback" not in ended.complaints


async def test_a_request_that_fails(url: str) -> None:
    failing = ["--config", 'stage_params={"fake": {"fail_after_chunks": 1}}']
    ended = await talk("--url", url, "--text", "a b", *failing, "--json")
    assert ended.status == 1
    assert ended.of_type("error")[0]["code"] == "engine_failed"
    assert ended.of_type("final")[0]["finish_reason"] == "error"


async def test_a_setting_that_the_server_refuses(url: str) -> None:
    ended = await talk("--url", url, "--text", "a", "--config", "sampling.top_p=7")
    assert ended.status == 1
    assert "sampling.top_p" in ended.complaints


async def test_a_reply_without_sound_cannot_be_saved(url: str, tmp_path: Path) -> None:
    reply = tmp_path / "reply.wav"
    ended = await talk("--url", url, "--text", "x", "--save", str(reply), "--config", 'modalities=["text"]')
    assert ended.status == 1
    assert "no sound" in ended.complaints
    assert not reply.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--file", "no/such/file.wav"], "no/such/file.wav"),
        (["--file", __file__], "not a WAV file"),
        (["--text", "x", "--config", "novalue"], "KEY=VALUE"),
        (["--text", "x", "--config", "sampling.max_token=5"], "session_config has no field sampling.max_token"),
        (["--text", "x", "--ca-file", "no/such/ca.pem"], "--ca-file: cannot read no/such/ca.pem: No such file"),
        (["--text", "x", "--ca-file", __file__], "--ca-file"),
        (["--text", "x", "--config", "stage_params=5", "--config", "stage_params.a.b=c"], "has a value already"),
        (["--text", "x", "--config", "output_audio=1"], "--config output_audio: must be an object"),
        (["--text", "x", "--config", "input_audio=null"], "--config input_audio: must be an object"),
        (["--text", "x", "--raw"], "not allowed with"),
        (["--raw", "--rate", "0", "--realtime", "ws://x"], "--rate: must be a whole number above 0"),
        (["--save", "x.wav"], "--save goes with"),
        (["--text", "--save", "x.wav"], "--save goes with"),
        (["--text", "x", "--hold"], "--hold goes with"),
        (["--hold", "--cancel-echo"], "--cancel-echo goes without --hold"),
        (["--config", "turn_detection=null"], "an open microphone needs turn detection"),
        (["--url", "ws://x", "--realtime", "wss://x"], "--realtime: not allowed with argument --url"),
        (["--text", "x", "--realtime", "wss://x", "--task", "speech"], "not with --realtime: needs: native"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str) -> None:
    ended = run_here(main, *arguments)
    assert ended.status == 2
    assert words in ended.errors


@pytest.mark.parametrize("arguments", [["--list-devices"], [], ["--text", "x", "--play"]])
async def test_no_sound_library(arguments: list[str], bare_python: dict[str, str]) -> None:
    ended = await talk(*arguments, environ=bare_python)
    assert ended.status == 3
    assert "need the extra talk" in ended.complaints
    assert "pip install 'omni-ws[talk]'" in ended.complaints


async def test_help_says_how_turns_are_marked() -> None:
    ended = await talk("--help")
    assert ended.status == 0
    assert "--hold" in ended.output
    assert "exits with" in ended.output
