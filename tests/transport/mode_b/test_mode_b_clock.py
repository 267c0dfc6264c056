"""Mode B: time-outs and expiry of sessions, on the virtual clock."""

from __future__ import annotations

import asyncio

import pytest
from support.live_server import live_server, read
from support.mode_b_client import EVENTS, create, mode_b, text
from support.native_client import native_client, raw_websocket
from support.raw_http import raw_client, request

from omni_ws.engine.base import TextOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine

pytestmark = pytest.mark.virtual_clock

#: Tolerance: timers are armed in the virtual instant in which the client acts, or a few passes later.
JUST = 0.2


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_silent_session_expires_is_remembered_and_is_forgotten() -> None:
    async with live_server(streaming_input={"session_timeout_sec": 50}) as server:
        session = await create(server, {"chunk": text("half a", 0), "start_policy": "on_end_only"})
        assert (server.sessions, server.held_bytes) == (1, 6)
        await asyncio.sleep(50 - JUST)
        assert (await session.status())["expires_in"] == 1
        await asyncio.sleep(2 * JUST)
        assert (server.sessions, server.held_bytes) == (0, 0)
        for method, below in (
            *(("GET", ""), ("GET", "/result"), ("POST", "/finish"), ("DELETE", "")),
            *(("POST", "/chunks"), ("POST", "/append"), ("PATCH", "")),
        ):
            response = await session.call(method, below)
            assert (response.status, response.error["code"]) == (410, "session_expired")
        async with native_client(server, query=f"?session_id={session.id}", greeted=False) as client:
            assert (await client.error())["code"] == "session_not_found"
            assert await client.closed() == 4404
        await asyncio.sleep(50 - 3 * JUST)
        assert (await session.call("GET")).status == 410
        await asyncio.sleep(3 * JUST)
        response = await session.call("GET")
        assert (response.status, response.error["code"]) == (404, "session_not_found")
        assert len(server.app.registry) == 0


@pytest.mark.parametrize("sign", ["chunk", "duplicate", "finish", "refused"])
async def test_what_ends_the_silence(sign: str) -> None:
    async with live_server(streaming_input={"session_timeout_sec": 50, "reorder_timeout_sec": 1000}) as server:
        session = await create(server, {"chunk": text("x", 1)})
        for number in range(3):
            await asyncio.sleep(49)
            match sign:
                case "chunk":
                    await session.append(text("x", 2 + number))
                case "duplicate":
                    await session.append(text("x", 1))
                case "finish":
                    await session.finish()
                case "refused":
                    assert (await session.call("POST", "/chunks", {"text": 1})).status == 400
        await asyncio.sleep(49)
        assert (await session.status())["state"] == "open"
        await asyncio.sleep(1 + JUST)
        assert (await session.call("GET")).status == 410


async def test_who_only_looks_is_silent() -> None:
    async with live_server(streaming_input={"session_timeout_sec": 50}) as server:
        session = await create(server)
        for _ in range(3):
            await asyncio.sleep(15)
            await session.status()
            assert (await session.result(wait=0)).status == 202
        await asyncio.sleep(5 + JUST)
        assert (await session.call("GET")).status == 410


@pytest.mark.parametrize("body", [{"chunks": []}, {}, b"garbage", b""])
async def test_a_body_without_a_chunk_is_silence(body: object) -> None:
    async with live_server(streaming_input={"session_timeout_sec": 50}) as server:
        session = await create(server)
        for _ in range(3):
            await asyncio.sleep(15)
            await session.call("POST", "/chunks", body)
        await asyncio.sleep(5 + JUST)
        assert (await session.call("GET")).status == 410


async def test_nothing_expires_while_an_answer_is_owed() -> None:
    engine = EchoEngine(EchoSettings(first_chunk_delay_ms=500_000))
    async with (
        live_server(engine, streaming_input={"session_timeout_sec": 50}) as server,
        mode_b(server, {"chunk": text("x", 0, end_of_input=True)}) as session,
    ):
        await asyncio.sleep(400)
        status = await session.status()
        assert (status["state"], status["expires_in"]) == ("started", 50)
        await asyncio.sleep(100 + JUST)
        assert (await session.status())["state"] == "finished"


async def test_a_body_on_its_way_keeps_a_session() -> None:
    settings, slow = {"session_timeout_sec": 50}, {"min_body_bytes_per_sec": 0}
    async with (
        live_server(streaming_input=settings, http=slow) as server,
        mode_b(server) as session,
        raw_client(server.port) as c,
    ):
        body = b'{"text":"slow","sequence_id":0,"end_of_input":true}'
        await c.send(request("POST", session.path + "/chunks", f"Content-Length: {len(body)}"))
        for position in range(0, len(body), 8):
            await asyncio.sleep(25)
            await c.send(body[position : position + 8])
        assert (await c.response()).status == 202
        assert now() > 150
        assert await session.content() == "slow"


