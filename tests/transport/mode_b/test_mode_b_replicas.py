"""Mode B over HTTP at two servers with one store: a request may go to either."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.live_server import LiveServer, live_server, read
from support.mode_b_client import EVENTS, ModeBSession, create, text
from support.raw_http import call
from support.scripted_engines import CountingEngine, ReinedEngine, Reins

from omni_ws.config.keys import ApiKey, digest

KEYS = (ApiKey(name="one", key_sha256=digest("sesame")), ApiKey(name="two", key_sha256=digest("open")))
ONE, TWO = "Authorization: Bearer sesame", "Authorization: Bearer open"


def at(server: LiveServer, session: ModeBSession, *headers: str) -> ModeBSession:
    return ModeBSession(server, session.created, headers or session.headers)


@asynccontextmanager
async def replicas(
    folder: Path, reins: Reins | None = None, keys: tuple[ApiKey, ...] = ()
) -> AsyncIterator[list[LiveServer]]:
    kept = {"store": f"sqlite:{folder / 'kept' / 'sessions.db'}"}
    async with (
        live_server(ReinedEngine(reins or Reins()), sessions=kept, keys=keys) as first,
        live_server(ReinedEngine(reins or Reins()), sessions=kept, keys=keys) as second,
    ):
        yield [first, second]


async def test_each_request_of_a_session_may_go_to_another_server(tmp_path: Path) -> None:
    async with replicas(tmp_path) as (first, second):
        here = await create(first, {"start_policy": "on_end_only", "chunks": [text("one ", 0)]})
        there = at(second, here)
        await there.append(text("two ", 1))
        assert (await here.status())["next_sequence_id"] == 2
        assert (await there.append(text("two ", 1)))["duplicates"] == 1
        await here.append(text("three", 2))
        await there.finish()
        events = await there.events()
        assert await here.events() == events
        assert await here.events(last=2) == events[2:] == await there.events(last=2)
        assert (await here.completion())["choices"] == (await there.completion())["choices"]
        assert (await here.content()).endswith("one two three")
        assert await here.attached() == await there.attached()
        assert await there.delete() == 204
        assert (await here.status())["state"] == "cancelled"


async def test_what_a_session_uses_counts_once_however_often_it_is_taken_from_the_store(tmp_path: Path) -> None:
    kept, used = {"store": f"sqlite:{tmp_path / 'kept' / 'sessions.db'}"}, tmp_path / "usage.json"
    keys = (ApiKey(name="one", key_sha256=digest("sesame"), audio_seconds_per_day=60),)
    second = base64.b64encode(bytes(32_000)).decode()
    async with live_server(sessions=kept, keys=keys, auth={"usage_file": used}, still_answers=False) as server:
        session = await create(server, {"start_policy": "on_end_only"}, ONE)
        for number in range(3):
            await server.until(lambda: len(server.app.registry) == 0)
            await session.append({"modality": "audio", "payload": second, "sequence_id": number})
        await server.until(lambda: len(server.app.registry) == 0)
        await session.finish()
        await session.completion()
    assert json.loads(used.read_bytes())["keys"]["one"]["audio_ms"] == 3000


async def test_a_session_that_another_server_has_is_a_conflict_to_be_tried_again(tmp_path: Path) -> None:
    reins = Reins()
    reins.loose = False
    async with replicas(tmp_path, reins) as (first, second):
        here = await create(first, {"chunks": [text("one", 0, end_of_input=True)]})
        answer = await at(second, here).result()
        error = answer.json()["error"]
        assert (answer.status, error["code"], answer.headers["retry-after"]) == (409, "session_conflict", "1")
        reins.let_go()
        content = await here.content()
        assert await at(second, here).content() == content


@pytest.mark.counts_passes  # the engine begins within a pass, and its pace counts from then on
async def test_a_session_that_comes_back_at_the_pace_of_its_engine_is_told_of_and_cancelled_at_once(
    tmp_path: Path,
) -> None:
    kept = {"store": f"sqlite:{tmp_path / 'kept' / 'sessions.db'}"}
    idle = CountingEngine(gate=asyncio.Event())
    async with (
        live_server(CountingEngine(), sessions=kept, keys=KEYS) as first,
        live_server(idle, sessions=kept, keys=KEYS) as second,
    ):
        here = await create(first, {"chunk": text("x", 0)}, ONE)
        for begin in (1, 41):
            await here.append(*(text("y" * (1 << 16), number) for number in range(begin, begin + 40)))
        await first.until(lambda: len(first.app.registry) == 0)  # it is given back
        there = at(second, here)
        more = asyncio.create_task(there.call("POST", "/chunks", {"chunks": [text("z", 81)]}))
        await second.until(lambda: second.held_bytes > 1 << 20)
        other = at(second, here, TWO)
        assert (await other.call("GET")).status == 404
        assert (await other.call("DELETE")).status == 404
        status = await there.status()
        assert (status["state"], 0 < status["next_sequence_id"] < 81) == ("started", True)
        result = await there.result(wait=None)
        assert (result.status, result.json()["state"]) == (202, "started")
        events = asyncio.create_task(there.call("GET", "/result", None, EVENTS))
        await there.status()
        assert not more.done()  # as it waits whenever the engine is behind
        assert not events.done()
        assert await there.delete() == 204
        assert (await more).status == 409
        await events
        assert (await there.status())["state"] == "cancelled"
        assert (await here.status())["state"] == "cancelled"


async def test_a_session_is_its_owners_at_every_server_and_its_owner_deletes_it(tmp_path: Path) -> None:
    async with replicas(tmp_path, keys=KEYS) as (first, second):
        here = await create(first, {"chunks": [text("one", 0, end_of_input=True)]}, ONE)
        await here.content()
        assert (await at(second, here, TWO).call("GET")).status == 404
        path = f"/v1/sessions/{here.id}"
        assert (await call(second.port, "DELETE", path, None, TWO)).status == 404
        assert (await call(second.port, "DELETE", path, None, ONE)).status == 204
        assert (await here.call("GET")).status == 404
        assert (await call(second.port, "DELETE", path, None, ONE)).status == 404


@pytest.mark.parametrize("start", ["on_end_only", "on_first_chunk"])
async def test_what_a_session_uses_is_counted_once_however_often_it_comes_back(tmp_path: Path, start: str) -> None:
    key = ApiKey(name="one", key_sha256=digest("sesame"), audio_seconds_per_day=60)
    kept = {"store": f"sqlite:{tmp_path / 'kept' / 'sessions.db'}"}
    async with live_server(keys=(key,), sessions=kept, auth={"usage_file": tmp_path / "usage.json"}) as server:
        session = await create(server, {"start_policy": start}, ONE)
        for number in range(3):
            speech = base64.b64encode(bytes(3200)).decode()
            await session.append({"sequence_id": number, "modality": "audio", "payload": speech})
            await server.until(lambda: server.sessions == 0)  # it is in the store alone
            await session.status()
            await server.until(lambda: server.sessions == 0)
        await session.finish()
        assert (await session.completion())["usage"]["input_audio_ms"] == 300
        counted = read(server)
        file = server.app.sessions.daily_use_file
        assert file is not None
        assert file.use.used_by("one").audio_ms == 300
        assert file.use.running_of("one") == 0
    assert counted.value("input_audio_seconds_total") == pytest.approx(0.3)
    assert counted.value("input_chunks_total") == 3
    assert [one["finish_reason"] for one in counted.labels("requests_total")] == ["stop"]
