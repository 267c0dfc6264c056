"""Responses of ``/v1/realtime`` over real sockets: their events, in their order."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from support.live_server import live_server
from support.realtime_client import TEXT_RESPONSE, failed, realtime_client, text_of
from support.scripted_engines import CapableEngine, RetortEngine, said

from omni_ws.config.keys import ApiKey, digest
from omni_ws.engine.base import AudioOutput, EngineOutput, TextOutput
from omni_ws.engine.fake import ScriptedEngine


@pytest.mark.virtual_clock
async def test_a_text_is_answered() -> None:
    async with live_server() as server, realtime_client(server) as client:
        item = await client.say("one two three", id="mine")
        assert (item["id"], item["role"], item["status"]) == ("mine", "user", "completed")
        begin = len(client.received)
        response = await client.respond(output_modalities=["text"], metadata={"client_event_id": "7"})
        assert text_of(response) == "one two three"
        assert client.kinds(since=begin) == list(TEXT_RESPONSE)
        assert (response["status"], response["metadata"]) == ("completed", {"client_event_id": "7"})
        assert client.seen("response.created")[0]["response"]["metadata"] == {"client_event_id": "7"}
        assert response["usage"]["output_tokens"] == 3


async def test_an_answer_is_spoken_with_its_transcript() -> None:
    script: list[EngineOutput] = [
        TextOutput("one "),
        AudioOutput(np.zeros(2400, np.float32), 24_000),
        TextOutput("two"),
    ]
    async with live_server(ScriptedEngine(script)) as server, realtime_client(server) as client:
        await client.say("hello")
        response = await client.respond()
        assert response["output_modalities"] == ["audio"]
        assert response["output"][0]["content"] == [{"type": "output_audio", "transcript": "one two"}]
        assert len(client.heard(response["id"])) == 4800
        assert client.seen("response.content_part.added")[0]["part"] == {"type": "audio", "transcript": ""}


async def test_a_response_is_cancelled_once() -> None:
    endless = ScriptedEngine([TextOutput("one "), lambda: asyncio.Event().wait()])
    async with live_server(endless) as server, realtime_client(server) as client:
        await client.say("hello")
        await client.send("response.create")
        await client.until("response.output_audio_transcript.delta")
        error = await failed(client, "response.create")
        assert error["code"] == "conversation_already_has_active_response"
        await client.send("response.cancel")
        response = await client.response()
        assert response["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
        assert response["output"][0]["status"] == "incomplete"
        late = await failed(client, "response.cancel")
        assert late["code"] == "response_cancel_not_active"
        assert late["message"].startswith("Cancellation failed")  # which clients look for


async def test_the_response_of_an_id_is_cancelled() -> None:
    endless = ScriptedEngine([TextOutput("one "), lambda: asyncio.Event().wait()])
    async with live_server(endless) as server, realtime_client(server) as client:
        await client.send("response.create", response={"conversation": "none", "instructions": "Count."})
        beside = (await client.until("response.created"))["response"]["id"]
        for other in (None, "resp_no"):  # neither is the one in the conversation
            error = await failed(client, "response.cancel", response_id=other)
            assert error["code"] == "response_cancel_not_active"
        await client.send("response.cancel", response_id=beside)
        ended = await client.until("response.done", "error")
        assert (ended["type"], ended["response"]["id"]) == ("response.done", beside)
        assert ended["response"]["status"] == "cancelled"


async def test_a_response_may_be_cut_by_its_limit() -> None:
    async with live_server() as server, realtime_client(server) as client:
        await client.say("one two three")
        response = await client.respond(max_output_tokens=2, output_modalities=["text"])
        assert (text_of(response), response["max_output_tokens"]) == ("one two", 2)
        assert client.seen("response.created")[0]["response"]["max_output_tokens"] == 2
        assert response["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}


async def test_a_response_without_a_limit_is_not_cut_by_that_of_the_session() -> None:
    async with live_server() as server, realtime_client(server) as client:
        await client.update(max_output_tokens=2, output_modalities=["text"])
        await client.say("one two three")
        assert (await client.respond())["status"] == "incomplete"
        await client.say("one two three")
        response = await client.respond(max_output_tokens="inf")
        assert (text_of(response), response["max_output_tokens"]) == ("one two three", "inf")


async def test_a_response_without_input_follows_its_instructions() -> None:
    engine = CapableEngine([said("Hello!")])
    async with live_server(engine) as server, realtime_client(server) as client:
        await client.update(instructions="You are a cook.")
        await client.respond(instructions="Greet the user.")
        assert b"".join(chunk.payload for chunk in engine.inputs[0]) == b"Greet the user."
        assert engine.requests[0].instructions == "You are a cook."
        await client.say("Who are you?")
        await client.respond(instructions="Be brief.")
        assert engine.requests[1].instructions == "Be brief."
        assert [(one.role, one.text) for one in engine.requests[1].history] == [("assistant", "Hello!")]
        await client.say("And I?")
        await client.respond()
        assert engine.requests[2].instructions == "You are a cook."


async def test_nothing_to_answer_is_a_failed_response() -> None:
    async with live_server(RetortEngine()) as server, realtime_client(server) as client:
        response = await client.respond()
        details = response["status_details"]
        assert details["type"] == "failed"
        assert (details["error"]["type"], details["error"]["code"]) == ("invalid_request_error", "empty_input")
        assert details["error"]["message"] == "the request has no input"
        assert not client.seen("error")


async def test_a_response_beside_the_conversation_leaves_nothing() -> None:
    engine = CapableEngine([said("weather")])
    async with live_server(engine) as server, realtime_client(server) as client:
        await client.say("Is it cold?", id="other")
        await client.say("Is it hot?", id="mine")
        given = [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]},
            {"type": "item_reference", "id": "mine"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Name the topic."}]},
        ]
        beside = {"conversation": "none", "metadata": {"topic": "1"}, "output_modalities": ["text"]}
        response = await client.respond(input=given, **beside)
        assert (response["conversation_id"], response["metadata"]) == (None, {"topic": "1"})
        assert [(one.role, one.text) for one in engine.requests[0].history] == [("assistant", "Hi.")]
        assert b"".join(chunk.payload for chunk in engine.inputs[0]) == b"Is it hot?\nName the topic."
        assert len(client.seen("conversation.item.added")) == 2
        await client.respond(instructions="Say it.", **beside)
        assert engine.requests[1].history == ()
        assert b"".join(chunk.payload for chunk in engine.inputs[1]) == b"Is it cold? Is it hot? Say it."
        await client.respond()
        assert engine.requests[2].history == ()
        assert b"".join(chunk.payload for chunk in engine.inputs[2]) == b"Is it cold?\nIs it hot?"


REFUSED_RESPONSES: list[tuple[Any, str, str]] = [
    ({"input": "x"}, "invalid_value", "response.input"),
    ({"input": [{"type": "item_reference", "id": "nobody"}]}, "invalid_value", "response.input[0].id"),
    ({"audio": {"output": {"voice": "nobody"}}}, "invalid_value", "response.audio.output.voice"),
    ({"max_output_tokens": -1}, "invalid_value", "response.max_output_tokens"),
    ({"instructions": 5}, "invalid_value", "response.instructions"),
    ({"tools": [{"type": "mcp"}]}, "unsupported_parameter", "response.tools[0].type"),
    ({"output_modalities": ["video"]}, "invalid_value", "response.output_modalities"),
    ({"metadata": {"a": 1}}, "invalid_value", "response.metadata"),
    ({"metadata": {"a": "x" * 513}}, "invalid_value", "response.metadata"),
    ({"metadata": dict.fromkeys(map(str, range(17)), "")}, "invalid_value", "response.metadata"),
]


async def test_a_refused_response_names_its_field() -> None:
    async with live_server() as server:
        for response, code, param in REFUSED_RESPONSES:
            async with realtime_client(server) as client:
                await client.say("hello")
                error = await failed(client, "response.create", response=response)
                assert (error["code"], error["param"]) == (code, param), response
                assert text_of(await client.respond()) == "hello", response


async def test_a_request_beyond_the_rate_of_a_key_is_a_failed_response() -> None:
    keys = (ApiKey(name="slow", key_sha256=digest("slow"), requests_per_sec=0.001, burst=1),)
    async with (
        live_server(keys=keys) as server,
        realtime_client(server, subprotocols=("realtime", "openai-insecure-api-key.slow")) as client,
    ):
        await client.say("hello")
        await client.respond()
        await client.say("hello")
        response = await client.respond()
        assert response["status_details"]["error"]["code"] == "rate_limit_exceeded"
        assert not client.seen("error")
