"""Checks of the Host and Origin fields."""

from __future__ import annotations

import logging

import pytest
from support.live_server import LiveServer, live_server, routes_of
from support.raw_http import RawResponse, raw_client

from omni_ws.config.keys import ApiKey, digest
from omni_ws.transport.http import access

WEBSOCKET = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


async def ask(server: LiveServer, host: str | None, line: str, more: str = "", *, version: str = "1.1") -> RawResponse:
    async with raw_client(server.port) as client:
        field = "" if host is None else f"Host: {host}\r\n"
        await client.send(f"{line} HTTP/{version}\r\n{field}{more}\r\n")
        return await client.response()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "localhost.evil.example", ""])
async def test_a_server_without_keys_answers_to_no_foreign_name(host: str) -> None:
    """On every route and on the WebSocket, also where the origin matches the foreign Host, as after DNS rebinding."""
    async with live_server() as server:
        foreign = host.format(port=server.port)
        methods = [(method, path) for path, methods in routes_of(server.app).items() for method in methods]
        for method, path in (*methods, ("GET", "/nowhere"), ("OPTIONS", "/health"), ("GET", "*")):
            for origin in ("", f"Origin: http://{foreign}\r\n"):
                response = await ask(server, foreign, f"{method} {path}", origin)
                assert (response.status, response.error["code"]) == (403, "origin_not_allowed"), (method, path)
                assert "--allow-host" in response.error["message"]
        response = await ask(server, foreign, "GET /v1/streaming_input", WEBSOCKET)
        assert (response.status, response.error["code"]) == (403, "origin_not_allowed")


@pytest.mark.parametrize("host", ["localhost:{port}", "127.0.0.1", "[::1]:{port}", "192.0.2.1", "app.localhost"])
async def test_it_answers_to_this_machine_and_to_addresses(host: str) -> None:
    async with live_server() as server:
        own = host.format(port=server.port)
        assert (await ask(server, own, "GET /health")).status == 200
        assert (await ask(server, own, "GET /v1/streaming_input", WEBSOCKET)).status == 101
        assert (await ask(server, None, "GET /health", version="1.0")).status == 200  # HTTP/1.0 needs no Host


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        (("voice.example",), "voice.example:443", 200),
        (("voice.example",), "other.example", 403),
        (("*",), "other.example", 200),
    ],
)
async def test_configured_names(allowed: tuple[str, ...], host: str, status: int) -> None:
    async with live_server(allow_host=allowed) as server:
        assert (await ask(server, host, "GET /health")).status == status


async def test_a_server_with_keys_answers_to_any_name() -> None:
    async with live_server(keys=(ApiKey(name="one", key_sha256=digest("one")),)) as server:
        assert (await ask(server, "evil.example", "GET /health")).status == 200
        assert (await ask(server, "evil.example", "GET /v1/models")).status == 401


@pytest.mark.parametrize(("scheme", "status"), [("http", 101), ("HTTP", 101), ("https", 403), ("ws", 403)])
async def test_the_own_origin_has_the_own_scheme(scheme: str, status: int) -> None:
    """Behind a TLS proxy a page has an https origin, which must be allowed by name."""
    async with live_server() as server:
        host = f"localhost:{server.port}"
        origin = f"Origin: {scheme}://{host}\r\n"
        assert (await ask(server, host, "GET /v1/streaming_input", WEBSOCKET + origin)).status == status
        response = await ask(server, host, "POST /v1/streaming_input/sessions/x/finish", origin)
        assert response.status == (404 if status == 101 else 403)
    async with live_server(
        allow_origin=(f"{scheme.lower()}://voice.example",), allow_host=("voice.example",)
    ) as server:
        origin = f"Origin: {scheme.lower()}://voice.example\r\n"
        assert (await ask(server, "voice.example", "GET /v1/streaming_input", WEBSOCKET + origin)).status == 101


async def test_a_page_that_is_refused_is_told_why_and_the_log_how_to_allow_it(caplog: pytest.LogCaptureFixture) -> None:
    """One line of the log, however often and whichever it is; the origin is in the errors alone."""
    access._warn_of_refused_origins.cache_clear()
    caplog.set_level(logging.WARNING)
    async with live_server() as server:
        host = f"localhost:{server.port}"
        for origin in ("https://one.example", "https://two.example:8443", "null"):
            field = f"Origin: {origin}\r\n"
            for line, more in (("GET /v1/streaming_input", WEBSOCKET), ("POST /v1/chat/completions", "")):
                response = await ask(server, host, line, field + more)
                assert (response.status, response.error["code"]) == (403, "origin_not_allowed")
                assert response.error["message"] == (
                    f"pages of {origin} are not allowed; allow them with --allow-origin {origin}"
                )
        warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warned) == 1
        assert "--allow-origin" in warned[0]
        assert "example" not in warned[0]


async def test_a_page_that_only_reads_is_warned_of_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    access._warn_of_refused_origins.cache_clear()
    async with live_server() as server:
        response = await ask(server, f"localhost:{server.port}", "GET /health", "Origin: https://one.example\r\n")
        assert response.status == 200
    assert "--allow-origin" not in caplog.text


@pytest.mark.parametrize(("length", "shown"), [(300, 300), (301, 300)])
async def test_no_more_of_an_origin_is_repeated_than_a_name_has(length: int, shown: int) -> None:
    origin = "https://" + "a" * (length - 8)
    async with live_server() as server:
        field = f"Origin: {origin}\r\n"
        response = await ask(server, f"localhost:{server.port}", "GET /v1/streaming_input", WEBSOCKET + field)
        assert response.error["message"].endswith(f"--allow-origin {origin[:shown]}")


async def test_the_host_that_is_refused_is_named() -> None:
    async with live_server() as server:
        response = await ask(server, "evil.example", "GET /health")
        assert "Host evil.example not allowed" in response.error["message"]
