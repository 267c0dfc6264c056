"""history_truncate over real sockets: what is dropped, when it is refused, and what outlives a connection."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from support.live_server import live_server
from support.native_client import NativeClient, native_client

from omni_ws.core.history import Message
from omni_ws.engine.base import GenerationRequest, OutputWriter, TextOutput
from omni_ws.engine.fake import EchoEngine, ScriptedEngine

KEEPS: dict[str, Any] = {"resume_grace_sec": 30}


class Attentive(EchoEngine):
    """Echoes, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.requests.append(request)
        await super().generate(request, out)


async def ask(client: NativeClient, text: str) -> str:
    """A whole request; returns its id."""
    await client.say(text)
    request_id: str = (await client.answer()).final["request_id"]
    return request_id


async def truncated(client: NativeClient, request_id: str) -> int:
    await client.send("history_truncate", request_id=request_id)
    frame = await client.until("history_truncated", "error")
    assert (frame["type"], frame.get("request_id")) == ("history_truncated", request_id), frame
    dropped: int = frame["dropped_requests"]
    return dropped


async def refused(client: NativeClient, code: str, **fields: Any) -> None:
    await client.send("history_truncate", **fields)
    error = await client.error()
    assert (error["code"], error["param"], error["request_id"]) == (code, "request_id", None)
    assert error["retryable"] is False


async def prompt(client: NativeClient, engine: Attentive | ScriptedEngine) -> tuple[Message, ...]:
    """What a further request sees."""
    await ask(client, "next")
    return engine.requests[-1].history


def exchange(text: str) -> tuple[Message, Message]:
    return Message("user", text), Message("assistant", text)


# what is dropped


@pytest.mark.parametrize("subprotocol", ["omni.v1+json", "omni.v1+binary"])
async def test_a_request_and_all_later_ones_are_dropped(subprotocol: str) -> None:
    engine = Attentive()
    async with live_server(engine) as server, native_client(server, subprotocols=[subprotocol]) as client:
        _, second, _ = [await ask(client, text) for text in ("one", "two", "three")]
        assert await truncated(client, second) == 2
        assert await prompt(client, engine) == exchange("one")


async def test_numbering_and_configuration_stay() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(instructions="Be brief.")
        first = await ask(client, "one")
        before = client.guarantees.next_output
        assert await truncated(client, first) == 1
        assert client.guarantees.next_output == before
        config = await client.configure()
        assert config["instructions"] == "Be brief."
        await ask(client, "two")


async def test_a_request_that_failed_can_be_named() -> None:
    engine = Attentive()
    async with live_server(engine) as server, native_client(server) as client:
        await ask(client, "one")
        await client.configure(stage_params={"fake": {"fail_after_chunks": 0}})
        await client.say("fails")
        answer = await client.answer()
        assert answer.reason == "error"
        await client.configure(stage_params=None)
        await ask(client, "two")
        assert await truncated(client, answer.final["request_id"]) == 2
        assert await prompt(client, engine) == exchange("one")


async def test_truncation_counts_as_a_sign_of_life_and_is_told_in_line() -> None:
    async with live_server() as server, native_client(server) as client:
        first = await ask(client, "one")
        await client.send("history_truncate", request_id=first)
        await client.say("two")
        await client.answer()
        types = [frame["type"] for frame in client.frames if frame["type"] != "input_ack"]
        assert types[-4:-2] == ["history_truncated", "response_started"]


async def test_truncating_again_changes_nothing() -> None:
    engine = Attentive()
    async with live_server(engine) as server, native_client(server) as client:
        first = await ask(client, "one")
        second = await ask(client, "two")
        assert await truncated(client, first) == 2
        third = await ask(client, "three")
        assert [await truncated(client, name) for name in (first, second)] == [0, 0]
        assert await prompt(client, engine) == exchange("three")
        assert await truncated(client, third) == 2


async def test_results_of_tools_go_with_their_request() -> None:
    engine = ScriptedEngine([TextOutput("Fine.")])
    async with live_server(engine) as server, native_client(server) as client:
        await client.say("one")
        first = (await client.answer()).final["request_id"]
        await client.say("two")
        await client.answer()
        assert await truncated(client, first) == 2
        assert await prompt(client, engine) == ()


async def test_a_playing_answer_that_was_dropped_stays_so_when_it_is_interrupted() -> None:
    engine = Attentive()
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(overlap="interrupt")
        await client.chunk("spoken ")
        await client.binary(bytes(32_000), end=True)
        answer = await client.answer()
        await client.send("output_ack", sequence_id=answer.final["sequence_id"], played_ms=100)
        assert await truncated(client, answer.final["request_id"]) == 1
        assert await prompt(client, engine) == ()


# when it is refused


@pytest.mark.parametrize("request_id", ["req_unknown", "", "x" * 5000])
async def test_unknown_request(request_id: str) -> None:
    engine = Attentive()
    async with live_server(engine) as server, native_client(server) as client:
        await ask(client, "one")
        await refused(client, "invalid_value", request_id=request_id)
        assert await prompt(client, engine) == exchange("one")


@pytest.mark.parametrize("fields", [{}, {"request_id": None}, {"request_id": 7}, {"request_id": ["req_1"]}])
async def test_no_request_is_named(fields: dict[str, Any]) -> None:
    async with live_server() as server, native_client(server) as client:
        await refused(client, "invalid_value", **fields)
        await ask(client, "one")


