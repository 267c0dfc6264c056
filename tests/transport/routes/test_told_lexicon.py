"""How words are said, as clients and the operator tell it."""

from __future__ import annotations

import pytest
from support.live_server import LiveServer, live_server
from support.native_client import native_client
from support.raw_http import RawResponse, post
from support.realtime_client import realtime_client
from support.scripted_engines import CapableEngine

from omni_ws.client import connect
from omni_ws.core.chunks import Task
from omni_ws.engine.base import TextOutput
from omni_ws.engine.fake import CAPABILITIES
from omni_ws.errors import InvalidValue, UnsupportedParameter

SCRIPT = [TextOutput("yes")]
READS = {"tasks": CAPABILITIES.tasks | {Task.SPEECH}}
MOST = {f"w{number}": "x" * 128 for number in range(500)}


async def chat(server: LiveServer, **body: object) -> RawResponse:
    return await post(
        server.port, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, **body}
    )


async def speak(server: LiveServer, **body: object) -> RawResponse:
    return await post(server.port, "/v1/audio/speech", {"input": "x", **body})


async def test_how_words_are_said_reaches_the_engine_from_every_front_end() -> None:
    engine = CapableEngine(SCRIPT, **READS)
    async with live_server(engine) as server:
        for ask in (chat, speak):
            assert (await ask(server, tts={"lexicon": {"nginx": "engine x"}})).status == 200
            assert (await ask(server, tts={"lexicon": MOST})).status == 200
            refused = await ask(server, tts={"lexicon": {**MOST, "w500": "x"}})
            assert (refused.status, refused.error["code"], refused.error["param"]) == (
                *(400, "invalid_value", "tts.lexicon"),
            )
        async with connect(server.websocket_url, config={"tts": {"lexicon": {"a": "b", "c": "d"}}}) as session:
            assert session.created.capabilities.lexicon is True
            await session.ask_text("x")
            # Words are added, and taken back one by one or all.
            config = await session.configure(tts={"lexicon": {"a": None, "e": "f"}})
            assert config.tts.lexicon == {"c": "d", "e": "f"}
            await session.ask_text("x")
            with pytest.raises(InvalidValue) as caught:
                await session.configure(tts={"lexicon": MOST})
            assert caught.value.param == "tts.lexicon"
            await session.configure(tts={"lexicon": None})
            await session.ask_text("x")
    nginx, many = {"nginx": "engine x"}, MOST
    told = [nginx, many, nginx, many, {"a": "b", "c": "d"}, {"c": "d", "e": "f"}, {}]
    assert [request.lexicon for request in engine.requests] == told


async def test_the_operators_lexicon_is_a_default_to_which_clients_add() -> None:
    engine = CapableEngine(SCRIPT, **READS)
    async with live_server(engine, tts={"lexicon": {"nginx": "engine x", "a": "b"}}) as server:
        assert (await speak(server)).status == 200
        assert (await chat(server, tts={"lexicon": {"a": "c"}})).status == 200
    assert [request.lexicon for request in engine.requests] == [
        {"nginx": "engine x", "a": "b"},
        {"nginx": "engine x", "a": "c"},
    ]


async def test_an_engine_whose_voice_cannot_be_told_refuses_it_by_name() -> None:
    engine = CapableEngine(SCRIPT, lexicon=False, **READS)
    async with live_server(engine, tts={"lexicon": {"nginx": "engine x"}}) as server:
        for ask in (chat, speak):
            refused = await ask(server, tts={"lexicon": {"nginx": "engine x"}})
            assert (refused.status, refused.error["code"], refused.error["param"]) == (
                *(400, "unsupported_parameter", "tts.lexicon"),
            )
            assert (await ask(server, tts={"lexicon": {}})).status == 200
        async with connect(server.websocket_url) as session:
            assert not session.created.capabilities.lexicon
            with pytest.raises(UnsupportedParameter) as caught:
                await session.configure(tts={"lexicon": {"nginx": "engine x"}})
            assert caught.value.param == "tts.lexicon"
            await session.configure(tts={"lexicon": {}})
    assert [request.lexicon for request in engine.requests] == [{}, {}]  # not even the operator's


async def test_a_lexicon_is_shown_as_it_is_in_effect() -> None:
    async with live_server(CapableEngine(SCRIPT)) as server, native_client(server) as client:
        for given, shown in (({}, {}), ({"lexicon": {"a": "b"}}, {"a": "b"}), (None, {})):
            assert (await client.configure(tts=given))["tts"] == {"lexicon": shown}


async def test_the_operators_lexicon_holds_for_the_realtime_api() -> None:
    engine = CapableEngine(SCRIPT)
    async with live_server(engine, tts={"lexicon": {"nginx": "engine x"}}) as server, realtime_client(server) as client:
        await client.say("x")
        await client.respond()
    assert [request.lexicon for request in engine.requests] == [{"nginx": "engine x"}]
