"""Sessions in a store: what waits for it, who may take them, those that a server loses, and their deletion."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_store import FakeBackend, FakeStore
from support.live_server import LiveServer, live_server, read
from support.native_client import NativeClient, connecting, frame_bytes, native_client, raw_websocket, text
from support.raw_http import call
from websockets.frames import Close, Opcode

from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import FinishReason, ToolCallFragment, Usage
from omni_ws.engine.base import AudioOutput, Finished, TextOutput, ToolCallOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.errors import SessionTimeout, ShuttingDown
from omni_ws.service.sessions import factory, session
from omni_ws.service.store import session_store
from omni_ws.service.store.records import ChangeOutcome, Sealer
from omni_ws.service.store.session_store import SessionStore

pytestmark = pytest.mark.virtual_clock

KEEPS: dict[str, Any] = {"resume_grace_sec": 30}
ALICE, BOB = (ApiKey(name=name, key_sha256=digest(name)) for name in ("alice", "bob"))


LIMITS: dict[str, Any] = {"max_age_sec": 86_400, "max_bytes": 1 << 30, "slow_sec": 0.25}


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    """The store of all servers of a test."""
    store = FakeStore()

    def configured_store(config: Any, *, budget: Any, metrics: Any) -> SessionStore:
        return SessionStore(FakeBackend(store), sealer=Sealer(), budget=budget, metrics=metrics, **LIMITS)

    monkeypatch.setattr(factory, "configured_store", configured_store)
    return store


def query(client: NativeClient, token: str | None = None, last_output: int | None = None) -> str:
    last_output = client.guarantees.next_output - 1 if last_output is None else last_output
    session_id = client.created["session_id"]
    return f"?session_id={session_id}&resume_token={token or client.created['resume_token']}&last_output={last_output}"


@contextlib.asynccontextmanager
async def resumed(server: LiveServer, before: NativeClient, **options: Any) -> AsyncIterator[NativeClient]:
    """The client ``before`` over another connection, to any server."""
    wanted = query(before, options.pop("token", None), options.pop("last_output", None))
    async with connecting(server, wanted, **options) as connection:
        client = NativeClient(connection)
        client.guarantees = before.guarantees
        frame = await client.receive()
        assert frame["type"] == "session_resumed", frame
        client.created = {**before.created, "resume_token": frame["resume_token"], "resumed": frame}
        client.next_sequence_id = frame["next_sequence_id"]
        yield client


def authorized(name: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Bearer {name}"}}


async def refused(server: LiveServer, wanted: str, param: str, **options: Any) -> None:
    """A client that comes with this query gets a fresh session, and is told so."""
    async with native_client(server, query=wanted, greeted=False, **options) as client:
        error = await client.error()
        assert (error["code"], error["param"]) == ("resync_required", param)
        assert (await client.receive())["type"] == "session_created"
        await client.connection.close()


def keeps(server: LiveServer) -> bool:
    store = server.app.sessions.store
    return store is not None and not store.degraded


async def quiet(client: NativeClient) -> list[str]:
    """The kinds of what comes before the answer to a ping that is sent now."""
    before = len(client.frames)
    await client.barrier()
    return [one["type"] for one in client.frames[before:-1]]


def pieces(count: int) -> list[Any]:
    """Audio of an answer, of 20 ms each."""
    return [AudioOutput(np.zeros(480, dtype=np.float32), 24_000) for _ in range(count)]


# what waits


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is never slow: time jumps while a test holds it up."""
    monkeypatch.setitem(LIMITS, "slow_sec", 1e6)


@pytest.mark.usefixtures("patient")
async def test_nothing_is_told_before_it_is_kept_but_audio(shared: FakeStore) -> None:
    go_on = asyncio.Event()
    engine = ScriptedEngine([TextOutput("one "), *pieces(1), go_on.wait, *pieces(1), TextOutput("two"), *pieces(1)])
    async with live_server(engine, streaming_input=KEEPS) as server, native_client(server) as client:
        await client.configure(modalities=["text", "audio"], start_policy="on_end_only")
        await client.say("hello")
        await client.until("output_chunk")
        assert (await client.until("output_chunk"))["modality"] == "audio"
        await asyncio.sleep(1)
        assert set(await quiet(client)) <= {"input_ack"}
        shared.open.clear()
        go_on.set()
        assert (await client.until("output_chunk"))["modality"] == "audio"  # waits for nothing
        await client.chunk("more")
        text = asyncio.create_task(client.receive())
        await asyncio.sleep(1)
        assert not text.done()  # neither the text, nor the audio behind it, nor the acknowledgement
        shared.open.set()
        assert (await text)["text"] == "two"
        assert (await client.until("output_chunk"))["modality"] == "audio"
        await client.until("output_chunk")