@pytest.mark.parametrize("ended_by", ["finished", "failed", "cancelled"])
async def test_what_has_ended_is_kept_as_long_again(ended_by: str) -> None:
    async with live_server(streaming_input={"session_timeout_sec": 50}) as server:
        session = await create(server)
        if ended_by == "cancelled":
            await session.append(text("answer", 0))
            assert await session.delete() == 204
        else:
            if ended_by == "finished":
                await session.append(text("answer", 0))
            await session.finish()
        await session.until(ended_by)
        ended = now()
        await asyncio.sleep(50 - JUST)
        assert (await session.status())["state"] == ended_by
        if ended_by == "finished":
            assert await session.content() == "answer"
            assert server.held_bytes > 0
        await asyncio.sleep(2 * JUST)
        assert server.held_bytes == 0
        assert (await session.call("GET")).status == 410
        await asyncio.sleep(ended + 100 - now() - JUST)
        assert (await session.call("GET", "/result")).status == 410
        await asyncio.sleep(2 * JUST)
        assert (await session.call("GET")).status == 404


async def test_delete_begins_the_time_anew() -> None:
    async with live_server(streaming_input={"session_timeout_sec": 50}) as server:
        session = await create(server, {"chunk": text("x", 0, end_of_input=True)})
        await session.until("finished")
        await asyncio.sleep(40)
        assert await session.delete() == 204
        await asyncio.sleep(49)
        assert (await session.status())["state"] == "cancelled"
        await asyncio.sleep(1 + JUST)
        assert (await session.call("GET")).status == 410


# gaps


@pytest.mark.parametrize("end", ["finish", "chunk"])
async def test_a_gap_has_its_time_from_the_end_of_the_input(end: str) -> None:
    async with live_server() as server, mode_b(server, {"chunk": text("a ", 0)}) as session:
        await session.append(text("c", 2))
        await asyncio.sleep(200)
        assert (await session.status())["state"] == "started"
        if end == "finish":
            await session.finish()
        else:
            await session.append(text("d", 3, end_of_input=True))
        begin = now()
        await asyncio.sleep(5)
        # Repeating it does not extend the time.
        assert (await session.finish())["expires_in"] == 5
        response = await session.result()
        assert (response.status, response.error["code"]) == (408, "sequence_gap")
        assert now() - begin == pytest.approx(10, abs=JUST)
        assert "chunk 1" in response.error["message"]
        status = await session.status()
        assert (status["state"], status["buffered_chunks"]) == ("failed", 0)


async def test_a_gap_that_is_filled_in_time() -> None:
    async with live_server() as server, mode_b(server, {"chunk": text("c", 2)}) as session:
        await session.finish()
        await asyncio.sleep(5)
        await session.append(text("b", 1))
        await asyncio.sleep(4)
        await session.append(text("a", 0))
        assert await session.content() == "abc"
        await asyncio.sleep(20)
        assert (await session.status())["state"] == "finished"


async def test_a_session_that_a_gap_ends_counts_with_its_code() -> None:
    async with live_server(streaming_input={"reorder_timeout_sec": 5}) as server:
        session = await create(server, {"chunks": [text("a", 0), text("b", 2, end_of_input=True)]})
        await asyncio.sleep(5 + JUST)
        assert (await session.status())["error"]["code"] == "sequence_gap"
        (counted,) = read(server).labels("requests_total")
        assert (counted["finish_reason"], counted["code"]) == ("error", "sequence_gap")


# readers


async def test_readers_of_a_session_that_expires() -> None:
    async with live_server(streaming_input={"session_timeout_sec": 50}) as server:
        session = await create(server)
        early = asyncio.create_task(session.call("GET", "/result", None, EVENTS))
        await asyncio.sleep(1)
        await session.append(text("half", 0))
        async with native_client(server, query=f"?session_id={session.id}", greeted=False) as client:
            polling = asyncio.create_task(session.result(wait=60))
            answer = await client.answer()
            assert (answer.text, answer.reason) == ("half", "cancelled")
            closing = await client.until("session_closing")
            assert closing["reason"] == "session_timeout"
            assert await client.closed() == 4408
        assert now() == pytest.approx(51, abs=JUST)
        assert (await polling).status == 408
        body = (await early).body
        assert b"half" in body
        assert b'event: error\ndata: {"message":"no input for 50 seconds"' in body


