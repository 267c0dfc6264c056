"""The registry of Mode B sessions: what it finds, keeps, evicts and forgets."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import ExitStack

import pytest
from support.parts_of_sessions import FORM, GOING, Slots, answered, chunk, factory, opener

from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.request_input import InputState
from omni_ws.engine.base import TextOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.errors import RateLimited, SessionConflict, SessionExpired, SessionNotFound, ShuttingDown
from omni_ws.service.sessions.factory import FILE_FORMATS
from omni_ws.transport.mode_b import session as mode_b_session
from omni_ws.transport.mode_b.session import MAX_READERS, ModeBRegistry

pytestmark = [pytest.mark.virtual_clock, pytest.mark.usefixtures("no_task_left")]

ONE, TWO = (ApiKey(name=name, key_sha256=digest(name)) for name in ("one", "two"))


async def test_a_session_passes_through_all_its_stages() -> None:
    sessions = factory()
    registry = ModeBRegistry(sessions)
    slots = Slots()
    session = opener(registry)(slot=slots.take())
    assert registry.get(session.id, None) is session
    assert (session.state, session.started, slots.taken) == (InputState.OPEN, False, 1)
    await session.feed([chunk("a ")])
    assert (session.state, session.started) == (InputState.STARTED, True)
    session.finish()
    await session.ended.wait()
    assert (session.state, slots.taken) == (InputState.FINISHED, 0)
    assert sessions.budget.used == session.output.held > 0
    await asyncio.sleep(300)
    assert (session.expired, sessions.budget.used) == (True, 0)
    with pytest.raises(SessionExpired):
        registry.get(session.id, None)
    await asyncio.sleep(300)
    with pytest.raises(SessionNotFound):
        registry.get(session.id, None)
    assert len(registry) == 0


async def test_a_session_that_is_cancelled_before_its_task_ran_releases_its_slot() -> None:
    sessions = factory()
    registry = ModeBRegistry(sessions)
    slots = Slots()
    session = opener(registry)(slot=slots.take())
    session.cancel()
    session.cancel()
    await session.wait_released()
    assert slots.taken == 0
    assert await session.output.get(0) is None
    assert isinstance(session.failure(), SessionConflict)
    registry.end_all(GOING)
    await registry.wait_released()


@pytest.mark.parametrize("ending", ["finish", "cancel", "fail"])
async def test_an_ended_session_releases_its_conversation(ending: str) -> None:
    sessions = factory()
    registry = ModeBRegistry(sessions)
    conversation = sessions.open(output_formats=FILE_FORMATS, single_request=True)
    session = registry.add(conversation, FORM, key=None, slot=ExitStack())
    reference = weakref.ref(conversation)
    del conversation
    await session.feed([chunk("a"), chunk("c", 2)])
    match ending:
        case "finish":
            await session.feed([chunk("b", 1)])
            session.finish()
            await session.ended.wait()
        case "cancel":
            session.cancel()
        case "fail":
            session.fail(GOING)
    await session.wait_released()
    gc.collect()
    assert reference() is None
    assert session.progress.next_sequence_id == (3 if ending == "finish" else 1)
    assert session.progress.buffered_chunks == 0
    registry.end_all(GOING)


async def test_a_session_is_found_by_its_own_key_alone() -> None:
    sessions = factory(replica_id="r-1")
    registry = ModeBRegistry(sessions)
    opened = opener(registry)
    ours, free = opened(ONE), opened()
    assert ours.id.startswith("r-1_sess_")
    assert registry.get(ours.id, ONE) is ours
    for session_id, key in ((ours.id, TWO), (ours.id, None), (free.id, ONE), ("sess_0", ONE), ("", None)):
        with pytest.raises(SessionNotFound):
            registry.get(session_id, key)
    registry.end_all(GOING)
    await registry.wait_released()


async def test_the_session_that_ended_first_is_forgotten_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode_b_session, "MAX_REMEMBERED", 3)
    sessions = factory()
    registry = ModeBRegistry(sessions)
    opened = opener(registry)
    known = [opened() for _ in range(4)]
    for session in known[:3]:
        await answered(session)
    assert registry.get(known[0].id, None) is known[0]
    await answered(known[3])
    with pytest.raises(SessionNotFound):
        registry.get(known[0].id, None)
    assert registry.get(known[1].id, None) is known[1]
    assert sessions.budget.used == sum(session.output.held for session in known[1:])
    # The time of what was forgotten changes nothing any more.
    await asyncio.sleep(700)
    assert (len(registry), sessions.budget.used) == (0, 0)


async def test_the_key_that_holds_most_loses_its_oldest_results() -> None:
    engine = ScriptedEngine([TextOutput("y" * 1000)])
    sessions = factory(engine, limits={"max_held_bytes": 4 * 42_000})
    registry = ModeBRegistry(sessions)
    opened = opener(registry)
    modest = opened(ONE)
    await answered(modest)
    flood = [opened(TWO) for _ in range(8)]
    for session in flood:
        await answered(session)
    size = modest.output.held
    assert 42_000 - size < sessions.budget.used <= 42_000
    more = opened(TWO)
    await answered(more)
    assert [session.expired for session in flood] == [True] * 4 + [False] * 4
    assert not modest.expired
    await more.wait_released()  # what its conversation is charged for its history
    assert sessions.budget.used == 6 * size
    with pytest.raises(SessionExpired):
        registry.get(flood[0].id, TWO)
    # Forgotten in its turn, and no sooner than the others that have expired.
    await asyncio.sleep(700)
    assert (len(registry), sessions.budget.used) == (0, 0)


async def test_readers_up_to_the_limit() -> None:
    sessions = factory()
    registry = ModeBRegistry(sessions)
    session = opener(registry)()
    with ExitStack() as readers:
        for _ in range(MAX_READERS):
            readers.enter_context(session.reading())
        with pytest.raises(RateLimited):
            readers.enter_context(session.reading())
    with session.reading():
        pass
    registry.end_all(GOING)
    await registry.wait_released()


async def test_draining_ends_sessions_without_input() -> None:
    sessions = factory()
    registry = ModeBRegistry(sessions)
    opened = opener(registry)
    idle, begun, waiting, finished = (opened() for _ in range(4))
    await begun.feed([chunk("a ")])
    await waiting.feed([chunk("b", 1)])
    await answered(finished)
    registry.drain(GOING)
    assert [one.state for one in (idle, begun, waiting, finished)] == [
        *(InputState.FAILED, InputState.STARTED, InputState.OPEN, InputState.FINISHED),
    ]
    assert isinstance(idle.failure(), ShuttingDown)
    begun.finish()
    await begun.ended.wait()
    assert begun.state is InputState.FINISHED
    registry.end_all(GOING)
    assert waiting.state is InputState.FAILED
    await registry.wait_released()
    assert (len(registry), sessions.budget.used) == (0, 0)


async def test_a_discarded_session_is_not_known() -> None:
    sessions = factory()
    registry = ModeBRegistry(sessions)
    session = opener(registry)()
    await session.feed([chunk("half")])
    registry.discard(session)
    with pytest.raises(SessionNotFound):
        registry.get(session.id, None)
    await session.wait_released()
    assert (len(registry), sessions.budget.used) == (0, 0)
    await asyncio.sleep(700)


async def test_a_failure_is_raised_anew_each_time() -> None:
    engine = ScriptedEngine([RuntimeError("secret")])
    sessions = factory(engine)
    registry = ModeBRegistry(sessions)
    session = opener(registry)()
    await session.feed([chunk("x", end=True)])
    await session.ended.wait()
    first, second = session.failure(), session.failure()
    assert first is not second
    assert (first.code, first.message) == (second.code, second.message) == ("engine_failed", first.message)
    with pytest.raises(type(first)):
        await session.feed([chunk("y", 1)])
    registry.end_all(GOING)
    await registry.wait_released()


async def test_an_expired_session_stays_expired() -> None:
    sessions = factory()
    registry = ModeBRegistry(sessions)
    session = opener(registry)()
    await asyncio.sleep(301)
    for change in (session.expire, session.cancel):
        with pytest.raises(RuntimeError, match="illegal transition from EXPIRED"):
            change()
    registry.end_all(GOING)
