"""Order, duplicates and loss: acknowledgements, the reorder window, and the same bytes whatever arrives when."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.live_server import live_server
from support.native_client import NativeClient, native_client

RATE = 16_000


def acks(client: NativeClient) -> list[tuple[int, int]]:
    return [(frame["next_sequence_id"], frame["buffered_chunks"]) for frame in client.seen("input_ack")]


async def test_acknowledged_every_16_chunks() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only")
        for _ in range(40):
            await client.binary(b"\0\0")
        await client.barrier()
        assert [number for number, _ in acks(client)][:2] == [16, 32]
        await client.send("cancel")
        await client.answer()


@pytest.mark.virtual_clock
async def test_acknowledged_after_100_ms() -> None:
    loop = asyncio.get_running_loop()
    async with live_server() as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only")
        await asyncio.sleep(5)
        begin = loop.time()
        await client.binary(b"\0\0")
        ack = await client.until("input_ack")
        assert loop.time() - begin == pytest.approx(0.1, abs=0.02)
        assert (ack["next_sequence_id"], ack["received_bytes"]) == (1, 2)
        await asyncio.sleep(5)
        await client.barrier()
        assert len(acks(client)) == 1  # nothing new, nothing said
        await client.send("cancel")
        await client.answer()


async def test_acknowledged_at_once_after_duplicate_filled_gap_and_end() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only")
        await client.binary(b"aa", number=0)
        await client.binary(b"xx", number=0)
        assert (await client.until("input_ack"))["next_sequence_id"] == 1
        await client.binary(b"cc", number=2)
        await client.binary(b"yy", number=2)
        ack = await client.until("input_ack")
        assert (ack["next_sequence_id"], ack["buffered_chunks"], ack["received_bytes"]) == (1, 1, 2)
        await client.binary(b"bb", number=1)
        ack = await client.until("input_ack")
        assert (ack["next_sequence_id"], ack["buffered_chunks"], ack["received_bytes"]) == (3, 0, 6)
        await client.binary(b"dd", number=3, end=True)
        assert (await client.until("input_ack"))["next_sequence_id"] == 4
        assert (await client.answer()).reason == "stop"


async def test_first_copy_of_a_duplicate_counts() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk("c", number=2, end=True)
        await client.chunk("X", number=2)
        await client.chunk("b ", number=1)
        await client.chunk("a ", number=0)
        await client.chunk("X", number=0)
        await client.chunk("X", number=1, end=True)
        answer = await client.answer()
        assert answer.text == "a b c"
        await client.barrier()
        assert client.seen("error") == []


async def test_credit_and_held_bytes() -> None:
    async with (
        live_server(streaming_input={"max_payload_per_session": 1000}) as server,
        native_client(server) as client,
    ):
        await client.configure(start_policy="on_end_only")
        await client.binary(bytes(600))
        await client.binary(bytes(100), number=2)
        ack = await client.until("input_ack")
        while ack["buffered_chunks"] == 0:
            await client.binary(bytes(100), number=2)
            ack = await client.until("input_ack")
        assert (ack["credit_bytes"], ack["received_bytes"], server.held_bytes >= 700) == (300, 600, True)
        await client.send("cancel")
        await client.answer()


async def test_reject_mode() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(out_of_order="reject")
        await client.chunk("c", number=2, end=True)
        error = await client.error()
        assert (error["code"], error["retryable"]) == ("out_of_order", True)
        assert (error["param"], error["sequence_id"]) == ("sequence_id", 2)
        await client.chunk("a ", number=0)
        await client.chunk("b ", number=1)
        await client.chunk("a again", number=0)
        await client.chunk("c", number=2, end=True)
        answer = await client.answer()
        assert (answer.text, answer.errors) == ("a b c", [])
        await client.chunk("beyond", number=3 + 256)
        assert (await client.error())["code"] == "reorder_window_exceeded"
        assert await client.closed() == 4422


async def test_reject_mode_reports_a_refused_chunk_ahead_of_a_gap_as_out_of_order_alone() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(out_of_order="reject")
        refused: list[dict[str, Any]] = [{"text": 5}, {"payload": "no base64"}, {"text": "x", "format": "x/y"}]
        for number, fields in enumerate(refused, 1):
            await client.send("input_chunk", sequence_id=number, **fields)
        await client.raw(bytes([1, 1, 9, 0, *(4).to_bytes(4, "big"), 0, 0, 0, 0]))
        await client.barrier()
        errors = [frame["error"] for frame in client.seen("error")]
        assert [(one["code"], one["retryable"]) for one in errors] == [("out_of_order", True)] * 4
        assert [one["sequence_id"] for one in errors] == [1, 2, 3, 4]
        await client.chunk("a ", number=0)
        await client.chunk("b", number=1, end=True)  # the number was still free
        assert (await client.answer()).text == "a b"


async def test_reject_mode_is_for_the_next_request() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk("a ", number=0)
        await client.barrier()
        await client.configure(out_of_order="reject")
        await client.chunk("c", number=2, end=True)
        await client.chunk("b ", number=1)
        assert (await client.answer()).errors == []
        await client.chunk("e", number=4)
        assert (await client.error())["code"] == "out_of_order"


@pytest.mark.parametrize("window", [2, 4, 256])
async def test_last_number_inside_the_window_and_the_first_beyond(window: int) -> None:
    async with (
        live_server(streaming_input={"reorder_window_chunks": window}) as server,
        native_client(server) as client,
    ):
        await client.chunk("first", number=0)
        await client.chunk("last inside", number=window)
        await client.barrier()
        assert client.seen("error") == []
        await client.chunk("beyond", number=window + 1)
        error = await client.error()
        assert (error["code"], error["sequence_id"]) == ("reorder_window_exceeded", window + 1)
        final = await client.answer()
        assert final.reason == "error"
        assert await client.closed() == 4422


@pytest.mark.virtual_clock
async def test_gap_that_is_not_filled() -> None:
    loop = asyncio.get_running_loop()
    async with live_server(streaming_input={"reorder_timeout_sec": 7}) as server, native_client(server) as client:
        await client.chunk("a", number=0)
        await client.chunk("c", number=2)
        begin = loop.time()
        await asyncio.sleep(6.5)
        await client.chunk("d", number=3)
        error = await client.error()
        assert (error["code"], error["sequence_id"], error["param"]) == ("sequence_gap", 1, "sequence_id")
        assert loop.time() - begin == pytest.approx(7, abs=0.1)
        assert (await client.answer()).reason == "error"
        assert await client.closed() == 4408


async def test_gap_whose_time_is_shorter_than_a_timer_can_tell() -> None:
    async with live_server(streaming_input={"reorder_timeout_sec": 1e-6}) as server, native_client(server) as client:
        await client.chunk("b", number=1)
        assert (await client.error())["code"] == "sequence_gap"
        assert await client.closed() == 4408


@pytest.mark.virtual_clock
async def test_gap_that_is_filled_in_time_and_the_next_one_has_its_own_clock() -> None:
    async with live_server(streaming_input={"reorder_timeout_sec": 7}) as server, native_client(server) as client:
        await client.chunk("c", number=2)
        await client.chunk("e", number=4, end=True)
        await asyncio.sleep(6.5)
        await client.chunk("a", number=0)
        await client.chunk("b", number=1)
        await asyncio.sleep(6.5)
        await client.chunk("d", number=3)
        assert (await client.answer()).text == "abcde"


async def test_refused_chunk_uses_its_number_up() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk("a ", number=0)
        await client.send("input_chunk", sequence_id=1, payload="%%%")
        assert (await client.error())["sequence_id"] == 1
        await client.chunk("c", number=2, end=True)
        assert (await client.answer()).text == "a c"


async def test_end_of_a_refused_chunk_has_no_effect() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk("a ")
        await client.chunk("b", end=True, modality="audio")
        assert (await client.error())["code"] == "invalid_value"
        await client.chunk("c", end=True)
        assert (await client.answer()).text == "a c"


async def test_refused_chunk_fills_a_gap() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk("b", number=1, end=True)
        await client.send("input_chunk", sequence_id=0, payload=5)
        assert (await client.error())["code"] == "invalid_frame"
        assert (await client.answer()).text == "b"


async def test_numbers_go_on_over_requests() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.chunk("three", number=2, end=True)
        await client.chunk("two", number=1, end=True)
        await client.chunk("one", number=0, end=True)
        assert [(await client.answer()).text for _ in range(3)] == ["one", "two", "three"]


async def test_numbers_past_the_largest() -> None:
    async with live_server() as server, native_client(server) as client:
        for bad in (-1, 2**32, 1.5, "1", None, True):
            await client.send("input_chunk", sequence_id=bad, text="x")
            error = await client.error()
            assert (error["code"], error["param"]) == ("invalid_value", "sequence_id"), bad
        await client.send("input_chunk", sequence_id=2**32 - 1, text="x")
        assert (await client.error())["code"] == "reorder_window_exceeded"


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=40),
    repeats=st.integers(0, 10),
    spread=st.integers(0, 60),
    binary=st.booleans(),
)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_order_and_repetition_gives_the_same_bytes(
    seed: int, sizes: list[int], repeats: int, spread: int, binary: bool
) -> None:
    async def run() -> None:
        chance = random.Random(seed)
        pieces = [chance.randbytes(size) for size in sizes]
        order = sorted(range(len(pieces)), key=lambda number: number + chance.uniform(0, spread))
        order += chance.choices(range(len(pieces)), k=repeats)
        async with live_server() as server, native_client(server) as client:
            await client.configure(output_audio={"sample_rate": RATE})
            for number in order:
                end = number == len(pieces) - 1
                if binary or number % 2:
                    await client.binary(pieces[number], number=number, end=end)
                else:
                    await client.chunk(pieces[number], number=number, end=end, modality="audio")
            answer = await client.answer()
            sent = b"".join(pieces)
            if sent:
                assert answer.audio == sent[: len(sent) // 2 * 2]
            else:
                assert answer.errors[0]["code"] == "empty_input"

    asyncio.run(run())