async def test_request_of_another_session() -> None:
    async with live_server() as server, native_client(server) as other, native_client(server) as client:
        await refused(client, "invalid_value", request_id=await ask(other, "one"))


@pytest.mark.parametrize("past", [False, True])
async def test_request_that_is_too_old(past: bool) -> None:
    engine = Attentive()
    async with live_server(engine, limits={"max_history_tokens": 2}) as server, native_client(server) as client:
        first = await ask(client, "one")
        for text in ("two", "three") if past else ("two",):
            await ask(client, text)
        if past:
            await refused(client, "invalid_value", request_id=first)
            assert await prompt(client, engine) == exchange("three")
        else:
            assert await truncated(client, first) == 2
            assert await prompt(client, engine) == ()


async def test_earlier_turns_come_back_into_view() -> None:
    engine = Attentive()
    async with live_server(engine, limits={"max_history_tokens": 2}) as server, native_client(server) as client:
        await ask(client, "one")
        second = await ask(client, "two")
        assert await truncated(client, second) == 1
        assert await prompt(client, engine) == exchange("one")


async def test_refused_while_input_is_open() -> None:
    engine = Attentive()
    async with live_server(engine) as server, native_client(server) as client:
        first = await ask(client, "one")
        await client.configure(start_policy="on_end_only")
        await client.chunk("half of ")
        await refused(client, "session_conflict", request_id=first)
        await client.chunk("two", end=True)
        await client.answer()
        assert engine.requests[-1].history == exchange("one")


async def test_refused_while_a_request_is_answered_or_waits() -> None:
    go_on = asyncio.Event()
    engine = ScriptedEngine([TextOutput("well"), go_on.wait])
    async with live_server(engine) as server, native_client(server) as client:
        await client.say("one")
        running = (await client.until("response_started"))["request_id"]
        await refused(client, "session_conflict", request_id=running)
        await refused(client, "session_conflict", request_id="req_unknown")
        await client.say("two")
        await refused(client, "session_conflict", request_id=running)
        go_on.set()
        assert (await client.answer()).reason == "stop"
        assert (await client.answer()).reason == "stop"
        assert await truncated(client, running) == 2
        assert await prompt(client, engine) == ()


async def test_refused_while_chunks_wait_behind_a_gap() -> None:
    engine = Attentive()
    async with live_server(engine) as server, native_client(server) as client:
        first = await ask(client, "one")
        await client.chunk("two", end=True, number=2)
        await refused(client, "session_conflict", request_id=first)
        await client.chunk(number=1)
        await client.answer()
        assert engine.requests[-1].history == exchange("one")


async def test_cancel_makes_room_for_it() -> None:
    engine = ScriptedEngine([TextOutput("well"), asyncio.Event().wait])
    async with live_server(engine) as server, native_client(server) as client:
        await client.say("one")
        await client.until("output_chunk")
        await client.send("cancel")
        cancelled = await client.answer()
        assert await truncated(client, cancelled.final["request_id"]) == 1


async def test_without_a_history_nothing_is_kept_that_could_be_dropped() -> None:
    async with live_server(limits={"max_history_tokens": 0}) as server, native_client(server) as client:
        await refused(client, "invalid_value", request_id=await ask(client, "one"))


# resume


async def resumed(client: NativeClient, again: NativeClient, heard: int) -> None:
    again.created = await again.receive()
    assert again.created["type"] == "session_resumed"
    again.guarantees.next_output = heard + 1
    again.next_sequence_id = client.next_sequence_id


@pytest.mark.parametrize("heard", [False, True])
async def test_truncation_and_its_answer_outlive_the_connection(heard: bool) -> None:
    engine = Attentive()
    async with live_server(engine, streaming_input=KEEPS) as server, native_client(server) as client:
        await ask(client, "one")
        second = await ask(client, "two")
        last_output = client.guarantees.next_output - 1
        await client.send("history_truncate", request_id=second)
        if heard:
            await client.until("history_truncated")
        else:
            await client.barrier()
        client.gone()
        created = client.created
        query = f"?session_id={created['session_id']}&resume_token={created['resume_token']}&last_output={last_output}"
        async with native_client(server, query=query, greeted=False) as again:
            await resumed(client, again, last_output)
            told = await again.until("history_truncated")
            assert (told["request_id"], told["dropped_requests"]) == (second, 1)
            assert await truncated(again, second) == 0  # as a client does that does not know
            assert await prompt(again, engine) == exchange("one")


async def test_a_fresh_session_has_no_history() -> None:
    async with live_server(streaming_input=KEEPS) as server:
        async with native_client(server) as client:
            first = await ask(client, "one")
        async with native_client(server) as client:
            await refused(client, "invalid_value", request_id=first)


# what is left


@pytest.mark.parametrize("seed", range(6))
async def test_prompt_is_that_of_a_fresh_conversation_with_the_same_turns(seed: int) -> None:
    random = Random(seed)
    engine = Attentive()
    async with live_server(engine, limits={"max_history_tokens": 30}) as server:
        turns: list[tuple[str, str]] = []
        async with native_client(server) as client:
            for step in range(25):
                if turns and random.random() < 0.35:
                    first = random.randrange(max(0, len(turns) - 3), len(turns))
                    assert await truncated(client, turns[first][0]) == len(turns) - first
                    del turns[first:]
                else:
                    text = f"{step}" + " word" * random.randrange(3)
                    turns.append((await ask(client, text), text))
            edited = await prompt(client, engine)
        async with native_client(server) as client:
            for _, text in turns:
                await ask(client, text)
            assert await prompt(client, engine) == edited
