"""Clients that others made for OpenAI's Realtime API: recorded speech, an interruption, a function call.

``make test-outside`` installs them; without it these tests are skipped. Nothing of a client is changed but its URL.
"""

from __future__ import annotations

import json
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import running
from support.embedded_engine import EmbeddedEngine, ears
from support.http_server import tls_contexts
from support.live_server import live_server
from support.outside import run_in_node, run_outside, tool
from support.scripted_upstream import ScriptedUpstream, delta, finish, hang, says, streams, upstream
from support.speech_clips import SAMPLE_RATE, WORDS, clip_samples

from omni_ws.audio.pcm import resampled
from omni_ws.config.model import VoiceChoice
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.llm.gguf_engine import QWEN_CODER_TEMPLATE, GgufEngine, GgufSettings
from omni_ws.engine.remote.engine import RemoteLlmEngine
from omni_ws.engine.remote.settings import RemoteLlmSettings
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.scenarios.speech import word_errors
from omni_ws.weights import fetched_file

CLIENTS = Path(__file__).parent / "clients"
#: What the Realtime API takes and gives.
RATE = 24_000
#: The answer of the embedded engine to the first turn.
TO_GOFORWARD = "I can't move. I'm only a voice."
TOLD = "It is sunny in Tokyo."
#: An agent with the tools that it is given (benchmarks/minds/agent.py).
AGENT = Path(__file__).parents[2] / "benchmarks" / "minds" / "agent.py"
MOVE = {
    "name": "move",
    "description": "Move the robot.",
    "parameters": {
        "type": "object",
        "required": ["direction", "meters"],
        "additionalProperties": False,
        "properties": {
            "direction": {"type": "string", "enum": ["forward", "backward"]},
            "meters": {"type": "integer"},
        },
    },
    "answer": "Done.",
}

pytestmark = [pytest.mark.slow]


def write_speech(folder: Path, clip: str) -> str:
    """A clip between silences, at the rate of the API."""
    speech = resampled(clip_samples(clip), SAMPLE_RATE, RATE)
    quiet = np.zeros(RATE, np.float32)
    samples = np.concatenate([quiet, speech, quiet, quiet])
    file = folder / f"{clip}.pcm"
    file.write_bytes(np.rint(samples * 32767).astype("<i2").tobytes())
    return str(file)


