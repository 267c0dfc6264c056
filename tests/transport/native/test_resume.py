"""Coming back to a session: tokens, takeover, what is told again, and how long a session waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.live_server import LiveServer, live_server
from support.native_client import (
    NATIVE,
    NativeClient,
    RawWebSocket,
    frame_bytes,
    native_client,
    raw_websocket,
    text,
)
from support.raw_http import raw_client, websocket_upgrade
from websockets.frames import Opcode

from omni_ws.config.keys import ApiKey, digest
from omni_ws.engine.base import TextOutput
from omni_ws.engine.fake import EchoEngine, ScriptedEngine
from omni_ws.errors import ShuttingDown
from omni_ws.service.conversation.output_log import (
    MESSAGE_OVERHEAD_BYTES,
    MOMENT_BYTES,
)

KEEPS: dict[str, Any] = {"resume_grace_sec": 30}
ALICE, BOB = (ApiKey(name=name, key_sha256=digest(name)) for name in ("alice", "bob"))


def query(session_id: str, token: str, last_output: object = -1) -> str:
    return f"?session_id={session_id}&resume_token={token}&last_output={last_output}"


@contextlib.asynccontextmanager
async def back(
    server: LiveServer,
    client: NativeClient,
    token: str | None = None,
    *,
    last_output: int | None = None,
    **options: Any,
) -> AsyncIterator[NativeClient]:
    """Another connection for the session of ``client``, with what it has heard."""
    heard = client.guarantees.next_output - 1 if last_output is None else last_output
    wanted = query(client.created["session_id"], token or client.created["resume_token"], heard)
    async with native_client(server, query=wanted, greeted=False, **options) as again:
        again.created = await again.receive()
        assert again.created["type"] == "session_resumed", again.created
        assert again.created["session_id"] == client.created["session_id"]
        again.guarantees.next_output = heard + 1
        again.next_sequence_id = again.created["next_sequence_id"]
        again.guarantees._running = client.guarantees._running
        yield again


async def refused(server: LiveServer, wanted: str, **options: Any) -> None:
    async with native_client(server, query=wanted, greeted=False, **options) as client:
        error = await client.error()
        assert (error["code"], error["param"], error["retryable"]) == ("session_not_found", "session_id", False)
        assert await client.closed() == 4404


def detached(server: LiveServer) -> bool:
    return server.sessions == 1 and not server.connections


async def vanish(server: LiveServer, client: NativeClient) -> None:
    client.gone()
    await server.until(lambda: detached(server), "a session without its connection")


# coming back


async def test_token_and_capability() -> None:
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        assert client.created["resume_token"]
        assert client.created["capabilities"]["resume"] is True


async def test_an_id_leads_to_its_replica() -> None:
    async with live_server(replica_id="west-2", streaming_input=KEEPS) as server, native_client(server) as client:
        assert client.created["session_id"].startswith("west-2_sess_")
        await vanish(server, client)
        async with back(server, client):
            pass


async def test_grace_of_0_turns_it_off() -> None:
    async with live_server(streaming_input={"resume_grace_sec": 0}) as server, native_client(server) as client:
        assert client.created["resume_token"] is None
        assert client.created["capabilities"]["resume"] is False
        client.gone()
        await server.check_empty()
        await refused(server, query(client.created["session_id"], ""))


async def test_conversation_goes_on_with_its_history_and_numbers() -> None:
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only")
        await client.say("one")
        await client.answer()
        await vanish(server, client)
        async with back(server, client) as again:
            assert again.created["next_sequence_id"] == 1
            assert again.created["replayed"] == 0
            ack = await again.receive()
            assert (ack["type"], ack["next_sequence_id"]) == ("input_ack", 1)
            await again.say("two")
            answer = await again.answer()
            assert answer.text == "two"
            assert answer.started is not None
            assert answer.started["trigger"] == "end_of_input"


async def test_answer_goes_on_while_nobody_is_there() -> None:
    go_on = asyncio.Event()
    engine = ScriptedEngine([TextOutput("before "), lambda: go_on.wait(), TextOutput("after")])
    async with live_server(engine, streaming_input=KEEPS) as server, native_client(server) as client:
        await client.say("hello")
        assert (await client.until("output_chunk"))["text"] == "before "
        await vanish(server, client)
        go_on.set()
        await server.until(lambda: engine.active_requests == 0, "the end of the answer")
        async with back(server, client) as again:
            assert again.created["replayed"] == 2
            answer = await again.answer()
            assert (answer.text, answer.reason) == ("after", "stop")


@pytest.mark.parametrize("first", ["omni.v1+json", "omni.v1+binary"])
@pytest.mark.parametrize("second", [None, "omni.v1+binary"])
async def test_form_of_the_output_is_each_connections_own(first: str, second: str | None) -> None:
    async with live_server(streaming_input=KEEPS) as server:
        async with native_client(server, subprotocols=[first]) as client:
            await client.configure(output_audio={"sample_rate": 16000})
            await client.binary(bytes(6400), end=True)
            whole = await client.answer()
            await vanish(server, client)
            async with back(server, client, last_output=-1, subprotocols=[second] if second else None) as again:
                again.guarantees.finished.clear()
                told_again = await again.answer()
        assert told_again.audio == whole.audio
        assert len(whole.audio) == 6400
        assert all(chunk.get("binary", False) == (second is not None) for chunk in told_again.chunks)


async def test_control_frames_come_again_behind_the_output_they_followed() -> None:
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        await client.say("a")
        await client.answer()
        await client.configure(voice="echo")
        await client.raw("{}")
        assert (await client.error())["code"] == "invalid_frame"
        await vanish(server, client)
        async with back(server, client) as again:
            await again.barrier()
            assert [frame["type"] for frame in again.frames[1:]] == ["input_ack", "session_updated", "error", "pong"]
        async with native_client(server) as fresh:
            await fresh.say("b")


async def test_chunk_behind_a_gap_is_kept_and_duplicates_are_harmless() -> None:
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        await client.chunk("c", number=2, end=True)
        await client.barrier()
        await vanish(server, client)
        async with back(server, client) as again:
            assert again.created["next_sequence_id"] == 0
            for number, content in enumerate("abc"):
                await again.chunk(content, number=number, end=number == 2)
            assert (await again.answer()).text == "abc"


@pytest.mark.parametrize("end", ["close_3000", "fin", "half_a_frame"])
async def test_lost_connections_keep_their_session(end: str) -> None:
    async with live_server(streaming_input=KEEPS) as server, raw_client(server.port) as raw:
        await raw.send(websocket_upgrade(NATIVE))
        await raw.head()
        await server.until(lambda: server.sessions == 1)
        last = {
            "close_3000": frame_bytes(Opcode.CLOSE, (3000).to_bytes(2)),
            "fin": b"",
            "half_a_frame": frame_bytes(Opcode.TEXT, b'{"type":"ping"}')[:9],
        }[end]
        await raw.send(last)
        raw.writer.write_eof()
        await server.until(lambda: detached(server))
        server.native.end_all(ShuttingDown("the test is over"))


@pytest.mark.parametrize(
    "farewell",
    [
        frame_bytes(Opcode.CLOSE, (1000).to_bytes(2)),
        frame_bytes(Opcode.CLOSE, (1001).to_bytes(2)),
        frame_bytes(Opcode.CLOSE),
        frame_bytes(Opcode.TEXT, b"\xff"),
        b"\xff\xff\xff\xff\xff\xff",
    ],
    ids=["1000", "1001", "no code", "not UTF-8", "no frame"],
)
async def test_farewells_and_violations_end_the_session(farewell: bytes) -> None:
    async with live_server(streaming_input={"resume_grace_sec": 3600}) as server, raw_client(server.port) as raw:
        await raw.send(websocket_upgrade(NATIVE))
        await raw.head()
        await server.until(lambda: server.sessions == 1)
        await raw.send(farewell)
        await server.check_empty()


# tokens


async def test_token_is_good_once() -> None:
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        await vanish(server, client)
        async with back(server, client) as again:
            assert again.created["resume_token"] != client.created["resume_token"]
            await again.barrier()
            await refused(server, query(client.created["session_id"], client.created["resume_token"]))
            await again.barrier()
            await vanish(server, again)
            await refused(server, query(client.created["session_id"], client.created["resume_token"]))
            async with back(server, again) as third:
                await third.barrier()


SIGNS = {
    "frame": text("ping"),
    "nonsense": frame_bytes(Opcode.TEXT, b"?"),
    "pong": frame_bytes(Opcode.PONG),
    "pong amid a message": frame_bytes(Opcode.TEXT, b"{", fin=False) + frame_bytes(Opcode.PONG),
}


@pytest.mark.parametrize("sign", SIGNS)
async def test_token_is_spent_by_the_first_sign_of_the_client(sign: str) -> None:
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        await vanish(server, client)
        wanted = query(client.created["session_id"], client.created["resume_token"])
        async with raw_websocket(server, query=wanted) as raw:
            resumed = await raw.until("session_resumed")
            (living,) = server.native._live._living.values()
            assert living.session.spent_token is not None
            await raw.send(SIGNS[sign])  # and no pong to the server's ping
            await server.until(lambda: living.session.spent_token is None, "the sign")
            await refused(server, wanted)
            raw.reset()
        await server.until(lambda: detached(server))
        async with back(server, client, resumed["resume_token"]) as again:
            await again.barrier()


async def test_of_connections_that_come_back_at_once_the_last_has_the_session() -> None:
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        await vanish(server, client)
        wanted = query(client.created["session_id"], client.created["resume_token"])
        async with (
            raw_websocket(server, query=wanted) as first,
            raw_websocket(server, query=wanted) as second,
            raw_websocket(server, query=wanted) as third,
        ):
            for replaced in (first, second):
                assert (await replaced.until("session_closing"))["reason"] == "replaced"
                assert await replaced.close_code() == 4409
                await replaced.send(frame_bytes(Opcode.PONG))  # of a connection that has nothing to say any more
            await third.until("session_resumed")
            third.reset()
        await server.until(lambda: detached(server))
        async with back(server, client) as again:  # with the token that no client was heard with
            await again.say("here")
            assert (await again.answer()).text == "here"


async def code_of_refused(peer: RawWebSocket) -> int | None:
    """The code of its close frame, which it does not keep the server waiting for an answer to."""
    code = await peer.close_code()
    peer.reset()
    return code


async def test_connections_that_come_back_in_one_moment() -> None:
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        await client.chunk("kept ")
        await client.barrier()
        await vanish(server, client)
        wanted = NATIVE + query(client.created["session_id"], client.created["resume_token"])
        async with contextlib.AsyncExitStack() as stack:
            peers = [RawWebSocket(await stack.enter_async_context(raw_client(server.port))) for _ in range(3)]
            for peer in peers:
                peer.send_now(websocket_upgrade(wanted))
            for peer in peers:
                await peer.head()
            codes = [asyncio.create_task(code_of_refused(peer)) for peer in peers]
            await asyncio.wait(codes, return_when=asyncio.FIRST_COMPLETED)
            await server.until(lambda: len(server.connections) == 1, "the one that has the session")
            left = [peer for peer, code in zip(peers, codes, strict=True) if not code.done()]
            assert [code.result() for code in codes if code.done()] == [4409, 4409]
            left[0].reset()
            await asyncio.wait(codes)
        await server.until(lambda: detached(server))
        async with back(server, client) as again:
            await again.chunk("whole", end=True)
            assert (await again.answer()).text == "kept whole"


async def test_token_counts_until_the_next_has_arrived() -> None:
    """A connection that breaks before its first frame arrives leaves the client with the token before."""
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        await vanish(server, client)
        wanted = query(client.created["session_id"], client.created["resume_token"])
        for _ in range(2):
            async with raw_client(server.port) as raw:
                await raw.send(websocket_upgrade(NATIVE + wanted))
                await raw.head()  # and no pong ever
                raw.reset()
            await server.until(lambda: detached(server))
        async with back(server, client) as again:
            await again.say("still here")
            assert (await again.answer()).text == "still here"


@pytest.mark.parametrize("token", ["", "wrong", "%F0%9F%94%91"])
async def test_wrong_token(token: str) -> None:
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        await refused(server, query(client.created["session_id"], token))
        await refused(server, query("sess_unknown", client.created["resume_token"]))
        await client.say("still mine")
        assert (await client.answer()).text == "still mine"


async def test_session_belongs_to_its_key() -> None:
    def by(name: str) -> dict[str, Any]:
        return {"additional_headers": {"Authorization": f"Bearer {name}"}}

    async with live_server(keys=(ALICE, BOB), streaming_input=KEEPS) as server:  # noqa: SIM117
        async with native_client(server, **by("alice")) as client:
            wanted = query(client.created["session_id"], client.created["resume_token"])
            await refused(server, wanted, **by("bob"))
            async with back(server, client, **by("alice")) as again:
                await again.barrier()


@pytest.mark.parametrize("last_output", ["", "x", "-2", "1.0", "99999999999", "%00"])
async def test_last_output_must_be_a_number(last_output: str) -> None:
    async with live_server(streaming_input=KEEPS) as server, raw_client(server.port) as raw:
        await raw.send(websocket_upgrade(NATIVE + query("sess_x", "t", last_output)))
        _, status, _ = await raw.head()
        assert status == 400


# takeover


async def test_takeover_of_a_live_connection() -> None:
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        await client.chunk("half ")
        await client.barrier()
        async with back(server, client) as again:
            closing = await client.until("session_closing")
            assert (closing["reason"], closing["retryable"], closing["time_left_ms"]) == ("replaced", False, 0)
            assert await client.closed() == 4409
            await again.chunk("whole", end=True)
            assert (await again.answer()).text == "half whole"
            assert server.sessions == 1


async def test_takeover_needs_no_place_of_its_own() -> None:
    async with (
        live_server(streaming_input=KEEPS, limits={"max_sessions": 1}) as server,
        native_client(server) as client,
    ):
        await client.say("hello")  # a session without content would give its place up
        await client.answer()
        await vanish(server, client)
        async with native_client(server, greeted=False) as other:
            assert (await other.error())["code"] == "engine_overloaded"
        async with back(server, client) as again:
            await again.barrier()


# what is kept


@pytest.mark.parametrize("past", [0, 1])
async def test_journal_at_its_limit_and_one_past(past: int) -> None:
    """Three outputs of 1000 bytes each, and the final, in which three moments are known."""
    content = MESSAGE_OVERHEAD_BYTES * 2 + 3 * MOMENT_BYTES + 3 * (MESSAGE_OVERHEAD_BYTES + 4 * 250)
    engine = ScriptedEngine([TextOutput("x" * 250)] * 3)
    fields = {**KEEPS, "max_output_bytes": content - past}
    async with live_server(engine, streaming_input=fields) as server, native_client(server) as client:
        await client.say("hello")
        await client.answer()
        await vanish(server, client)
        if not past:
            async with back(server, client, last_output=-1) as again:
                assert again.created["replayed"] == 4
                again.guarantees.finished.clear()
                assert (await again.answer()).text == "x" * 750
            return
        wanted = query(client.created["session_id"], client.created["resume_token"])
        async with native_client(server, query=wanted, greeted=False) as fresh:
            error = await fresh.error()
            assert (error["code"], error["param"], error["retryable"]) == ("resync_required", "last_output", False)
            created = await fresh.receive()
            assert created["type"] == "session_created"
            assert created["session_id"] != client.created["session_id"]
            await fresh.say("hello")
            assert (await fresh.answer()).text == "x" * 750
            assert server.sessions == 1


async def test_acknowledged_output_is_not_kept() -> None:
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        await client.say("one two three")
        await client.answer()
        last = client.guarantees.next_output - 1
        assert server.held_bytes > 0
        await client.send("output_ack", sequence_id=last)
        await client.barrier()
        assert server.held_bytes == 0
        await client.send("output_ack", sequence_id=4_000_000_000)
        await vanish(server, client)
        wanted = query(client.created["session_id"], client.created["resume_token"], last - 1)
        async with native_client(server, query=wanted, greeted=False) as fresh:
            assert (await fresh.error())["code"] == "resync_required"
            assert (await fresh.receive())["type"] == "session_created"


async def test_more_than_was_ever_sent_cannot_have_been_heard() -> None:
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        wanted = query(client.created["session_id"], client.created["resume_token"], 0)
        async with native_client(server, query=wanted, greeted=False) as fresh:
            assert (await fresh.error())["code"] == "resync_required"
            assert (await fresh.receive())["type"] == "session_created"
            assert await client.closed() == 4409


# cancelling


@pytest.mark.parametrize("before", [True, False])
async def test_cancel(before: bool) -> None:
    engine = ScriptedEngine([TextOutput("a"), lambda: asyncio.Event().wait()])
    async with live_server(engine, streaming_input=KEEPS) as server, native_client(server) as client:
        await client.say("hello")
        await client.until("output_chunk")
        if before:
            await client.send("cancel")
            await server.until(lambda: engine.active_requests == 0)
        await vanish(server, client)
        async with back(server, client) as again:
            await again.send("cancel")
            assert (await again.answer()).reason == "cancelled"
            await again.barrier()
            assert len(again.guarantees.finished) == 1


# how long


@pytest.mark.virtual_clock
@pytest.mark.parametrize("late", [False, True])
async def test_grace(late: bool) -> None:
    engine = ScriptedEngine([TextOutput("a"), lambda: asyncio.Event().wait()])
    async with live_server(engine, streaming_input=KEEPS) as server, native_client(server) as client:
        await client.say("hello")
        await client.until("output_chunk")
        await vanish(server, client)
        await asyncio.sleep(30.5 if late else 29.5)
        if late:
            assert (server.sessions, engine.active_requests, server.held_bytes) == (0, 0, 0)
            await refused(server, query(client.created["session_id"], client.created["resume_token"]))
            return
        async with back(server, client) as again:
            await asyncio.sleep(100)
            await again.send("cancel")
            assert (await again.answer()).reason == "cancelled"


@pytest.mark.virtual_clock
async def test_clocks_of_the_client_rest_while_it_is_away() -> None:
    """A gap of 10 and a silence of 20 seconds are counted from its return."""
    fields = {**KEEPS, "session_timeout_sec": 20, "reorder_timeout_sec": 10}
    async with live_server(streaming_input=fields) as server, native_client(server) as client:
        await client.chunk("b", number=1, end=True)
        await client.barrier()
        await vanish(server, client)
        await asyncio.sleep(25)
        async with back(server, client) as again:
            await asyncio.sleep(9)
            await again.chunk("a", number=0)
            assert (await again.answer()).text == "ab"


@pytest.mark.virtual_clock
async def test_peer_that_does_not_answer_pings_keeps_its_session() -> None:
    async with live_server(streaming_input=KEEPS) as server, raw_client(server.port) as raw:
        await raw.send(websocket_upgrade(NATIVE))
        await raw.head()
        await asyncio.sleep(50)
        assert detached(server)
        await asyncio.sleep(25)
        assert server.sessions == 0


# going down


async def test_drain_while_nothing_is_owed() -> None:
    async with live_server(EchoEngine(), streaming_input=KEEPS, still_answers=False) as server:  # noqa: SIM117
        async with native_client(server) as client:
            await client.say("hello")
            await client.answer()
            await vanish(server, client)
            await server.running.drain(5)
            assert server.sessions == 0


async def test_drain_waits_for_a_client_that_is_owed_something() -> None:
    go_on = asyncio.Event()
    engine = ScriptedEngine([TextOutput("a"), lambda: go_on.wait(), TextOutput("b")])
    async with live_server(engine, streaming_input=KEEPS, still_answers=False) as server:  # noqa: SIM117
        async with native_client(server) as client:
            await client.say("hello")
            await client.until("output_chunk")
            await vanish(server, client)
            draining = asyncio.create_task(server.running.drain(20))
            await server.until(lambda: server.app.sessions.admission.draining)
            go_on.set()
            await server.until(lambda: engine.active_requests == 0)
            assert not draining.done()
            async with back(server, client) as again:
                answer = await again.answer()
                assert (answer.text, answer.reason) == ("b", "stop")
                assert (await again.until("session_closing"))["reason"] == "shutting_down"
                assert await again.closed() == 1012
            await draining


async def test_takeover_during_a_drain_hears_of_it() -> None:
    go_on = asyncio.Event()
    engine = ScriptedEngine([TextOutput("a"), lambda: go_on.wait(), TextOutput("b")])
    async with live_server(engine, streaming_input=KEEPS, still_answers=False) as server:  # noqa: SIM117
        async with native_client(server) as client:
            await client.say("hello")
            await client.until("output_chunk")
            draining = asyncio.create_task(server.running.drain(20))
            assert (await client.until("session_closing"))["reason"] == "shutting_down"
            async with back(server, client) as again:
                closing = await again.until("session_closing")
                assert (closing["reason"], closing["time_left_ms"] > 0) == ("shutting_down", True)
                go_on.set()
                assert (await again.answer()).text == "b"
                assert await again.closed() == 1012
            await draining


async def test_server_closes_with_a_session_that_waits() -> None:
    async with live_server(streaming_input=KEEPS, still_answers=False) as server, native_client(server) as client:
        await client.say("hello")
        await client.answer()
        await vanish(server, client)
        await server.running.close()
        assert (server.sessions, server.held_bytes) == (0, 0)


@pytest.mark.virtual_clock
async def test_whoever_comes_back_is_asked_again_before_the_session_ends() -> None:
    """The silence begins anew with each connection."""
    async with live_server(streaming_input=KEEPS) as server, native_client(server) as client:
        await client.configure(idle_prompt={"after_sec": 20, "closes_after_sec": 10})
        await client.answer()  # the question whether anybody is still there
        await asyncio.sleep(5)
        await vanish(server, client)
        async with back(server, client) as again:
            begin = asyncio.get_running_loop().time()
            started = await again.until("response_started")
            assert started["trigger"] == "idle"
            assert asyncio.get_running_loop().time() - begin == pytest.approx(20, abs=0.5)
