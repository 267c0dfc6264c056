"""Mode B: readers that resume events, WebSockets that only read, and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from support.live_server import live_server
from support.mode_b_client import EVENTS, SESSIONS, arriving, create, mode_b, text
from support.native_client import native_client, raw_websocket
from support.patience import PATIENCE_SEC
from support.raw_http import Event, call, raw_client, request
from support.scripted_engines import ToneEngine
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import Modality
from omni_ws.engine.base import TextOutput, TranscriptOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine
from omni_ws.errors import ShuttingDown
from omni_ws.transport.mode_b.session import MAX_READERS

WHOLE = {"chunk": text("do re mi fa", 0, end_of_input=True)}
SPOKEN = {**WHOLE, "modalities": ["text", "audio"], "stream_options": {"include_usage": True}}


# events


@pytest.mark.parametrize("parameters", [WHOLE, SPOKEN])
async def test_a_stream_that_is_cut_at_any_event_goes_on_as_if_it_had_not_been(parameters: dict[str, Any]) -> None:
    async with live_server(ToneEngine()) as server, mode_b(server, parameters) as session:
        whole = await session.events()
        assert [event.id for event in whole] == list(range(1, len(whole) + 1))
        assert whole[-1].data == "[DONE]"
        for cut in range(len(whole)):
            assert await session.events(last=cut) == whole[cut:]
        done = await session.call("GET", "/result", None, EVENTS, f"Last-Event-ID: {len(whole)}")
        assert (done.status, done.body) == (204, b"")
        assert await session.events(last=0) == whole


@pytest.mark.parametrize("read", ["events", "whole"])
async def test_chat_knows_a_spoken_answer_by_its_id(read: str) -> None:
    async with live_server(ToneEngine()) as server, mode_b(server, SPOKEN) as session:
        if read == "events":
            deltas = [event.json()["choices"] for event in await session.events() if event.data != "[DONE]"]
            audio = [choice["delta"].get("audio", {}) for choices in deltas for choice in choices]
            (spoken,) = (piece["id"] for piece in audio if "id" in piece)
        else:
            spoken = (await session.completion())["choices"][0]["message"]["audio"]["id"]
        again = {"role": "assistant", "audio": {"id": spoken}}
        messages = [again, {"role": "user", "content": "and then?"}]
        response = await call(server.port, "POST", "/v1/chat/completions", {"model": "fake", "messages": messages})
        assert response.status == 200


async def test_a_stream_that_is_cut_while_it_is_made() -> None:
    """The reader disconnects after every event and resumes at the next."""
    async with live_server(ToneEngine()) as server, mode_b(server, {"modalities": ["text", "audio"]}) as session:
        words = ["do ", "re ", "mi "]
        seen: list[Event] = []
        while not seen or seen[-1].data != "[DONE]":
            resume = (f"Last-Event-ID: {seen[-1].id}",) if seen else ()
            async with raw_client(server.port) as client:
                await client.send(request("GET", session.path + "/result", EVENTS, *resume))
                if words:
                    await session.append(text(words.pop(0)))
                else:
                    await session.finish()
                assert (await client.head())[1] == 200
                async with asyncio.timeout(PATIENCE_SEC):
                    async for event in arriving(client):
                        seen.append(event)
                        break
                client.reset()
        assert seen == await session.events()


@pytest.mark.parametrize("wanted", ["x", "-1", "1.5", "99", "²", "9" * 16])
async def test_an_event_that_never_was(wanted: str) -> None:
    async with live_server() as server, mode_b(server, WHOLE) as session:
        await session.until("finished")
        header = "Last-Event-ID: " + wanted
        for _ in range(2):
            response = await session.call("GET", "/result", None, EVENTS, header)
            assert (response.status, response.error["param"]) == (400, "Last-Event-ID")
        async with mode_b(server, {"chunk": text("half", 0)}) as running:
            response = await running.call("GET", "/result", None, EVENTS, header)
            assert (response.status, response.error["param"]) == (400, "Last-Event-ID")


async def test_the_event_after_the_last_of_a_running_answer_never_was_either() -> None:
    async with (
        live_server() as server,
        mode_b(server, {"chunk": text("half", 0)}) as session,
        raw_client(server.port) as client,
    ):
        await client.send(request("GET", session.path + "/result", EVENTS))
        await client.head()
        events = arriving(client)
        last = [await anext(events), await anext(events)][-1].id
        response = await session.call("GET", "/result", None, EVENTS, f"Last-Event-ID: {last + 1}")
        assert response.status == 400


async def test_a_reader_that_leaves_does_not_stop_the_work() -> None:
    async with (
        live_server(EchoEngine(EchoSettings(chunk_interval_ms=1))) as server,
        mode_b(server, {"chunk": text("one two ", 0)}) as session,
    ):
        async with raw_client(server.port) as client:
            await client.send(request("GET", session.path + "/result", EVENTS))
            await client.head()
            client.reset()
        async with native_client(server, query=f"?session_id={session.id}", greeted=False) as watching:
            await watching.until("response_started")
            watching.gone()
        polling = asyncio.create_task(session.result())
        await asyncio.sleep(0)
        polling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await polling
        await session.append(text("three", 1, end_of_input=True))
        assert await session.content() == "one two three"


async def test_readers_at_the_limit_and_one_more() -> None:
    async with live_server() as server, mode_b(server, {"chunk": text("a", 0)}) as session:
        waiting = [asyncio.create_task(session.result()) for _ in range(MAX_READERS)]
        known = server.app.registry.get(session.id, None)
        await server.until(lambda: known._readers == MAX_READERS)
        response = await session.result()
        assert (response.status, response.error["code"]) == (429, "rate_limited")
        async with native_client(server, query=f"?session_id={session.id}", greeted=False) as client:
            assert (await client.error())["code"] == "rate_limited"
            assert await client.closed() == 4429
        await session.finish()
        assert {(await one).status for one in waiting} == {200}
        assert (await session.result()).status == 200


async def test_events_of_a_session_that_is_deleted() -> None:
    async with live_server() as server:
        session = await create(server, {"chunk": text("half", 0)})
        async with raw_client(server.port) as client:
            await client.send(request("GET", session.path + "/result", EVENTS))
            await client.head()
            events = arriving(client)
            assert [(await anext(events)).id, (await anext(events)).id] == [1, 2]
            assert await session.delete() == 204
            error = await anext(events)
            assert (error.id, error.json()["code"]) == (3, "session_conflict")


# WebSocket


async def test_several_readers_from_the_beginning_and_in_both_forms() -> None:
    async with live_server(ToneEngine()) as server, mode_b(server, {"modalities": ["text", "audio"]}) as session:
        query = f"?session_id={session.id}"
        async with (
            native_client(server, query=query, greeted=False) as json,
            native_client(server, query=query, greeted=False, subprotocols=["omni.v1+binary"]) as binary,
        ):
            await session.append(text("do re ", 0))
            await json.until("output_chunk")
            async with native_client(server, query=query, greeted=False, subprotocols=["omni.v1+json"]) as late:
                await session.append(text("mi", 1, end_of_input=True))
                answers = [await late.answer(), await binary.answer()]
                while not json.frames[-1].get("final"):
                    await json.receive()
                assert [await one.closed() for one in (json, late, binary)] == [1000] * 3
        assert binary.connection.subprotocol == "omni.v1+binary"
        assert answers[0].text == answers[1].text == "do re mi "
        assert answers[0].audio == answers[1].audio
        assert any(chunk.get("binary") for chunk in answers[1].chunks)
        assert json.frames == late.frames
        assert (await session.attached())[0] == answers[0]


async def test_an_attached_websocket_takes_no_input() -> None:
    async with live_server() as server, mode_b(server, {"chunk": text("a ", 0)}) as session:
        async with native_client(server, query=f"?session_id={session.id}", greeted=False) as client:
            await client.barrier()
            await client.chunk("more")
            assert (await client.error())["code"] == "session_conflict"
            await client.binary(b"\0\0", Modality.AUDIO)
            assert (await client.error())["code"] == "session_conflict"
            for type_ in ("finish", "cancel", "session_config"):
                await client.send(type_)
                assert (await client.error())["code"] == "session_conflict"
            await client.send("nonsense")
            assert (await client.error())["code"] == "unknown_type"
            await client.raw("garbage")
            assert (await client.error())["code"] == "invalid_frame"
            await client.raw(b"garbage")
            assert (await client.error())["code"] == "invalid_frame"
            await client.send("output_ack", sequence_id=0)
            await client.barrier()
            await session.finish()
            await client.until("output_chunk")
            assert await client.closed() == 1000
        status = await session.status()
        assert (status["next_sequence_id"], status["received_bytes"]) == (1, 2)


async def test_text_that_is_none_and_messages_that_are_too_long() -> None:
    async with live_server() as server, mode_b(server) as session:
        async with raw_websocket(server, query=f"?session_id={session.id}") as peer:
            await peer.send(b"\x81\x82\0\0\0\0\xff\xff")
            assert await peer.close_code() == 1007
        async with native_client(server, query=f"?session_id={session.id}", greeted=False) as client:
            await client.raw("x" * (1 << 16))
            await client.error()
            await client.raw("x" * ((1 << 16) + 1))
            assert await client.closed() == 1009
        assert (await session.status())["state"] == "open"


@pytest.mark.parametrize(("failure", "code"), [("payload", 1009), ("window", 4422), ("delete", 1000), ("empty", 1000)])
async def test_how_a_session_ends_is_how_its_reader_is_left(failure: str, code: int) -> None:
    streaming = {"max_chunk_bytes": 10, "reorder_window_chunks": 4}
    async with (
        live_server(streaming_input=streaming) as server,
        mode_b(server) as session,
        native_client(server, query=f"?session_id={session.id}", greeted=False) as client,
    ):
        if failure != "empty":
            await session.append(text("half", 0))
            await client.until("output_chunk")
        match failure:
            case "payload":
                assert (await session.call("POST", "/chunks", text("x" * 11, 1))).status == 413
            case "window":
                assert (await session.call("POST", "/chunks", text("x", 9))).status == 422
            case "delete":
                assert await session.delete() == 204
            case "empty":
                await session.finish()
        answer = await client.answer()
        assert answer.reason == ("cancelled" if failure == "delete" else "error")
        assert [error["code"] for error in answer.errors] == {
            "payload": ["payload_too_large"],
            "window": ["reorder_window_exceeded"],
            "delete": [],
            "empty": ["empty_input"],
        }[failure]
        assert await client.closed() == code


async def test_who_may_attach() -> None:
    keys = tuple(ApiKey(name=name, key_sha256=digest(name)) for name in ("one", "two"))
    async with live_server(keys=keys) as server, mode_b(server, None, "Authorization: Bearer one") as session:
        query = f"?session_id={session.id}"
        with pytest.raises(InvalidStatus) as caught:
            await connect(server.websocket_url + query, proxy=None)
        assert caught.value.response.status_code == 401
        headers = {"Authorization": "Bearer two"}
        for one in (query, "?session_id=sess_0", "?session_id="):
            async with native_client(server, query=one, greeted=False, additional_headers=headers) as client:
                error = await client.error()
                assert (error["code"], error["param"]) == ("session_not_found", "session_id")
                assert await client.closed() == 4404
        entry = ["omni-api-key.one"]
        async with native_client(server, query=query, greeted=False, subprotocols=entry) as client:
            assert client.connection.subprotocol is None
            await client.barrier()


async def test_nobody_attaches_where_streaming_input_is_off() -> None:
    async with live_server(streaming_input={"enabled": False}) as server:
        with pytest.raises(InvalidStatus) as caught:
            await connect(server.websocket_url + "?session_id=sess_0", proxy=None)
        assert caught.value.response.status_code == 404


async def test_transcripts_reach_every_reader() -> None:
    engine = ScriptedEngine([TranscriptOutput("hi", interim=True), TranscriptOutput("hi there"), TextOutput("hello")])
    async with live_server(engine) as server, mode_b(server, WHOLE) as session:
        events = await session.events()
        assert [e.json()["input_transcript"]["text"] for e in events[1:3]] == ["hi", "hi there"]
        answer, _ = await session.attached()
        assert [(c["modality"], c.get("interim", False)) for c in answer.chunks] == [
            *(("transcript", True), ("transcript", False), ("text", False)),
        ]


# shutdown


async def test_draining_lets_answers_finish_and_ends_what_has_not_begun() -> None:
    async with live_server(still_answers=False) as server:
        begun = await create(server, {"chunk": text("a ", 0)})
        idle = await create(server)
        draining = asyncio.create_task(server.running.drain(30))
        await server.until(lambda: server.app.sessions.admission.draining)  # draining closes idle connections
        await idle.until("failed")
        response = await idle.result()
        assert (response.status, response.error["code"]) == (503, "shutting_down")
        refused = await call(server.port, "POST", SESSIONS)
        assert (refused.status, refused.error["code"]) == (503, "shutting_down")
        async with native_client(server, query=f"?session_id={begun.id}", greeted=False) as client:
            polling = asyncio.create_task(begun.result())
            await server.until(lambda: any(one.busy for one in server.running._connections._open))
            await client.until("response_started")
            await begun.append(text("b", 1, end_of_input=True))
            assert (await client.answer()).text == "a b"
            assert (await polling).json()["choices"][0]["message"]["content"] == "a b"
            assert await client.closed() == 1000
        await draining
        server.app.registry.end_all(ShuttingDown("the server is shutting down"))


async def test_closing_ends_every_session_and_holds_nothing() -> None:
    engine = EchoEngine(EchoSettings(chunk_interval_ms=60_000))
    async with live_server(engine, still_answers=False) as server:
        session = await create(server, {"chunk": text("a b", 0)})
        async with native_client(server, query=f"?session_id={session.id}", greeted=False) as client:
            await client.until("output_chunk")
            closing = asyncio.create_task(server.running.close())
            frame = await client.until("session_closing")
            assert (frame["reason"], frame["retryable"]) == ("shutting_down", True)
            assert await client.closed() == 1012
        await closing
        assert (engine.active_requests, server.sessions, server.held_bytes) == (0, 0, 0)
