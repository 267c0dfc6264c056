"""Names of models in requests: any name is served, unless the operator requires exact ones."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import orjson
import pytest
from support.live_server import LiveServer, live_server
from support.mode_b_client import SESSIONS
from support.raw_http import RawResponse, call, post

from omni_ws.audio.container import wav_header

CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = [{"role": "user", "content": "hello"}]
FILE: Final = wav_header(sample_rate=16_000, channels=1, data_bytes=320) + bytes(320)


async def chat(server: LiveServer, name: str) -> RawResponse:
    return await post(server.port, CHAT, {"model": name, "messages": MESSAGES})


async def mode_a(server: LiveServer, name: str) -> RawResponse:
    lines = [{"model": name, "stream": False}, {"text": "hello"}]
    return await post(server.port, CHAT, b"\n".join(map(orjson.dumps, lines)), "X-Streaming-Input: true")


async def completions(server: LiveServer, name: str) -> RawResponse:
    return await post(server.port, "/v1/completions", {"model": name, "prompt": "hello"})


async def speech(server: LiveServer, name: str) -> RawResponse:
    return await post(server.port, "/v1/audio/speech", {"model": name, "input": "hello"})


async def transcriptions(server: LiveServer, name: str) -> RawResponse:
    model = f'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n{name}\r\n'
    file = '--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    body = model.encode() + file.encode() + FILE + b"\r\n--b--\r\n"
    return await post(server.port, "/v1/audio/transcriptions", body, "Content-Type: multipart/form-data; boundary=b")


async def mode_b(server: LiveServer, name: str) -> RawResponse:
    body = {"model": name, "stream": False, "chunk": {"text": "hello", "end_of_input": True}}
    opened = await call(server.port, "POST", SESSIONS, body)
    if opened.status != 201:
        return opened
    path = f"{SESSIONS}/{opened.json()['session_id']}"
    result = await call(server.port, "GET", f"{path}/result?wait=10")
    await call(server.port, "DELETE", path)
    return result


Route = Callable[[LiveServer, str], Awaitable[RawResponse]]
ROUTES: Final[tuple[Route, ...]] = (chat, mode_a, completions, speech, transcriptions, mode_b)


@pytest.mark.parametrize("ask", ROUTES)
async def test_any_name_is_served_and_the_answer_says_by_what(ask: Route) -> None:
    async with live_server(served_model_name=("mine", "other")) as server:
        for name in ("mine", "other", "local-model", "whisper-1", "gpt-4o", ""):
            response = await ask(server, name)
            assert response.status == 200, (name, response.body)
            if ask in (chat, mode_a, completions, mode_b):
                assert response.json()["model"] == "mine"


@pytest.mark.parametrize("ask", ROUTES)
async def test_names_are_exact_where_the_operator_wants_it(ask: Route) -> None:
    async with live_server(served_model_name=("mine", "other"), strict_model_names=True) as server:
        for name in ("mine", "other", "local-model", "whisper-1"):
            assert (await ask(server, name)).status == 200
        response = await ask(server, "gpt-4o")
    error = response.error
    assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["type"] == "invalid_request_error"


async def test_a_reader_of_events_gets_the_refusal_as_its_only_event() -> None:
    body = {"model": "gpt-4o", "messages": MESSAGES, "stream": True}
    async with live_server(strict_model_names=True) as server:
        response = await post(server.port, CHAT, body)
    assert response.status == 200
    assert response.body.startswith(b"event: error\ndata: ")
    assert b'"code":"model_not_found"' in response.body


async def test_a_name_that_is_no_text() -> None:
    async with live_server() as server:
        response = await post(server.port, CHAT, {"model": 4, "messages": MESSAGES})
    assert (response.status, response.error["code"], response.error["param"]) == (400, "invalid_value", "model")


def facts(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [vars(record)["facts"] for record in caplog.records if record.name == "omni_ws.model"]


@pytest.mark.parametrize("log_content", [False, True])
async def test_the_log_says_once_that_another_name_was_asked_for(
    caplog: pytest.LogCaptureFixture, log_content: bool
) -> None:
    """Which one is text of a client. It may be a key that was put into the wrong field."""
    caplog.set_level(logging.INFO, "omni_ws.model")
    async with live_server(served_model_name=("mine",), log_content=log_content) as server:
        for name in ("mine", "x" * 200, "tts-1", "gpt-5"):
            assert (await chat(server, name)).status == 200
    assert facts(caplog) == [{"asked": "x" * 128, "served": "mine"} if log_content else {"served": "mine"}]
