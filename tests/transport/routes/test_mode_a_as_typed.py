"""Mode A without its header: chunked bodies, typed by hand, are distinguished from ordinary requests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
from support.live_server import LiveServer, live_server
from support.raw_http import RawResponse, chunked, content, events_of, post, raw_client, request
from support.recordings import events, recordings
from support.scripted_engines import CapableEngine, ToneEngine

from omni_ws.audio.container import wav_header
from omni_ws.core.chunks import AudioEncoding
from omni_ws.engine.base import TextOutput

CHAT: Final = "/v1/chat/completions"
SPEECH: Final = "/v1/audio/speech"
CHUNKED: Final = "Transfer-Encoding: chunked"
NDJSON: Final = "Content-Type: application/x-ndjson"
FORM: Final = "Content-Type: application/x-www-form-urlencoded"
HELLO: Final = {"text": "hello"}
ORDINARY: Final = {"messages": [{"role": "user", "content": "hello"}]}


async def curl(server: LiveServer, path: str, body: bytes, *options: str) -> tuple[int, str, bytes]:
    """Status, content type and body of a response to the real curl."""
    program = await asyncio.create_subprocess_exec(
        *("curl", "-sN", "--data-binary", "@-", "-w", "\n%{http_code} %{content_type}", *options),
        f"http://127.0.0.1:{server.port}{path}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await program.communicate(body)
    assert program.returncode == 0
    answer, _, last = output.rpartition(b"\n")
    status, _, kind = last.decode().partition(" ")
    return int(status), kind, answer


def ndjson(*objects: dict[str, Any]) -> bytes:
    return b"".join(orjson.dumps(one) + b"\n" for one in objects)


async def send(server: LiveServer, *headers: str, body: bytes, path: str = CHAT) -> RawResponse:
    async with raw_client(server.port) as client:
        await client.send(request("POST", path, "Connection: close", CHUNKED, *headers), chunked(body))
        return await client.response()


@pytest.mark.parametrize("options", [(), ("-H", NDJSON)])
async def test_lines_that_curl_sends_in_chunks_are_a_stream(options: tuple[str, ...]) -> None:
    body = ndjson({**HELLO, "end_of_input": True})
    async with live_server() as server:
        status, kind, answer = await curl(server, CHAT, body, "-H", CHUNKED, *options)
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    assert b'"delta":{"content":"hello"}' in answer
    assert answer.endswith(b"data: [DONE]\n\n")


async def test_a_name_for_the_request_is_ignored_whatever_it_is() -> None:
    body = ndjson({"text": "hel", "ref": "a"}, {"text": "", "ref": 5}, {"text": "lo", "ref": "", "end_of_input": True})
    async with live_server() as server:
        response = await send(server, NDJSON, body=body)
    assert response.status == 200
    assert b'"ref"' not in response.body


async def test_lines_that_are_to_be_read_aloud() -> None:
    async with live_server(ToneEngine()) as server:
        status, kind, answer = await curl(server, SPEECH, ndjson({"voice": "alloy"}, HELLO), "-H", CHUNKED)
        assert (status, kind.partition(";")[0]) == (200, "audio/pcm")
        assert answer
        whole = await curl(server, SPEECH, b'{"input": "hello"}', "-H", CHUNKED)
    assert whole[:2] == (200, "audio/mpeg")


@pytest.mark.parametrize("indent", [None, 2])
async def test_an_ordinary_body_that_curl_sends_in_chunks_is_an_ordinary_request(indent: int | None) -> None:
    body = json.dumps(ORDINARY, indent=indent).encode() + b"\n"
    async with live_server() as server:
        for options in (("-H", CHUNKED), ("-H", CHUNKED, "-H", "Content-Type: application/json"), ()):
            status, kind, answer = await curl(server, CHAT, body, *options)
            assert (status, kind) == (200, "application/json")
            assert orjson.loads(answer)["choices"][0]["message"]["content"] == "hello"
        # Without a content type.
        status, _, answer = await curl(server, CHAT, body, "-H", CHUNKED, "-H", "Content-Type:")
    assert (status, orjson.loads(answer)["object"]) == (200, "chat.completion")


async def test_earlier_messages_as_parameters_are_followed_by_chunks() -> None:
    async with live_server() as server:
        answer = await send(server, FORM, body=ndjson(ORDINARY, {"text": "again"}))
        assert content(events_of(answer)) == "again"


async def test_the_answer_begins_while_the_body_is_on_its_way() -> None:
    async with live_server() as server, raw_client(server.port) as client:
        await client.send(request("POST", CHAT, CHUNKED, FORM), chunked(ndjson(HELLO), end=False))
        _, status, headers = await client.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert b'"role":"assistant"' in await client.chunk()
        await client.send(chunked(ndjson({"text": " there", "end_of_input": True})))
        assert b"[DONE]" in b"".join([chunk async for chunk in client.chunks()])


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ((NDJSON,), 400, "invalid_frame"),
        ((FORM,), 400, "invalid_frame"),
        (("Content-Type: application/json",), 400, "invalid_frame"),
    ],
)
async def test_what_can_be_read_as_neither(headers: tuple[str, ...], status: int, code: str) -> None:
    async with live_server() as server:
        response = await send(server, *headers, body=b'{"messages": [\n')
    assert (response.status, response.error["code"]) == (status, code)


async def test_a_wrong_line_is_named_as_soon_as_it_is_there() -> None:
    async with live_server() as server, raw_client(server.port) as client:
        await client.send(request("POST", CHAT, CHUNKED, FORM), chunked(b'{"text": "a",}\n', end=False))
        response = await client.response()
    assert response.status == 400
    assert response.error["message"].startswith("line 1: ")


@pytest.mark.parametrize(
    "kind",
    [
        *("audio/wav", "application/octet-stream", "multipart/form-data; boundary=x"),
        *("text/plain", "text/plain; charset=utf-8", "text/json", "application/vnd.api+json"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, SPEECH])
async def test_other_types_are_refused_and_the_message_names_the_header(kind: str, path: str) -> None:
    for body in (b"RIFF", ndjson(HELLO), ndjson({**ORDINARY, "input": "hello"})):
        async with live_server() as server:
            response = await send(server, f"Content-Type: {kind}", body=body, path=path)
        assert (response.status, response.error["param"]) == (415, "Content-Type")
        assert "X-Streaming-Input: true" in response.error["message"]


@pytest.mark.parametrize("kind", ["text/plain", "text/json", "application/vnd.api+json"])
async def test_other_types_of_json_are_ordinary_bodies_where_their_length_is_known(kind: str) -> None:
    async with live_server() as server:
        assert (await post(server.port, CHAT, ORDINARY, f"Content-Type: {kind}")).status == 200


@pytest.mark.parametrize("kind", [NDJSON, FORM, "Content-Type: application/json", ""])
async def test_lines_whose_length_is_known_are_an_ordinary_body(kind: str) -> None:
    """A body with a known length is not a stream."""
    async with live_server() as server, raw_client(server.port) as client:
        headers = (kind,) if kind else ()
        await client.send(request("POST", CHAT, "Connection: close", *headers, body=ndjson(HELLO, HELLO)))
        response = await client.response()
    assert response.status == (415 if kind == NDJSON else 400)


async def test_where_streaming_input_is_off_the_ordinary_requests_stay() -> None:
    async with live_server(streaming_input={"enabled": False}) as server:
        assert (await send(server, FORM, body=orjson.dumps(ORDINARY))).status == 200
        for headers in ((FORM,), (NDJSON,)):
            response = await send(server, *headers, body=ndjson(HELLO))
            assert (response.status, response.error["code"]) == (404, "not_found")


async def test_an_ordinary_body_in_chunks_is_as_long_as_any() -> None:
    body = orjson.dumps({"messages": [{"role": "user", "content": "a" * 3000}]})
    async with live_server(http={"max_body_bytes": len(body)}) as server:
        assert (await send(server, FORM, body=body)).status == 200
        response = await send(server, FORM, body=b" " + body)
        assert (response.status, response.error["code"]) == (413, "payload_too_large")
        # A body that is known to be a stream is not held.
        assert (await send(server, FORM, body=ndjson(*[{"text": "a"}] * 1000))).status == 200


@pytest.mark.virtual_clock
async def test_a_body_that_stands_still_times_out_as_a_stream_does() -> None:
    async with live_server(streaming_input={"session_timeout_sec": 60}) as server, raw_client(server.port) as client:
        begin = asyncio.get_running_loop().time()
        await client.send(request("POST", CHAT, CHUNKED, FORM), chunked(orjson.dumps(ORDINARY), end=False))
        response = await client.response()
        assert (response.status, response.error["code"]) == (408, "session_timeout")
        assert asyncio.get_running_loop().time() - begin == pytest.approx(60, abs=1)


async def test_such_a_body_is_recorded_once(tmp_path: Path) -> None:
    async with live_server(record=tmp_path) as server:
        assert (await send(server, FORM, body=orjson.dumps(ORDINARY))).status == 200
    (path,) = recordings(tmp_path)
    assert len(events(path, "in_end")) == 1
    assert len(events(path, "in")) == 1


async def test_live_input_by_curl() -> None:
    """``-T .`` sends what is there: the answer to the first line comes before there is a second."""
    async with live_server() as server:
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-sSN", "-X", "POST", "-T", ".", "-H", "X-Streaming-Input: true"),
            f"http://127.0.0.1:{server.port}/v1/chat/completions",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert curl.stdin is not None
        assert curl.stdout is not None
        curl.stdin.write(b'{"text":"one "}\n')
        while b'"content":"one "' not in await curl.stdout.readline():
            pass
        curl.stdin.write(b'{"text":"two"}\n')
        curl.stdin.close()
        rest = await curl.stdout.read()
        assert await curl.wait() == 0
    assert b'"content":"two"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")


# --- the bytes decide what a body is that has no type, or a wrong one

STREAMING: Final = "X-Streaming-Input: true"
TRANSCRIPTIONS: Final = "/v1/audio/transcriptions"
WAV: Final = wav_header(sample_rate=8000, channels=1, data_bytes=None) + bytes(640)
UNTYPED: Final = ["", "application/octet-stream", "text/plain", "video/mp4", "application/json", "audio/pcm"]


def typed(kind: str) -> tuple[str, ...]:
    return (f"Content-Type: {kind}",) if kind else ()


@pytest.mark.parametrize("kind", UNTYPED)
async def test_a_streamed_body_that_begins_as_a_file_does_is_raw_audio(kind: str) -> None:
    engine = CapableEngine([TextOutput("heard")])
    async with live_server(engine) as server:
        for path in (TRANSCRIPTIONS, CHAT):
            answer = await send(server, STREAMING, *typed(kind), body=WAV, path=path)
            assert answer.status == 200, answer.body
            assert b"heard" in answer.body
    assert [b"".join(chunk.payload for chunk in chunks) for chunks in engine.inputs] == [WAV, WAV]
    assert {request.input_audio.encoding for request in engine.requests} == {AudioEncoding.WAV}


@pytest.mark.parametrize("kind", UNTYPED[:-1])
async def test_a_streamed_body_that_begins_with_an_object_is_lines(kind: str) -> None:
    async with live_server() as server:
        answer = await send(server, STREAMING, *typed(kind), body=b" \n" + ndjson(HELLO))
        assert content(events_of(answer)) == "hello"


@pytest.mark.parametrize("kind", UNTYPED[:4])
@pytest.mark.parametrize("body", [b"[1]", b"RIFF....AVI ", b"\xff\xf1\x58", b"\0" * 30])
async def test_any_other_streamed_body_is_refused(kind: str, body: bytes) -> None:
    async with live_server() as server:
        answer = await send(server, STREAMING, *typed(kind), body=body)
    assert (answer.status, answer.error["param"]) == (415, "Content-Type")


async def test_a_head_that_arrives_byte_by_byte() -> None:
    engine = CapableEngine([TextOutput("heard")])
    async with live_server(engine) as server, raw_client(server.port) as client:
        await client.send(request("POST", TRANSCRIPTIONS, "Connection: close", CHUNKED, STREAMING))
        for at in range(16):
            await client.send(chunked(WAV[at : at + 1], end=False))
        await client.send(chunked(WAV[16:]))
        assert (await client.response()).status == 200
    assert b"".join(chunk.payload for chunk in engine.inputs[0]) == WAV


@pytest.mark.parametrize("path", [CHAT, TRANSCRIPTIONS])
async def test_a_file_that_curl_sends_as_it_stands_is_raw_audio(path: str) -> None:
    engine = CapableEngine([TextOutput("heard")])
    async with live_server(engine) as server:
        for options in ((), ("-H", CHUNKED)):
            status, kind, answer = await curl(server, path, WAV, *options)
            assert (status, kind) == (200, "text/event-stream; charset=utf-8")
            assert b"heard" in answer
    assert [b"".join(chunk.payload for chunk in chunks) for chunks in engine.inputs] == [WAV, WAV]
