"""Live sessions with ``store: true`` in the store, and forks, which begin with them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI
from support.fake_store import FakeBackend, FakeStore, kept_by
from support.inline_workers import inline, loud_24k, quiet_24k
from support.live_server import LiveServer, live_server
from support.raw_http import call
from support.realtime_client import LiveClient, live_client
from support.scripted_engines import Talker
from websockets.exceptions import InvalidStatus

from omni_ws.config.keys import ApiKey, digest
from omni_ws.errors import InvalidRequest
from omni_ws.wire.live_session import MediaStart, read_fork, read_start

pytestmark = pytest.mark.virtual_clock

KEYS = (ApiKey(name="a", key_sha256=digest("secret")), ApiKey(name="b", key_sha256=digest("other")))
OWN, OTHER = ({"Authorization": f"Bearer {key}"} for key in ("secret", "other"))
TURN = quiet_24k(96) + loud_24k(320) + quiet_24k(640)


@asynccontextmanager
async def keeping(shared: FakeStore, engine: Talker, keys: tuple[ApiKey, ...] = ()) -> AsyncIterator[LiveServer]:
    async with live_server(engine, keys=keys) as server:
        server.app.sessions.store = store = kept_by(FakeBackend(shared))
        await store.start()
        try:
            yield inline(server)
        finally:
            await store.stop()


async def talk(client: LiveClient, said: str) -> None:
    await client.append(TURN)
    while not client.said().endswith(said):
        await client.receive()


async def begin_fork(client: LiveClient, **overrides: Any) -> dict[str, Any]:
    await client.send("session.start", event_id="start", session=overrides)
    session: dict[str, Any] = (await client.until("session.started"))["session"]
    return session


def fork_of(started: dict[str, Any]) -> str:
    token = f"?resume_token={started['resume_token']}" if "resume_token" in started else ""
    return f"/{started['session']['id']}/fork{token}"


async def refused(server: LiveServer, query: str, **options: Any) -> str:
    async with live_client(server, query=query, **options) as client:
        error: dict[str, Any] = (await client.until("error"))["error"]
        await client.closed()
        code: str = error["code"]
        return code


async def test_a_fork_begins_with_what_was_said_and_set() -> None:
    shared, first, second = FakeStore(), Talker("go forward"), Talker("go back")
    async with keeping(shared, first) as one, keeping(shared, second) as other:
        async with live_client(one) as client:
            given = [{"role": "user", "content": [{"text": "My name is Ada."}]}]
            stored = await client.start(store=True, instructions="Be brief.", input=given)
            await talk(client, "You said go forward")
        query = fork_of(client.received[0])
        for server in (other, one):  # it may be forked again
            async with live_client(server, query=query) as client:
                session = await begin_fork(client, audio={"format": {"type": "audio/pcmu", "rate": 8000}}, store=False)
                assert session["id"] != stored["id"]
                assert (session["instructions"], session["model"]) == ("Be brief.", stored["model"])
                assert (session["audio"]["format"]["type"], session["store"]) == ("audio/pcmu", False)
                assert "resume_token" not in client.received[0]
                await client.end()
        async with live_client(other, query=query) as client:
            assert (await begin_fork(client))["store"] is True
            await talk(client, "You said go back")
            history = [(message.role, message.text) for message in second.requests[-1].history]
            assert history == [
                ("user", "My name is Ada."),
                ("user", "go forward"),
                ("assistant", "You said go forward"),
            ]
            await client.end()


async def test_what_is_not_stored_or_is_open_or_belongs_to_others_has_no_forks() -> None:
    shared, engine = FakeStore(), Talker("yes")
    async with keeping(shared, engine) as server:
        async with live_client(server) as client:
            await client.start()
            assert await refused(server, fork_of(client.received[0])) == "session_not_found"
            await client.end()
        assert not shared.records
        async with live_client(server) as client:
            await client.start(store=True)
            query = fork_of(client.received[0])
            assert await refused(server, query) == "session_conflict"
            await client.end()
        assert await refused(server, query.partition("?")[0]) == "session_not_found"
        assert await refused(server, query + "x") == "session_not_found"
        session_id = client.received[0]["session"]["id"]
        token = query.partition("?")[2]
        assert (await call(server.port, "DELETE", f"/v1/sessions/{session_id}?{token}")).status == 204
        assert await refused(server, query) == "session_not_found"


async def test_with_keys_the_owner_forks() -> None:
    shared = FakeStore()
    async with keeping(shared, Talker("yes"), KEYS) as server:
        async with live_client(server, additional_headers=OWN) as client:
            await client.start(store=True)
            query = fork_of(client.received[0])
            await client.end()
        assert "resume_token" not in client.received[0]
        assert await refused(server, query, additional_headers=OTHER) == "session_not_found"
        with pytest.raises(InvalidStatus):
            async with live_client(server, query=query):
                pass
        async with live_client(server, query=query, additional_headers=OWN) as client:
            await begin_fork(client)
            await client.end()


async def test_openais_library_forks() -> None:
    shared = FakeStore()
    async with keeping(shared, Talker("yes"), KEYS) as server:
        async with live_client(server, additional_headers=OWN) as client:
            stored = await client.start(store=True, instructions="Be brief.")
            await client.end()
        address = f"127.0.0.1:{server.port}/v1"
        openai = AsyncOpenAI(base_url=f"http://{address}", websocket_base_url=f"ws://{address}", api_key="secret")
        async with openai, openai.live.forks.connect(session_id=stored["id"]) as fork:
            await fork.session.start(session={})
            started = await fork.recv()
            assert started.type == "session.started"
            assert started.session.instructions == "Be brief."
            await fork.session.close()
            while (await fork.recv()).type != "session.closed":
                pass


async def test_a_fork_is_refused_what_it_cannot_change() -> None:
    shared = FakeStore()
    async with keeping(shared, Talker("yes")) as server:
        async with live_client(server) as client:
            await client.start(store=True)
            query = fork_of(client.received[0])
            await client.end()
        for wrong in ({"model": "gpt-live-1"}, {"instructions": "no"}, {"audio": {"output": {"voice": "x"}}}):
            async with live_client(server, query=query) as client:
                error = await client.failed("session.start", session=wrong)
                assert error["code"] == "unknown_parameter"
                assert error["param"].startswith(f"session.{next(iter(wrong))}")
                await client.closed()


# The fields


STORED = read_start(
    {
        "model": "gpt-live-1",
        "store": True,
        "audio": {"format": {"type": "audio/pcmu", "rate": 8000}, "output": {"voice": "ada"}},
        "delegation": {"type": "responses", "responses": {"model": "big", "instructions": "Work."}},
    }
)


def test_a_fork_has_the_voice_of_the_stored_session_and_a_format_of_its_own() -> None:
    assert read_fork({}, STORED) == MediaStart(
        model="gpt-live-1",
        store=True,
        audio=type(STORED.audio)(output=STORED.audio.output),  # type: ignore[misc, union-attr]
        delegation=STORED.delegation,
    )
    forked = read_fork({"audio": {"format": {"type": "audio/pcm", "rate": 16_000}}, "store": False}, STORED)
    assert (forked.voice, forked.format.rate, forked.store) == ("ada", 16_000, False)


def test_a_fork_changes_of_the_second_model_what_it_names() -> None:
    changed = {"type": "responses", "responses": {"instructions": "Hurry."}, "acknowledgement_delay_ms": 5}
    delegation: Any = read_fork({"delegation": changed}, STORED).delegation
    assert (delegation.responses.model, delegation.responses.instructions) == ("big", "Hurry.")
    assert delegation.acknowledgement_delay_ms == 5
    delegation = read_fork({"delegation": {"type": "client"}}, STORED).delegation
    assert type(delegation).__name__ == "ClientDelegation"


@pytest.mark.parametrize(
    ("fields", "media", "param"),
    [
        ({"audio": {"format": {"type": "audio/pcm", "rate": 24_000}}}, True, "session.audio"),
        ({"client": {"data_channel": {}}}, False, "session.client"),
        ({"delegation": {"type": "decisions"}}, False, "session.delegation.type"),
        ({"input": []}, False, "session.input"),
        ({"store": 1}, False, "session.store"),
    ],
)
def test_wrong_fields_of_a_fork_are_named(fields: dict[str, Any], media: bool, param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read_fork(fields, STORED, media=media)
    assert refusal.value.param == param
