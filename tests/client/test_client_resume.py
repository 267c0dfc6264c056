"""Client sessions over connections that break: resumed, or replaced by a fresh one."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from support.live_server import LiveServer, live_server
from support.tcp_relay import Cut, Direction, tcp_relay

from omni_ws.client import ClientLimits, ClientSession, Reconnected, Resumed, TextChunk, connect
from omni_ws.client.halves import (
    SentFrame,
    SentFrames,
    SentKind,
)
from omni_ws.client.session import OUTPUTS_PER_ACK
from omni_ws.core.chunks import FinishReason
from omni_ws.engine.base import TextOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine
from omni_ws.errors import InvalidValue, ShuttingDown

KEEPS: dict[str, Any] = {"resume_grace_sec": 30}
#: Where a connection breaks, as parts of what a whole one carries behind its opening.
PLACES = (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.97)
AUDIO = [random.Random(number).randbytes(1280) for number in range(10)]


def break_connection(session: ClientSession) -> None:
    session._link.websocket.transport.abort()


def end_orphans(server: LiveServer) -> None:
    """Sessions whose clients never heard of them wait for nobody."""
    server.native.end_all(ShuttingDown("the test is over"))


async def converse(url: str, *, binary: bool = True) -> list[Any]:
    """Requests with their ends on a chunk and apart, one cancelled, and a configuration in between."""
    seen: list[Any] = []
    config = {"start_policy": "on_first_chunk"}
    async with connect(url, reconnect=True, binary=binary, config=config) as session:
        for text in ("one", "two"):
            seen.append((await session.ask_text(text)).text)
        await session.configure(output_audio={"sample_rate": 16_000})
        for piece in AUDIO:
            await session.send_audio(piece)
        await session.finish()
        answer = await session.answer()
        seen += [answer.audio, answer.sample_rate, answer.finish_reason]
        await session.send_text("half")
        await session.cancel()
        seen.append((await session.answer()).finish_reason)
        seen.append((await session.ask_text("the end")).text)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("pace_ms", [0, 1])
async def test_conversation_over_connections_that_break(pace_ms: int) -> None:
    engine = EchoEngine(EchoSettings(chunk_ms=10, chunk_interval_ms=pace_ms))
    async with live_server(engine, streaming_input=KEEPS) as server, tcp_relay(server.port) as proxy:
        url = f"ws://127.0.0.1:{proxy.port}/v1/streaming_input"
        unbroken = await converse(url)
        assert unbroken[:2] == ["one", "two"]
        assert unbroken[2] == b"".join(AUDIO)
        carried = proxy.carried
        cuts = [
            # The first session is opened and configured without a second try.
            Cut(direction, opened + int(place * (carried[direction] - opened)), bool(number % 2))
            for direction, opened in ((Direction.TO_SERVER, 700), (Direction.TO_CLIENT, 2600))
            for number, place in enumerate(PLACES)
        ]
        # One in each conversation, then several in one.
        several = [random.Random(seed).sample(cuts, 3) for seed in range(4)]
        for number, broken in enumerate([*([cut] for cut in cuts), *several]):
            proxy.cuts.extend(broken)
            assert await converse(url, binary=number % 3 > 0) == unbroken, broken
            proxy.cuts.clear()
        assert proxy.made > len(PLACES)  # a conversation that is cut may carry a little less
        end_orphans(server)


async def test_answer_goes_on_over_another_connection() -> None:
    go_on = asyncio.Event()
    engine = ScriptedEngine([TextOutput("before "), lambda: go_on.wait(), TextOutput("after")])
    async with live_server(engine, streaming_input=KEEPS) as server:  # noqa: SIM117
        async with connect(server.websocket_url, reconnect=True) as session:
            session_id = session.session_id
            await session.send_text("hello", end=True)
            seen: list[Any] = []
            async for event in session.response():
                seen.append(event)
                if isinstance(event, TextChunk) and not go_on.is_set():
                    break_connection(session)
                    go_on.set()
            assert [event.text for event in seen if isinstance(event, TextChunk)] == ["before ", "after"]
            assert [event.session_id for event in seen if isinstance(event, Resumed)] == [session_id]
            assert not [event for event in seen if isinstance(event, Reconnected)]


async def test_the_reply_to_a_configuration_is_its_own_over_another_connection() -> None:
    async with live_server(EchoEngine(), streaming_input=KEEPS) as server:  # noqa: SIM117
        async with connect(server.websocket_url, reconnect=True) as session:
            with pytest.raises(InvalidValue):
                await session.configure(voice="nobody")
            wanted = asyncio.create_task(session.configure(instructions="Be brief."))
            await asyncio.sleep(0)
            break_connection(session)
            assert (await wanted).instructions == "Be brief."


async def test_a_configuration_whose_call_was_cancelled_is_that_of_a_fresh_session() -> None:
    async with live_server(EchoEngine()) as server, connect(server.websocket_url, reconnect=True) as session:
        call = asyncio.create_task(session.configure(instructions="Be brief."))
        await asyncio.sleep(0)
        call.cancel()
        await session.ping()
        assert session.config is not None
        assert session.config.instructions == "Be brief."
        break_connection(session)
        assert isinstance(await anext(session.events()), Reconnected)
        assert session.config is not None
        assert session.config.instructions == "Be brief."


async def test_a_ping_without_a_connection_goes_over_the_next_one() -> None:
    late = ClientLimits(reconnect_delays=(0.2, 0.2, 0.2))
    async with live_server(EchoEngine(), streaming_input=KEEPS) as server:  # noqa: SIM117
        async with connect(server.websocket_url, reconnect=True, limits=late) as session:
            break_connection(session)
            await session._link.websocket.wait_closed()
            await asyncio.sleep(0.05)  # the reader has seen it, too
            assert await asyncio.wait_for(session.ping(), 10) > 0


@pytest.mark.virtual_clock
async def test_fresh_session_where_the_old_one_is_over() -> None:
    late = ClientLimits(reconnect_delays=(100, 1))
    async with live_server(EchoEngine(), streaming_input=KEEPS) as server:  # noqa: SIM117
        async with connect(server.websocket_url, reconnect=True, limits=late) as session:
            session_id = session.session_id
            await session.send_text("hello ")
            break_connection(session)
            await asyncio.sleep(35)
            assert server.sessions == 0
            await session.send_text("again", end=True)
            answer = await session.answer()
            assert (answer.text, answer.finish_reason) == ("hello again", FinishReason.STOP)
            assert session.session_id != session_id


async def test_fresh_session_where_the_server_has_forgotten_too_much() -> None:
    fields = {**KEEPS, "max_output_bytes": 100}
    async with live_server(EchoEngine(), streaming_input=fields) as server:  # noqa: SIM117
        async with connect(server.websocket_url, reconnect=True) as session:
            assert (await session.ask_text("hello")).text == "hello"
            session._link.incoming.last_output_sequence_id = -1  # as if it had never arrived
            break_connection(session)
            assert isinstance(await anext(session.events()), Reconnected)
            assert (await session.ask_text("hello")).text == "hello"


async def test_output_is_acknowledged() -> None:
    engine = ScriptedEngine([TextOutput("word ")] * OUTPUTS_PER_ACK)
    async with live_server(engine, streaming_input=KEEPS) as server:  # noqa: SIM117
        async with connect(server.websocket_url, reconnect=True) as session:
            await session.ask_text("hello")
            await session.ping()
            assert server.held_bytes < 1500  # the final, with its times


def test_what_may_have_to_be_sent_again() -> None:
    sent = SentFrames()
    frames = [
        SentFrame(0, SentKind.CONFIG, b"config", is_text=True),
        SentFrame(0, SentKind.CHUNK, b"0", is_text=True),
        SentFrame(1, SentKind.CHUNK, b"1", is_text=False),
        SentFrame(2, SentKind.FINISH, b"finish", is_text=True),
    ]
    for frame in frames:
        sent.add(frame)
    assert sent.to_resend(0, lambda frame: frame.kind is not SentKind.CONFIG) == frames[1:]
    assert sent.to_resend(1, lambda frame: True) == frames[2:]
    assert sent.to_resend(2, lambda frame: True) == frames[3:]
    sent.accepted(3)
    assert sent.to_resend(2, lambda frame: True) == []
