"""Places of the server and of its keys."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from omni_ws.config.keys import ApiKey, digest
from omni_ws.errors import EngineOverloaded, RateLimited, ShuttingDown
from omni_ws.service.admission import Admission


def key(name: str, max_sessions: int | None) -> ApiKey:
    return ApiKey(name=name, key_sha256=digest(name), max_sessions=max_sessions)


def test_places_of_the_server() -> None:
    admission = Admission(max_sessions=2)
    with admission.session(None), contextlib.suppress(KeyError), admission.session(None):
        assert admission.sessions == 2
        with pytest.raises(EngineOverloaded) as refused, admission.session(None):
            pass
        assert refused.value.retry_after_ms == 1000
        raise KeyError
    assert admission.sessions == 0


def test_places_of_a_key() -> None:
    admission = Admission(max_sessions=10)
    one, two = key("one", 1), key("two", None)
    with admission.session(one), admission.session(two), admission.session(two), admission.session(None):
        with pytest.raises(RateLimited), admission.session(one):
            pass
        assert admission.sessions == 4
    with admission.session(one):
        assert admission.sessions == 1
    assert admission._by_key == {}


def test_draining() -> None:
    admission = Admission(max_sessions=10)
    with admission.session(None):
        admission.draining = True
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
    await asyncio.wait_for(waiting, 10)
