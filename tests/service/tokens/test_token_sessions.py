"""The expiry of token sessions, what they hold, and what their bookkeeping costs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from support.token_engine import END, PAD, START, TokenEngine

from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.quota import ByteBudget
from omni_ws.core.token_session import TOKEN_BYTES, TokenImage
from omni_ws.engine.base import TokenEvent, TokenGeneration, TokensFinished, TokenStop
from omni_ws.errors import EngineOverloaded, InvalidValue, OffsetMismatch, SessionNotFound
from omni_ws.service.sessions.admission import EMPTY_SEC, Admission
from omni_ws.service.tokens import (
    IMAGE_OVERHEAD_BYTES,
    TokenCall,
    TokensDone,
    TokenSessions,
)

TTL_SEC = 1800
LONG = 200_000


def sessions(engine: TokenEngine, *, max_sessions: int = 100, budget_bytes: int = 1 << 30) -> TokenSessions:
    return TokenSessions(
        engine,
        ttl_sec=TTL_SEC,
        budget=ByteBudget(budget_bytes),
        admission=Admission(max_sessions=max_sessions),
        check_ready=lambda: None,
    )


async def append(made: TokenSessions, session_id: str, *tokens: int, offset: int = 0, max_tokens: int = 0) -> None:
    async for _ in made.generate(session_id, None, TokenCall(tokens=tokens, offset=offset, max_tokens=max_tokens)):
        pass


@pytest.mark.virtual_clock
async def test_a_session_without_tokens_makes_room_once_it_is_old() -> None:
    made = sessions(TokenEngine(), max_sessions=2)
    empty, used = made.open(None), made.open(None)
    await append(made, used, 1, 2)
    await append(made, empty)  # a call that does nothing is no content
    await asyncio.sleep(EMPTY_SEC - 1)
    with pytest.raises(EngineOverloaded):
        made.open(None)
    await asyncio.sleep(1)
    fork = made.fork(used, None, at=1)
    with pytest.raises(SessionNotFound):
        made.dump(empty, None)
    await asyncio.sleep(EMPTY_SEC)
    with pytest.raises(EngineOverloaded):  # tokens that a session begins with are content
        made.open(None)
    assert list(made.dump(fork, None)) == [1]
    made.close_all()


@pytest.mark.virtual_clock
async def test_an_unused_session_expires() -> None:
    made = sessions(TokenEngine())
    session_id = made.open(None)
    for _ in range(3):
        await asyncio.sleep(TTL_SEC - 1)
        await append(made, session_id)  # the call that does nothing keeps it
    await asyncio.sleep(TTL_SEC - 1)
    assert made.dump(session_id, None) is not None
    await asyncio.sleep(TTL_SEC - 1)
    child = made.fork(session_id, None, at=0)
    await asyncio.sleep(TTL_SEC - 1)
    made.dump(child, None)
    await asyncio.sleep(2)
    with pytest.raises(SessionNotFound):
        made.dump(session_id, None)
    made.dump(child, None)
    await asyncio.sleep(TTL_SEC + 1)
    assert len(made) == 0


@pytest.mark.virtual_clock
async def test_a_session_ends_that_is_as_long_as_its_key_allows() -> None:
    """In use or not; the call in progress tells its client."""
    engine = TokenEngine()
    made = sessions(engine)
    key = ApiKey(name="ann", key_sha256=digest("ann"), max_session_sec=60)
    idle, busy = made.open(key), made.open(key)
    engine.gate.clear()

    async def work() -> list[object]:
        return [event async for event in made.generate(busy, key, TokenCall(tokens=(5,), max_tokens=2))]

    call = asyncio.create_task(work())
    await engine.waiting.wait()
    await asyncio.sleep(59.9)
    assert made.dump(idle, key) is not None
    await asyncio.sleep(0.1)
    assert (await call)[-1] == TokensDone(1, 1, TokenStop.CANCELLED)
    for session_id in (idle, busy):
        with pytest.raises(SessionNotFound):
            made.dump(session_id, key)
    made.close(made.open(key), key)


@pytest.mark.virtual_clock
async def test_a_busy_session_does_not_expire_until_long_after_its_call() -> None:
    engine = TokenEngine()
    made = sessions(engine)
    session_id = made.open(None)
    engine.gate.clear()
    call = asyncio.create_task(append(made, session_id, 5, max_tokens=2))
    await engine.waiting.wait()
    await asyncio.sleep(3 * TTL_SEC)
    engine.gate.set()
    await call
    await asyncio.sleep(TTL_SEC - 1)
    assert len(made.dump(session_id, None)) == 3
    await asyncio.sleep(TTL_SEC + 1)
    assert len(made) == 0


@pytest.mark.virtual_clock
async def test_a_failed_call_restarts_the_time() -> None:
    engine = TokenEngine()
    made = sessions(engine)
    session_id = made.open(None)
    await asyncio.sleep(TTL_SEC - 1)
    engine.fail_with = RuntimeError("broken")
    with pytest.raises(RuntimeError):
        await append(made, session_id, 5)
    await asyncio.sleep(TTL_SEC - 1)
    assert len(made.dump(session_id, None)) == 0
    made.close_all()


@pytest.mark.virtual_clock
async def test_a_refused_call_restarts_the_time() -> None:
    made = sessions(TokenEngine())
    session_id = made.open(None)
    for _ in range(3):
        await asyncio.sleep(TTL_SEC - 1)
        with pytest.raises(OffsetMismatch):
            await append(made, session_id, 5, offset=9)
        await asyncio.sleep(TTL_SEC - 1)
        with pytest.raises(InvalidValue):
            made.fork(session_id, None, at=9)
    await asyncio.sleep(TTL_SEC + 1)
    assert len(made) == 0


class Instant(TokenEngine):
    """Takes any list and does nothing with it."""

    async def generate_tokens(self, generation: TokenGeneration) -> AsyncIterator[TokenEvent]:
        yield TokensFinished(TokenStop.LENGTH)


async def test_long_lists_cost_what_is_new_in_them() -> None:
    """CPU time of the bookkeeping of a call, the best of many, with 200,000 tokens and with none."""
    made = sessions(Instant(max_model_len=LONG + 1000))
    long_id, short_id = made.open(None), made.open(None)
    await append(made, long_id, *[7] * LONG)

    async def cost(session_id: str, offset: int) -> float:
        best = 1.0
        for done in range(50):
            begun = time.thread_time()
            await append(made, session_id, 1, 2, 3, offset=offset + 3 * done)
            best = min(best, time.thread_time() - begun)
        return best

    long, short = await cost(long_id, LONG), await cost(short_id, 0)
    assert long < 0.001
    assert long < 3 * short
    took = []
    for _ in range(5):
        begun = time.thread_time()
        child = made.fork(long_id, None, at=LONG)
        took.append(time.thread_time() - begun)
        assert len(made.dump(child, None)) == LONG
    assert min(took) < 0.005
    made.close_all()


@pytest.mark.parametrize(("may", "counted"), [(False, 0), (True, -3)])
async def test_a_priority_before_all_others_is_for_keys_that_may(may: bool, counted: int) -> None:
    engine = TokenEngine()
    asked = ApiKey(name="ann", key_sha256=digest("ann"), priority=may)
    made = TokenSessions(
        engine,
        ttl_sec=TTL_SEC,
        budget=ByteBudget(1 << 30),
        admission=Admission(max_sessions=1, keys=[asked]),
        check_ready=lambda: None,
    )
    async for _ in made.generate(made.open(asked), asked, TokenCall(tokens=[5], max_tokens=1, priority=-3)):
        pass
    assert [generation.priority for generation in engine.calls] == [counted]
    made.close_all()


async def test_each_image_is_charged_for_what_holds_it_also_where_its_data_are_shared() -> None:
    count = 10
    engine = TokenEngine()
    made = sessions(engine)
    images = tuple(TokenImage(bytes([one]), "image/png", 3 * one, 3 * one + 3) for one in range(count))
    parent = made.open(None)
    async for _ in made.generate(parent, None, TokenCall(tokens=[START, PAD, END] * count, images=images)):
        pass
    alone = count * (3 * TOKEN_BYTES + IMAGE_OVERHEAD_BYTES)
    assert made._budget.used == alone + count
    child = made.fork(parent, None, at=3 * count)
    assert made._budget.used == 2 * alone + count
    made.close(parent, None)
    assert made._budget.used == alone + count
    made.close(child, None)
    assert made._budget.used == 0


@pytest.mark.parametrize("missing", [0, 1])
async def test_an_image_needs_room_once_for_all_sessions(missing: int) -> None:
    tokens, image = [START, *[PAD] * 10, END], TokenImage(bytes(10), "image/png", 0, 12)
    alone = len(tokens) * TOKEN_BYTES + IMAGE_OVERHEAD_BYTES
    outcome = pytest.raises(EngineOverloaded) if missing else contextlib.nullcontext()

    async def look(made: TokenSessions) -> str:
        session_id = made.open(None)
        async for _ in made.generate(session_id, None, TokenCall(tokens=tokens, images=(image,))):
            pass
        return session_id

    with outcome:
        await look(sessions(TokenEngine(), budget_bytes=alone + 10 - missing))
    made = sessions(TokenEngine(), budget_bytes=2 * alone + 10 - missing)
    session_id = await look(made)
    with outcome:
        made.fork(session_id, None, at=len(tokens))
    made.close_all()
    assert made._budget.used == 0
