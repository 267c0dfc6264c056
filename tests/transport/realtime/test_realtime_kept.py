"""``/v1/realtime?session=…``: a conversation goes on at another server of the store, behind the last that was said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import inline_workers
from support.fake_store import FakeBackend, FakeStore, kept_by
from support.inline_workers import inline
from support.live_server import LiveServer, live_server
from support.raw_http import call
from support.realtime_client import RealtimeClient, realtime_client, text_of
from support.scripted_engines import CapableEngine, finished, said, tool_call

from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import FinishReason
from omni_ws.engine.base import AudioOutput, Engine, TextOutput, TranscriptOutput
from omni_ws.errors import ShuttingDown
from omni_ws.service.sessions.session import Session, Sessions
from omni_ws.transport.realtime.session import MAX_HELD_EVENTS, Realtime, RealtimeConnection

KEYS = (ApiKey(name="one", key_sha256=digest("sesame")), ApiKey(name="two", key_sha256=digest("open")))
ONE, TWO = ({"Authorization": f"Bearer {key}"} for key in ("sesame", "open"))


@asynccontextmanager
async def replicas(
    folder: Path, first: Engine, second: Engine, keys: tuple[ApiKey, ...] = (), **fields: Any
) -> AsyncIterator[list[LiveServer]]:
    kept = {"store": f"sqlite:{folder / 'kept' / 'sessions.db'}"}
    async with (
        live_server(first, sessions=kept, keys=keys, **fields) as one,
        live_server(second, sessions=kept, keys=keys, **fields) as other,
    ):
        yield [one, other]


loud, quiet = partial(inline_workers.loud, khz=24), partial(inline_workers.quiet, khz=24)


def history(engine: CapableEngine) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in engine.requests[-1].history]


def created(client: RealtimeClient) -> dict[str, Any]:
    return client.received[0]


def again(client: RealtimeClient, *, token: bool = True) -> str:
    first = created(client)
    return f"session={first['session']['id']}" + (f"&resume_token={first['resume_token']}" if token else "")


async def refused(server: LiveServer, query: str, **options: Any) -> tuple[dict[str, Any], int]:
    """The error that a connection gets in place of a session, and the code that it is closed with."""
    async with realtime_client(server, query=query, created=False, **options) as client:
        error: dict[str, Any] = (await client.receive())["error"]
        return error, (await client.closed())[0]


async def test_the_items_and_the_settings_of_a_session_go_on_at_another_server(tmp_path: Path) -> None:
    first, second = CapableEngine([said("at nine")]), CapableEngine([said("and at ten")])
    async with replicas(tmp_path, first, second) as (one, other):
        async with realtime_client(one) as client:
            await client.update(instructions="Be brief.", output_modalities=["text"])
            asked = await client.say("When?")
            answered = (await client.respond())["output"][0]
            before, query = created(client), again(client)
        async with realtime_client(other, query=query) as client:
            session = created(client)["session"]
            assert (session["id"], session["instructions"]) == (before["session"]["id"], "Be brief.")
            assert session["output_modalities"] == ["text"]
            assert created(client)["item_ids"] == [asked["id"], answered["id"]]
            await client.send("conversation.item.retrieve", item_id=answered["id"])
            assert (await client.until("conversation.item.retrieved"))["item"]["content"] == answered["content"]
            await client.say("And then?")
            response = await client.respond()
            assert text_of(response) == "and at ten"
            assert history(second) == [("user", "When?"), ("assistant", "at nine")]
            assert second.requests[-1].instructions.startswith("Be brief.")
        async with realtime_client(one, query=query) as client:  # again, by the same token
            assert len(created(client)["item_ids"]) == 4


async def test_what_waits_for_an_answer_and_the_calls_of_tools_go_on(tmp_path: Path) -> None:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    calls = [*tool_call("look", "{}"), finished(FinishReason.TOOL_CALLS)]
    first, second = CapableEngine(calls), CapableEngine([said("hot")])
    async with replicas(tmp_path, first, second) as (one, other):
        async with realtime_client(one) as client:
            await client.update(tools=[tool], output_modalities=["text"])
            await client.say("Is it hot?")
            (called,) = (await client.respond())["output"]
            output = {"type": "function_call_output", "call_id": called["call_id"], "output": "90 degrees"}
            await client.send("conversation.item.create", item=output)
            await client.until("conversation.item.done")
            query = again(client)
        async with realtime_client(other, query=query) as client:
            assert text_of(await client.respond()) == "hot"
            (result,) = second.inputs[0]
            assert (result.tool_call_id, result.payload) == (called["call_id"], b"90 degrees")
            deleted = created(client)["item_ids"][0]
            await client.send("conversation.item.delete", item_id=deleted)
            await client.until("conversation.item.deleted")
            await client.say("Sure?")
            await client.respond()
            assert ("user", "Is it hot?") not in history(second)


async def test_a_session_that_is_open_is_a_conflict_and_so_it_is_at_its_own_server(tmp_path: Path) -> None:
    async with replicas(tmp_path, CapableEngine(), CapableEngine()) as (one, other), realtime_client(one) as client:
        for server in (one, other):
            error, code = await refused(server, again(client))
            assert (error["code"], code) == ("session_conflict", 1011)
        await client.say("still here")


async def test_only_its_owner_or_who_has_its_token_goes_on_with_it(tmp_path: Path) -> None:
    async with replicas(tmp_path, CapableEngine(), CapableEngine()) as (one, other):
        async with realtime_client(one) as client:
            session_id, token = created(client)["session"]["id"], created(client)["resume_token"]
        for query in (
            f"session={session_id}",
            f"session={session_id}&resume_token=wrong",
            f"session=sess_none&resume_token={token}",
            "session=",
        ):
            assert (await refused(other, query))[0]["code"] == "session_not_found"
        assert (await call(other.port, "DELETE", f"/v1/sessions/{session_id}")).status == 404
        assert (await call(other.port, "DELETE", f"/v1/sessions/{session_id}?resume_token={token}")).status == 204
        assert (await refused(other, f"session={session_id}&resume_token={token}"))[0]["code"] == "session_not_found"


async def test_with_keys_the_owners_suffices_and_a_secret_of_it_does_not(tmp_path: Path) -> None:
    async with replicas(tmp_path, CapableEngine(), CapableEngine(), KEYS) as (one, other):
        async with realtime_client(one, additional_headers=ONE) as client:
            query = again(client, token=False)
            assert "resume_token" not in created(client)
        assert (await refused(other, query, additional_headers=TWO))[0]["code"] == "session_not_found"
        answer = await call(other.port, "POST", "/v1/realtime/client_secrets", {}, "Authorization: Bearer sesame")
        secret = {"Authorization": f"Bearer {answer.json()['value']}"}
        assert (await refused(other, query, additional_headers=secret))[0]["code"] == "session_not_found"
        async with realtime_client(other, query=query, additional_headers=ONE):
            pass
        async with realtime_client(other, additional_headers=secret) as client:  # a page goes on with its own
            own = again(client)
        async with realtime_client(other, query=own, additional_headers=secret):
            pass


async def test_without_a_store_sessions_are_not_kept() -> None:
    async with live_server(CapableEngine()) as server:
        async with realtime_client(server) as client:
            assert "resume_token" not in created(client)
        error, _ = await refused(server, f"session={created(client)['session']['id']}")
        assert (error["code"], error["param"]) == ("unsupported_parameter", "session")


@pytest.mark.virtual_clock
async def test_the_end_of_an_answer_is_told_once_it_is_kept_and_what_follows_comes_behind_it() -> None:
    shared = FakeStore()
    async with live_server(CapableEngine([said("yes")])) as server:
        server.app.sessions.store = store = kept_by(FakeBackend(shared))
        await store.start()
        async with realtime_client(inline(server)) as client:
            await client.say("Is it?")
            shared.open.clear()
            await client.send("response.create", response={"output_modalities": ["text"]})
            await client.until("response.output_text.delta")
            await client.send(
                "conversation.item.retrieve", item_id=client.seen("conversation.item.done")[0]["item"]["id"]
            )
            await asyncio.sleep(0.1)
            assert not client.seen("response.done")
            shared.open.set()
            await client.until("conversation.item.retrieved")
            assert client.kinds()[-2:] == ["response.done", "conversation.item.retrieved"]
        await store.stop()


@pytest.mark.virtual_clock
async def test_a_client_whose_events_wait_for_the_store_is_not_read_on_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[RealtimeConnection] = []
    keep = RealtimeConnection.keep

    def found(connection: RealtimeConnection, *arguments: Any) -> None:
        connections.append(connection)
        keep(connection, *arguments)

    monkeypatch.setattr(RealtimeConnection, "keep", found)
    shared = FakeStore()
    async with live_server(CapableEngine([said("yes")])) as server:
        server.app.sessions.store = store = kept_by(FakeBackend(shared))
        await store.start()
        async with realtime_client(inline(server)) as client:
            await client.say("Is it?", id="asked")
            shared.open.clear()
            await client.send("response.create", response={"output_modalities": ["text"]})
            await client.until("response.output_text.delta")
            for _ in range(4 * MAX_HELD_EVENTS):
                await client.send("conversation.item.retrieve", item_id="asked")
            await asyncio.sleep(0.1)
            assert len(connections[0]._held or ()) == MAX_HELD_EVENTS + 1
            shared.open.set()
            for _ in range(4 * MAX_HELD_EVENTS):
                await client.until("conversation.item.retrieved")
        await store.stop()


@pytest.mark.virtual_clock
async def test_a_response_that_waited_for_a_transcript_begins_behind_it_also_while_it_is_kept() -> None:
    transcribed = asyncio.Event()
    engine = CapableEngine([lambda: transcribed.wait(), TranscriptOutput("go forward"), said("I go")])
    async with live_server(engine) as server:
        server.app.sessions.store = store = kept_by(FakeBackend(FakeStore()))
        await store.start()
        async with realtime_client(inline(server)) as client:
            await client.update(audio={"input": {"turn_detection": {"type": "server_vad", "create_response": False}}})
            await client.append(loud(320) + quiet(640))
            await client.until("input_audio_buffer.committed")
            await client.send("response.create", response={"output_modalities": ["text"]})
            await server.until(lambda: bool(engine.inputs))
            transcribed.set()
            assert text_of(await client.response()) == "I go"
            kinds = client.kinds()
            completed = kinds.index("conversation.item.input_audio_transcription.completed")
            assert completed < kinds.index("response.created")
        await store.stop()


@pytest.mark.virtual_clock
@pytest.mark.parametrize("speaks", [True, False])
@pytest.mark.parametrize("shuts_down", [True, False])
async def test_what_a_response_was_being_made_to_is_answered_when_the_client_asks_again(
    speaks: bool, shuts_down: bool
) -> None:
    engine = CapableEngine([TranscriptOutput("When?"), said("at"), lambda: asyncio.Event().wait()])
    async with live_server(engine) as server:
        server.app.sessions.store = store = kept_by(FakeBackend(FakeStore()))
        await store.start()
        async with realtime_client(inline(server)) as client:
            await client.update(output_modalities=["text"])
            if speaks:
                await client.append(loud(320) + quiet(640))
            else:
                await client.say("When?")
                await client.send("response.create")
            await client.until("response.output_text.delta")
            if shuts_down:
                server.front_end(Realtime).end_all(ShuttingDown("the server is shutting down"))
                await client.closed()
            query = again(client)
        engine.script = (said("at ten"),)
        async with realtime_client(inline(server), query=query) as client:
            assert len(created(client)["item_ids"]) == 1
            assert text_of(await client.respond()) == "at ten"
            assert b"".join(chunk.payload for chunk in engine.inputs[-1]) == b"When?"
            assert history(engine) == []
        await store.stop()


@pytest.mark.virtual_clock
@pytest.mark.parametrize("answered", [True, False])
async def test_of_an_answer_that_was_interrupted_what_was_heard_goes_on(answered: bool) -> None:
    words = [TextOutput("one two three four"), AudioOutput(np.full(4 * 24_000, 0.25, np.float32), 24_000)]
    engine = CapableEngine([TranscriptOutput("Count."), *words])
    async with live_server(engine) as server:
        server.app.sessions.store = store = kept_by(FakeBackend(FakeStore()))
        await store.start()
        async with realtime_client(inline(server)) as client:
            await client.append(loud(320) + quiet(640))
            await client.response()
            await asyncio.sleep(2.1)  # of four
            await client.append(loud(320) + quiet(640 if answered else 0))
            await client.until("response.done" if answered else "input_audio_buffer.speech_started")
            query = again(client)
        async with realtime_client(inline(server), query=query) as client:
            await client.say("And then?")
            await client.respond()
            assert history(engine)[:2] == [("user", "Count."), ("assistant", "one two")]
        await store.stop()


@pytest.mark.virtual_clock
async def test_a_session_that_is_deleted_while_it_is_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = FakeStore()
    async with live_server(CapableEngine()) as server:
        server.app.sessions.store = store = kept_by(FakeBackend(shared))
        await store.start()
        async with realtime_client(inline(server)) as client:
            query = again(client)
        admit = Sessions.admit

        async def slow(*arguments: Any, session_id: str, **options: Any) -> Session:
            assert await store.delete(session_id, owner=None)
            return await admit(*arguments, session_id=session_id, **options)

        monkeypatch.setattr(Sessions, "admit", slow)
        error, _ = await refused(server, query)
        assert error["code"] == "session_conflict"
        await asyncio.sleep(1)
        assert server.app.sessions.admission.sessions == 0
        await store.stop()


@pytest.mark.virtual_clock
async def test_while_the_store_is_gone_answers_go_on() -> None:
    shared = FakeStore()
    async with live_server(CapableEngine([said("yes")])) as server:
        server.app.sessions.store = store = kept_by(FakeBackend(shared))
        await store.start()
        async with realtime_client(inline(server)) as client:
            query = again(client)
            shared.gone = True
            for _ in range(2):
                await client.say("Is it?")
                assert text_of(await client.respond(output_modalities=["text"])) == "yes"
            error, _ = await refused(server, "session=sess_other&resume_token=x")
            assert error["code"] == "engine_overloaded"
            shared.gone = False
            await asyncio.sleep(5)
        async with realtime_client(server, query=query) as client:
            assert len(created(client)["item_ids"]) == 4
        await store.stop()


@pytest.mark.virtual_clock
async def test_a_session_that_its_owner_deletes_is_closed_with_its_next_answer() -> None:
    shared = FakeStore()
    async with live_server(CapableEngine([said("yes")])) as server:
        server.app.sessions.store = store = kept_by(FakeBackend(shared))
        await store.start()
        other = kept_by(FakeBackend(shared))
        await other.start()
        async with realtime_client(inline(server)) as client:
            assert await other.delete(created(client)["session"]["id"], owner=None)
            await client.say("Is it?")
            await client.send("response.create", response={"output_modalities": ["text"]})
            assert (await client.closed())[0] == 1000
            assert not client.seen("response.done")
        await other.stop()
        await store.stop()
