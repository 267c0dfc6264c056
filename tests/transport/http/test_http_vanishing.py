"""Clients that disconnect in the middle of the request or of the response: nothing of them is left."""

from __future__ import annotations

import orjson
import pytest
from support.live_server import live_server
from support.mode_b_client import SESSIONS
from support.raw_http import call, raw_client, request
from support.scripted_engines import CapableEngine, ToneEngine, finished, said

from omni_ws.engine.base import Engine
from omni_ws.engine.fake import EchoEngine

pytestmark = pytest.mark.slow

#: Every so many bytes a client goes, by a reset and in order in turns.
REQUEST_STEP = 5
RESPONSE_CUTS = 25

FORM_TYPE = "Content-Type: multipart/form-data; boundary=xXx"
FORM = (
    b'--xXx\r\nContent-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n'
    b'--xXx\r\nContent-Disposition: form-data; name="file"; filename="a.pcm"\r\n\r\n' + bytes(64) + b"\r\n--xXx--\r\n"
)
CHAT = {"messages": [{"role": "user", "content": "one two"}], "stream": True}
REQUESTS = {
    "chat": request("POST", "/v1/chat/completions", body=orjson.dumps(CHAT)),
    "spoken chat": request(
        "POST", "/v1/chat/completions", body=orjson.dumps({**CHAT, "stream": False, "modalities": ["text", "audio"]})
    ),
    "speech": request("POST", "/v1/audio/speech", body=b'{"input":"one two","stream_format":"audio"}'),
    "completions": request("POST", "/v1/completions", body=b'{"prompt":["a b","c"],"stream":true}'),
    "transcriptions": request("POST", "/v1/audio/transcriptions", FORM_TYPE, body=FORM),
}


def engine_for(kind: str) -> Engine:
    if kind in ("chat", "completions"):
        return EchoEngine()
    return ToneEngine() if "sp" in kind and kind != "transcriptions" else CapableEngine([said("heard"), finished()])


@pytest.mark.parametrize("kind", REQUESTS)
async def test_throughout_the_request(kind: str) -> None:
    whole = REQUESTS[kind]
    async with live_server(engine_for(kind)) as server:
        for cut in range(0, len(whole) + 1, REQUEST_STEP):
            async with raw_client(server.port) as client:
                await client.send(whole[:cut])
                if cut % 2:
                    client.reset()
        # Behind all requests before it.
        assert (await call(server.port, "GET", "/health")).status == 200
        await server.check_empty()


@pytest.mark.parametrize("kind", REQUESTS)
async def test_throughout_the_response(kind: str) -> None:
    async with live_server(engine_for(kind)) as server:
        async with raw_client(server.port) as client:
            await client.send(REQUESTS[kind].replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            whole = len(await client.rest())
        assert whole > 100  # with the line that the other requests lack
        for cut in range(1, whole - 40, max(1, whole // RESPONSE_CUTS) | 1):
            async with raw_client(server.port) as client:
                await client.send(REQUESTS[kind])
                await client.reader.readexactly(cut)
                if cut % 2:
                    client.reset()
        # Behind all requests before it.
        assert (await call(server.port, "GET", "/health")).status == 200
        await server.check_empty()


async def test_throughout_a_session_over_several_requests() -> None:
    body = orjson.dumps({"chunk": {"text": "hello", "sequence_id": 0}})
    async with live_server() as server:
        for target, data in ((SESSIONS, body), (None, b'{"text":"x","sequence_id":1,"end_of_input":true}')):
            session = (await call(server.port, "POST", SESSIONS, body)).json()["session_id"]
            whole = request("POST", target or f"{SESSIONS}/{session}/chunks", body=data)
            for cut in range(0, len(whole), REQUEST_STEP):
                async with raw_client(server.port) as client:
                    await client.send(whole[:cut])
                    if cut % 2:
                        client.reset()
            status = (await call(server.port, "GET", f"{SESSIONS}/{session}")).json()
            assert (status["next_sequence_id"], status["state"]) == (1, "started")
            assert (await call(server.port, "DELETE", f"{SESSIONS}/{session}")).status == 204
        assert len(server.app.registry) == 2  # both are remembered as deleted
