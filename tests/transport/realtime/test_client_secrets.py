"""Client secrets: how they are made, what they open, and when they expire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from openai.types.realtime import ClientSecretCreateResponse
from pydantic import TypeAdapter
from support.live_server import LiveServer, live_server
from support.raw_http import RawResponse, post, raw_client, request, websocket_upgrade
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from omni_ws.config.keys import ApiKey, digest
from omni_ws.errors import RateLimited
from omni_ws.transport.http import access
from omni_ws.transport.http.access import ClientSecret, ClientSecrets

PATH = "/v1/realtime/client_secrets"
KEYS = (ApiKey(name="one", key_sha256=digest("sesame")), ApiKey(name="two", key_sha256=digest("open"), max_sessions=1))
ONE, TWO = "Authorization: Bearer sesame", "Authorization: Bearer open"
BRIEF = {"type": "realtime", "instructions": "Be brief."}


async def create(server: LiveServer, *headers: str, **body: Any) -> RawResponse:
    return await post(server.port, PATH, body, *headers)


async def secret(server: LiveServer, *headers: str, **body: Any) -> str:
    answer = await create(server, *headers, **body)
    assert answer.status == 200, answer.body
    value: str = answer.json()["value"]
    return value


@asynccontextmanager
async def realtime(server: LiveServer, **options: Any) -> AsyncIterator[ClientConnection]:
    url = f"ws://127.0.0.1:{server.port}/v1/realtime?model=gpt-realtime"
    async with connect(url, proxy=None, ping_interval=None, close_timeout=2, **options) as connection:
        yield connection


def bearing(value: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Bearer {value}"}}


def offering(value: str) -> dict[str, Any]:
    """As OpenAI's SDKs for browsers do."""
    return {"subprotocols": ["realtime", f"openai-insecure-api-key.{value}"]}


async def created(connection: ClientConnection) -> dict[str, Any]:
    event: dict[str, Any] = orjson.loads(await connection.recv())
    assert event["type"] == "session.created", event
    session: dict[str, Any] = event["session"]
    return session


async def is_refused(server: LiveServer, value: str) -> bool:
    try:
        async with realtime(server, **bearing(value)):
            return False
    except InvalidStatus as error:
        return error.response.status_code == 401


# creating


async def test_the_model_is_any_unless_names_are_strict() -> None:
    for strict, status in ((False, 200), (True, 404)):
        async with live_server(strict_model_names=strict) as server:
            answer = await create(server, session={"type": "realtime", "model": "gpt-4o-realtime"})
            assert answer.status == status
            assert (await create(server, session={"type": "realtime", "model": "fake"})).status == 200
            wrong = await create(server, session={"type": "realtime", "model": ["fake"]})
            assert (wrong.status, wrong.error["param"]) == (400, "session.model")


@pytest.mark.parametrize("path", [PATH, "/v1/streaming_input/client_secrets"])
@pytest.mark.parametrize("allowed", [(), ("mcp.example",)])
async def test_mcp_servers_are_no_settings_of_a_secret(path: str, allowed: tuple[str, ...]) -> None:
    """Only where the operator allows none, allowing them is told as a remedy."""
    tool = {"type": "mcp", "server_label": "s", "server_url": "https://mcp.example/x", "require_approval": "never"}
    async with live_server(realtime={"mcp_servers": allowed}) as server:
        error = (await post(server.port, path, {"session": {"tools": [tool]}})).error
        assert (error["code"], error["param"]) == ("unsupported_parameter", "tools[0].type")
        assert ("realtime.mcp_servers" in error["message"]) == (not allowed)


async def test_what_is_created() -> None:
    async with live_server(keys=KEYS) as server:
        before = int(time.time())
        answer = await create(server, ONE, expires_after={"anchor": "created_at", "seconds": 60}, session=BRIEF)
        made, after = answer.json(), int(time.time())
        other = await secret(server, ONE)
    assert answer.headers["cache-control"] == "no-store"
    assert made.keys() == {"value", "expires_at", "session"}
    assert before + 60 <= made["expires_at"] <= after + 60
    assert made["session"]["type"] == "realtime"
    assert made["session"]["instructions"] == "Be brief."
    assert made["value"].startswith("ek_")
    assert len(made["value"]) == 35
    assert made["value"] != other


