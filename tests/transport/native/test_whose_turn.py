"""Nobody guesses turns by order: the names of requests and of speech turns, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from support.inline_workers import MS, HeldWorkers, InlineWorkers, loud, quiet
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client
from support.scripted_engines import HearingEngine, tool_call

from omni_ws.audio.vad import WINDOW_MS
from omni_ws.engine.base import Engine, TextOutput, TranscriptOutput
from omni_ws.errors import InvalidValue

pytestmark = pytest.mark.virtual_clock

FRAME = 20 * MS
#: A turn of speech: what turn detection takes for it, and the silence that ends it.
BEGINNING, END = quiet(96) + loud(320), quiet(640)
LONGEST = "r" * 64


def hearing(*typed: Any, heard: Sequence[Any] = (), **changes: Any) -> HearingEngine:
    heard = heard or [TranscriptOutput("hello"), TextOutput("spoken answer")]
    return HearingEngine(typed or [TextOutput("typed answer")], heard=heard, **changes)


@contextlib.asynccontextmanager
async def conversation(
    engine: Engine | None = None, *, workers: InlineWorkers | None = None, listens: bool = True, **fields: Any
) -> AsyncIterator[tuple[LiveServer, NativeClient]]:
    keeps = {"resume_grace_sec": 30}
    async with live_server(engine or hearing(), expect_errors=True, streaming_input=keeps) as server:
        server.app.sessions.speech_workers = workers or InlineWorkers()
        async with native_client(server) as client:
            if listens:
                fields.setdefault("turn_detection", {"type": "server_vad"})
            await client.configure(modalities=["text"], **fields)
            yield server, client


async def stream(client: NativeClient, audio: bytes) -> None:
    for start in range(0, len(audio), FRAME):
        await client.binary(audio[start : start + FRAME])


async def name(client: NativeClient, ref: str) -> None:
    """A chunk that does nothing but name a request."""
    await client.chunk(ref=ref)


def names(client: NativeClient) -> list[tuple[str, str | None]]:
    """What names the client is told, in their order."""
    found = []
    for frame in client.frames:
        if frame["type"] == "response_started":
            found.append(("started", frame.get("ref")))
        elif frame.get("final"):
            found.append(("final", frame.get("ref")))
        else:
            assert "ref" not in frame or frame["type"] == "history_truncated"
    return found


def speech(client: NativeClient) -> list[tuple[str, str, str | None]]:
    """What is told of speech: whether it started or stopped, its turn, and its request."""
    return [
        (frame["type"].removeprefix("speech_"), frame["turn_id"], frame["request_id"])
        for frame in client.frames
        if frame["type"].startswith("speech_")
    ]


# ref


async def test_a_request_is_told_by_the_name_that_the_client_gave_it() -> None:
    async with conversation(listens=False) as (_, client):
        await client.say("hello", ref=LONGEST)
        first = await client.answer()
        await client.say("nameless", ref=None)
        await client.answer()
        assert names(client) == [("started", LONGEST), ("final", LONGEST), ("started", None), ("final", None)]
        await client.send("history_truncate", request_id=first.final["request_id"])
        truncated = await client.until("history_truncated")
        assert (truncated["ref"], truncated["dropped_requests"]) == (LONGEST, 2)
        await client.say("again", ref="😀" * 64)
        await client.answer()
        assert names(client)[-1] == ("final", "😀" * 64)


@pytest.mark.parametrize("ref", [LONGEST + "r", "", 5, True, ["a"], {"name": "a"}])
async def test_a_name_that_is_none_is_refused(ref: Any) -> None:
    async with conversation(listens=False) as (_, client):
        number = await client.chunk("refused", ref=ref)
        error = await client.error()
        assert (error["code"], error["param"], error["sequence_id"]) == ("invalid_value", "ref", number)
        assert "ref" not in error
        await client.say("taken")  # the number of the refused chunk leaves no gap
        await client.answer()
        assert names(client) == [("started", None), ("final", None)]


async def test_the_first_name_counts_whether_its_chunk_opened_the_request_or_joined_it() -> None:
    async with conversation(listens=False, start_policy="on_first_chunk") as (_, client):
        await client.chunk("one ")
        await client.until("response_started")  # which was sent before the name had come
        await client.chunk("two ", ref="a")
        await client.chunk("three", ref="b", end=True)
        await client.answer()
        assert names(client) == [("started", None), ("final", "a")]
        await client.chunk("four", ref="c")
        await client.until("response_started")
        await client.chunk(ref="d", end=True)  # nothing but the end, and a name that comes too late
        await client.answer()
        assert names(client)[2:] == [("started", "c"), ("final", "c")]


@pytest.mark.parametrize("opens", ["a chunk", "binary audio", "speech"])
async def test_a_chunk_that_only_names_opens_nothing_and_names_what_opens_next(opens: str) -> None:
    async with conversation(listens=opens == "speech") as (_, client):
        await name(client, "a")
        await name(client, "b")  # the first of several counts
        await client.send("finish")
        await client.barrier()
        assert not client.seen("response_started")
        match opens:
            case "a chunk":
                await client.say("hello", ref="c")
            case "binary audio":
                await client.binary(loud(640), end=True)
            case _:
                await stream(client, BEGINNING + END)
        await client.answer()
        await client.say("another")
        await client.answer()
        assert names(client) == [("started", "a"), ("final", "a"), ("started", None), ("final", None)]
        assert not client.seen("error")


async def test_a_chunk_that_only_names_names_the_request_that_is_open() -> None:
    async with conversation(start_policy="on_end_only") as (_, client):
        await client.chunk("look at ")
        await name(client, "a")
        await client.chunk("this", end=True)
        await client.answer()
        await stream(client, BEGINNING)
        await client.until("speech_started")
        await name(client, "b")
        await stream(client, END)
        await client.answer()
        assert names(client) == [("started", "a"), ("final", "a"), ("started", "b"), ("final", "b")]


async def test_a_cancel_forgets_a_name_that_waits() -> None:
    async with conversation(listens=False) as (_, client):
        await name(client, "a")
        await client.send("cancel")
        await client.say("hello")
        await client.answer()
        await name(client, "b")
        await client.send("cancel", request_id="req_of_another")
        await client.say("hello")
        await client.answer()
        assert [ref for _, ref in names(client)] == [None, None, "b", "b"]


async def test_a_name_keeps_its_place_in_the_order_of_the_input() -> None:
    workers = HeldWorkers()
    async with conversation(workers=workers) as (_, client):
        await stream(client, BEGINNING + END)
        await name(client, "typed")  # behind speech that nobody has listened to yet
        await client.say("hello", number=client.next_sequence_id + 1)
        await client.chunk("Well, ", number=client.next_sequence_id - 2)  # a gap is filled
        await client.barrier()
        workers.listen()
        await client.answer()
        await client.answer()
        assert names(client) == [("started", None), ("final", None), ("started", "typed"), ("final", "typed")]


async def test_audio_that_belongs_to_nobody_names_nothing() -> None:
    async with conversation(turn_detection={"type": "server_vad", "prefix_padding_ms": 0}) as (_, client):
        await client.chunk(quiet(960), ref="silence")
        await client.chunk(loud(320), ref="a")
        await client.chunk(quiet(416), ref="too late")
        await client.chunk(quiet(62 * WINDOW_MS), ref="silence again")
        await client.answer()
        await client.chunk(loud(320))
        await client.chunk(quiet(640))
        await client.answer()
        assert [ref for _, ref in names(client)] == ["a", "a", None, None]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"payload": "%%%"}, "payload"),
        ({"text": "x", "modality": "audio"}, "modality"),
        ({"payload": "", "format": "nothing/known"}, "format"),
        ({"payload": "/w==", "modality": "text"}, "payload"),
        ({"text": "rain", "role": "tool", "tool_call_id": "call_0"}, "tool_call_id"),
    ],
)
async def test_an_error_about_a_chunk_has_the_name_that_this_chunk_carried(fields: dict[str, Any], param: str) -> None:
    async with conversation(hearing(tools=True), listens=False) as (_, client):
        await client.chunk("one ", ref="a")
        number = await client.chunk(ref="b", **fields)
        error = await client.error()
        assert (error["param"], error["sequence_id"], error["ref"]) == (param, number, "b")


async def test_an_error_about_a_character_has_the_name_of_the_chunk_in_which_it_begins() -> None:
    async with conversation(listens=False) as (_, client):
        number = await client.chunk(b"\xc3", modality="text", ref="a")
        await client.chunk("x", end=True, ref="b")
        error = await client.error()
        assert (error["sequence_id"], error["ref"]) == (number, "a")


async def test_an_error_of_a_request_has_its_name() -> None:
    async with conversation(hearing(InvalidValue("no", param="text")), listens=False) as (_, client):
        await client.say("hello", ref="a")
        answer = await client.answer()
        assert (answer.errors[0]["ref"], answer.final["ref"]) == ("a", "a")
        await client.chunk(end=True, ref="b")  # ends nothing, names nothing
        await client.say("hello")
        assert "ref" not in (await client.answer()).final


async def test_an_error_that_ends_the_session_has_the_name_of_its_chunk() -> None:
    async with conversation(listens=False) as (_, client):
        await client.chunk("far ahead", number=5000, ref="a")
        assert await client.closed() == 4422
        assert client.seen("error")[0]["error"]["ref"] == "a"


# speech


async def test_everything_about_a_spoken_turn_names_it() -> None:
    async with conversation() as (_, client):
        turns = []
        for _ in range(2):
            await stream(client, BEGINNING + END)
            answer = await client.answer()
            assert answer.started is not None
            (transcript,) = (chunk for chunk in answer.chunks if chunk["modality"] == "transcript")
            turn_id, request_id = answer.started["turn_id"], answer.started["request_id"]
            assert (transcript["turn_id"], answer.final["turn_id"]) == (turn_id, turn_id)
            assert "turn_id" not in next(chunk for chunk in answer.chunks if chunk["modality"] == "text")
            turns += [("started", turn_id, request_id), ("stopped", turn_id, request_id)]
        assert speech(client) == turns
        assert len({turn_id for _, turn_id, _ in turns}) == 2
        assert all(turn_id.startswith("turn_") for _, turn_id, _ in turns)
        await client.say("typed")
        answer = await client.answer()
        assert answer.started is not None
        assert "turn_id" not in answer.started | answer.final


async def test_speech_that_joins_a_typed_request_names_it() -> None:
    async with conversation(start_policy="on_first_chunk") as (_, client):
        await client.chunk("look at ")
        started = await client.until("response_started")
        assert "turn_id" not in started  # nobody had spoken
        await stream(client, BEGINNING + END)
        answer = await client.answer()
        (begun, stopped) = speech(client)
        assert begun[1:] == stopped[1:] == (answer.final["turn_id"], started["request_id"])


async def test_speech_that_straddles_a_cancel_belongs_to_no_request() -> None:
    workers = HeldWorkers()
    async with conversation(workers=workers) as (_, client):
        await stream(client, quiet(96) + loud(640))
        await client.send("cancel")
        await client.barrier()
        workers.listen()
        await stream(client, loud(320) + quiet(640))
        await client.until("speech_stopped")
        await client.say("hello")
        answer = await client.answer()
        (begun, stopped) = speech(client)
        assert (begun[0], begun[2], stopped[0], stopped[2]) == ("started", None, "stopped", None)
        assert begun[1] == stopped[1]
        assert "turn_id" not in answer.final


@pytest.mark.parametrize("how", ["cancel", "cancel by name", "failure", "interruption"])
async def test_speech_whose_request_is_over_stops_without_one(how: str) -> None:
    failing = [InvalidValue("no", param="text")] if how == "failure" else ()
    async with conversation(hearing(heard=failing), start_policy="on_first_chunk") as (_, client):
        await stream(client, BEGINNING)
        begun = await client.until("speech_started")
        match how:
            case "cancel":
                await client.send("cancel")
            case "cancel by name":
                await client.send("cancel", request_id=begun["request_id"])
            case _:  # while the speech goes on
                await client.send("finish")
        if how == "interruption":
            await client.say("no, this")
        first = await client.answer()
        assert first.final["request_id"] == begun["request_id"]
        await stream(client, END)
        stopped = await client.until("speech_stopped")
        assert (stopped["turn_id"], stopped["request_id"]) == (begun["turn_id"], None)


async def test_speech_whose_request_is_refused_stops_without_one() -> None:
    endless = hearing(TextOutput("an answer"), asyncio.Event().wait)
    turns = {"type": "server_vad", "interrupt_response": False}
    async with conversation(endless, turn_detection=turns) as (server, client):
        await client.say("hello")
        await client.until("output_chunk")
        server.native.drain(60)
        await stream(client, BEGINNING + END)
        refused = await client.answer()
        await client.until("speech_stopped")
        (begun, stopped) = speech(client)
        assert (refused.reason, refused.final["turn_id"]) == ("error", begun[1])
        assert (begun[2], stopped[2]) == (refused.final["request_id"], None)


async def test_speech_stops_with_its_request_also_where_the_client_ended_that_and_has_the_answer() -> None:
    async with conversation() as (_, client):
        await stream(client, BEGINNING)
        await client.until("speech_started")
        await client.send("finish")
        answer = await client.answer()
        assert answer.reason == "stop"
        await stream(client, loud(320) + END)
        stopped = await client.until("speech_stopped")
        assert stopped["request_id"] == answer.final["request_id"]


async def test_a_resume_repeats_the_names() -> None:
    async with conversation() as (server, client):
        await name(client, "a")
        await stream(client, BEGINNING + END)
        await client.answer()
        await client.barrier()
        told = [frame for frame in client.frames if frame["type"] not in ("input_ack", "pong", "session_created")]
        query = f"?session_id={client.created['session_id']}&resume_token={client.created['resume_token']}"
        client.gone()
        async with native_client(server, query=query, greeted=False) as again:
            await again.until("output_chunk")
            while not again.frames[-1].get("final"):
                await again.receive()
            kinds = ("session_resumed", "input_ack")
            assert [frame for frame in again.frames if frame["type"] not in kinds] == told


# results of tools, which are answered wherever their place in the order of the input is


@contextlib.asynccontextmanager
async def called(*calls: str, **options: Any) -> AsyncIterator[NativeClient]:
    """A session with these calls in its history, and turn detection, whose other answers are "it rains"."""
    typed = [one for call in calls for one in tool_call(call, "{}", index=calls.index(call))]
    engine = hearing(*typed, tools=True)
    async with conversation(engine, **options) as (_, client):
        await client.say("What is it like outside?")
        await client.answer()
        engine.script = (TextOutput("it rains"),)
        yield client


async def result(client: NativeClient, call: str, index: int = 0, **fields: Any) -> int:
    return await client.chunk("rain", role="tool", tool_call_id=f"call_{call}_{index}", **fields)


async def test_a_result_that_is_sent_as_speech_has_just_ended_is_answered() -> None:
    workers = HeldWorkers()
    async with called("look", workers=workers) as client:
        await stream(client, BEGINNING + END)
        await result(client, "look", ref="result")  # while the detector is still busy with the speech
        await client.barrier()
        workers.listen()
        spoken, answer = await client.answer(), await client.answer()
        assert (spoken.text, "ref" in spoken.final) == ("spoken answer", False)
        assert (answer.text, answer.final["ref"]) == ("it rains", "result")


async def test_results_of_one_answer_are_one_input_also_where_they_wait() -> None:
    workers = HeldWorkers()
    turns = {"type": "server_vad", "interrupt_response": False}
    async with called("look", "feel", workers=workers, turn_detection=turns) as client:
        await stream(client, BEGINNING + END)
        await result(client, "look")
        await result(client, "feel", 1)
        await result(client, "feel", 1)  # again, which changes nothing
        await client.say("Thanks.")
        await client.barrier()
        workers.listen()
        answers = [await client.answer() for _ in range(3)]
        assert [answer.text for answer in answers] == ["spoken answer", "it rains", "it rains"]
        await client.barrier()
        assert len(client.seen("response_started")) == 4


async def test_the_answer_to_a_result_does_not_talk_over_the_user() -> None:
    gate = asyncio.Event()
    turns = {"type": "server_vad", "interrupt_response": False}
    engine = hearing(*tool_call("look", "{}"), tools=True)
    async with conversation(engine, turn_detection=turns) as (_, client):
        await client.say("What is it like outside?")
        await client.answer()
        engine.script = (TextOutput("I am looking"), gate.wait)
        await client.say("And?")
        await client.until("output_chunk")
        engine.script = (TextOutput("it rains"),)
        await result(client, "look")
        await stream(client, BEGINNING)
        await client.until("speech_started")
        gate.set()
        await client.answer()
        await client.barrier()
        assert len(client.seen("response_started")) == 2
        await stream(client, END)
        assert [(await client.answer()).text for _ in range(2)] == ["it rains", "spoken answer"]


async def test_a_result_ahead_of_a_gap_is_answered_by_itself() -> None:
    async with called("look", listens=False) as client:
        missing = client.next_sequence_id
        await result(client, "look", number=missing + 1)
        await client.say("Thanks.", number=missing + 2)
        await client.say("And then?", number=missing)
        answers = [await client.answer() for _ in range(3)]
        triggers = [answer.started["trigger"] for answer in answers if answer.started is not None]
        assert triggers == ["min_length", "end_of_input", "min_length"]


async def test_a_result_whose_number_is_left_free_may_come_again() -> None:
    async with called("look", listens=False, out_of_order="reject") as client:
        missing = client.next_sequence_id
        number = await result(client, "look", number=missing + 1, ref="a")
        error = await client.error()
        assert (error["code"], error["sequence_id"], error["ref"]) == ("out_of_order", number, "a")
        await client.chunk(end=True, number=missing)  # which ends nothing
        await result(client, "look", number=number)
        assert (await client.answer()).text == "it rains"


async def test_a_result_that_a_cancel_has_dropped_may_come_again() -> None:
    workers = HeldWorkers()
    async with called("look", workers=workers) as client:
        await stream(client, quiet(320))
        await result(client, "look")
        await client.send("cancel")
        await client.barrier()
        workers.listen()
        await result(client, "look")
        assert (await client.answer()).text == "it rains"
        assert not client.seen("error")


async def test_a_result_whose_call_has_left_the_history_is_refused_also_where_it_had_come() -> None:
    async with called("look", listens=False) as client:
        first = client.guarantees.finished[0]
        await result(client, "look")
        await client.answer()
        await client.send("history_truncate", request_id=first)
        assert (await client.until("history_truncated"))["dropped_requests"] == 2
        await result(client, "look", end=True)
        assert (await client.error())["code"] == "session_conflict"
        await client.say("And?")  # nothing is left open
        assert (await client.answer()).text == "it rains"
