"""Slots of the server and of its keys."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from support.patience import PATIENCE_SEC

from omni_ws.config.keys import ApiKey, digest
from omni_ws.errors import EngineOverloaded, RateLimited, ShuttingDown
from omni_ws.service.sessions.admission import EMPTY_SEC, Admission


def key(name: str, max_sessions: int | None) -> ApiKey:
    return ApiKey(name=name, key_sha256=digest(name), max_sessions=max_sessions)


def test_slots_of_the_server() -> None:
    admission = Admission(max_sessions=2)
    with admission.session(None), contextlib.suppress(KeyError), admission.session(None):
        assert admission.sessions == 2
        with pytest.raises(EngineOverloaded) as refused, admission.session(None):
            pass
        assert refused.value.retry_after_ms == 1000
        raise KeyError
    assert admission.sessions == 0


def test_slots_of_a_key() -> None:
    admission = Admission(max_sessions=10)
    one, two = key("one", 1), key("two", None)
    with admission.session(one), admission.session(two), admission.session(two), admission.session(None):
        with pytest.raises(RateLimited), admission.session(one):
            pass
        assert admission.sessions == 4
    with admission.session(one):
        assert admission.sessions == 1
    assert admission.all_sessions == 0


def test_draining() -> None:
    admission = Admission(max_sessions=10)
    with admission.session(None):
        admission.drain()
        with pytest.raises(ShuttingDown), admission.session(None):
            pass
    assert admission.sessions == 0


async def test_waiting_for_the_last_session() -> None:
    admission = Admission(max_sessions=10)
    await admission.wait_empty()
    with admission.session(None):
        waiting = asyncio.create_task(admission.wait_empty())
        with admission.session(None):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, PATIENCE_SEC)


# shares


def test_a_holder_has_a_share_above_half_occupancy() -> None:
    admission = Admission(max_sessions=10)
    with contextlib.ExitStack() as slots:

        def take(client: str) -> None:
            slots.enter_context(admission.session(None, client=client))

        for _ in range(5):
            take("198.51.100.1")
        with pytest.raises(RateLimited, match="share"):
            take("198.51.100.1")
        for _ in range(3):
            take("198.51.100.2")
        with pytest.raises(RateLimited):
            take("198.51.100.2")
        take("198.51.100.3")
        # Loopback and no address are not counted.
        take("127.0.0.1")
        with pytest.raises(EngineOverloaded):
            take("")
    assert admission.all_sessions == 0
    with contextlib.ExitStack() as slots:
        for _ in range(4):
            take("198.51.100.1")
        take("198.51.100.1")  # below half there are no shares


@pytest.mark.parametrize(("known_keys", "share"), [(1, 10), (2, 5), (50, 5)])
def test_shares_of_keys(known_keys: int, share: int) -> None:
    """Where one key is all that there is, it may have everything; an address behind it does not matter."""
    admission = Admission(max_sessions=10)
    admission.known_keys = known_keys
    one = key("one", None)
    with contextlib.ExitStack() as slots:
        for _ in range(share):
            slots.enter_context(admission.session(one, client="198.51.100.1"))
        with pytest.raises(RateLimited if share < 10 else EngineOverloaded):
            slots.enter_context(admission.session(one, client="198.51.100.2"))


def test_a_key_with_a_limit_of_its_own_has_that_instead_of_a_share() -> None:
    admission = Admission(max_sessions=10)
    admission.known_keys = 2
    with contextlib.ExitStack() as slots:
        for _ in range(9):
            slots.enter_context(admission.session(key("one", 9)))
        with pytest.raises(RateLimited, match="at most 9 concurrent sessions"):
            slots.enter_context(admission.session(key("one", 9)))
        slots.enter_context(admission.session(key("two", None)))


# lent slots


def test_the_oldest_lent_slot_is_taken_back_where_slots_are_short() -> None:
    admission = Admission(max_sessions=2)
    with admission.session(None, lent=True) as first, admission.session(None, lent=True) as second:
        second.keep()
        with admission.session(None):
            assert admission.sessions == 2
            with pytest.raises(EngineOverloaded):
                first.keep()
            with pytest.raises(EngineOverloaded):
                admission.check(None)
        first.keep()
        first.keep()
        assert admission.sessions == 2
    assert admission.sessions == 0


def test_a_lent_slot_that_was_taken_back_is_not_given_back_twice() -> None:
    admission = Admission(max_sessions=1)
    with admission.session(key("one", None), lent=True):
        with admission.session(key("two", None)):
            assert (admission.sessions, admission.all_sessions) == (1, 1)
        assert (admission.sessions, admission.all_sessions) == (0, 0)
    assert (admission.sessions, admission.all_sessions) == (0, 0)


def test_a_refused_request_costs_no_other_its_slot() -> None:
    admission = Admission(max_sessions=1)
    limited = ApiKey(name="limited", key_sha256=digest("limited"), requests_per_sec=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omni_ws.service.sessions.admission._now", lambda: 0.0)
        admission.request(limited)
        with admission.session(None, lent=True) as lent:
            with pytest.raises(RateLimited), admission.session(limited):
                pass
            assert lent in admission._taken


# sessions without content


class Empty:
    """A session that has had no content, on a slot."""

    def __init__(self, admission: Admission) -> None:
        self.slot = admission.take(None, many_requests=True)
        self.has_content = False
        self.evicted = False
        admission.opened_empty(self)

    def evict(self) -> None:
        self.evicted = True
        self.slot.release()


@pytest.mark.virtual_clock
async def test_only_the_oldest_session_without_content_goes_and_only_once_it_is_old() -> None:
    admission = Admission(max_sessions=3)
    used, oldest = Empty(admission), Empty(admission)
    used.has_content = True
    await asyncio.sleep(1)
    younger = Empty(admission)
    await asyncio.sleep(EMPTY_SEC - 1.5)
    with pytest.raises(EngineOverloaded):
        admission.take(None)
    await asyncio.sleep(0.5)
    with admission.session(None), pytest.raises(EngineOverloaded):
        admission.take(None)
    assert (used.evicted, oldest.evicted, younger.evicted) == (False, True, False)


@pytest.mark.virtual_clock
async def test_as_many_wait_as_sessions_are_about_to_go() -> None:
    admission = Admission(max_sessions=2)
    slot = admission.take(None)
    empty = Empty(admission)
    now = asyncio.get_running_loop().time
    first = asyncio.create_task(admission.room(None))
    await asyncio.sleep(0)
    with pytest.raises(EngineOverloaded):  # at once
        await admission.room(None)
    assert (now(), first.done()) == (0, False)
    await first
    assert now() == EMPTY_SEC
    with admission.session(None):
        assert empty.evicted
    with admission.session(None), pytest.raises(EngineOverloaded):  # nobody else is about to go
        await admission.room(None)
    slot.release()


@pytest.mark.virtual_clock
@pytest.mark.counts_passes
async def test_who_waits_takes_a_slot_that_is_given_back_and_hears_of_the_end() -> None:
    admission = Admission(max_sessions=3)
    slots = [admission.take(None), admission.take(None)]
    Empty(admission)
    admission.opened_empty(_Going())
    admission.opened_empty(_Going())
    gone, next_one, last = waiting = [asyncio.create_task(admission.room(None)) for _ in range(3)]
    await asyncio.sleep(0)
    slots[0].release()  # which wakes the first
    gone.cancel()  # and it leaves in the same moment
    await asyncio.wait([next_one])
    assert (next_one.exception(), last.done()) == (None, False)
    admission.drain()
    with pytest.raises(ShuttingDown):
        await last
    assert asyncio.get_running_loop().time() == 0
    await asyncio.gather(*waiting, return_exceptions=True)


class _Going:
    has_content = False

    def evict(self) -> None:
        raise AssertionError("it has no slot")
