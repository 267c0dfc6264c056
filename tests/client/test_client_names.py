"""What answers what: the client goes by the names of requests and of what was said, never by their order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.scripted_server import Peer, Script, scripted_server

from omni_ws.client import (
    AudioChunk,
    ClientLimits,
    Event,
    Final,
    ResponseStarted,
    SpeechConfirmed,
    SpeechDismissed,
    SpeechStarted,
    SpeechStopped,
    TranscriptChunk,
    connect,
)
from omni_ws.core.chunks import FinishReason, InputChunk
from omni_ws.errors import EngineOverloaded, SessionConflict
from omni_ws.wire.frames import CancelFrame, FinishFrame
from omni_ws.wire.server_frames import (
    SpeechConfirmedFrame,
    SpeechDismissedFrame,
    SpeechStartedFrame,
    SpeechStoppedFrame,
)

pytestmark = pytest.mark.usefixtures("no_task_left")

AT_ONCE = ClientLimits(reconnect_delays=(0, 0, 0))
OPEN = {"turn_detection": {"type": "server_vad"}}


def script(action: Script, *, configured: bool = False) -> Script:
    """A script that begins as every session does, and ends when the client goes."""

    async def run(peer: Peer) -> None:
        await peer.create()
        if configured:
            await peer.configuration()
        await action(peer)
        await peer.until_closed()

    return run


async def answer_text(peer: Peer, request_id: str, text: str, **names: Any) -> None:
    await peer.started(request_id, None, **names)
    await peer.output(request_id, "text", text=text)
    await peer.final(request_id, **names)


async def speech(peer: Peer, turn_id: str, request_id: str | None) -> None:
    await peer.send(SpeechStartedFrame(audio_ms=96, turn_id=turn_id, request_id=request_id))
    await peer.send(SpeechStoppedFrame(audio_ms=700, turn_id=turn_id, request_id=request_id))


@pytest.mark.parametrize("binary", [True, False])
async def test_the_first_and_the_last_chunk_name_their_request(binary: bool) -> None:
    seen: list[str | None] = []

    async def server(peer: Peer) -> None:
        for _ in range(3):
            seen.extend([chunk.ref for chunk in await peer.request()])
        await answer_text(peer, "req", "ok")

    async with scripted_server(script(server)) as url, connect(url, binary=binary) as session:
        for ref in ("mine", None):
            for last in (False, False, True):
                await session.send_audio(b"\0\0", end=last, ref=ref)
        await session.send_text("x" * 200_000, end=True)
        with pytest.raises(ValueError, match="64"):
            await session.send_text("x", ref="x" * 65)
        await session.answer()
    assert seen[:6] == ["mine", None, "mine", "request-2", None, "request-2"]
    assert seen[6:] == ["request-3", None, None, "request-3"]


async def test_each_takes_its_own_answer_in_whatever_order_they_come() -> None:
    async def server(peer: Peer) -> None:
        await peer.request()
        await peer.request()
        await peer.started("req_a", None, ref="a")
        await answer_text(peer, "req_b", "B", ref="b")
        await peer.output("req_a", "text", text="A")
        await peer.final("req_a", ref="a")

    async with scripted_server(script(server)) as url, connect(url) as session:
        await session.send_text("one", end=True, ref="a")
        await session.send_text("two", end=True, ref="b")
        first, second = await session.answer("a"), await session.answer("b")
        assert [(one.text, one.request_id, one.ref) for one in (first, second)] == [
            ("A", "req_a", "a"),
            ("B", "req_b", "b"),
        ]


async def test_a_text_is_answered_by_its_own_answer_beside_what_is_said() -> None:
    """The speech has begun before the server has the text, and is interrupted by it; other speech opens no request."""
    said: list[Event] = []

    async def server(peer: Peer) -> None:
        await peer.request()
        await speech(peer, "turn_a", "req_speech")
        await peer.final("req_speech", FinishReason.CANCELLED, turn_id="turn_a")
        await speech(peer, "turn_b", None)
        await answer_text(peer, "req_text", "Four.", ref="request-1")
        await peer.request()
        await answer_text(peer, "req_next", "Six.", ref="request-2")

    async with (
        scripted_server(script(server, configured=True)) as url,
        connect(url, config=OPEN) as session,
    ):
        assert (await session.ask_text("What is 2+2?")).text == "Four."
        await session.send_text("What is 3+3?", end=True)
        spoken = await session.answer()
        assert (spoken.request_id, spoken.turn_id, spoken.finish_reason) == (
            "req_speech",
            "turn_a",
            FinishReason.CANCELLED,
        )
        async for event in session.response():
            said.append(event)
    assert isinstance(said[-1], Final)


async def test_speech_is_told_with_its_turn_and_its_request() -> None:
    async def server(peer: Peer) -> None:
        await speech(peer, "turn_a", "req_a")
        await peer.started("req_a", 3, turn_id="turn_a")
        await peer.final("req_a", FinishReason.CANCELLED, turn_id="turn_a")
        await peer.output("req_a", "transcript", text="Robert.", late=True, turn_id="turn_a")
        await answer_text(peer, "req_b", "B", turn_id="turn_b")

    async with scripted_server(script(server, configured=True)) as url, connect(url, config=OPEN) as session:
        events = [event async for event in session.response()]
        assert events == [
            SpeechStarted(96, "turn_a", "req_a"),
            SpeechStopped(700, "turn_a", "req_a"),
            ResponseStarted("req_a", "end_of_input", 3, "extend", turn_id="turn_a"),
            events[-1],
        ]
        late = await anext(aiter(session.events()))
        assert isinstance(late, TranscriptChunk)
        assert (late.late, late.turn_id, late.text) == (True, "turn_a", "Robert.")
        assert (await session.answer()).transcript == ""


@pytest.mark.parametrize("interrupts", [True, False])
async def test_speech_that_is_not_certain_is_told_and_so_is_what_becomes_of_it(interrupts: bool) -> None:
    async def server(peer: Peer) -> None:
        await peer.send(SpeechStartedFrame(audio_ms=96, turn_id="turn_a", certain=False))
        if interrupts:
            await peer.send(SpeechConfirmedFrame(audio_ms=96, turn_id="turn_a", request_id="req_a"))
        else:
            await peer.send(SpeechDismissedFrame(audio_ms=96, turn_id="turn_a"))

    async with (
        scripted_server(script(server, configured=True)) as url,
        connect(url, config={"turn_detection": {"type": "server_vad", "duck": True}}) as session,
    ):
        events: list[Event] = []
        async for event in session.events():
            events.append(event)
            if len(events) == 2:
                break
        assert events == [
            SpeechStarted(96, "turn_a", None, certain=False),
            SpeechConfirmed(96, "turn_a", "req_a") if interrupts else SpeechDismissed(96, "turn_a"),
        ]


async def test_text_that_joined_what_is_being_said_is_answered_once() -> None:
    """The request is announced before the text has joined it; its final has the name."""

    async def server(peer: Peer) -> None:
        await peer.send(SpeechStartedFrame(audio_ms=96, turn_id="turn_a", request_id="req_a"))
        await peer.started("req_a", 1, turn_id="turn_a")
        await peer.request()
        await peer.output("req_a", "text", text="both")
        await peer.final("req_a", ref="request-1", turn_id="turn_a")
        await peer.request()
        await answer_text(peer, "req_b", "next", ref="request-2")

    async with scripted_server(script(server, configured=True)) as url, connect(url, config=OPEN) as session:
        assert (await session.ask_text("one")).text == "both"
        assert (await session.ask_text("two")).text == "next"
        assert not session._link.outgoing.requests


async def test_of_two_texts_the_refused_one_raises_and_the_other_is_answered() -> None:
    async def server(peer: Peer) -> None:
        (first,) = await peer.request()
        await peer.request()
        await peer.error(EngineOverloaded("no", sequence_id=first.sequence_id, ref=first.ref))
        await answer_text(peer, "req_b", "B", ref="b")

    async with scripted_server(script(server)) as url, connect(url) as session:
        await session.send_text("one", end=True, ref="a")
        await session.send_text("two", end=True, ref="b")
        assert (await session.answer("b")).text == "B"
        with pytest.raises(EngineOverloaded):
            await session.answer("a")


@pytest.mark.counts_passes  # a task has begun before it is cancelled
async def test_a_request_is_cancelled_by_its_name_and_no_other_is() -> None:
    """It has no id yet: its cancel goes out with the id as soon as that is told."""
    received: list[object] = []

    async def server(peer: Peer) -> None:
        await peer.request()
        await peer.started("req_a", None, ref="a")
        await peer.request()
        received.append(await peer.receive())  # of the third text
        await peer.started("req_b", None, ref="b")
        received.append(await peer.receive())
        await peer.final("req_b", FinishReason.CANCELLED, ref="b")
        await peer.final("req_a", ref="a")

    async with scripted_server(script(server)) as url, connect(url) as session:
        await session.send_text("one", end=True, ref="a")
        await session.send_text("two", end=True, ref="b")
        waiting = asyncio.create_task(session.answer("b"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await session.send_text("three", ref="c")
        assert (await session.answer("a")).finish_reason is FinishReason.STOP
        await session.cancel(ref="unknown")
    chunk, cancel = received
    assert isinstance(chunk, InputChunk)
    assert cancel == CancelFrame("req_b")


async def test_while_a_microphone_is_open_an_open_request_is_ended_and_cancelled_by_its_id() -> None:
    received: list[object] = []

    async def server(peer: Peer) -> None:
        await peer.chunk()
        received.append(await peer.receive())
        await peer.started("req_a", None, ref="a")
        received.append(await peer.receive())
        await peer.final("req_a", FinishReason.CANCELLED, ref="a")

    async with scripted_server(script(server, configured=True)) as url, connect(url, config=OPEN) as session:
        await session.send_text("one", ref="a")
        await session.cancel(ref="a")
        assert (await session.answer("a")).finish_reason is FinishReason.CANCELLED
    assert received == [FinishFrame(), CancelFrame("req_a")]


async def test_bare_sound_is_of_the_answer_that_was_announced_last() -> None:
    """Whatever waits before it, and whatever is written down of other requests meanwhile."""

    async def server(peer: Peer) -> None:
        await peer.request()
        await peer.request()
        await peer.started("req_b", None, ref="b")
        await peer.binary_audio("req_b", b"\1\2", 0)
        await peer.output("req_a", "transcript", text="hm", interim=True)
        await peer.binary_audio("req_b", b"\3\4", 20)
        await peer.final("req_b", ref="b")

    async with scripted_server(script(server)) as url, connect(url) as session:
        await session.send_text("one", end=True, ref="a")
        await session.send_text("two", end=True, ref="b")
        audio = [event async for event in session.response("b") if isinstance(event, AudioChunk)]
    assert [(chunk.request_id, chunk.audio) for chunk in audio] == [("req_b", b"\1\2"), ("req_b", b"\3\4")]


async def test_results_of_tools_go_to_the_session_that_made_the_call() -> None:
    """A fresh session gets neither those that were under way nor those that come later; other input it gets."""
    asked: list[str | None] = []

    async def first(peer: Peer) -> None:
        await peer.create()
        await peer.request()
        await peer.started("req_a", None, ref="a")
        await peer.output("req_a", "tool_call", index=0, id="call_1", name="weather", arguments="{}")
        await peer.output("req_a", "tool_call", index=1, id="call_2", name="weather", arguments="{}")
        await peer.final("req_a", FinishReason.TOOL_CALLS, ref="a")
        await peer.request()
        await peer.request()
        peer.drop()

    async def second(peer: Peer) -> None:
        asked.extend([chunk.tool_call_id for chunk in await peer.request()])
        await answer_text(peer, "req_b", "B", ref="b")

    async with (
        scripted_server(first, script(second)) as url,
        connect(url, reconnect=True, limits=AT_ONCE) as session,
    ):
        await session.send_text("one", end=True, ref="a")
        assert len((await session.answer("a")).tool_calls) == 2
        await session.send_tool_result("call_1", "rain", end=True, ref="results")
        await session.send_text("two", end=True, ref="b")
        with pytest.raises(SessionConflict):
            await session.answer("results")
        assert (await session.answer("b")).text == "B"
        with pytest.raises(SessionConflict, match="lost"):
            await session.send_tool_result("call_2", "rain", end=True)
    assert asked == [None]


async def test_a_fresh_session_is_asked_under_the_same_name() -> None:

    async def first(peer: Peer) -> None:
        await peer.create()
        await peer.request()
        await peer.started("req_a", None, ref="a")
        await peer.output("req_a", "text", text="half")
        peer.drop()

    async def second(peer: Peer) -> None:
        (chunk,) = await peer.request()
        assert chunk.ref == "a"
        await answer_text(peer, "req_a", "whole", ref="a")

    async with (
        scripted_server(first, script(second)) as url,
        connect(url, reconnect=True, limits=AT_ONCE) as session,
    ):
        await session.send_text("one", end=True, ref="a")
        assert (await session.answer("a")).text == "whole"