def caller(greeting: bool) -> list[Any]:
    """What the language model says: an answer without an end, a call, and what the call returned."""
    call = {"index": 0, "id": "call_weather", "type": "function"}
    story = streams(delta(role="assistant"), delta(content="Once there was a king. "), delta(content="He "), hang)
    weather = streams(
        delta(role="assistant"),
        delta(tool_calls=[{**call, "function": {"name": "get_weather", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"city":"Tokyo"}'}}]),
        finish("tool_calls"),
    )
    return [*([says("Good morning.")] if greeting else []), story, weather, says(TOLD)]


@asynccontextmanager
async def servers(*, greeting: bool = False, **fields: Any) -> AsyncIterator[tuple[list[str], ScriptedUpstream]]:
    """The base URLs of the two servers that the clients talk to, and what the second one asks."""
    scheme, options = ("https", {"still_answers": False, **fields}) if fields else ("http", {})
    async with (
        upstream(*caller(greeting)) as model,
        live_server(EmbeddedEngine(voice=VoiceChoice.ESPEAK), still_answers=not fields, **fields) as one,
        live_server(
            ComposedEngine(
                RemoteLlmEngine(RemoteLlmSettings(urls=(model.url,), start_timeout=0)),
                asr=ears(),
                tts=SpeechEngine(VoiceProcess(VoiceChoice.ESPEAK)),
            ),
            **options,
        ) as other,
    ):
        yield [f"{scheme}://127.0.0.1:{server.port}/v1" for server in (one, other)], model


def arguments(urls: list[str], folder: Path) -> list[str]:
    return [*urls, write_speech(folder, "goforward"), write_speech(folder, "cards_001"), str(folder)]


def check_voice(file: Path, seconds: float) -> None:
    """It is loud enough to be heard, and takes about as long as saying its words."""
    samples = np.frombuffer(file.read_bytes(), "<i2").astype(np.float32) / 32768
    assert seconds / 2 < len(samples) / RATE < 2 * seconds
    assert np.sqrt(np.mean(samples**2)) > 0.02


def check(output: str, folder: Path, model: ScriptedUpstream) -> dict[str, Any]:
    """What every client must have seen."""
    seen: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    assert word_errors(WORDS["goforward"], seen["heard"].strip()).wrong <= 1
    assert seen["said"].split() == TO_GOFORWARD.split()
    check_voice(folder / "turn.pcm", 2.2)
    assert seen["asked"] == {"city": "Tokyo"}
    assert seen["told"].split() == TOLD.split()
    check_voice(folder / "told.pcm", 1.6)
    assert model.deserted.is_set(), "the answer that was interrupted went on"
    call, result = model.requests[-1]["messages"][-2:]
    assert call["tool_calls"][0]["function"]["name"] == "get_weather"
    assert (result["role"], result["tool_call_id"]) == ("tool", call["tool_calls"][0]["id"])
    assert result["content"].strip('"') == "sunny"  # pipecat sends it as JSON
    return seen


@pytest.mark.parametrize("client", ["openai_python", "agents_python", "pipecat", "livekit"])
async def test_clients_of_python(client: str, tmp_path: Path) -> None:
    python = tool("OUTSIDE_PYTHON")
    async with servers(greeting=client == "pipecat") as (urls, model):
        output = await run_outside(python, str(CLIENTS / f"realtime_{client}.py"), *arguments(urls, tmp_path))
    seen = check(output, tmp_path, model)
    if client == "openai_python":
        assert seen["statuses"] == ["cancelled", "completed", "completed"]
        assert seen["truncated"] == 200
    else:
        assert seen["interrupted"]


async def test_the_openai_package_of_node(tmp_path: Path) -> None:
    """It connects by TLS only."""
    tool("OUTSIDE_NODE")
    tls_contexts(tmp_path)
    certificate = tmp_path / "certificate.pem"
    async with servers(ssl_certfile=certificate, ssl_keyfile=certificate) as (urls, model):
        script, trust = CLIENTS / "realtime_openai_node.mjs", {"NODE_EXTRA_CA_CERTS": str(certificate)}
        output = await run_in_node(script, tmp_path, *arguments(urls, tmp_path), variables=trust)
    seen = check(output, tmp_path, model)
    assert seen["statuses"] == ["cancelled", "completed", "completed"]
    assert seen["truncated"] == 200


async def test_the_agents_package_of_node(tmp_path: Path) -> None:
    tool("OUTSIDE_NODE")
    async with servers() as (urls, model):
        output = await run_in_node(CLIENTS / "realtime_agents_node.mjs", tmp_path, *arguments(urls, tmp_path))
    assert check(output, tmp_path, model)["interrupted"]


async def test_an_agent_calls_its_tool_on_a_model_in_a_file(tmp_path: Path) -> None:
    """Qwen, the smallest model here that calls tools by itself; without its weights this is skipped."""
    python, file = tool("OUTSIDE_PYTHON"), fetched_file("qwen")
    if file is None:
        pytest.skip("the weights of qwen are not here: omni-ws weights fetch qwen")
    llm = GgufEngine(GgufSettings(file=file, name="qwen", parallel=1, chat_template=QWEN_CODER_TEMPLATE))
    engine = ComposedEngine(llm, asr=ears(), tts=SpeechEngine(VoiceProcess(VoiceChoice.ESPEAK)))
    async with live_server(engine) as server:
        order = {
            "url": f"ws://127.0.0.1:{server.port}/v1/realtime?model=omni",
            "instructions": "You steer a robot with the tool. Answer in one short sentence.",
            "tools": [MOVE],
            "speech": [write_speech(tmp_path, "goforward")],
        }
        async with running(python, AGENT, stdin=PIPE, stdout=PIPE) as agent:
            output, _ = await agent.communicate(json.dumps(order).encode())
    seen = json.loads(output)
    assert "failed" not in seen
    assert seen["calls"] == [["move", {"direction": "forward", "meters": 10}]]
    assert seen["said"].strip()
