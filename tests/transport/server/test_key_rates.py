"""What a key may do in a second, on a clock that jumps: requests and bytes of input, at the limit and one past it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client
from support.raw_http import RawResponse, chunked, post, raw_client, request

from omni_ws.config.keys import ApiKey, digest
from omni_ws.engine.base import TextOutput
from omni_ws.engine.fake import ScriptedEngine

pytestmark = pytest.mark.virtual_clock

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
#: Bytes of frames and heads around the content, and the passes of the loop in between.
ROUGHLY = 0.2


def now() -> float:
    return asyncio.get_running_loop().time()


def keys(**limits: Any) -> tuple[ApiKey, ...]:
    return (
        ApiKey(name="ann", key_sha256=digest("ann"), **limits),
        ApiKey(name="bob", key_sha256=digest("bob")),
    )


def bearer(name: str) -> str:
    return f"Authorization: Bearer {name}"


async def chat(server: LiveServer, name: str, **fields: Any) -> RawResponse:
    return await post(server.port, CHAT, {**BODY, **fields}, bearer(name))


def client_of(server: LiveServer, name: str) -> Any:
    return native_client(server, additional_headers={"Authorization": f"Bearer {name}"})


# requests


async def test_requests_over_http() -> None:
    async with live_server(keys=keys(requests_per_sec=0.5, burst=2)) as server:
        assert [(await chat(server, "ann")).status for _ in range(2)] == [200, 200]
        for _ in range(3):  # what is refused costs nothing
            refused = await chat(server, "ann", stream=True)
            assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (429, "rate_limited", "2")
            assert refused.error["type"] == "rate_limit_error"
        assert (await chat(server, "bob")).status == 200
        await asyncio.sleep(2)
        assert [(await chat(server, "ann")).status for _ in range(2)] == [200, 429]


@pytest.mark.parametrize(("rate", "at_once"), [(0.1, 1), (1, 1), (3, 3)])
async def test_the_burst_that_nobody_set_is_a_second_of_the_rate(rate: float, at_once: int) -> None:
    async with live_server(keys=keys(requests_per_sec=rate)) as server:
        answers = [(await chat(server, "ann")).status for _ in range(at_once + 1)]
        assert answers == [200] * at_once + [429]


async def test_only_requests_are_counted() -> None:
    async with live_server(keys=keys(requests_per_sec=0.1)) as server:
        for _ in range(5):
            async with raw_client(server.port) as client:
                await client.send(request("GET", "/v1/models", bearer("ann")))
                assert (await client.response()).status == 200
            async with client_of(server, "ann"):  # a session alone is no request
                pass
        assert (await chat(server, "ann")).status == 200


async def test_each_turn_of_a_session_is_a_request() -> None:
    async with live_server(keys=keys(requests_per_sec=0.5, burst=2)) as server, client_of(server, "ann") as client:
        for _ in range(2):
            await client.say("hello")
            assert (await client.answer()).reason == "stop"
        await client.chunk("too")
        await client.say(" many")
        refused = await client.answer()
        assert (refused.reason, refused.text, refused.started) == ("error", "", None)
        (error,) = refused.errors
        assert (error["code"], error["retryable"], error["retry_after_ms"]) == ("rate_limited", True, 2000)
        assert error["request_id"] == refused.final["request_id"]
        # The session goes on, and so does its numbering; the key's other ways in know of its turns.
        assert (await chat(server, "ann")).status == 429
        await asyncio.sleep(2)
        await client.say("again")
        assert (await client.answer()).text == "again"


async def test_a_refused_turn_does_not_interrupt_the_one_before() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine([gate.wait, TextOutput("whole")])
    async with (
        live_server(engine, keys=keys(requests_per_sec=0.1)) as server,
        client_of(server, "ann") as client,
    ):
        await client.configure(overlap="interrupt")
        await client.say("one")
        await client.say("two")
        refused = await client.answer()
        assert [error["code"] for error in refused.errors] == ["rate_limited"]
        gate.set()
        answer = await client.answer()
        assert (answer.reason, answer.text) == ("stop", "whole")


# bytes


async def paced(client: NativeClient, *, pieces: int, size: int) -> float:
    """Sends audio as fast as it can; how long until all of it was accepted."""
    begin = now()
    await client.configure(start_policy="on_end_only")
    for number in range(pieces):
        await client.binary(bytes(size), end=number == pieces - 1)
    assert (await client.answer()).reason == "stop"
    return now() - begin


@pytest.mark.parametrize("timeouts", [{}, {"session_timeout_sec": 3, "ping_interval_sec": 1, "ping_timeout_sec": 1}])
async def test_a_flood_is_read_at_its_pace_and_never_an_error(timeouts: dict[str, int]) -> None:
    """One second's worth at once, then as much in each second; the silence in between is not the client's."""
    async with (
        live_server(keys=keys(input_bytes_per_sec=20_000), streaming_input=timeouts) as server,
        client_of(server, "ann") as client,
    ):
        assert await paced(client, pieces=50, size=4_000) == pytest.approx(9, abs=1)
        assert await paced(client, pieces=1, size=2_000) < ROUGHLY + 1  # nothing is owed from before
        assert not client.seen("error")
        async with client_of(server, "bob") as other:
            assert await paced(other, pieces=50, size=4_000) < ROUGHLY


async def test_what_is_within_the_rate_is_not_held_up() -> None:
    async with live_server(keys=keys(input_bytes_per_sec=40_000)) as server, client_of(server, "ann") as client:
        await client.configure(start_policy="on_first_chunk")
        for _ in range(200):
            await asyncio.sleep(0.02)
            await client.binary(bytes(640))
            begin = now()
            await client.barrier()
            assert now() == begin
        await client.send("cancel")
        await client.answer()


async def test_all_connections_of_a_key_share_its_rate() -> None:
    async with (
        live_server(keys=keys(input_bytes_per_sec=20_000)) as server,
        client_of(server, "ann") as one,
        client_of(server, "ann") as two,
    ):
        begin = now()
        async with asyncio.TaskGroup() as group:
            group.create_task(paced(one, pieces=25, size=4_000))
            group.create_task(paced(two, pieces=25, size=4_000))
        assert now() - begin == pytest.approx(9, abs=1)


async def test_a_gap_that_is_filled_behind_the_pace() -> None:
    """The missing chunk is in the socket, which the server does not read: that is not the client's gap."""
    fields = {"reorder_timeout_sec": 2}
    async with (
        live_server(keys=keys(input_bytes_per_sec=1_000), streaming_input=fields) as server,
        client_of(server, "ann") as client,
    ):
        await client.configure(start_policy="on_end_only")
        await client.binary(bytes(10), number=1, end=True)
        await client.barrier()
        await client.binary(bytes(8_000), number=0)
        begin = now()
        assert (await client.answer()).reason == "stop"
        assert now() - begin == pytest.approx(7, abs=1)


