"""Answers as streams of events, between a source and a sink that the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from support.parts_of_sessions import GivenAnswer, final, text

from omni_ws.core.chunks import FinalChunk, FinishReason, OutputChunk
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import EngineFailed, EngineOverloaded, InvalidValue, OmniError
from omni_ws.transport.routes.sole_request import (
    LARGE_EVENT_BYTES,
    WRITE_BATCH_EVENTS,
    charging,
    collect_answer,
    write_events,
)
from omni_ws.wire import server_frames
from omni_ws.wire.server_frames import ResponseStartedFrame

pytestmark = pytest.mark.virtual_clock

STOP = final(FinishReason.STOP)
STARTED = ResponseStartedFrame(request_id="r", trigger="end", sequence_id=0, input_mode="snapshot")
DONE = b"data: [DONE]\n\n"


class RecordingSink:
    """An EventSink that records its writes; ``has_room`` decides whether it is writable."""

    def __init__(self) -> None:
        self.error: OmniError | None = None
        self.has_room = True
        self.head_sent = False
        self.ended = False
        #: What each write contained, and the task that wrote it.
        self.writes: list[bytes] = []
        self.writers: list[asyncio.Task[Any] | None] = []

    def tell_error(self, error: OmniError) -> None:
        self.error = error

    async def start(self, status: int, headers: Iterable[tuple[str, str]] = (), *, filler: bytes = b"") -> None:
        assert not self.head_sent
        self.head_sent = True

    @property
    def startable(self) -> bool:
        return self.has_room and not self.head_sent

    def start_now(
        self, status: int, headers: Iterable[tuple[str, str]] = (), *, filler: bytes = b"", content: bytes = b""
    ) -> None:
        assert self.startable
        self.head_sent = True
        self.write_now(content)

    async def write(self, data: bytes) -> None:
        assert self.head_sent
        if data:
            self.writes.append(data)
            self.writers.append(asyncio.current_task())

    async def write_all(self, parts: Sequence[bytes]) -> None:
        await self.write(b"".join(parts))

    @property
    def writable(self) -> bool:
        return self.head_sent and self.has_room

    def write_now(self, data: bytes) -> None:
        assert self.writable
        self.writes.append(data)

    async def end(self, parts: Sequence[bytes] = ()) -> None:
        await self.write_all(parts)
        self.ended = True


class TextEncoder:
    """An event for each output, with its text."""

    def output(self, chunk: OutputChunk) -> Iterable[dict[str, Any] | bytes]:
        return ({"text": chunk.text},)

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]:
        yield {"reason": chunk.finish_reason.value}


def event(content: str) -> bytes:
    return server_frames.event({"text": content})


END = server_frames.event({"reason": "stop"})


class Streaming:
    """A stream that is being written."""

    def __init__(self, **options: Any) -> None:
        self.source = GivenAnswer()
        self.sink = RecordingSink()
        options = {"head_at_start": False, "heartbeat_sec": 0, **options}
        self.task = asyncio.create_task(write_events(self.sink, self.source, TextEncoder(), **options))

    async def give(self, *messages: Any) -> list[bytes]:
        """Provide messages, and return the writes that they caused."""
        before = len(self.sink.writes)
        self.source.put(*messages)
        await asyncio.sleep(0.001)
        return self.sink.writes[before:]


async def test_events_that_are_available_together_are_written_together() -> None:
    streaming = Streaming()
    assert await streaming.give(text("a"), text("b")) == [event("a") + event("b")]
    assert await streaming.give(text("c")) == [event("c")]
    assert await streaming.give(text("d"), STOP) == [event("d") + END + DONE]
    await streaming.task
    assert streaming.sink.ended
    assert streaming.sink.error is None


async def test_batches_are_bounded_in_number_and_by_large_events() -> None:
    streaming = Streaming()
    many = await streaming.give(*(text("x") for _ in range(WRITE_BATCH_EVENTS + 1)))
    assert many == [event("x") * WRITE_BATCH_EVENTS, event("x")]
    large = "y" * LARGE_EVENT_BYTES
    assert await streaming.give(text("a"), text(large), text("b")) == [event("a") + event(large), event("b")]
    await streaming.give(STOP)
    await streaming.task


async def test_sink_without_room_is_waited_for() -> None:
    streaming = Streaming()
    await streaming.give(text("a"))
    streaming.sink.has_room = False
    assert await streaming.give(text("b")) == [event("b")]
    assert streaming.sink.writers[-1] is streaming.task
    await streaming.give(STOP)
    await streaming.task


async def test_the_head_of_a_sink_without_room_is_waited_for() -> None:
    streaming = Streaming()
    streaming.sink.has_room = False
    assert await streaming.give(text("a")) == [event("a")]
    assert streaming.sink.writers == [streaming.task]
    await streaming.give(STOP)
    await streaming.task


async def test_the_head_goes_with_the_first_output_at_once() -> None:
    streaming = Streaming()
    assert await streaming.give(STARTED) == []
    assert await streaming.give(text("a")) == [event("a")]
    assert streaming.sink.head_sent
    assert streaming.sink.writers == []  # none of them by the waiting task
    await streaming.give(STOP)
    await streaming.task


@pytest.mark.parametrize("head_at_start", [True, False])
async def test_head_waits_for_the_first_output_unless_it_marks_the_start(head_at_start: bool) -> None:
    streaming = Streaming(head_at_start=head_at_start)
    assert await streaming.give(STARTED) == []
    assert streaming.sink.head_sent is head_at_start
    streaming.source.put(InvalidValue("no"))
    if head_at_start:
        await streaming.task
        assert streaming.sink.ended
        assert isinstance(streaming.sink.error, InvalidValue)
        assert streaming.sink.writes[-1].startswith(b"event: error\n")
    else:
        with pytest.raises(InvalidValue):
            await streaming.task
        assert not streaming.sink.head_sent


async def test_error_behind_outputs_is_an_event_without_done() -> None:
    streaming = Streaming()
    (last,) = await streaming.give(text("a"), EngineFailed("broken"))
    await streaming.task
    assert last.startswith(event("a") + b"event: error\n")
    assert DONE not in last
    assert streaming.sink.ended


async def test_cancelled_answer_is_an_error() -> None:
    streaming = Streaming()
    streaming.source.put(final(FinishReason.CANCELLED))
    with pytest.raises(EngineFailed, match="before its answer was complete"):
        await streaming.task


@pytest.mark.parametrize("by_heartbeat", [True, False])
async def test_heartbeats_follow_the_head_or_send_it(by_heartbeat: bool) -> None:
    streaming = Streaming(heartbeat_sec=15, head_by_heartbeat=by_heartbeat)
    await asyncio.sleep(31)
    assert streaming.sink.writes == [server_frames.HEARTBEAT_BLOCK] * (2 if by_heartbeat else 0)
    await streaming.give(text("a"))
    await asyncio.sleep(16)
    assert streaming.sink.writes[-2:] == [event("a"), server_frames.HEARTBEAT_BLOCK]
    await streaming.give(STOP)
    await streaming.task


async def test_done_may_be_left_out() -> None:
    streaming = Streaming(done=False)
    assert await streaming.give(STOP) == [END]
    await streaming.task


async def test_collected_answer_is_charged_until_the_block_ends() -> None:
    budget = ByteBudget(10_000)
    source = GivenAnswer()
    source.put(text("a"), text("b"), STOP)
    with charging(budget) as charge:
        outputs, last = await collect_answer(source, charge)
        assert [output.text for output in outputs] == ["a", "b"]
        assert last is STOP
        assert budget.used > 0
        source.put(*(text("x" * 1000) for _ in range(100)))
        with pytest.raises(EngineOverloaded):
            await collect_answer(source, charge)
    assert budget.used == 0
