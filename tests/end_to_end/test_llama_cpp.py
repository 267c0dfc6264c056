"""Ears and a voice for a model behind a server of other people: llama.cpp's own, with SmolLM2."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
import pytest
from support.embedded_engine import ears
from support.live_server import LiveServer, live_server
from support.patience import PATIENCE_SEC
from support.real_models import CONTEXT, KEY, TOOLS_TEMPLATE, llama_cpp_server
from support.speech_clips import WORDS, clip_bytes, silence
from support.tcp_relay import TcpRelay, tcp_relay

from omni_ws.client import AudioChunk, Final, connect
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import FinishReason
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.remote.engine import RemoteLlmEngine
from omni_ws.engine.remote.settings import Dialect, RemoteLlmSettings
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.scenarios.speech import word_errors

pytestmark = [pytest.mark.slow]

SAMPLING = {"temperature": 0, "max_tokens": 12, "seed": 7}


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[int]:
    with llama_cpp_server() as port:
        yield port


@pytest.fixture(scope="module")
def llama_cpp_with_tools() -> Iterator[int]:
    with llama_cpp_server(TOOLS_TEMPLATE) as port:
        yield port


@asynccontextmanager
async def spoken_to(port: int) -> AsyncIterator[tuple[LiveServer, RemoteLlmEngine, TcpRelay]]:
    """A server whose LLM is the one at ``port``, and a relay between them that keeps what is sent."""
    async with tcp_relay(port) as relay:
        llm = RemoteLlmEngine(
            RemoteLlmSettings(urls=(f"http://127.0.0.1:{relay.port}",), api_key=KEY, start_timeout=500)
        )
        engine = ComposedEngine(llm, asr=ears(), tts=SpeechEngine(VoiceProcess(VoiceChoice.ESPEAK)))
        async with live_server(engine) as server:
            yield server, llm, relay


def prompts(relay: TcpRelay) -> list[list[dict[str, Any]]]:
    """The messages of all chats that went to the server, in order."""
    found: list[list[dict[str, Any]]] = []
    for sent in relay.sent:
        for head in re.finditer(rb"POST /v1/chat/completions .*?content-length: (\d+).*?\r\n\r\n", sent, re.S | re.I):
            body = orjson.loads(sent[head.end() : head.end() + int(head[1])])
            found.append(body["messages"])
    return sorted(found, key=len)


def is_loud(pcm: bytes) -> bool:
    samples = np.frombuffer(pcm, "<i2").astype(float)
    return len(samples) > 4000 and float(np.sqrt(np.mean(samples**2))) > 300


async def test_five_spoken_turns_are_in_its_prompt(llama_cpp: int) -> None:
    clips = ["goforward", "cards_001", "cards_005", "goforward", "cards_001"]
    config = {"instructions": "Answer briefly.", "sampling": SAMPLING}
    async with spoken_to(llama_cpp) as (server, llm, relay):
        assert [one.dialect for one in llm.upstreams] == [Dialect.LLAMA_CPP]
        assert [one.context for one in llm.upstreams] == [CONTEXT]
        async with connect(server.websocket_url, config=config) as session:
            said: list[dict[str, str]] = [{"role": "system", "content": "Answer briefly."}]
            for clip in clips:
                await session.send_audio(clip_bytes(clip), end=True)
                answer = await session.answer()
                assert word_errors(WORDS[clip], answer.transcript).wrong <= 2
                assert answer.text.strip()
                assert is_loud(answer.audio)
                assert answer.usage is not None
                assert answer.usage.output_tokens <= 12
                said += [
                    {"role": "user", "content": answer.transcript.strip()},
                    {"role": "assistant", "content": answer.text},
                ]
        seen = prompts(relay)
    assert [len(messages) for messages in seen] == [2, 4, 6, 8, 10]
    for messages in seen:
        assert [(one["role"], one["content"].strip()) for one in messages] == [
            (one["role"], one["content"].strip()) for one in said[: len(messages)]
        ]


async def test_speech_interrupts_its_answer(llama_cpp: int) -> None:
    config: dict[str, Any] = {
        "turn_detection": {"type": "server_vad"},
        "sampling": {"temperature": 0, "max_tokens": 400},
        "instructions": "Tell a long story.",
    }
    async with spoken_to(llama_cpp) as (server, llm, _), connect(server.websocket_url, config=config) as session:
        await session.send_audio(silence(0.5) + clip_bytes("goforward") + silence(1))
        finals: list[Final] = []
        interrupted = False
        async for event in session.events():
            if isinstance(event, AudioChunk) and not interrupted:
                interrupted = True
                await session.configure(sampling=SAMPLING)
                await session.send_audio(clip_bytes("cards_005") + silence(1))
            elif isinstance(event, Final):
                finals.append(event)
                if len(finals) == 2:
                    break
        assert finals[0].finish_reason is FinishReason.CANCELLED
        assert finals[1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        await server.until(lambda: llm.active_requests == 0)
        assert [one.active for one in llm.upstreams] == [0]


async def test_a_conversation_longer_than_its_context(llama_cpp: int) -> None:
    """Turns go on, with those that fit."""
    async with spoken_to(llama_cpp) as (server, _, relay):
        sampling = {"temperature": 0, "max_tokens": 4}
        config = {"modalities": ["text"], "sampling": sampling, "history_summary": False}
        async with connect(server.websocket_url, config=config) as session:
            for number in range(5):
                words = f"Remember number {number}. " + "The sun is bright today. " * 30
                assert (await session.ask_text(words)).text
        seen = prompts(relay)
    assert len(seen) == 5
    heads = b"".join(relay.sent).count(b"POST /v1/chat/completions")
    assert b"".join(relay.sent).lower().count(b"connection: close") == heads
    assert max(len(messages) for messages in seen) < 9


async def test_it_closes_the_connection_after_a_streamed_answer(llama_cpp: int) -> None:
    """Without having said so, and long before the time-out that it tells: why our requests ask for it."""
    body = orjson.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 2})
    reader, writer = await asyncio.open_connection("127.0.0.1", llama_cpp)
    lines = ("POST /v1/chat/completions HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}")
    length = f"Content-Length: {len(body)}"
    writer.write("\r\n".join((*lines, "Content-Type: application/json", length, "", "")).encode() + body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    assert "keep-alive: timeout=5" in head
    assert "connection: close" not in head
    await reader.readuntil(b"\r\n0\r\n\r\n")
    async with asyncio.timeout(PATIENCE_SEC):
        assert await reader.read() == b""
    writer.close()


async def test_a_tool_call_and_its_result(llama_cpp_with_tools: int) -> None:
    """SmolLM2 never learnt to call, but it can repeat: llama.cpp reads the call in what it writes."""
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Tokyo"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "local_time", "parameters": parameters}}
    config = {"modalities": ["text"], "tools": [tool], "sampling": {"temperature": 0, "max_tokens": 60}}
    written = '<tool_call>\n{"name": "local_time", "arguments": {"city": "Tokyo"}}\n</tool_call>'
    async with spoken_to(llama_cpp_with_tools) as (server, _, relay):
        async with connect(server.websocket_url, config=config) as session:
            asked = await session.ask_text(f"Repeat: {written}")
            assert asked.finish_reason is FinishReason.TOOL_CALLS
            assert asked.text == ""
            (call,) = asked.tool_calls
            assert (call.name, orjson.loads(call.arguments)) == ("local_time", {"city": "Tokyo"})
            await session.send_tool_result(call.id, "12:30", end=True)
            assert (await session.answer()).text.strip()
        *_, told = prompts(relay)
    assert [one["role"] for one in told] == ["user", "assistant", "tool"]
    assert told[1]["tool_calls"][0]["function"]["name"] == "local_time"
    assert told[2] == {"role": "tool", "tool_call_id": call.id, "content": "12:30"}
