"""The states of a Mode B session, and how it takes input, without HTTP."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from support.parts_of_sessions import GOING, Slots, answered, chunk, factory, opener

from omni_ws.core.chunks import FinalChunk, InputChunk, Modality
from omni_ws.core.request_input import InputState
from omni_ws.engine.base import GenerationRequest, OutputWriter, TextOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.errors import (
    EngineFailed,
    InvalidValue,
    OmniError,
    PayloadTooLarge,
    SequenceGap,
    SessionConflict,
    SessionTimeout,
)
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.transport.mode_b.session import ModeBRegistry, ModeBSession
from omni_ws.wire.frames import RefusedChunk
from omni_ws.wire.streaming_body import BodyChunk

pytestmark = [pytest.mark.virtual_clock, pytest.mark.usefixtures("no_task_left")]

SILENCE_SEC = 300
GAP_SEC = 10


def opened(sessions: SessionFactory, slot: ExitStack | None = None) -> tuple[ModeBSession, ModeBRegistry]:
    registry = ModeBRegistry(sessions)
    return opener(registry)(slot=slot), registry


async def in_state(state: InputState, sessions: SessionFactory) -> ModeBSession:
    """A session that has just come to ``state``."""
    session, _ = opened(sessions)
    match state:
        case InputState.STARTED:
            await session.feed([chunk("a ")])
        case InputState.FINISHED:
            await answered(session)
        case InputState.FAILED:
            session.fail(GOING)
        case InputState.CANCELLED:
            session.cancel()
        case InputState.EXPIRED:
            session.expire()
    assert session.state is state
    return session


@pytest.mark.parametrize("before", list(InputState))
@pytest.mark.parametrize(
    ("change", "after", "allowed"),
    [
        ("cancel", InputState.CANCELLED, "open started finished failed cancelled"),
        ("expire", InputState.EXPIRED, "open started finished failed cancelled"),
        ("fail", InputState.FAILED, "open started"),
        ("finish", InputState.FINISHED, "started"),
    ],
)
async def test_every_change_from_every_state(before: InputState, change: str, after: InputState, allowed: str) -> None:
    sessions = factory()
    session = await in_state(before, sessions)
    expected = after if before.value in allowed.split() else before
    match change:
        case "fail":
            session.fail(GOING)  # ignored once the session has ended
        case "finish":
            if before is InputState.OPEN:
                expected = InputState.FAILED  # there is no input
            session.finish()
            if session.live:
                await session.ended.wait()
        case _ if before is InputState.EXPIRED:
            with pytest.raises(RuntimeError, match="illegal transition from EXPIRED"):
                getattr(session, change)()
        case _:
            getattr(session, change)()
    assert session.state is expected
    session.fail(GOING)
    await session.wait_released()
    if session.state is not InputState.FINISHED:
        assert sessions.budget.used == (session.output.held if change == "finish" else 0)


async def test_an_answer_that_fails_keeps_its_output_and_a_session_that_is_ended_does_not() -> None:
    sessions = factory(ScriptedEngine([TextOutput("half "), EngineFailed("gone")]))
    session, _ = opened(sessions)
    await session.feed([chunk("x", end=True)])
    await session.ended.wait()
    assert session.state is InputState.FAILED
    assert isinstance(session.failure(), EngineFailed)
    assert session.output.held > 0
    kinds = [type(message).__name__ for message in session.output.messages]
    assert kinds[-2:] == ["EngineFailed", "FinalChunk"]
    session.cancel()
    assert (session.output.held, session.output.messages) == (0, ())
    await session.wait_released()


async def test_the_slot_is_released_once_whatever_ends_the_session() -> None:
    for end in ("cancel", "expire", "evict", "finish"):
        slots = Slots()
        session, _ = opened(factory(), slots.take())
        assert slots.taken == 1
        if end == "finish":
            await answered(session)
        else:
            getattr(session, end)()
        await session.wait_released()
        await asyncio.sleep(0)
        assert slots.taken == 0


async def test_an_evicted_session_frees_its_slot_at_once_and_says_why() -> None:
    slots = Slots()
    session, _ = opened(factory(), slots.take())
    session.evict()
    assert slots.taken == 0
    assert session.expired
    assert "was evicted" in session.expired_because
    await session.wait_released()


async def test_cancelling_frees_the_engine_and_ends_the_readers() -> None:
    engine = ScriptedEngine([TextOutput("a"), asyncio.Event().wait])
    session, _ = opened(factory(engine))
    await session.feed([chunk("x", end=True)])
    while session.output.find(1) is None:
        await session.output.get(session.output.end)
    assert engine.active_requests == 1
    reader = asyncio.create_task(session.output.get(session.output.end))
    await asyncio.sleep(0)
    session.cancel()
    await session.wait_released()
    assert engine.active_requests == 0
    found = await reader
    assert found is None or isinstance(found[1], FinalChunk)
    with pytest.raises(SessionConflict):
        raise session.failure()


# time


async def test_a_silent_client_loses_its_session_and_a_body_on_its_way_keeps_it() -> None:
    session, _ = opened(factory())
    with session.incoming():
        await asyncio.sleep(3 * SILENCE_SEC)
        assert session.state is InputState.OPEN
        await session.feed([chunk("")])
    await asyncio.sleep(SILENCE_SEC - 1)
    assert session.state is InputState.OPEN
    await asyncio.sleep(2)
    assert session.expired
    assert isinstance(session.error, SessionTimeout)
    await session.wait_released()


async def test_a_body_without_a_chunk_does_not_restart_the_time_out() -> None:
    session, _ = opened(factory())
    for _ in range(3):
        await asyncio.sleep(SILENCE_SEC / 4)
        with session.incoming():
            await session.feed([])
    await asyncio.sleep(SILENCE_SEC / 4 - 1)
    with session.incoming(), session.incoming():
        await asyncio.sleep(SILENCE_SEC)
        assert session.state is InputState.OPEN
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert session.expired
    await session.wait_released()


async def test_a_gap_has_time_until_the_end_is_announced_and_then_its_own() -> None:
    session, _ = opened(factory())
    await session.feed([chunk("a "), chunk("c", 2)])
    await asyncio.sleep(SILENCE_SEC - 10)
    assert session.started
    session.finish()
    await asyncio.sleep(GAP_SEC - 1)
    assert session.live
    await asyncio.sleep(2)
    assert session.state is InputState.FAILED
    assert isinstance(session.failure(), SequenceGap)
    await session.wait_released()


async def test_a_gap_that_is_filled_after_the_end_was_announced() -> None:
    session, _ = opened(factory())
    await session.feed([chunk("a "), chunk("c", 2)])
    session.finish()
    await asyncio.sleep(GAP_SEC - 1)
    await session.feed([chunk("b ", 1)])
    await session.ended.wait()
    assert session.state is InputState.FINISHED
    assert (session.progress.next_sequence_id, session.progress.buffered_chunks) == (3, 0)
    await session.wait_released()


# input


async def test_the_first_refusal_is_raised_and_the_other_chunks_are_accepted() -> None:
    session, _ = opened(factory())
    refused = [
        BodyChunk(f"chunks[{n}]", RefusedChunk(n, InvalidValue("bad", param="x", sequence_id=n))) for n in (1, 2)
    ]
    with pytest.raises(InvalidValue) as error:
        await session.feed([chunk("a "), *refused, chunk("d", 3)])
    assert (error.value.sequence_id, error.value.param) == (1, "chunks[1].x")
    assert (session.state, session.progress.next_sequence_id) == (InputState.STARTED, 4)
    session.finish()
    await session.ended.wait()
    assert session.state is InputState.FINISHED
    await session.wait_released()


async def test_too_much_input_ends_the_session() -> None:
    session, _ = opened(factory(streaming_input={"max_payload_per_session": 100}))
    with pytest.raises(PayloadTooLarge):
        await session.feed([chunk("a "), chunk("c" * 200, 2)])
    assert session.state is InputState.FAILED
    with pytest.raises(OmniError) as error:
        await session.feed([chunk("b", 1)])
    assert error.value.code == "payload_too_large"
    await session.wait_released()


class LateEngine(ScriptedEngine):
    """Takes no input until ``begin`` is set."""

    def __init__(self) -> None:
        super().__init__([])
        self.called = asyncio.Event()
        self.begin = asyncio.Event()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.called.set()
        await self.begin.wait()
        await super().generate(request, out)


@pytest.mark.parametrize("ends", ["engine reads", "cancelled"])
async def test_input_waits_for_a_slow_engine(ends: str) -> None:
    engine = LateEngine()
    session, _ = opened(factory(engine))
    big = b"x" * (1 << 20)
    chunks = [BodyChunk("", InputChunk(Modality.TEXT, big, number)) for number in range(24)]
    await session.feed(chunks[:1])
    await engine.called.wait()
    feeding = asyncio.create_task(session.feed(chunks[1:]))
    await asyncio.sleep(2 * SILENCE_SEC)  # the client is not silent: it is not read
    assert not feeding.done()
    accepted = session.progress.next_sequence_id
    assert 0 < accepted < len(chunks)
    if ends == "engine reads":
        engine.begin.set()
        await feeding
        assert session.progress.next_sequence_id == len(chunks)
        session.cancel()
    else:
        session.cancel()
        with pytest.raises(SessionConflict):
            await feeding
        assert session.progress.next_sequence_id == accepted
    await session.wait_released()


async def test_input_after_the_end() -> None:
    session, _ = opened(factory())
    await answered(session)
    await session.feed([chunk("x", end=True)])
    assert session.progress.duplicates == 1
    with pytest.raises(SessionConflict):
        await session.feed([chunk("y", 1)])
    session.finish()
    assert session.state is InputState.FINISHED
    await session.wait_released()