@pytest.mark.parametrize("session_timeout", [300, 3])
async def test_a_streamed_body_is_read_at_its_pace(session_timeout: int) -> None:
    fields = {"session_timeout_sec": session_timeout}
    async with (
        live_server(keys=keys(input_bytes_per_sec=20_000), streaming_input=fields) as server,
        raw_client(server.port) as client,
    ):
        head = ("X-Streaming-Input: true", "Content-Type: audio/pcm", "Transfer-Encoding: chunked")
        await client.send(request("POST", CHAT + "?start_policy=on_end_only&stream=false", *head, bearer("ann")))
        begin = now()
        await client.send(chunked(*[bytes(4_000)] * 50))
        answer = await client.response()
        assert (answer.status, answer.json()["usage"]["input_audio_ms"]) == (200, 6250)
        assert now() - begin == pytest.approx(9, abs=ROUGHLY)


async def test_an_ordinary_body_is_read_at_its_pace() -> None:
    async with live_server(keys=keys(input_bytes_per_sec=20_000), http={"body_timeout_sec": 1}) as server:
        begin = now()
        content = "x" * 200_000
        answer = await chat(server, "ann", messages=[{"role": "user", "content": content}])
        assert answer.json()["choices"][0]["message"]["content"] == content
        assert now() - begin == pytest.approx(9, abs=ROUGHLY)
        for _ in range(3):  # small ones are held to it together
            assert (await chat(server, "ann", messages=[{"role": "user", "content": "x" * 20_000}])).status == 200
        assert now() - begin == pytest.approx(12, abs=ROUGHLY)
        assert (await chat(server, "bob", messages=[{"role": "user", "content": content}])).status == 200
        assert now() - begin == pytest.approx(12, abs=ROUGHLY)


async def test_a_client_that_goes_while_it_is_held_up_leaves_nothing() -> None:
    async with live_server(keys=keys(input_bytes_per_sec=1_000)) as server:
        async with client_of(server, "ann") as client:
            await client.binary(bytes(50_000))
            await server.until(lambda: server.connections[0].held_to_pace, "the pause")
            client.gone()
        async with raw_client(server.port) as peer:
            await peer.send(request("POST", CHAT, bearer("ann"), body=bytes(50_000)))
            await server.until(lambda: server.sessions == 2, "the upload")
            peer.reset()
        await asyncio.sleep(200)
        await server.check_empty()