@pytest.mark.parametrize("kind", ["realtime", "transcription"])
async def test_the_response_has_the_form_of_openai(kind: str) -> None:
    session = {"type": kind, "audio": {"input": {"transcription": {"model": "gpt-4o-mini-transcribe"}}}}
    async with live_server() as server:
        made = (await create(server, session=session)).json()
        assert TypeAdapter(ClientSecretCreateResponse).validate_python(made).session.type == kind
        async with realtime(server, **bearing(made["value"])) as connection:
            assert (await created(connection))["type"] == kind


async def test_a_body_may_be_empty() -> None:
    async with live_server() as server, raw_client(server.port) as client:
        before = int(time.time())
        await client.send(request("POST", PATH, "Content-Length: 0"))
        made = (await client.response()).json()
    assert before + 600 <= made["expires_at"] <= time.time() + 600
    assert made["session"]["type"] == "realtime"


@pytest.mark.parametrize("seconds", [10, 7200])
async def test_the_limits_of_a_lifetime(seconds: int) -> None:
    async with live_server() as server:
        before = int(time.time())
        made = (await create(server, expires_after={"seconds": seconds})).json()
    assert before + seconds <= made["expires_at"] <= time.time() + seconds


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"expires_after": {"seconds": 9}}, "expires_after.seconds"),
        ({"expires_after": {"seconds": 7201}}, "expires_after.seconds"),
        ({"expires_after": {"anchor": "last_used", "seconds": 60}}, "expires_after.anchor"),
        ({"expires_after": 60}, "expires_after"),
        ({"session": "realtime"}, "session"),
        ({"session": {"audio": {"input": {"turn_detection": {"type": "psychic"}}}}}, None),
    ],
)
async def test_what_is_refused(body: dict[str, Any], param: str | None) -> None:
    async with live_server() as server:
        answer = await create(server, **body)
    assert (answer.status, answer.error["code"]) == (400, "invalid_value")
    assert param is None or answer.error["param"] == param


async def test_a_body_that_is_too_large() -> None:
    async with live_server() as server:
        largest = {"session": {"instructions": ""}}
        largest["session"]["instructions"] = "a" * (256 * 1024 - len(orjson.dumps(largest)))
        assert (await create(server, **largest)).status == 200
        largest["session"]["instructions"] += "a"
        answer = await create(server, **largest)
    assert (answer.status, answer.error["code"]) == (413, "payload_too_large")


async def test_a_secret_is_made_with_a_real_key_only() -> None:
    async with live_server(keys=KEYS) as server:
        value = await secret(server, ONE)
        for header in ((), (f"Authorization: Bearer {value}",)):
            answer = await create(server, *header)
            assert (answer.status, answer.error["code"]) == (401, "unauthenticated")


# using


@pytest.mark.parametrize("presented", [bearing, offering])
async def test_a_secret_opens_sessions_with_its_settings(presented: Any) -> None:
    async with live_server(keys=KEYS) as server:
        value = await secret(server, ONE, session=BRIEF)
        for _ in range(2):
            async with realtime(server, **presented(value)) as connection:
                assert (await created(connection))["instructions"] == "Be brief."
                if presented is offering:
                    assert connection.subprotocol == "realtime"


async def test_a_session_with_the_settings_of_a_secret_begins_with_its_warnings() -> None:
    async with live_server(keys=KEYS) as server:
        value = await secret(server, ONE, session={"tracing": "auto", "instructions": "Be brief."})
        async with realtime(server, **bearing(value)) as connection:
            event = orjson.loads(await connection.recv())
            assert (event["type"], event["session"]["tracing"]) == ("session.created", "auto")
            assert [one["param"] for one in event["warnings"]] == ["session.tracing"]


