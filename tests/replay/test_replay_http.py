"""Replay of Mode A, Mode B and ordinary requests to another server."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.live_server import LiveServer, live_server
from support.native_client import native_client
from support.raw_http import RawResponse, chunked, post, raw_client, request
from support.recordings import events, lines, recordings, replay

from omni_ws.config.keys import ApiKey, digest
from omni_ws.engine.fake import EchoEngine, EchoSettings

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
SESSIONS = "/v1/streaming_input/sessions"
KEY = ApiKey(name="phones", key_sha256=digest("k"))


async def ask(server: LiveServer, method: str, target: str, *headers: str, body: bytes = b"") -> RawResponse:
    async with raw_client(server.port) as client:
        await client.send(request(method, target, "Connection: close", *headers, body=body))
        return await client.response()


async def replayed_alike(path: Path, *options: str, **fields: Any) -> dict[str, Any]:
    """Answered alike by an echo, and not alike by a server that says something else."""
    async with live_server(**fields) as server:
        url = f"ws://127.0.0.1:{server.port}"
        again = await replay(path, "--url", url, "--compare", "exact", "--format", "json", *options)
        await forget_sessions(server)
    assert again.status == 0, again.output + again.errors
    async with live_server(EchoEngine(EchoSettings(reply="something else")), **fields) as server:
        url = f"ws://127.0.0.1:{server.port}"
        other = await replay(path, "--url", url, *options)
        await forget_sessions(server)
    assert other.status == 1, other.output
    (session,) = again.report["sessions"]
    return dict(session)


async def forget_sessions(server: LiveServer) -> None:
    """What is kept for readers would be kept for minutes."""
    for _, session in tuple(server.app.registry._by_id.values()):
        server.app.registry.discard(session)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_ordinary_request(tmp_path: Path, stream: bool) -> None:
    folder = tmp_path / "r"
    async with live_server(record=folder) as server:
        body = {"messages": [{"role": "user", "content": "how do you do"}], "stream": stream}
        await post(server.port, CHAT, body, "Authorization: Bearer not-to-be-seen", "Cookie: nor-this")
    (path,) = recordings(folder)
    assert lines(path)[0]["kind"] == "http"
    assert "not-to-be-seen" not in path.read_text()
    assert "nor-this" not in path.read_text()
    session = await replayed_alike(path)
    assert [answer["finish_reason"] for answer in session["answers"]] == ["stop"]


async def test_speech_in_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    audio = bytes(range(256)) * 20
    async with live_server(record=folder) as server, raw_client(server.port) as client:
        target = "/v1/audio/speech?response_format=pcm"
        head = ("X-Streaming-Input: true", "Content-Type: audio/pcm;rate=24000", "Transfer-Encoding: chunked")
        await client.send(request("POST", target, "Connection: close", *head), chunked(audio))
        answer = await client.response()
        assert len(answer.body) == len(audio)
    (path,) = recordings(folder)
    async with live_server() as server:
        again = await replay(path, "--url", f"http://127.0.0.1:{server.port}", "--compare", "exact")
    assert again.status == 0, again.output
    assert "the same audio bytes" in again.output


async def test_mode_a_is_uploaded_at_the_pace_of_then(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    async with live_server(record=folder) as server, raw_client(server.port) as client:
        head = ("X-Streaming-Input: true", "Transfer-Encoding: chunked", "Connection: close")
        await client.send(request("POST", CHAT, *head), chunked(b'{"modality":"text","text":"one "}\n', end=False))
        assert (await client.head())[1] == 200
        while b"one" not in await client.chunk():
            pass
        await client.send(chunked(b'{"modality":"text","text":"two"}\n'))
        await client.rest()
    (path,) = recordings(folder)
    assert [event["text"] for event in events(path, "in")] == [
        '{"modality":"text","text":"one "}\n',
        '{"modality":"text","text":"two"}\n',
    ]
    first_output = next(event["at"] for event in events(path, "out") if "one" in event["text"])
    assert first_output < events(path, "in")[1]["at"]
    await replayed_alike(path)


@pytest.mark.parametrize("reader", ["poll", "events", "websocket"])
async def test_a_session_over_several_requests(tmp_path: Path, reader: str) -> None:
    folder = tmp_path / "r"
    async with live_server(record=folder, keys=(KEY,)) as server:
        key = ("Authorization: Bearer k", "Content-Type: application/json")
        created = await ask(server, "POST", SESSIONS, *key, body=b"{}")
        one = f"{SESSIONS}/{created.json()['session_id']}"
        for number, text in ((1, "world"), (0, "hello "), (0, "hello ")):
            chunk = {"sequence_id": number, "modality": "text", "text": text}
            await ask(server, "POST", f"{one}/chunks", *key, body=orjson.dumps(chunk))
        assert (await ask(server, "GET", f"{one}/result", *key)).status == 202
        await ask(server, "POST", f"{one}/finish", *key)
        match reader:
            case "poll":
                assert (await ask(server, "GET", f"{one}/result?wait=5", *key)).status == 200
            case "events":
                assert b"hello" in (await ask(server, "GET", f"{one}/result", *key, "Accept: text/event-stream")).body
            case "websocket":
                query = f"?session_id={created.json()['session_id']}"
                headers = {"Authorization": "Bearer k"}
                async with native_client(server, query=query, greeted=False, additional_headers=headers) as client:
                    assert (await client.answer()).text == "hello world"
                    assert await client.closed() == 1000
        await forget_sessions(server)
        await ask(server, "GET", "/v1/models", *key)
        health = await ask(server, "GET", "/health")
        assert health.status == 200
    (path,) = recordings(folder)
    assert lines(path)[0]["kind"] == "session"
    assert lines(path)[-1]["event"] == "end"
    session = await replayed_alike(path, "--api-key", "k", keys=(KEY,))
    assert len(session["answers"]) == 1


async def test_a_request_that_is_refused_is_refused_again(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    body = {"messages": [{"role": "user", "content": "hello"}], "model": "no-such-model"}
    async with live_server(record=folder, strict_model_names=True) as server:
        assert (await post(server.port, CHAT, body)).status == 404
    (path,) = recordings(folder)
    for strict, status in ((True, 0), (False, 1)):
        async with live_server(strict_model_names=strict) as server:
            again = await replay(path, "--url", f"ws://127.0.0.1:{server.port}")
        assert again.status == status, again.output


async def test_a_client_that_goes_away_goes_away_again(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    slow = EchoSettings(chunk_interval_ms=1000)  # the replay leaves when the client left, and must have heard something
    async with (
        live_server(EchoEngine(slow), record=folder, expect_errors=True) as server,
        raw_client(server.port) as client,
    ):
        body = {"messages": [{"role": "user", "content": "a b c d e f g h i j k l m n o p"}], "stream": True}
        await client.send(request("POST", CHAT, "Content-Type: application/json", body=orjson.dumps(body)))
        await client.head()
        while b" c" not in await client.chunk():
            pass
        client.reset()
        with contextlib.suppress(ConnectionError):
            await client.close()
        await server.until(lambda: server.sessions == 0)
    (path,) = recordings(folder)
    assert events(path, "close")[0]["by"] == "lost"
    async with live_server(EchoEngine(slow), expect_errors=True) as server:
        again = await replay(path, "--url", f"ws://127.0.0.1:{server.port}")
    assert again.status == 0, again.output


async def test_who_has_no_key_is_not_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    async with live_server(record=folder, keys=(KEY,)) as server:
        assert (await post(server.port, CHAT, {"messages": []})).status == 401
        assert (await ask(server, "GET", "/health")).status == 200
    assert recordings(folder) == []
