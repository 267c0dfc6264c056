"""The client library: what the server says unasked, such as a greeting, is an answer to no request of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.live_server import live_server
from support.scripted_engines import SAMPLE_RATE, FindingEngine, ReadingEngine, ToneEngine, ToolCallingEngine, tone

from omni_ws.client import ClientLimits, Final, Reconnected, ResponseStarted, connect
from omni_ws.core.chunks import FinishReason
from omni_ws.engine.base import AudioOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.fake import EchoEngine, ScriptedEngine
from omni_ws.engine.spoken.languages import load_rules

GREETING: dict[str, Any] = {"greeting": "Hello there"}
WRITTEN: dict[str, Any] = {**GREETING, "modalities": ["text"]}
KEEPS: dict[str, Any] = {"resume_grace_sec": 30}


@pytest.mark.parametrize("binary", [False, True])
async def test_it_is_the_first_answer(binary: bool) -> None:
    async with (
        live_server(ToneEngine()) as server,
        connect(server.websocket_url, binary=binary, config=GREETING) as session,
    ):
        greeting = await session.answer()
        assert (greeting.text, greeting.finish_reason) == ("Hello there", FinishReason.STOP)
        assert len(greeting.audio) == 2 * 2 * 20 * SAMPLE_RATE // 1000
        answer = await session.ask_text("one")
        assert answer.text == "one "
        assert answer.request_id != greeting.request_id


@pytest.mark.parametrize("binary", [False, True])
async def test_a_request_behind_it_is_not_taken_for_it(binary: bool) -> None:
    async with (
        live_server(ToneEngine()) as server,
        connect(server.websocket_url, binary=binary, config=GREETING) as session,
    ):
        await session.send_text("one", end=True)
        answers = [await session.answer() for _ in range(2)]
        assert [answer.text for answer in answers] == ["Hello there", "one "]
        assert [len(answer.audio) for answer in answers] == [2 * 2 * 480, 2 * 480]
        assert not session._link.outgoing.requests


async def test_its_audio_is_in_the_format_in_which_it_began() -> None:
    go_on = asyncio.Event()
    engine = ScriptedEngine([AudioOutput(tone(300), SAMPLE_RATE), go_on.wait, AudioOutput(tone(300), SAMPLE_RATE)])
    async with live_server(engine) as server, connect(server.websocket_url, config=GREETING) as session:
        events = session.response()
        assert isinstance(await anext(events), ResponseStarted)
        await session.configure(output_audio={"sample_rate": 8000})
        go_on.set()
        rates = {event.sample_rate async for event in events if hasattr(event, "sample_rate")}
        assert rates == {SAMPLE_RATE}


async def test_it_is_cancelled_as_what_runs() -> None:
    engine = ScriptedEngine([AudioOutput(tone(300), SAMPLE_RATE), asyncio.Event().wait])
    async with live_server(engine) as server, connect(server.websocket_url, config=GREETING) as session:
        events = session.response()
        assert isinstance(await anext(events), ResponseStarted)
        await session.cancel()
        last = [event async for event in events][-1]
        assert isinstance(last, Final)
        assert last.finish_reason is FinishReason.CANCELLED
        assert not session._link.outgoing.requests


@pytest.mark.parametrize("modalities", [["text", "audio"], ["audio"]])
async def test_it_goes_on_over_another_connection(modalities: list[str]) -> None:
    """Also where nothing of it had arrived but that it has begun, which the server then says again."""
    go_on = asyncio.Event()
    engine = ScriptedEngine([go_on.wait, AudioOutput(tone(300), SAMPLE_RATE)])
    config = {**GREETING, "modalities": modalities}
    async with (
        live_server(engine, streaming_input=KEEPS) as server,
        connect(server.websocket_url, reconnect=True, config=config) as session,
    ):
        started: list[ResponseStarted] = []
        finals: list[Final] = []
        async for event in session.response():
            match event:
                case ResponseStarted():
                    started.append(event)
                    session._link.websocket.transport.abort()
                    go_on.set()
                case Final():
                    finals.append(event)
        assert (len(started), len(finals)) == (1, 1)
        assert not session._link.outgoing.requests


@pytest.mark.parametrize("ended", [False, True])
async def test_a_fresh_session_repeats_only_one_that_had_not_ended(ended: bool) -> None:
    go_on = asyncio.Event()
    engine = ScriptedEngine([AudioOutput(tone(300), SAMPLE_RATE), go_on.wait])
    limits = ClientLimits(reconnect_delays=(0, 0.01, 0.01, 0.01))
    async with (
        live_server(engine) as server,  # without a grace
        connect(server.websocket_url, reconnect=True, config={**GREETING, "voice": "echo"}, limits=limits) as session,
    ):
        if ended:
            go_on.set()
            assert (await session.answer()).text == "Hello there"
        else:
            assert isinstance(await anext(session.response()), ResponseStarted)
        session._link.websocket.transport.abort()
        async for event in session.events():
            if isinstance(event, Reconnected):
                break
        go_on.set()
        if not ended:
            assert (await session.answer()).text == "Hello there"
        await session.send_text("one", end=True)
        assert len((await session.answer()).audio) == 960
        assert session.config is not None
        assert session.config.greeting == ("" if ended else "Hello there")


async def test_text_alone() -> None:
    async with live_server(EchoEngine()) as server, connect(server.websocket_url, config=WRITTEN) as session:
        assert (await session.answer()).text == "Hello there"
        assert (await session.ask_text("one")).text == "one"


@pytest.mark.virtual_clock
async def test_what_is_said_while_a_tool_works_is_no_answer_to_its_result() -> None:
    engine = ComposedEngine(ToolCallingEngine(), tts=ReadingEngine())
    await load_rules("en")  # in a thread, which the clock does not see
    async with live_server(engine) as server, connect(server.websocket_url) as session:
        asked = await session.ask_text("What time is it?")
        assert asked.finish_reason is FinishReason.TOOL_CALLS
        await asyncio.sleep(5)  # and something was said meanwhile
        await session.send_tool_result(asked.tool_calls[0].id, "noon", end=True)
        assert (await session.answer()).text == "It is noon."
        assert not session._link.outgoing.requests
        assert not session._link.outgoing._opened_by_server


@pytest.mark.virtual_clock
@pytest.mark.parametrize("end", [False, True])
async def test_the_result_of_an_async_tool_is_answered_by_its_name_whatever_is_said_meanwhile(end: bool) -> None:
    tool = {"type": "function", "async": True, "function": {"name": "find"}}
    config = {"tools": [tool], "modalities": ["text"], "start_policy": "on_end_only"}
    async with live_server(FindingEngine()) as server, connect(server.websocket_url, config=config) as session:
        asked = await session.ask_text("Where is it?")
        assert (await session.ask_text("hello")).text == "hello"
        await session.send_text("how ")
        await session.send_tool_result(asked.tool_calls[0].id, "found", end=end, ref="result")
        await session.send_text("are you", end=True)
        answers = [await session.answer(), await session.answer()]
        assert [answer.text for answer in answers] == ["how are you", "found"]
        assert answers[1].ref == "result"
        assert not session._link.outgoing.requests
        assert not session._link.outgoing._opened_by_server