@pytest.mark.usefixtures("patient")
async def test_a_client_knows_no_token_that_the_store_does_not(shared: FakeStore) -> None:
    async with live_server(streaming_input=KEEPS) as server:
        shared.open.clear()
        async with native_client(server, greeted=False) as client:
            created = asyncio.create_task(client.receive())
            await asyncio.sleep(1)
            assert not created.done()
            shared.open.set()
            client.created = await created
            assert client.created["type"] == "session_created"
            shared.open.clear()
            wanted = query(client)
            async with connecting(server, wanted) as connection:
                again = NativeClient(connection)
                waiting = asyncio.create_task(again.receive())
                await asyncio.sleep(1)
                assert not waiting.done()
                shared.open.set()
                assert (await waiting)["type"] == "session_resumed"


@pytest.mark.usefixtures("patient")
async def test_what_a_store_lost_is_kept_anew_before_it_is_told(
    shared: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, ends = asyncio.Event(), asyncio.Event()
    engine = ScriptedEngine([TextOutput("one "), go_on.wait, TextOutput("two"), ends.wait])
    commit = FakeBackend.commit

    async def once(backend: FakeBackend, changes: Any) -> Any:
        outcomes = await commit(backend, changes)
        if ChangeOutcome.GAP in outcomes:
            shared.open.clear()
        return outcomes

    monkeypatch.setattr(FakeBackend, "commit", once)
    async with live_server(engine, streaming_input=KEEPS) as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only", modalities=["text"])
        await client.say("hello")
        assert (await client.until("output_chunk"))["text"] == "one "
        await asyncio.sleep(1)
        await client.barrier()
        shared.lose_everything()
        go_on.set()
        await server.until(lambda: not shared.open.is_set(), "the loss to be noticed")
        told = asyncio.create_task(client.until("output_chunk"))
        await asyncio.sleep(1)
        assert not told.done()
        shared.open.set()
        assert (await told)["text"] == "two"
        (record,) = shared.records.values()
        assert not record.gone
        ends.set()
        await client.answer()


# who may take it


async def test_another_server_goes_on_with_the_conversation(shared: FakeStore) -> None:
    async with (
        live_server(streaming_input=KEEPS) as first,
        live_server(streaming_input=KEEPS) as second,
        native_client(first) as client,
    ):
        await client.configure(start_policy="on_end_only", modalities=["text"])
        await client.say("one")
        assert (await client.answer()).text == "one"
        await client.chunk("two ")
        while (await client.until("input_ack"))["next_sequence_id"] < 2:
            pass
        async with resumed(second, client) as again:
            assert again.next_sequence_id == 2
            await client.chunk("too late", number=2)
            assert await client.closed() == 4409
            await again.say("three")
            assert (await again.answer()).text == "two three"
            assert first.sessions == 0
            assert second.app.sessions.metrics.resumes.labels("taken_over")._value.get() == 1
        assert list(shared.records) == [client.created["session_id"]]


@pytest.mark.usefixtures("patient")
async def test_whoever_comes_back_may_lose_the_answer_to_that_too(shared: FakeStore) -> None:
    """The token that was shown at the second server is good at the first, which does not know yet that it lost."""
    async with (
        live_server(streaming_input=KEEPS) as first,
        live_server(streaming_input=KEEPS) as second,
        native_client(first) as client,
    ):
        await client.configure(start_policy="on_end_only", modalities=["text"])
        record = shared.records[client.created["session_id"]]
        shared.open.clear()
        async with connecting(second, query(client)) as lost:
            await second.until(lambda: second.sessions == 1, "the session at the second server")
            lost.transport.abort()
        shared.open.set()
        await second.until(lambda: record.fence == 2 and record.away_since is not None, "the loss of its client")
        async with resumed(first, client) as third:
            await third.say("hello")
            assert (await third.answer()).text == "hello"
            # Now the client was heard with its new token.
            await refused(second, query(client, last_output=-1), "session_id")


LATE = {
    "elsewhere": ["is gone", "is gone, and was seen before", "has closed", "is mute", "answers"],
    "there": ["is gone", "has closed", "is mute", "answers"],
}


@pytest.mark.parametrize(("where", "late_client"), [(where, late) for where, some in LATE.items() for late in some])
async def test_an_attempt_that_was_given_up_takes_no_session(
    shared: FakeStore, monkeypatch: pytest.MonkeyPatch, where: str, late_client: str
) -> None:
    """A client that got no answer in time goes on by another connection; then a slow server looks at the first.

    That may be the same server, as a front may have tried others before.
    """
    take, looks, goes_on = FakeBackend.take, asyncio.Event(), asyncio.Event()

    async def slowly(backend: FakeBackend, session_id: str, **options: Any) -> Any:
        looks.set()
        await goes_on.wait()
        return await take(backend, session_id, **options)

    monkeypatch.setattr(FakeBackend, "take", slowly)
    async with (
        live_server(streaming_input=KEEPS) as first,
        live_server(streaming_input=KEEPS) as other,
        native_client(first) as client,
        contextlib.AsyncExitStack() as stack,
    ):
        slow = first if where == "there" else other
        await client.barrier()
        wanted = query(client)
        (record,) = shared.records.values()
        if late_client.endswith("before"):
            late = await stack.enter_async_context(raw_websocket(slow, query=wanted))
            await looks.wait()
        current = await stack.enter_async_context(raw_websocket(first, query=wanted))
        await current.until("session_resumed")  # and does not answer the ping behind it, so its token stays good
        assert await client.closed() == 4409
        goes_on.set()
        if not late_client.endswith("before"):
            late = await stack.enter_async_context(raw_websocket(slow, query=wanted))
        assert await late.frame() == (Opcode.PING, b"call")
        if late_client == "answers":
            await late.send(frame_bytes(Opcode.PONG, b"call"))
            await late.until("session_resumed")
            (living,) = slow.native._live._living.values()
            await late.send(frame_bytes(Opcode.PING))
            while (await late.frame())[0] is not Opcode.PONG:
                pass
            assert living.session.spent_token is not None  # that pong does not tell that it has its new token
        elif late_client.startswith("is gone"):
            late.reset()
            await slow.until(lambda: len(slow.connections) == (slow is first), "its absence")
        elif late_client == "has closed":  # as a page does that comes back
            sent = text("ping", t=0) + text("ping", t="a" * 200)
            await late.send(sent + frame_bytes(Opcode.CLOSE, Close(4000, "").serialize()))
            await slow.until(lambda: len(slow.connections) == (slow is first), "its absence")
        else:
            assert await late.close_code() == 4408
        has_it, server = (late, slow) if late_client == "answers" else (current, first)
        await has_it.send(text("ping", t=1))
        await has_it.until("pong")
        assert record.fence == (1 if server is first else 2)
        await has_it.send(frame_bytes(Opcode.CLOSE, Close(1000, "").serialize()))
        await server.until(lambda: not server.sessions, "its end")


async def test_an_attempt_that_was_given_up_begins_no_session(
    shared: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, looks, goes_on = FakeBackend.find, asyncio.Event(), asyncio.Event()

    async def slowly(backend: FakeBackend, session_id: str) -> Any:
        looks.set()
        await goes_on.wait()
        return await find(backend, session_id)

    monkeypatch.setattr(FakeBackend, "find", slowly)
    async with live_server(streaming_input=KEEPS) as server:
        async with raw_websocket(server, query="?session_id=sess_x&resume_token=x") as late:
            await looks.wait()
            (connection,) = server.connections
            late.reset()
            await server.until(lambda: not connection.is_open, "its absence")
            goes_on.set()
            await server.until(lambda: not server.connections, "the end of the attempt")
        assert (server.sessions, server.app.sessions.metrics.resumes.labels("refused")._value.get()) == (0, 1)


async def test_who_is_asked_again_answers_again(shared: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other server takes the session while the client that came back to this one is asked."""
    take, went = FakeBackend.take, 0

    async def overtaken(backend: FakeBackend, session_id: str, **options: Any) -> Any:
        nonlocal went
        if went < 2:
            went += 1
            record.clear = dataclasses.replace(record.clear, tokens=(bytes([went]), *record.clear.tokens))
        return await take(backend, session_id, **options)

    async with (
        live_server(streaming_input=KEEPS) as first,
        live_server(streaming_input=KEEPS) as second,
        native_client(first) as client,
    ):
        await client.chunk("one ")
        await client.barrier()
        record: Any = shared.records[client.created["session_id"]]
        monkeypatch.setattr(FakeBackend, "take", overtaken)
        async with raw_websocket(second, query=query(client), behind=text("ping", t=1)) as again:
            for _ in range(2):
                assert await again.frame() == (Opcode.PING, b"call")
                await again.send(frame_bytes(Opcode.PONG, b"call"))
            await again.until("session_resumed")
            assert (await again.until("pong"))["t"] == 1  # what was sent with the handshake
            await again.send(text("ping", t=2))
            assert (await again.until("pong"))["t"] == 2
            await again.send(frame_bytes(Opcode.CLOSE, Close(1000, "").serialize()))
            await second.until(lambda: not second.sessions, "its end")


async def test_who_is_overtaken_here_is_asked_again(shared: FakeStore) -> None:
    async with (
        live_server(streaming_input=KEEPS) as server,
        native_client(server) as client,
        contextlib.AsyncExitStack() as stack,
    ):
        await client.barrier()
        wanted = query(client)
        lost = await stack.enter_async_context(raw_websocket(server, query=wanted))
        await lost.until("session_resumed")
        waiting = [await stack.enter_async_context(raw_websocket(server, query=wanted)) for _ in range(3)]
        for each in waiting:
            assert await each.frame() == (Opcode.PING, b"call")
        one, other, late = waiting
        await one.send(frame_bytes(Opcode.PONG, b"call"))
        await one.until("session_resumed")
        await other.send(frame_bytes(Opcode.PONG, b"call"))
        assert await other.frame() == (Opcode.PING, b"call")
        await other.send(frame_bytes(Opcode.PONG, b"call"))
        await other.until("session_resumed")
        await other.send(text("ping", t=1))  # so it has its new token
        await other.until("pong")
        await late.send(frame_bytes(Opcode.PONG, b"call"))
        assert (await late.until("error"))["error"]["code"] == "session_timeout"
        assert server.app.sessions.metrics.resumes.labels("refused")._value.get() == 1
        await other.send(text("ping", t=2))
        await other.until("pong")
        await other.send(frame_bytes(Opcode.CLOSE, Close(1000, "").serialize()))
        await server.until(lambda: not server.sessions, "its end")


async def test_only_its_own_client_gets_a_session(shared: FakeStore) -> None:
    keys = (ALICE, BOB)
    alice, bob = (authorized(name) for name in ("alice", "bob"))
    async with (
        live_server(streaming_input=KEEPS, keys=keys) as first,
        live_server(streaming_input=KEEPS, keys=keys) as second,
        native_client(first, **alice) as client,
    ):
        await client.barrier()
        await refused(second, query(client), "session_id", **bob)
        await refused(second, query(client, "a" * 32), "session_id", **alice)
        client.created["session_id"], own = "sess_unknown", client.created["session_id"]
        await refused(second, query(client), "session_id", **alice)
        client.created["session_id"] = own
        assert await quiet(client) == []  # it is still there
        async with resumed(second, client, **alice):
            pass


@pytest.mark.usefixtures("patient")
async def test_of_two_that_come_at_once_one_has_the_session(shared: FakeStore) -> None:
    async with (
        live_server(streaming_input=KEEPS) as first,
        live_server(streaming_input=KEEPS) as second,
        native_client(first) as client,
    ):
        await client.barrier()
        shared.open.clear()
        async with connecting(second, query(client)) as one, connecting(second, query(client)) as other:
            await second.until(lambda: second.sessions == 1, "the session at the second server")
            for _ in range(20):
                await asyncio.sleep(0)
            shared.open.set()
            clients = [NativeClient(one), NativeClient(other)]
            frames = await asyncio.gather(*(each.receive() for each in clients))
            assert [frame["type"] for frame in frames] == ["session_resumed"] * 2
            assert await clients[0].closed() == 4409
            await client.chunk("too late")
            assert await client.closed() == 4409
            assert second.sessions == 1


async def test_outputs_that_there_never_were_begin_a_fresh_session(shared: FakeStore) -> None:
    async with (
        live_server(streaming_input=KEEPS) as first,
        live_server(streaming_input=KEEPS) as second,
        native_client(first) as client,
    ):
        await client.configure(start_policy="on_end_only", modalities=["text"])
        await client.say("one")
        await client.answer()
        last_output = client.guarantees.next_output  # one more than there was
        await refused(second, query(client, last_output=last_output), "session_id")


async def test_a_record_that_cannot_be_read_begins_a_fresh_session(shared: FakeStore) -> None:
    async with (
        live_server(streaming_input=KEEPS) as first,
        live_server(streaming_input=KEEPS) as second,
        native_client(first) as client,
    ):
        await client.barrier()
        (record,) = shared.records.values()
        record.snapshot = record.snapshot[:-10]
        await refused(second, query(client, last_output=-1), "session_id")


async def test_a_store_that_does_not_answer_is_asked_again_later(shared: FakeStore) -> None:
    async with (
        live_server(streaming_input=KEEPS) as first,
        live_server(streaming_input=KEEPS) as second,
        native_client(first) as client,
    ):
        await client.barrier()
        shared.gone = True
        async with native_client(second, query=query(client), greeted=False) as again:
            error = await again.error()
            assert (error["code"], error["retryable"]) == ("engine_overloaded", True)
            await again.closed()
        shared.gone = False
        async with resumed(second, client):
            pass


async def test_a_server_without_room_leaves_the_session_to_others(shared: FakeStore) -> None:
    async with (
        live_server(streaming_input=KEEPS) as first,
        live_server(streaming_input=KEEPS, limits={"max_sessions": 1}) as full,
        native_client(first) as client,
        native_client(full) as other,
    ):
        await other.chunk("content")
        await other.barrier()
        async with native_client(full, query=query(client), greeted=False) as again:
            assert (await again.error())["code"] == "engine_overloaded"
            await again.closed()
        assert await quiet(client) == []


@pytest.mark.parametrize("where", ["elsewhere", "back at its server"])
async def test_who_waited_for_room_takes_nothing_with_a_token_of_before(
    shared: FakeStore, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async with (
        live_server(streaming_input=KEEPS) as first,
        live_server(streaming_input=KEEPS) as second,
        live_server(streaming_input=KEEPS) as full,
        native_client(first) as client,
    ):
        admission = full.app.sessions.admission
        waits, has_room = asyncio.Event(), asyncio.Event()
        room = admission.room

        async def waited_for(*arguments: Any, **options: Any) -> None:
            waits.set()
            await has_room.wait()
            await room(*arguments, **options)

        monkeypatch.setattr(admission, "room", waited_for)
        before, session_id = query(client), client.created["session_id"]

        def tokens() -> tuple[bytes, ...]:
            clear = shared.records[session_id].clear
            assert clear is not None
            return clear.tokens

        (old,) = tokens()
        client.gone()
        async with native_client(full, query=before, greeted=False) as late:
            await waits.wait()
            async with resumed(second if where == "elsewhere" else first, client) as again:
                await again.barrier()
                await full.until(lambda: old not in tokens(), "the end of the token of before")
                has_room.set()
                assert (await late.error())["code"] == "resync_required"
                await again.chunk("still here")
                await again.barrier()


async def test_a_session_that_ends_is_not_taken_from_the_store(
    shared: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        await client.barrier()
        (living,) = server.native._live._living.values()
        session = living.session
        stopped = asyncio.Event()
        stop = session._stop

        async def slowly(answers: Any) -> None:
            await stop(answers)
            await stopped.wait()

        monkeypatch.setattr(session, "_stop", slowly)
        session.end(SessionTimeout("silent"))
        (record,) = shared.records.values()
        await refused(server, query(client), "session_id")
        assert record.fence == 1
        stopped.set()
        await server.until(lambda: record.gone, "its deletion")


# an answer that was being made


async def test_an_answer_goes_on_at_another_server(shared: FakeStore) -> None:
    """Text, audio and the fragments of a call are told once, wherever the client lost its server."""
    go_on = [asyncio.Event(), asyncio.Event()]
    call_parts = [ToolCallOutput(ToolCallFragment(0, "call_1", "find", '{"a"')), ToolCallOutput(_arguments(": 1}"))]
    script = [TextOutput("one "), *pieces(2), call_parts[0], lambda: None, *pieces(1), call_parts[1], TextOutput("two")]

    def engine(number: int) -> ScriptedEngine:
        return ScriptedEngine([*script[:4], go_on[number].wait, *script[5:]])

    async with (
        live_server(engine(0), streaming_input=KEEPS, still_answers=False) as first,
        live_server(engine(1), streaming_input=KEEPS, still_answers=False) as second,
        native_client(first) as client,
    ):
        await client.configure(start_policy="on_end_only", modalities=["text", "audio"])
        await client.say("hello")
        heard = [await client.until("output_chunk") for _ in range(4)]
        assert [one["modality"] for one in heard] == ["text", "audio", "audio", "tool_call"]
        async with resumed(second, client) as again:
            go_on[1].set()
            heard += (await again.answer()).chunks
        assert "".join(one.get("text", "") for one in heard) == "one two"
        assert [one["start_ms"] for one in heard if one["modality"] == "audio"] == [0, 20, 40]
        parts = [one["arguments"] for one in heard if one["modality"] == "tool_call"]
        assert "".join(parts) == '{"a": 1}'
        assert [one["sequence_id"] for one in heard] == list(range(len(heard)))


def _arguments(text: str) -> ToolCallFragment:
    return ToolCallFragment(0, "", "", text)


# losing and ending


async def test_a_server_that_slept_says_nothing_more(shared: FakeStore) -> None:
    go_on = asyncio.Event()
    engine = ScriptedEngine([TextOutput("one "), go_on.wait, TextOutput("two")])
    async with (
        live_server(engine, streaming_input=KEEPS) as slept,
        live_server(ScriptedEngine([TextOutput("one "), TextOutput("two")]), streaming_input=KEEPS) as awake,
        native_client(slept) as client,
    ):
        await client.configure(start_policy="on_end_only", modalities=["text"])
        await client.say("hello")
        await client.until("output_chunk")
        shared.open.clear()  # as if no commit of it was ever done
        await client.chunk("not acknowledged")
        shared.open.set()
        async with resumed(awake, client) as again:
            go_on.set()  # it wakes up, and makes more of the answer
            assert (await again.answer()).text == "two"
            assert await client.closed() == 4409
        told = [one["type"] for one in client.frames]
        assert told.count("output_chunk") == 1
        (record,) = shared.records.values()
        assert record.fence == 2


@pytest.mark.parametrize("store", ["works", "is gone"])
async def test_a_server_that_slept_takes_its_session_back(shared: FakeStore, store: str) -> None:
    """Its own copy knows nothing of the token that the other server gave."""
    async with (
        live_server(streaming_input=KEEPS) as slept,
        live_server(streaming_input=KEEPS) as awake,
        native_client(slept) as client,
    ):
        await client.configure(start_policy="on_end_only", modalities=["text"])
        async with resumed(awake, client) as again:
            await again.say("one")
            assert (await again.answer()).text == "one"
            if store == "is gone":
                shared.gone = True
                async with native_client(slept, query=query(again), greeted=False) as early:
                    assert (await early.error())["code"] == "engine_overloaded"  # to be asked again
                shared.gone = False
                for server in (slept, awake):
                    await server.until(partial(keeps, server), "its store")
            async with resumed(slept, again) as back:
                await back.say("two")
                assert (await back.answer()).text == "two"
                assert await client.closed() == 4409


async def test_what_ends_is_deleted(shared: FakeStore) -> None:
    async with live_server(streaming_input=KEEPS) as server:
        async with native_client(server) as client:
            await client.barrier()
            (record,) = shared.records.values()
            assert not record.gone
            await client.connection.close()
            await server.until(lambda: record.gone, "its deletion")
        async with native_client(server) as client:
            await client.barrier()
            record = shared.records[client.created["session_id"]]
            client.gone()
            await server.until(lambda: record.away_since is not None, "its absence")
            assert not record.gone
            await asyncio.sleep(KEEPS["resume_grace_sec"])
            await server.until(lambda: record.gone, "its deletion after the grace period")


async def test_a_drain_hands_over_at_once(shared: FakeStore) -> None:
    go_on = asyncio.Event()
    engine = ScriptedEngine([TextOutput("one "), go_on.wait, TextOutput("two")])
    async with (
        live_server(engine, streaming_input=KEEPS, still_answers=False) as first,
        live_server(ScriptedEngine([TextOutput("one "), TextOutput("two")]), streaming_input=KEEPS) as second,
        native_client(first) as client,
    ):
        await client.configure(start_policy="on_end_only", modalities=["text"])
        await client.say("hello")
        await client.until("output_chunk")
        began = asyncio.get_running_loop().time()
        await first.running.drain(30)
        assert asyncio.get_running_loop().time() - began < 1
        closing = await client.until("session_closing")
        assert closing == {
            "type": "session_closing",
            "reason": "shutting_down",
            "retryable": True,
            "time_left_ms": 0,
            "resume": "now",
        }
        assert await client.closed() == 1012
        (record,) = shared.records.values()
        assert (record.holder, record.gone) == ("", False)
        async with resumed(second, client) as again:
            assert (await again.answer()).text == "two"


@pytest.mark.parametrize("how", ["handed over", "taken"])
async def test_what_goes_on_elsewhere_counts_there_alone(shared: FakeStore, how: str) -> None:
    go_on = asyncio.Event()
    end = Finished(FinishReason.STOP, Usage(input_audio_ms=100))
    script = [TextOutput("one "), *pieces(4), end]
    options: dict[str, Any] = {"streaming_input": KEEPS, "still_answers": False}
    async with (
        live_server(ScriptedEngine([*script[:3], go_on.wait, script[3], asyncio.Event().wait]), **options) as first,
        live_server(ScriptedEngine(script), **options) as second,
        native_client(first) as client,
    ):
        await client.configure(start_policy="on_end_only", modalities=["text", "audio"])
        await client.chunk(bytes(3200), modality="audio", end=True)
        for _ in range(3):
            await client.until("output_chunk")
        if how == "handed over":
            await first.running.drain(30)
            await client.closed()
        async with resumed(second, client) as again:
            await again.answer()
            go_on.set()  # the first writes on, and so learns that it lost the session
        await first.until(lambda: first.sessions == 0)
        counted = [read(server) for server in (first, second)]
    finals = [one["finish_reason"] for server in counted for one in server.labels("requests_total")]
    assert finals == ["stop"]
    assert sum(server.value("input_audio_seconds_total") for server in counted) == pytest.approx(0.1)
    assert sum(server.value("output_audio_seconds_total") for server in counted) == pytest.approx(0.08)


async def test_a_second_signal_hands_over_too(shared: FakeStore) -> None:
    async with live_server(streaming_input=KEEPS, still_answers=False) as server, native_client(server) as client:
        await client.barrier()
        server.app.end_all(ShuttingDown("the server is shutting down"))
        assert (await client.until("session_closing"))["resume"] == "now"
        assert await client.closed() == 1012
        assert not shared.records[client.created["session_id"]].gone


# a store that is out of order


@pytest.mark.parametrize("how", ["slow", "full", "gone"])
async def test_sessions_go_on_without_their_store(shared: FakeStore, how: str) -> None:
    async with (
        live_server(streaming_input=KEEPS) as first,
        live_server(streaming_input=KEEPS) as second,
        native_client(first) as client,
    ):
        await client.configure(start_policy="on_end_only", modalities=["text"])
        shared.full, shared.gone, shared.delay_sec = how == "full", how == "gone", 2.0 * (how == "slow")
        await client.say("one")
        told = await client.until("session_updated")
        assert told["resumable"] is False
        assert (await client.until("input_ack"))["resumable"] is False
        await client.say("two")  # while it lasts
        assert (await client.answer()).text in ("one", "two")
        health = (await call(first.port, "GET", "/health")).json()
        assert (health["status"], health["store"]["status"]) == ("degraded", "degraded")
        await first.running.app.front_ends[0].wait_ended()
        shared.full = shared.gone = False
        shared.delay_sec = 0.0
        assert (await client.until("session_updated"))["resumable"] is True
        assert (await client.until("input_ack"))["resumable"] is True
        assert (await call(first.port, "GET", "/health")).json()["status"] == "ok"
        await client.say("three")
        await client.answer()
        async with resumed(second, client) as again:
            await again.say("four")
            assert (await again.answer()).text == "four"


async def test_a_session_that_is_written_before_it_is_asked_is_told_that_it_is_kept(
    shared: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that works again asks a few sessions at a time; the others may have something to write before."""
    asked: list[str] = []
    monkeypatch.setattr(session_store, "_ask", lambda lease: asked.append(lease.session_id))
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        shared.gone = True
        await client.chunk("fails")
        assert (await client.until("session_updated"))["resumable"] is False
        shared.gone = False
        await server.until(lambda: asked == [client.created["session_id"]], "the question")
        await client.configure(start_policy="on_end_only")
        while (await client.until("session_updated")).get("resumable") is not True:
            pass


async def test_a_session_that_begins_without_the_store_is_told_so(shared: FakeStore) -> None:
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as first:
        shared.gone = True
        await first.chunk("hello")
        assert (await first.until("session_updated"))["resumable"] is False
        async with native_client(server) as second:
            assert (await second.until("session_updated"))["resumable"] is False
            shared.gone = False
            assert (await second.until("session_updated"))["resumable"] is True


async def test_whoever_comes_back_while_the_store_fails_is_told_so(
    shared: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = FakeBackend.take

    async def last(backend: FakeBackend, session_id: str, **options: Any) -> Any:
        contents = await take(backend, session_id, **options)
        shared.gone = True
        return contents

    monkeypatch.setattr(FakeBackend, "take", last)
    async with (
        live_server(streaming_input=KEEPS) as first,
        live_server(streaming_input=KEEPS) as second,
        native_client(first) as client,
    ):
        await client.barrier()
        async with resumed(second, client) as again:
            assert (await again.until("session_updated"))["resumable"] is False
            shared.gone = False
            assert (await again.until("session_updated"))["resumable"] is True


async def test_what_was_told_of_the_store_is_not_told_again_elsewhere(shared: FakeStore) -> None:
    async with (
        live_server(streaming_input=KEEPS) as first,
        live_server(streaming_input=KEEPS) as second,
        native_client(first) as client,
    ):
        shared.gone = True
        await client.chunk("fails")
        assert (await client.until("session_updated"))["resumable"] is False
        shared.gone = False
        assert (await client.until("session_updated"))["resumable"] is True
        await client.barrier()
        async with resumed(second, client) as again:
            assert "session_updated" not in await quiet(again)


async def test_whoever_was_away_is_told_what_became_of_the_store(shared: FakeStore) -> None:
    """What a client was told, or should have been, is lost with its connection."""
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        client.gone()
        await server.until(lambda: server.native.sessions_away == 1, "its absence")
        shared.gone = True
        async with native_client(server) as other:
            await other.chunk("fails")
            assert (await other.until("session_updated"))["resumable"] is False
            async with resumed(server, client) as again:
                assert (await again.until("session_updated"))["resumable"] is False
                again.gone()
                await server.until(lambda: server.native.sessions_away == 1, "its absence")
                shared.gone = False
                assert (await other.until("session_updated"))["resumable"] is True
                async with resumed(server, again) as last:
                    while not (await last.until("session_updated"))["resumable"]:
                        pass  # this session's record comes a little later than the other's


async def test_a_drain_without_the_store_waits_for_answers(shared: FakeStore) -> None:
    go_on = asyncio.Event()
    engine = ScriptedEngine([TextOutput("one "), go_on.wait, TextOutput("two")])
    async with (
        live_server(engine, streaming_input=KEEPS, still_answers=False) as server,
        native_client(server) as client,
    ):
        await client.configure(start_policy="on_end_only", modalities=["text"])
        await client.say("hello")
        await client.until("output_chunk")
        shared.gone = True
        await client.chunk("more")
        assert (await client.until("session_updated"))["resumable"] is False
        draining = asyncio.create_task(server.running.drain(30))
        assert "resume" not in await client.until("session_closing")
        go_on.set()
        assert (await client.until("output_chunk"))["text"] == "two"
        await draining


# length


@pytest.mark.parametrize("away_sec", [15, 90])
async def test_the_length_of_a_session_counts_from_its_beginning(
    shared: FakeStore, monkeypatch: pytest.MonkeyPatch, away_sec: float
) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(session, "time", SimpleNamespace(time=loop.time))
    keys = (ApiKey(name="alice", key_sha256=digest("alice"), max_session_sec=60),)
    async with (
        live_server(streaming_input=KEEPS, keys=keys, still_answers=False) as first,
        live_server(streaming_input=KEEPS, keys=keys, still_answers=False) as second,
        native_client(first, **authorized("alice")) as client,
    ):
        begun = loop.time()
        await client.barrier()
        await asyncio.sleep(30)
        # As if its server were gone: the record stays.
        record = copy.deepcopy(shared.records[client.created["session_id"]])
        await asyncio.sleep(away_sec)
        record.fence += 1
        shared.records[client.created["session_id"]] = record
        async with resumed(second, client, **authorized("alice")) as again:
            closing = await again.until("session_closing")
            left = 10 if away_sec == 15 else 0
            assert (closing["reason"], closing["time_left_ms"]) == ("rate_limited", pytest.approx(left * 1000, abs=100))
            assert await again.closed() == 4429
            assert loop.time() - begun == pytest.approx(max(60, 30 + away_sec), abs=0.5)


# deletion


@pytest.mark.parametrize(("where", "how"), [("here", "at rest"), ("elsewhere", "at rest"), ("elsewhere", "at work")])
async def test_its_owner_deletes_a_session(shared: FakeStore, where: str, how: str) -> None:
    keys = (ALICE, BOB)
    alice, bob = "Authorization: Bearer alice", "Authorization: Bearer bob"
    async with (
        live_server(streaming_input=KEEPS, keys=keys, still_answers=False) as first,
        live_server(streaming_input=KEEPS, keys=keys, still_answers=False) as second,
        native_client(first, additional_headers={"Authorization": "Bearer alice"}) as client,
    ):
        await client.configure(start_policy="on_end_only", instructions="personal")
        session_id = client.created["session_id"]
        asked = first if where == "here" else second
        path, token = f"/v1/sessions/{session_id}", client.created["resume_token"]
        for headers, found in ((bob, f"{path}?resume_token={token}"), (alice, "/v1/sessions/sess_unknown")):
            answer = await call(asked.port, "DELETE", found, None, headers)
            assert (answer.status, answer.json()["error"]["code"]) == (404, "session_not_found")
        assert (await call(asked.port, "DELETE", path)).status == 401
        assert await quiet(client) == []
        assert (await call(asked.port, "DELETE", path, None, alice)).status == 204
        record = shared.records[session_id]
        assert (record.gone, record.snapshot, record.log) == (True, b"", [])
        if how == "at work":
            with contextlib.suppress(Exception):
                await client.chunk("more")  # its server learns of it as it writes, or else a moment later
        closing = await client.until("session_closing")
        assert (closing["reason"], closing["retryable"]) == ("deleted", False)
        assert await client.closed() == 4404
        assert (await call(asked.port, "DELETE", path, None, alice)).status == 404


@pytest.mark.parametrize("where", ["here", "elsewhere"])
async def test_without_keys_its_token_deletes_a_session(shared: FakeStore, where: str) -> None:
    async with (
        live_server(streaming_input=KEEPS, still_answers=False) as first,
        live_server(streaming_input=KEEPS, still_answers=False) as second,
        native_client(first) as client,
    ):
        await client.barrier()
        asked = first if where == "here" else second
        path = f"/v1/sessions/{client.created['session_id']}"
        for wrong in (path, f"{path}?resume_token=wrong"):
            assert (await call(asked.port, "DELETE", wrong)).status == 404
        assert (await call(asked.port, "DELETE", f"{path}?resume_token={client.created['resume_token']}")).status == 204
        assert shared.records[client.created["session_id"]].gone


@pytest.mark.parametrize("with_key", [True, False])
async def test_a_server_that_does_not_know_that_it_lost_a_session_deletes_it_too(
    shared: FakeStore, with_key: bool
) -> None:
    fields: dict[str, Any] = {"streaming_input": KEEPS, "still_answers": False}
    options, headers = {}, []
    if with_key:
        fields["keys"], options, headers = (ALICE,), authorized("alice"), ["Authorization: Bearer alice"]
    async with (
        live_server(**fields) as before,
        live_server(**fields) as now,
        native_client(before, **options) as client,
    ):
        await client.barrier()
        async with resumed(now, client, **options) as again:
            await again.barrier()
            assert (before.sessions, now.sessions) == (1, 1)
            path = f"/v1/sessions/{client.created['session_id']}"
            wanted = path if with_key else f"{path}?resume_token={again.created['resume_token']}"
            assert (await call(before.port, "DELETE", wanted, None, *headers)).status == 204
            assert shared.records[client.created["session_id"]].gone
            assert (await again.until("session_closing"))["reason"] == "deleted"