async def test_without_keys_a_secret_brings_its_settings() -> None:
    async with live_server() as server:
        value = await secret(server, session=BRIEF)
        async with realtime(server, **bearing(value)) as connection:
            assert (await created(connection))["instructions"] == "Be brief."
        async with realtime(server, **bearing("ek_unknown")) as connection:
            assert (await created(connection))["instructions"] != "Be brief."


async def test_a_secret_opens_nothing_else() -> None:
    async with live_server(keys=KEYS) as server:
        value = await secret(server, ONE)
        header = f"Authorization: Bearer {value}"
        assert (await post(server.port, "/v1/chat/completions", {"messages": []}, header)).status == 401
        async with raw_client(server.port) as client:
            await client.send(websocket_upgrade("/v1/streaming_input", header))
            assert (await client.head())[1] == 401


async def test_an_unknown_secret() -> None:
    async with live_server(keys=KEYS) as server:
        await secret(server, ONE)
        assert await is_refused(server, "ek_" + 32 * "0")
        assert await is_refused(server, "ek_")


async def test_a_secret_has_the_limits_of_its_key() -> None:
    async with live_server(keys=KEYS) as server:
        value = await secret(server, TWO)
        async with realtime(server, **bearing(value)) as first:
            await created(first)
            async with realtime(server, **bearing(value)) as second:
                event = orjson.loads(await second.recv())
                assert (event["type"], event["error"]["code"]) == ("error", "rate_limit_exceeded")
                with pytest.raises(ConnectionClosed):
                    await second.recv()


@pytest.mark.virtual_clock
async def test_a_secret_expires_but_its_sessions_go_on() -> None:
    async with live_server(keys=KEYS) as server:
        value = await secret(server, ONE, expires_after={"seconds": 10})
        await asyncio.sleep(9.9)
        async with realtime(server, **bearing(value)) as connection:
            await created(connection)
            await asyncio.sleep(0.1)
            assert await is_refused(server, value)
            await connection.send('{"type":"session.update","session":{"type":"realtime"}}')
            assert orjson.loads(await connection.recv())["type"] == "session.updated"


# room


def a_secret(key: ApiKey | None = None, size: int = 2) -> ClientSecret:
    return ClientSecret(key=key, session=b" " * size)


def test_each_key_may_have_so_many() -> None:
    secrets = ClientSecrets()
    for number in range(access.MAX_SECRETS):
        secrets.create(a_secret(KEYS[0]), lifetime=100 + number, now=0)
    with pytest.raises(RateLimited) as refused:
        secrets.create(a_secret(KEYS[0]), lifetime=100, now=40)
    assert refused.value.retry_after_ms == 60_001
    assert secrets.find(secrets.create(a_secret(KEYS[1]), lifetime=100, now=40), now=40) == a_secret(KEYS[1])
    secrets.create(a_secret(KEYS[0]), lifetime=100, now=100)


def test_each_key_may_keep_so_many_bytes() -> None:
    secrets = ClientSecrets()
    secrets.create(a_secret(size=access.MAX_SESSION_BYTES - 10), lifetime=100, now=0)
    value = secrets.create(a_secret(size=10), lifetime=200, now=0)
    with pytest.raises(RateLimited):
        secrets.create(a_secret(size=1), lifetime=100, now=0)
    secrets.create(a_secret(size=access.MAX_SESSION_BYTES - 10), lifetime=100, now=100)
    assert secrets.find(value, now=199) == a_secret(size=10)
    assert secrets.find(value, now=200) is None


async def test_too_many_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MAX_SECRETS", 1)
    async with live_server() as server:
        await secret(server, expires_after={"seconds": 60})
        answer = await create(server)
    assert (answer.status, answer.error["code"]) == (429, "rate_limited")
    assert 50 < int(answer.headers["retry-after"]) <= 61  # a millisecond after 60 s, in whole seconds