async def test_heartbeats_have_no_ids() -> None:
    async with live_server() as server, mode_b(server) as session:
        reading = asyncio.create_task(session.call("GET", "/result", None, EVENTS))
        await asyncio.sleep(40)
        await session.append(text("a ", 0))
        await asyncio.sleep(40)
        await session.append(text("b", 1, end_of_input=True))
        blocks = (await reading).body.decode().split("\n\n")
        lines = [line for block in blocks for line in block.split("\n")]
        assert lines.count(": keep-alive") == 4
        assert [line for line in lines if line.startswith("id")] == [f"id: {n}" for n in range(1, 6)]
        # Behind an id a comment alone would be an event without data to the reader of OpenAI's Python package.
        assert [block for block in blocks if "data" not in block] == [": keep-alive", ": keep-alive", ""]


async def test_a_reader_that_has_finished_sending_gets_no_event_without_data() -> None:
    async with live_server(sse_heartbeat_sec=0) as server, mode_b(server) as session, raw_client(server.port) as client:
        await client.send(request("GET", f"{session.path}/result", EVENTS))
        await session.append(text("a ", 0))
        client.finish_sending()
        await asyncio.sleep(40)
        await session.append(text("b", 1, end_of_input=True))
        await client.head()
        body = b"".join([chunk async for chunk in client.chunks()]).decode()
    assert ": keep-alive\n" in body
    assert [block for block in body.split("\n\n") if "data" not in block] == [""]


async def test_a_reader_has_the_head_and_a_comment_before_the_answer_begins() -> None:
    async with live_server() as server, mode_b(server) as session, raw_client(server.port) as client:
        begin = now()
        await client.send(request("GET", f"{session.path}/result", EVENTS))
        _, status, headers = await client.head()
        assert now() - begin == pytest.approx(15, abs=JUST)
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert await client.chunk() == b": keep-alive\n\n"
        # From here on, errors are events.
        assert (await session.call("POST", "/chunks", text("hello", 300))).status == 422
        assert (await client.chunk()).startswith(b'id: 1\nevent: error\ndata: {"message":')
        assert await client.chunk() == b""


async def test_a_reader_hears_by_its_status_what_goes_wrong_before_that() -> None:
    async with live_server() as server, mode_b(server) as session:
        reading = asyncio.create_task(session.call("GET", "/result", None, EVENTS))
        await asyncio.sleep(15 - JUST)
        assert (await session.call("POST", "/chunks", text("hello", 300))).status == 422
        assert (await reading).status == 422


async def test_without_heartbeats_the_head_waits_for_the_answer() -> None:
    async with live_server(sse_heartbeat_sec=0) as server, mode_b(server) as session:
        reading = asyncio.create_task(session.call("GET", "/result", None, EVENTS))
        await asyncio.sleep(250)
        assert (await session.call("POST", "/chunks", text("hello", 300))).status == 422
        assert (await reading).status == 422


async def test_an_event_that_there_never_was_is_told_by_an_event_when_the_head_is_out() -> None:
    async with live_server() as server, mode_b(server) as session:
        response = await session.call("GET", "/result", None, EVENTS, "Last-Event-ID: 1")
    assert response.status == 200
    assert response.body.startswith(b": keep-alive\n\nid: 1\nevent: error\n")
    assert b'"param":"Last-Event-ID"' in response.body


async def test_the_seconds_that_are_left_are_never_more_than_were_configured() -> None:
    async with live_server(streaming_input={"session_timeout_sec": 2.5}) as server:
        session = await create(server)
        assert session.created["expires_in"] == 2
        assert (await session.finish())["expires_in"] <= 2
        assert await session.delete() == 204


async def test_an_attached_client_is_pinged_and_its_silence_ends_nothing() -> None:
    async with (
        live_server(streaming_input={"session_timeout_sec": 500}) as server,
        mode_b(server) as session,
        native_client(server, query=f"?session_id={session.id}", greeted=False) as client,
    ):
        await asyncio.sleep(400)
        await session.append(text("late", 0, end_of_input=True))
        assert (await client.answer()).text == "late"
        assert await client.closed() == 1000


async def test_a_reader_that_does_not_read_is_dropped_and_the_others_are_not() -> None:
    script = [TextOutput("x" * 100_000)] * 120
    async with (
        live_server(ScriptedEngine(script)) as server,
        mode_b(server, {"chunk": text("go", 0)}) as session,
        raw_websocket(server, query=f"?session_id={session.id}"),
    ):
        await session.finish()
        known = server.app.registry.get(session.id, None)
        await server.until(lambda: known._readers == 1)
        assert len(await session.content()) == 12_000_000
        # The write time-out, and the time-out of the close.
        await asyncio.sleep(30 + 5 + JUST)
        assert known._readers == 0
