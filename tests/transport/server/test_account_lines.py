"""What is logged of sessions, requests and HTTP requests; and what never is."""

from __future__ import annotations

import base64
import json
import logging
from typing import Any

import pytest
from support.live_server import LiveServer, live_server
from support.mode_b_client import mode_b, text
from support.native_client import native_client
from support.raw_http import post, raw_client, request, websocket_upgrade

from omni_ws.config.keys import ApiKey, digest
from omni_ws.engine.fake import EchoEngine, EchoSettings
from omni_ws.errors import ShuttingDown
from omni_ws.service.process import (
    JsonFormatter,
    TextFormatter,
    configure_logging,
)

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


class Lines(logging.Handler):
    """Everything that is logged, in both forms."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.text: list[str] = []
        self.facts: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(TextFormatter().format(record))
        self.facts.append(json.loads(JsonFormatter().format(record)))

    def of(self, message: str, **facts: Any) -> list[dict[str, Any]]:
        return [line for line in self.facts if facts.items() <= line.items() and line["message"] == message]

    @property
    def everything(self) -> str:
        return "\n".join([*self.text, json.dumps(self.facts, ensure_ascii=False)])


@pytest.fixture
def lines() -> Lines:
    """Set up as the server does it for whoever wants to see the most."""
    handler = Lines()
    configure_logging("json", "debug")
    logging.getLogger().addHandler(handler)
    return handler


async def over(server: LiveServer) -> None:
    await server.until(lambda: not server.sessions)


async def test_a_session_and_each_of_its_requests_have_a_line(lines: Lines) -> None:
    async with live_server() as server:
        async with native_client(server) as client:
            await client.say("hello there")
            final = (await client.answer()).final
            await client.chunk("")
            await client.send("finish")
            await client.answer()
        await over(server)
    (session,) = lines.of("session")
    first, second = lines.of("request")
    assert session["session_id"] == first["session_id"] == second["session_id"] == client.created["session_id"]
    assert (session["origin"], session["requests"], session["chunks"], session["received_bytes"]) == (
        "websocket",
        2,
        2,
        11,
    )
    assert first["request_id"] == final["request_id"]
    assert (first["finish_reason"], first["chunks"], first["received_bytes"], first["task"]) == ("stop", 1, 11, "chat")
    assert (first["level"], "code" in first) == ("info", False)
    assert 0 <= first["first_output_seconds"] <= first["seconds"]
    assert (second["level"], second["finish_reason"], second["code"]) == ("info", "error", "empty_input")
    (upgrade,) = lines.of("http request", status=101)
    assert (upgrade["method"], upgrade["route"]) == ("GET", "/v1/streaming_input")


async def test_an_http_request_has_a_line_that_names_its_session(lines: Lines) -> None:
    async with live_server() as server:
        answer = await post(server.port, CHAT, HELLO)
        async with mode_b(server) as session:
            await session.append(text("hello", end_of_input=True))
            await session.result(wait=10)
        await over(server)
    (chat,) = lines.of("http request", route=CHAT)
    assert (chat["method"], chat["status"], chat["client"], chat["level"]) == ("POST", 200, "127.0.0.1", "info")
    assert (chat["received_bytes"], chat["sent_bytes"]) == (
        len(json.dumps(HELLO, separators=(",", ":"))),
        len(answer.body),
    )
    first, second = lines.of("request")
    assert (first["session_id"], first["origin"]) == (chat["session_id"], "http")
    assert second["origin"] == "sessions"
    several = lines.of("http request", session_id=second["session_id"])
    assert {line["route"].rpartition("/")[2] for line in several} >= {"sessions", "chunks", "result"}
    assert [line["level"] for line in lines.of("session")] == ["debug", "info"]


@pytest.mark.parametrize("stream", [False, True])
async def test_our_own_failures_are_errors_and_the_clients_are_not(lines: Lines, stream: bool) -> None:
    async with live_server(EchoEngine(EchoSettings(fail_after_chunks=1)), expect_errors=True) as server:
        await post(server.port, CHAT, HELLO | {"messages": [{"role": "user", "content": "a b c"}], "stream": stream})
        await post(server.port, CHAT, HELLO | {"temperature": 9})
        await over(server)
    failed, refused = sorted(lines.of("http request", route=CHAT), key=lambda line: line["level"])
    assert (failed["level"], failed["code"], failed["status"]) == ("error", "engine_failed", 200 if stream else 500)
    assert (refused["level"], refused["code"], refused["status"]) == ("info", "invalid_value", 400)
    (request_line,) = lines.of("request")
    assert (request_line["level"], request_line["code"]) == ("error", "engine_failed")


async def test_what_cannot_be_read_has_a_line_too(lines: Lines) -> None:
    async with live_server() as server, raw_client(server.port) as client:
        await client.send("\x16\x03nonsense\r\n\r\n")
        await client.response()
    (line,) = lines.of("http request", status=400)
    assert (line["method"], line["route"], line["code"]) == ("other", "unmatched", "invalid_frame")


async def test_machines_that_watch_the_server_fill_no_log(lines: Lines) -> None:
    async with live_server() as server:
        for path in ("/health", "/metrics"):
            async with raw_client(server.port) as client:
                await client.send(request("GET", path))
                await client.response()
    assert {line["level"] for line in lines.of("http request")} == {"debug"}


SECRET = "sesame-1a2b3c4d5e6f"


@pytest.mark.parametrize("known", [True, False])
async def test_no_secret_and_nothing_that_was_said_is_ever_logged(lines: Lines, known: bool) -> None:
    keys = (ApiKey(name="alice", key_sha256=digest(SECRET if known else "another")),)
    bearer = f"Authorization: Bearer {SECRET}"
    subprotocol = f"omni-api-key.{SECRET}"
    said = "swordfish-said"
    body = {"messages": [{"role": "user", "content": said}], "user": SECRET, "voice": SECRET}
    async with live_server(keys=keys, streaming_input={"resume_grace_sec": 30}) as server:
        for target in (
            CHAT,
            f"{CHAT}?key={SECRET}",
            f"/v1/models/{SECRET}",
            f"/{SECRET}",
            f"/v1/streaming_input?k={SECRET}",
        ):
            for content in (body, {**body, "stream": True, "voice": None}, {SECRET: SECRET}, {"model": SECRET}):
                await post(server.port, target, content, bearer, f"X-{SECRET}: {SECRET}", f"Cookie: {SECRET}")
        async with raw_client(server.port) as client:
            await client.send(
                websocket_upgrade(f"/v1/streaming_input?token={SECRET}", f"Sec-WebSocket-Protocol: {subprotocol}")
            )
            assert (await client.head())[1] == (101 if known else 401)
        async with raw_client(server.port) as client:
            await client.send(f"GET /{SECRET} HTTP/1.1\r\nHost: x\r\n{SECRET}\r\n\r\n")
            await client.response()
        if known:
            query = f"?session_id={SECRET}&resume_token={SECRET}"
            headers = {"Authorization": f"Bearer {SECRET}"}
            async with native_client(server, query=query, greeted=False, additional_headers=headers) as again:
                await again.error()
            async with native_client(server, additional_headers=headers) as session:
                await session.say(said)
                await session.answer()
                await session.send(SECRET)
                await session.error()
                await session.send("session_config", model=SECRET, instructions=said)
                await session.error()
                await session.raw(json.dumps({"type": "input_chunk", "text": said})[:-1] + SECRET)
                await session.error()
        server.native.end_all(ShuttingDown("the test is over"))  # one waits for its client to come back
        await over(server)
    assert lines.of("http request"), "something was logged"
    for kept in (SECRET, said, base64.b64encode(said.encode()).decode(), SECRET.upper()):
        assert kept not in lines.everything
    if known:
        token = session.created["resume_token"]
        assert token not in lines.everything


async def test_what_was_said_is_logged_where_the_operator_asks_for_it(lines: Lines) -> None:
    async with live_server(log_content=True) as server:
        async with native_client(server) as client:
            await client.say("hello\nthere")
            await client.answer()
        await over(server)
    (line,) = lines.of("request")
    assert (line["input_text"], line["output_text"]) == ("hello\nthere", "hello\nthere")
    assert all(len(text.splitlines()) == 1 for text in lines.text if "omni_ws.session: request" in text)
