"""JSON of so many values that parsing it would stop everybody: refused on every way in, before anything is built."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from support.live_server import LiveServer, live_server
from support.native_client import native_client
from support.raw_http import raw_client, request
from support.realtime_client import realtime_client
from support.scripted_upstream import remote, streams, upstream

from omni_ws.core.json_values import MAX_BODY_VALUES, MAX_MESSAGE_VALUES
from omni_ws.errors import InvalidFrame
from omni_ws.transport.telephony.media_stream import decode_stream_message

pytestmark = pytest.mark.usefixtures("no_task_left")


def many(values: int) -> str:
    return f"[{'[],' * (values // 5)}[]]"


MESSAGE, BODY = many(MAX_MESSAGE_VALUES), many(MAX_BODY_VALUES)


async def test_a_native_frame() -> None:
    async with live_server() as server, native_client(server) as client:
        for frame in (f'{{"type":"ping","t":{MESSAGE}}}', f'{{"type":"session_config","x":{MESSAGE}}}'):
            await client.connection.send(frame)
            error = (await client.until("error"))["error"]
            assert (error["code"], error["message"]) == (
                "invalid_frame",
                f"the JSON has more than {MAX_MESSAGE_VALUES} values",
            )
        await client.say("hello")
        assert (await client.answer()).text == "hello"


async def test_a_realtime_event() -> None:
    async with live_server() as server, realtime_client(server) as client:
        await client.connection.send(f'{{"type":"session.update","session":{{"x":{MESSAGE}}}}}')
        assert "values" in (await client.until("error"))["error"]["message"]
        await client.send("session.update", session={"type": "realtime", "instructions": "Be brief."})
        await client.until("session.updated")


def test_a_message_of_a_telephone_stream() -> None:
    with pytest.raises(InvalidFrame, match="values"):
        decode_stream_message(f'{{"event":"connected","x":{MESSAGE}}}'.encode(), is_text=True)


CHAT = '{"model":"m","messages":[{"role":"user","content":"a"}],"x":'


@pytest.mark.parametrize(
    ("path", "headers", "body"),
    [
        ("/v1/chat/completions", "Content-Type: application/json", CHAT + BODY + "}"),
        ("/v1/completions", "Content-Type: application/json", f'{{"prompt":"a","x":{BODY}}}'),
        ("/v1/streaming_input/sessions", "Content-Type: application/json", f'{{"x":{BODY}}}'),
        ("/v1/chat/completions", "X-Streaming-Input: true", f'{{"sampling":{{}}}}\n{{"text":"a","x":{MESSAGE}}}\n'),
    ],
)
async def test_a_body(path: str, headers: str, body: str) -> None:
    async with live_server() as server:
        refused = await posted(server, path, headers, body)
        assert (refused["code"], "values" in refused["message"]) == ("invalid_frame", True), refused


async def posted(server: LiveServer, path: str, headers: str, body: str) -> dict[str, Any]:
    async with raw_client(server.port) as client:
        await client.send(request("POST", path, headers, "Connection: close", body=body.encode()))
        response = await client.response()
    if response.status == 200:  # the error of a stream
        (line,) = [line for line in response.body.splitlines() if b'"error"' in line]
        error: dict[str, Any] = orjson.loads(line.removeprefix(b"data: "))["error"]
        return error
    return response.error


async def test_a_body_of_as_many_values_as_are_taken() -> None:
    numbers = f"[{'1,' * (MAX_BODY_VALUES - 20)}1]"
    async with live_server() as server, raw_client(server.port) as client:
        body = (CHAT + numbers + "}").encode()
        await client.send(request("POST", "/v1/chat/completions", "Content-Type: application/json", body=body))
        assert (await client.response()).status == 200


async def test_an_event_of_an_upstream() -> None:
    event = f'data: {{"choices":[],"x":{MESSAGE}}}\n\n'.encode()
    body = '{"messages":[{"role":"user","content":"a"}]}'
    async with upstream(streams(event)) as there, remote(there) as engine, live_server(engine) as server:
        refused = await posted(server, "/v1/chat/completions", "Content-Type: application/json", body)
    assert (refused["code"], "values" in refused["message"]) == ("engine_failed", True)
