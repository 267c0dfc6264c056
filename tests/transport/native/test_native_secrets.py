"""Client secrets of the native WebSocket: what they open, with which configuration, and for how long."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from support.live_server import LiveServer, live_server
from support.raw_http import call, post, raw_client, websocket_upgrade
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from omni_ws.config.keys import ApiKey, digest
from omni_ws.transport.http.access import NATIVE, ClientSecret

PATH = "/v1/streaming_input/client_secrets"
KEYS = (ApiKey(name="one", key_sha256=digest("sesame"), max_sessions=1),)
KEY = "Authorization: Bearer sesame"


async def secret(server: LiveServer, path: str = PATH, **body: Any) -> str:
    answer = await post(server.port, path, body, KEY)
    assert answer.status == 200, answer.body
    value: str = answer.json()["value"]
    return value


def opened(server: LiveServer, value: str, query: str = "") -> connect:
    """A handshake as a page makes it."""
    protocols: Any = ["omni.v1+json", f"omni-api-key.{value}"]
    usual: Any = {"proxy": None, "close_timeout": 2, "ping_interval": None}
    return connect(server.websocket_url + query, subprotocols=protocols, **usual)


async def frame(connection: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(await connection.recv())
    return found


async def test_a_secret_opens_sessions_that_begin_as_it_says_and_count_for_its_key() -> None:
    async with live_server(keys=KEYS) as server:
        answer = await post(
            server.port, PATH, {"session": {"instructions": "Be brief.", "input_audio": {"sample_rate": 8000}}}, KEY
        )
        made = answer.json()
        assert answer.headers["cache-control"] == "no-store"
        assert made.keys() == {"value", "expires_at", "session"}
        async with opened(server, made["value"]) as first:
            assert (await frame(first))["input_audio"]["sample_rate"] == 8000
            await first.send('{"type":"session_config","overlap":"interrupt"}')
            updated = await frame(first)
            assert (updated["instructions"], updated["overlap"]) == ("Be brief.", "interrupt")
            async with opened(server, made["value"]) as second:
                assert (await frame(second))["error"]["code"] == "rate_limited"


async def test_a_secret_opens_nothing_else_but_the_list_of_models() -> None:
    async with live_server(keys=KEYS) as server:
        value = await secret(server)
        bearer = f"Authorization: Bearer {value}"
        other = await secret(server, "/v1/realtime/client_secrets")
        for path in (PATH, "/v1/chat/completions"):
            assert (await post(server.port, path, {}, bearer)).status == 401, path
        for method, path in (("DELETE", "/v1/sessions/sess_1"), ("GET", "/metrics")):
            assert (await call(server.port, method, path, None, bearer)).status == 401, path
        assert (await call(server.port, "GET", "/v1/models", None, bearer)).status == 200
        assert (await call(server.port, "GET", "/v1/models", None, f"Authorization: Bearer {other}")).status == 401
        async with raw_client(server.port) as client:
            await client.send(websocket_upgrade("/v1/realtime", bearer))
            assert (await client.head())[1] == 401
        with pytest.raises(InvalidStatus) as refused:
            await opened(server, other)
        assert refused.value.response.status_code == 401
        assert b"another kind" in refused.value.response.body


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"session": {"instructions": 1}}, "invalid_value", "instructions"),
        ({"session": {"voice": "nobody"}}, "invalid_value", "voice"),
        ({"expires_after": {"seconds": 7201}}, "invalid_value", "expires_after.seconds"),
    ],
)
async def test_what_is_refused(body: dict[str, Any], code: str, param: str) -> None:
    async with live_server(keys=KEYS) as server:
        answer = await post(server.port, PATH, body, KEY)
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == (code, param)


@pytest.mark.virtual_clock
async def test_a_session_goes_on_when_its_secret_has_expired_and_comes_back_with_another() -> None:
    async with live_server(keys=KEYS, streaming_input={"resume_grace_sec": 20}) as server:
        value = await secret(server, expires_after={"seconds": 10})
        async with opened(server, value) as connection:
            created = await frame(connection)
            await asyncio.sleep(10)
            with pytest.raises(InvalidStatus):
                await opened(server, value)
            await connection.send('{"type":"ping","t":1}')
            assert (await frame(connection))["type"] == "pong"
            await connection.close(4000)  # it is coming back
        query = f"?session_id={created['session_id']}&resume_token={created['resume_token']}"
        async with opened(server, await secret(server), query) as connection:
            assert (await frame(connection))["type"] == "session_resumed"
            await connection.close(1000)


async def test_what_the_engine_does_not_take_any_more_is_told() -> None:
    """The engine may have become another one since the secret was made."""
    async with live_server(keys=KEYS) as server:
        made = ClientSecret(key=KEYS[0], session=b'{"voice":"gone"}', kind=NATIVE)
        now = asyncio.get_running_loop().time()
        async with opened(server, server.app.secrets.create(made, lifetime=60, now=now)) as connection:
            error = (await frame(connection))["error"]
            assert (error["code"], error["param"]) == ("invalid_value", "voice")
            with pytest.raises(ConnectionClosed):
                await connection.recv()


async def test_the_earlier_turns_of_a_secret_are_seen_by_its_sessions() -> None:
    items = [{"role": "user", "content": "My name is Ada."}, {"role": "assistant", "content": "Hello Ada."}]
    async with live_server(keys=KEYS) as server:
        refused = await post(server.port, PATH, {"session": {"history_items": [{"role": "system"}]}}, KEY)
        assert (refused.status, refused.error["param"]) == (400, "history_items[0].role")
        async with opened(server, await secret(server, session={"history_items": items})) as connection:
            await frame(connection)
            await connection.send('{"type":"history_get"}')
            assert (await frame(connection))["items"] == items
            await connection.send(orjson.dumps({"type": "session_config", "history_items": items}).decode())
            error = (await frame(connection))["error"]
            assert (error["code"], error["param"]) == ("invalid_value", "history_items")  # once in a session


async def test_the_greeting_of_a_secret_waits_for_the_format_of_the_client() -> None:
    async with live_server(keys=KEYS) as server:
        value = await secret(server, session={"greeting": "Hello."})
        async with opened(server, value) as connection:
            await frame(connection)
            await connection.send('{"type":"ping","t":1}')
            assert (await frame(connection))["type"] == "pong"
            await connection.send('{"type":"session_config"}')
            assert [(await frame(connection))["type"] for _ in range(2)] == ["session_updated", "response_started"]
