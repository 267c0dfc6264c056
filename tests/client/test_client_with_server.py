"""The client with a real server and the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from omni_ws.client import (
    ClientSession,
    Closing,
    Event,
    Final,
    Reconnected,
    ResponseStarted,
    TextChunk,
    connect,
)
from omni_ws.config.keys import configured_keys
from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.core.chunks import FinishReason
from omni_ws.engine.fake import EchoEngine, EchoSettings
from omni_ws.errors import (
    EngineFailed,
    EngineOverloaded,
    InvalidValue,
    NotFound,
    SessionTimeout,
    ShuttingDown,
    Unauthenticated,
    UnsupportedFormat,
)
from omni_ws.server import RunningServer, create_app, listen

pytestmark = pytest.mark.usefixtures("no_task_left")


@asynccontextmanager
async def running(settings: EchoSettings | None = None, **config: Any) -> AsyncIterator[tuple[RunningServer, str]]:
    configuration = ServerConfig(**{"port": 0, "engine": EngineName.FAKE, **config})
    engine = EchoEngine(settings)
    await engine.start()
    async with listen(create_app(engine, configuration, configured_keys(configuration))) as server:
        yield server, f"ws://127.0.0.1:{server.port}"


@pytest.mark.parametrize("binary", [True, False])
async def test_text_comes_back(binary: bool) -> None:
    async with running() as (_, url), connect(url, binary=binary) as session:
        for text in ("hello big world", "grüße 👋", "again"):
            answer = await session.ask_text(text)
            assert answer.text == text
            assert answer.finish_reason is FinishReason.STOP
            assert answer.usage is not None
            assert answer.usage.input_tokens == len(text.split())


@pytest.mark.parametrize("binary", [True, False])
async def test_audio_comes_back(binary: bool) -> None:
    """At one rate all the way nothing is resampled: the samples are the same, whatever the chunks were."""
    sent = bytes(number * 7 % 256 for number in range(48_000))
    config = {"input_audio": {"sample_rate": 24_000}}
    async with running() as (_, url), connect(url, binary=binary, config=config) as session:
        assert session.input_audio.sample_rate == 24_000
        for start in range(0, len(sent), 960):
            await session.send_audio(sent[start : start + 960])
        await session.finish()
        answer = await session.answer()
        assert answer.audio == sent
        assert (answer.audio_format, answer.sample_rate) == ("pcm16", 24_000)
        assert answer.usage is not None
        assert answer.usage.input_audio_ms == answer.usage.output_audio_ms == 1000


async def test_much_more_than_the_credit_goes_through() -> None:
    """16 MB against an engine that takes its time: the client waits where it should, and nothing is lost."""
    sent = bytes(1 << 20)
    config = {"input_audio": {"sample_rate": 24_000}}
    async with running() as (_, url), connect(url, config=config) as session:

        async def send() -> None:
            for number in range(16):
                for start in range(0, len(sent), 65536):
                    await session.send_audio(sent[start : start + 65536], end=number == 15 and start == 15 << 16)

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            answering = group.create_task(session.answer())
        assert len(answering.result().audio) == 16 << 20


async def test_events_arrive_in_order() -> None:
    async with running() as (_, url), connect(url) as session:
        await session.send_text("one two", end=True)
        seen: list[Event] = [event async for event in session.response()]
        kinds = [type(event) for event in seen if type(event).__name__ != "InputAck"]
        assert kinds == [ResponseStarted, TextChunk, TextChunk, Final]
        assert await session.ping() < 5


async def test_configuration_is_refused_and_nothing_changes() -> None:
    async with running() as (_, url), connect(url) as session:
        with pytest.raises(InvalidValue) as refused:
            await session.configure(output_audio={"sample_rate": 1})
        assert refused.value.param == "output_audio.sample_rate"
        assert (await session.configure(instructions="Be brief.")).output_audio.sample_rate == 24_000


async def test_cancel_ends_a_running_answer() -> None:
    async with running(EchoSettings(chunk_interval_ms=3_600_000)) as (_, url), connect(url) as session:
        await session.send_text("one two three", end=True)
        events = session.response()
        started = await anext(events)
        while not isinstance(started, ResponseStarted):
            started = await anext(events)
        await session.cancel(started.request_id)
        rest = [event async for event in events]
        final = rest[-1]
        assert isinstance(final, Final)
        assert (final.request_id, final.finish_reason) == (started.request_id, FinishReason.CANCELLED)


async def test_giving_up_frees_the_engine() -> None:
    async with running(EchoSettings(first_chunk_delay_ms=3_600_000)) as (server, url), connect(url) as session:
        asking = asyncio.create_task(session.ask_text("one"))
        while server.app.sessions.engine.active_requests == 0:
            await session.ping()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while server.app.sessions.engine.active_requests:
            await session.ping()


async def test_a_failing_engine() -> None:
    async with running() as (_, url), connect(url) as session:
        await session.configure(stage_params={"fake": {"fail_after_chunks": 1}})
        with pytest.raises(EngineFailed):
            await session.ask_text("one two")
        await session.configure(stage_params=None)
        assert (await session.ask_text("one two")).text == "one two"


async def test_keys() -> None:
    async with running(api_key="right") as (_, url):
        for key in (None, "wrong"):
            with pytest.raises(Unauthenticated):
                async with connect(url, api_key=key):
                    pytest.fail("the key is wrong")
        async with connect(url, api_key="right") as session:
            assert (await session.ask_text("in")).text == "in"


async def test_a_path_that_is_nothing() -> None:
    async with running() as (_, url):
        with pytest.raises(NotFound):
            async with connect(url + "/v1/nothing"):
                pytest.fail("there is nothing")


async def test_a_refused_chunk() -> None:
    async with running() as (_, url), connect(url) as session:
        await session.send_image(b"this is no image", format="application/zip", end=True)
        with pytest.raises(UnsupportedFormat):
            await session.answer()
        assert (await session.ask_text("still here")).text == "still here"


@pytest.mark.virtual_clock
async def test_a_silent_session_is_closed_in_good_order() -> None:
    async with running(streaming_input={"session_timeout_sec": 60}) as (_, url), connect(url) as session:
        seen = [event async for event in session.events()]
        assert isinstance(seen[-1], Closing)
        assert seen[-1].reason == "session_timeout"
        with pytest.raises(SessionTimeout):
            await session.send_text("too late")


async def test_a_drained_server_answers_and_the_next_one_takes_over() -> None:
    async with running() as (first, url), connect(url, reconnect=True) as session:
        assert (await session.ask_text("one")).text == "one"
        port = first.port
        await first.drain(5)
        assert isinstance(await anext(session.events()), Closing)
        async with running(port=port):
            event = await anext(session.events())
            assert isinstance(event, Reconnected)
            assert (await session.ask_text("two")).text == "two"


async def test_without_reconnect_a_drain_is_the_end() -> None:
    async with running() as (server, url), connect(url) as session:
        await server.drain(5)
        seen = [event async for event in session.events()]
        assert [type(event) for event in seen] == [Closing]
        with pytest.raises(ShuttingDown):
            await session.ask_text("x")


async def test_a_configuration_that_finds_no_memory_is_refused() -> None:
    async def fill(session: ClientSession) -> None:
        for number in range(10):  # those of requests that wait are held, too
            await asyncio.wait_for(session.configure(instructions=f"{number}" * 30_000), 10)
            await session.send_text("hello")
            await session.finish()

    async with running(limits={"max_held_bytes": 100_000}) as (_, url), connect(url) as session:
        with pytest.raises(EngineOverloaded):
            await fill(session)
        assert (await session.configure(instructions="Be brief.")).instructions == "Be brief."
