"""An engine that completes raw prompts and cannot chat: each route refuses at once, and names the reason."""

from __future__ import annotations

from typing import Any

import pytest
from support.live_server import live_server
from support.native_client import native_client
from support.raw_http import post
from support.scripted_engines import CapableEngine, finished, said

REFUSAL = "this model has no chat template"


def engine() -> CapableEngine:
    return CapableEngine([said("there was"), finished()], chat_refusal=REFUSAL)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [(), ("X-Streaming-Input: 1",)])
async def test_chat_is_refused(stream: bool, headers: tuple[str, ...]) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "stream": stream}
    async with live_server(engine()) as server:
        response = await post(server.port, "/v1/chat/completions", body, "Accept: application/json", *headers)
        assert response.status == 400
        assert response.json()["error"]["message"] == REFUSAL
        assert response.json()["error"]["code"] == "unsupported_parameter"


async def test_prompts_as_they_stand_are_completed() -> None:
    async with live_server(engine()) as server:
        response = await post(server.port, "/v1/completions", {"prompt": "Once"})
        assert response.json()["choices"][0]["text"] == "there was"


async def test_a_native_session_goes_on_after_it() -> None:
    async with live_server(engine()) as server, native_client(server) as client:
        assert "chat" not in client.created["capabilities"]["tasks"]
        for _ in range(2):
            await client.chunk("Hello")
            (error,) = (await client.answer()).errors
            assert (error["code"], error["param"], error["message"]) == ("unsupported_parameter", "task", REFUSAL)
            await client.chunk(end=True)
