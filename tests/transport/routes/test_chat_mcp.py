"""MCP tools in ``/v1/chat/completions``: one answer, whatever the server has called for it."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import av
import numpy as np
import orjson
import pytest
from support.live_server import LiveServer, live_server
from support.mcp_server import CallingEngine, McpUnderTest, mcp_server
from support.raw_http import DONE, RawResponse, chunked, events_of, post, raw_client, request

from omni_ws.core.chunks import AnswerWarning, InputChunk, UrlCitation
from omni_ws.engine.base import AudioOutput, GenerationRequest, TextOutput

PATH = "/v1/chat/completions"
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def reference() -> Iterator[McpUnderTest]:
    with mcp_server() as server:
        yield server


@asynccontextmanager
async def chatting(reference: McpUnderTest, **settings: Any) -> AsyncIterator[tuple[LiveServer, CallingEngine]]:
    engine = CallingEngine(choices=True)
    async with live_server(engine, realtime={"mcp_servers": (reference.host,), **settings}) as server:
        yield server, engine


async def ask(server: LiveServer, text: str, *tools: dict[str, Any], **body: Any) -> RawResponse:
    messages = [{"role": "user", "content": text}]
    return await post(
        server.port, PATH, {"messages": messages, "tools": list(tools), **body}, "Accept: application/json"
    )


async def test_an_answer_has_what_the_tools_returned(reference: McpUnderTest) -> None:
    async with chatting(reference) as (server, engine):
        response = await ask(server, 'call add {"a": 2, "b": 3}\ncall add {"a": 4, "b": 5}', reference.tool())
        assert response.status == 200, response.body
        choice = response.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("5; 9", "stop")
        assert "tool_calls" not in choice["message"]
        assert response.json()["usage"]["total_tokens"] == 4
        assert [one.role for one in engine.requests[-1].history] == ["user", "assistant"]


class _Wordy(CallingEngine):
    """Says something before it calls a tool, and names a page and a warning in each answer."""

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterator[Any]:
        *steps, end = super().steps(request, taken)
        if not any(isinstance(step, TextOutput) for step in steps):
            steps.insert(0, TextOutput("Let me count."))
        (said,) = (step.text for step in steps if isinstance(step, TextOutput))
        warning = AnswerWarning("odd", f"{said} is odd")
        cited = UrlCitation(said, "https://example.org", 0, len(said))
        yield from (*steps, replace(end, citations=(cited,), warnings=(warning,)))


@pytest.mark.parametrize("streams", [False, True])
async def test_words_before_a_call_stand_apart_from_those_behind_it(reference: McpUnderTest, streams: bool) -> None:
    async with live_server(_Wordy(), realtime={"mcp_servers": (reference.host,)}) as server:
        answer = await ask(server, 'call add {"a": 2, "b": 3}', reference.tool(), stream=streams)
    if streams:
        chunks = [event.json() for event in events_of(answer)[:-1]]
        content = "".join(one["delta"].get("content") or "" for chunk in chunks for one in chunk["choices"])
        message, whole = chunks[-1]["choices"][0]["delta"], chunks[-1]
    else:
        whole = answer.json()
        message = whole["choices"][0]["message"]
        content = message["content"]
    assert content == "Let me count.\n\n5"
    cited = [one["url_citation"] for one in message["annotations"]]
    assert [content[one["start_index"] : one["end_index"]] for one in cited] == ["Let me count.", "5"]
    assert [one["message"] for one in whole["warnings"]] == ["Let me count. is odd", "5 is odd"]


class _Speaking(CallingEngine):
    """Speaks for a second in each answer."""

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterator[Any]:
        *steps, end = super().steps(request, taken)
        tone = np.sin(np.arange(24_000) * (2 * np.pi * 440 / 24_000)).astype(np.float32)
        yield from (*steps, AudioOutput(tone / 4, 24_000), end)


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "aac", "opus", "pcm16"])
async def test_the_sound_of_several_rounds_is_one_file(reference: McpUnderTest, name: str) -> None:
    async with live_server(_Speaking(), realtime={"mcp_servers": (reference.host,)}) as server:
        options = {"stream": True, "modalities": ["text", "audio"], "audio": {"format": name}}
        events = events_of(await ask(server, 'call add {"a": 2, "b": 3}', reference.tool(), **options))
    choices = [choice for event in events[:-1] for choice in event.json()["choices"]]
    sound = base64.b64decode("".join(one["delta"].get("audio", {}).get("data", "") for one in choices))
    if name == "pcm16":
        assert len(sound) == 2 * 48_000
        return
    with av.open(io.BytesIO(sound), "r") as file:
        rate = file.streams.audio[0].rate
        decoded = sum(frame.samples for frame in file.decode(audio=0))
    padding = {"wav": 0, "flac": 0}.get(name, 0.2)  # lossy codecs have whole frames, and delays
    assert 2 <= decoded / rate <= 2 + padding
    assert sound.count(b"RIFF") + sound.count(b"fLaC") + sound.count(b"ID3") <= 1


async def test_an_answer_is_streamed(reference: McpUnderTest) -> None:
    async with chatting(reference) as (server, _):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        events = events_of(await ask(server, 'call add {"a": 2, "b": 3}', reference.tool(), **options))
        assert events[-1] == DONE
        chunks = [event.json() for event in events[:-1]]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert "".join(one["delta"].get("content") or "" for one in choices) == "5"
        assert not any("tool_calls" in one["delta"] for one in choices)
        assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["stop"]
        assert chunks[-1]["usage"]["total_tokens"] == 4


async def test_functions_of_the_client_are_for_the_client(reference: McpUnderTest) -> None:
    called = len(reference.calls)
    async with chatting(reference) as (server, _):
        response = await ask(server, 'call add {"a": 2, "b": 3}\ncall look', reference.tool(), LOOK)
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["look"]
    assert len(reference.calls) == called


@pytest.mark.parametrize(
    ("changes", "body", "param"),
    [
        ({"require_approval": "always"}, {}, "tools[0].require_approval"),
        ({"server_url": "http://127.0.0.1:1/mcp"}, {}, "tools[0].server_url"),
        ({"connector_id": "connector_gmail", "server_url": None}, {}, "tools[0].connector_id"),
        ({}, {"n": 2}, "n"),
    ],
)
async def test_what_chats_refuse(
    reference: McpUnderTest, changes: dict[str, Any], body: dict[str, Any], param: str
) -> None:
    async with chatting(reference) as (server, _):
        response = await ask(server, "hello", reference.tool(**changes), **body)
        assert (response.status, response.error["param"]) == (400, param)


async def test_a_server_that_fails_fails_the_request(reference: McpUnderTest) -> None:
    async with chatting(reference) as (server, _):
        response = await ask(server, "hello", reference.tool(server_url=f"{reference.host}/nowhere"))
        assert (response.status, response.error["param"]) == (400, "tools")
        assert "'sums'" in response.error["message"]


async def test_without_the_operators_list_there_are_none(reference: McpUnderTest) -> None:
    async with live_server(CallingEngine()) as server:
        response = await ask(server, "hello", LOOK, reference.tool())
        assert (response.status, response.error["param"]) == (400, "tools[1].type")
        assert "realtime.mcp_servers" in response.error["message"]


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


async def test_credentials_in_what_is_no_chat_are_not_recorded(reference: McpUnderTest, tmp_path: Path) -> None:
    """Streamed bodies, queries, cut bodies, and other routes, which may ignore the tools."""
    secrets: dict[str, Any] = {"authorization": "sekrit", "headers": {"X-Key": "sekrit"}}
    tools = [reference.tool(server_url=f"{reference.url}?key=sekrit", **secrets)]
    parameters = orjson.dumps({"tools": tools})
    line, live = parameters + b"\n", "X-Streaming-Input: true"
    frame = len(parameters).to_bytes(4, "big") + parameters
    framed = "Content-Type: application/x-multipart-streaming; framing=length32"
    indented = orjson.dumps({"messages": [], "tools": tools}, option=orjson.OPT_INDENT_2)
    query = f"{PATH}?{urlencode({'tools': orjson.dumps(tools).decode()})}"
    settings: dict[str, Any] = {"realtime": {"mcp_servers": (reference.host,)}, "record": tmp_path}
    async with live_server(CallingEngine(), **settings) as server:
        for target, body, *headers in (
            (PATH, line, live),
            (PATH, frame, framed),
            (PATH, indented, live),
            (PATH, indented, "Content-Type: text/plain"),
            (PATH, parameters[:-5]),
            (query, b"\0\0" * 160, "Content-Type: audio/pcm;rate=16000", live),
            ("/v1/completions", {"prompt": "hello", "tools": tools}),
            ("/v1/audio/speech", {"input": "hello", "tools": tools}),
            ("/v1/streaming_input/sessions", {"tools": tools, "nonsense": 1}),
            ("/v1/streaming_input/sessions", indented),
        ):
            response = await post(server.port, target, body, *headers)
            assert response.status < 500, (target, body, response)
            assert b"sekrit" not in response.body
        async with raw_client(server.port) as client:  # which goes before its body has come
            await client.send(request("POST", PATH, live, "Transfer-Encoding: chunked"), chunked(line[:-9], end=False))
    recorded = contents(tmp_path)
    assert len(recorded) == 11
    assert not any(b"sekrit" in one for one in recorded)
    assert sum(b"sums" in one for one in recorded) >= 5
