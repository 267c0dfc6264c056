"""The output of a session: what waits, with its order, cost and backpressure; what is kept, and what is stored."""

from __future__ import annotations

import asyncio
import sys

import pytest
from support.patience import until

from omni_ws.core.chunks import FinalChunk, FinishReason, OutputChunk, OutputModality, Usage
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import EngineOverloaded, InvalidValue, PayloadTooLarge, SlowConsumer
from omni_ws.service.conversation.output_log import (
    COALESCE_SEC,
    FAIR_SHARE_BYTES,
    MESSAGE_OVERHEAD_BYTES,
    Attachment,
    OutputLog,
    OutputSequencer,
    ServerMessage,
    StoredBytes,
)
from omni_ws.wire.server_frames import PongFrame, SessionUpdatedFrame, SpeechStartedFrame


class Noting(Attachment):
    """Notes what a log reports to its reader."""

    def __init__(self, outbox: OutputLog) -> None:
        self._outbox = outbox
        outbox.reader = self
        outbox.watch_room(lambda: self.changes.append("full"), lambda seconds: None)
        #: How many messages the outbox held each time that it was reported to be ready.
        self.ready: list[int] = []
        self.changes: list[str] = []

    def output_ready(self) -> None:
        self.ready.append(len(self._outbox))

    def output_has_room(self) -> None:
        self.changes.append("room")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def output(size: int, number: int = 0) -> OutputChunk:
    """An output that costs ``size`` bytes."""
    payload = bytes(size - MESSAGE_OVERHEAD_BYTES)
    return OutputChunk(request_id="req", sequence_id=number, modality=OutputModality.AUDIO, payload=payload)


def make(capacity: int = 1000, *, budget: ByteBudget | None = None) -> tuple[OutputLog, Clock]:
    clock = Clock()
    return OutputLog(capacity, write_timeout=30, now=clock, budget=budget), clock


class Writing(Noting):
    """Takes outputs at once while ``takes``."""

    def __init__(self, outbox: OutputLog) -> None:
        super().__init__(outbox)
        self.takes = True
        self.written: list[int] = []

    def write_now(self, output: OutputChunk) -> bool:
        if self.takes:
            self.written.append(output.sequence_id)
        return self.takes


def test_an_output_is_written_at_once_and_those_right_behind_it_together() -> None:
    outbox, clock = make(10_000)
    reader = Writing(outbox)
    for number, pause in enumerate((0, 0.9, 0.2, 0, 1.1)):
        clock.now += pause * COALESCE_SEC
        outbox.put_nowait(output(200, number))
    assert (reader.written, reader.ready, len(outbox)) == ([0], [1], 4)  # nothing overtakes what is queued
    while outbox.take() is not None:
        pass
    outbox.put_nowait(output(200, 5))
    clock.now += 0.9 * COALESCE_SEC
    outbox.put_nowait(output(200, 6))
    assert (reader.written, len(outbox)) == ([0, 5], 1)


def test_what_the_reader_cannot_write_is_queued_and_the_next_is_offered_again() -> None:
    outbox, _ = make(10_000)
    reader = Writing(outbox)
    reader.takes = False
    outbox.put_nowait(output(200, 0))
    assert (len(outbox), outbox.take() is None) == (1, False)
    reader.takes = True
    outbox.put_nowait(output(200, 1))
    assert reader.written == [1]


def test_messages_are_taken_in_order() -> None:
    outbox, _ = make()
    for number in range(3):
        outbox.put_nowait(output(200, number))
    assert len(outbox) == 3
    taken = [outbox.take() for _ in range(4)]
    assert [message.sequence_id for message in taken if isinstance(message, OutputChunk)] == [0, 1, 2]
    assert taken[3] is None
    assert outbox.queued == 0


def test_the_reader_is_notified_of_the_first_message_only() -> None:
    outbox, _ = make()
    noting = Noting(outbox)
    for _ in range(3):
        outbox.put_nowait(output(200))
    outbox.clear()
    outbox.put_nowait(output(200))
    assert noting.ready == [1, 1]


def test_full_at_its_capacity_and_not_one_byte_earlier() -> None:
    outbox, _ = make(1000)
    changes = Noting(outbox).changes
    outbox.put_nowait(output(500))
    outbox.put_nowait(output(499))
    assert changes == []
    outbox.put_nowait(output(MESSAGE_OVERHEAD_BYTES))
    outbox.put_nowait(output(MESSAGE_OVERHEAD_BYTES))
    assert outbox.full
    outbox.take()
    assert changes == ["full", "room"]


async def test_output_waits_for_room() -> None:
    outbox, _ = make(1000)
    outbox.put_nowait(output(1000))
    done: list[int] = []

    async def write(number: int) -> None:
        await outbox.room()
        outbox.put_nowait(output(1000))
        done.append(number)

    tasks = [asyncio.create_task(write(number)) for number in range(3)]
    for written in range(3):
        await until(lambda: len(outbox._waiting) == 3 - written)  # noqa: B023 - called here
        assert len(done) == written
        if written < 2:
            outbox.take()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert outbox._waiting == type(outbox._waiting)()


def test_a_client_that_does_not_read_times_out() -> None:
    outbox, clock = make(1000)
    assert outbox.get_timer() is None
    outbox.put_nowait(output(1000))
    assert outbox.get_timer() == 130
    clock.now = 120
    outbox.put_nowait(output(1000))
    outbox.handle_timer(129.9)
    with pytest.raises(SlowConsumer):
        outbox.handle_timer(130)
    outbox.take()
    assert outbox.full
    outbox.take()
    assert outbox.get_timer() is None
    outbox.handle_timer(1000)


def test_an_error_keeps_nothing_alive() -> None:
    """The refused payload may have megabytes, and the error waits until the client reads."""
    outbox, _ = make()
    data = bytearray(10)

    def refuse(message: bytearray) -> None:
        try:
            raise KeyError(message)
        except KeyError as cause:
            raise InvalidValue("no") from cause

    before = sys.getrefcount(data)
    try:
        refuse(data)
    except InvalidValue as error:
        outbox.put_nowait(error)
    assert sys.getrefcount(data) == before


@pytest.mark.parametrize("size", [10, 10_000])
def test_messages_that_echo_the_client_cost_as_much(size: int) -> None:
    outbox, _ = make()
    outbox.put_nowait(PongFrame(t="x" * size, server_time_ms=1))
    assert outbox.queued >= size
    outbox.clear()
    outbox.put_nowait(SessionUpdatedFrame(instructions="x" * size))
    assert outbox.queued >= size
    outbox.clear()
    outbox.put_nowait(InvalidValue("x" * size))
    assert outbox.queued >= size
    outbox.clear()
    assert outbox.queued == 0


def test_the_budget_gets_everything_back() -> None:
    budget = ByteBudget(10_000_000)
    outbox, _ = make(1000, budget=budget)
    for size in (200, 300):
        outbox.put_nowait(output(size))
    assert budget.used == 500
    outbox.take()
    assert budget.used == 300
    outbox.clear()
    assert budget.used == 0


def test_output_may_use_half_of_the_budget() -> None:
    budget = ByteBudget(4 * FAIR_SHARE_BYTES)
    outbox, _ = make(1 << 30, budget=budget)
    other, _ = make(1 << 30, budget=budget)

    def full() -> tuple[bool, bool]:
        return outbox.full, other.full

    other.put_nowait(output(FAIR_SHARE_BYTES))
    outbox.put_nowait(output(FAIR_SHARE_BYTES))
    assert full() == (False, False)  # half is used, and none has more than its share
    outbox.put_nowait(output(200))
    assert full() == (True, False)
    other.put_nowait(output(200))
    assert full() == (True, True)
    outbox.take()
    assert full() == (False, True)  # each gets on by what its own client reads
    other.clear()
    outbox.clear()
    assert budget.used == 0


def test_messages_after_the_end_are_not_charged() -> None:
    budget = ByteBudget(1 << 20)
    outbox, _ = make(budget=budget)
    outbox.put_nowait(output(200))
    assert budget.used > 0
    outbox.close()
    outbox.put_nowait(output(200))
    outbox.clear()
    assert budget.used == 0


def piece(number: int, request_id: str, modality: OutputModality = OutputModality.TEXT) -> OutputChunk:
    return OutputChunk(request_id=request_id, sequence_id=number, modality=modality, text="x" * 10)


def test_withdrawn_outputs_leave_no_gap_and_return_their_bytes() -> None:
    budget = ByteBudget(10_000)
    outbox, _ = make(1000, budget=budget)
    changes = Noting(outbox).changes
    outbox.put_nowait(piece(5, "a", OutputModality.TRANSCRIPT))
    for number in (6, 7, 8, 9, 10):
        outbox.put_nowait(piece(number, "a"))
    outbox.put_nowait(FinalChunk(request_id="b", sequence_id=11, finish_reason=FinishReason.ERROR, usage=Usage()))
    outbox.put_nowait(piece(12, "c"))
    outbox.put_nowait(PongFrame(t=1, server_time_ms=1))
    assert outbox.full
    assert [chunk.sequence_id for chunk in outbox.withdraw("a")] == [6, 7, 8, 9, 10]
    assert changes == ["full", "room"]
    assert outbox.withdraw("a") == []
    left = []
    while (message := outbox.take()) is not None:
        left.append(message)
    assert [message.sequence_id for message in left if isinstance(message, OutputChunk | FinalChunk)] == [5, 6, 7]
    assert isinstance(left[-1], PongFrame)
    assert (outbox.queued, budget.used) == (0, 0)


def test_an_error_is_queued_without_its_traceback_which_it_keeps() -> None:
    """A traceback would keep the refused payload; but whoever logs the error later needs its cause."""
    outbox, _ = make()
    try:
        try:
            raise ValueError("why")
        except ValueError as cause:
            raise InvalidValue("refused", param="text") from cause
    except InvalidValue as caught:
        error = caught
    outbox.put_nowait(error)
    queued = outbox.take()
    assert isinstance(queued, InvalidValue)
    assert (queued.message, queued.param, str(queued)) == ("refused", "text", "refused")
    assert (queued.__traceback__, queued.__cause__, queued.__context__) == (None, None, None)
    assert error.__traceback__ is not None
    assert isinstance(error.__cause__, ValueError)


# kept for resume

SPEECH = SpeechStartedFrame(audio_ms=1)
#: What ``chunk`` and SPEECH cost.
LEAST = MESSAGE_OVERHEAD_BYTES


def chunk(number: int, size: int = LEAST) -> OutputChunk:
    return output(size, number)


def kept(capacity: int, messages: list[ServerMessage], *, budget: ByteBudget | None = None) -> OutputLog:
    """A log of which all was taken."""
    log = OutputLog(1 << 30, write_timeout=30, now=Clock(), budget=budget, kept_capacity=capacity)
    for message in messages:
        log.put_nowait(message)
    while log.take() is not None:
        pass
    return log


def taken(log: OutputLog) -> list[ServerMessage]:
    found = []
    while (message := log.take()) is not None:
        found.append(message)
    return found


@pytest.mark.parametrize(("capacity", "reaches"), [(3 * LEAST, True), (3 * LEAST - 1, False)])
def test_the_newest_bytes_are_kept(capacity: int, reaches: bool) -> None:
    log = kept(capacity, [chunk(number) for number in range(3)])
    assert log.can_rewind(-1) is reaches
    assert log.can_rewind(0)
    assert not log.can_rewind(3)


def test_a_message_without_a_number_belongs_to_the_output_behind_it() -> None:
    log = kept(100 * LEAST, [chunk(0), SPEECH, chunk(1)])
    assert log.rewind(0) == 1
    assert log.take() == SPEECH
    # Sent again, and lost again.
    assert log.rewind(0) == 1
    assert taken(log) == [SPEECH, chunk(1)]


def test_dropping_a_message_without_a_number_limits_the_reach() -> None:
    log = kept(2 * LEAST, [chunk(0), SPEECH, chunk(1), chunk(2)])
    assert not log.can_rewind(0)
    assert log.can_rewind(1)


def test_acknowledged_and_dropped_bytes_return_to_the_budget() -> None:
    budget = ByteBudget(1000 * LEAST)
    log = kept(100 * LEAST, [chunk(number) for number in range(4)], budget=budget)
    log.acknowledge(1)
    assert (log.held, budget.used) == (2 * LEAST, 2 * LEAST)
    log.acknowledge(1_000_000)
    assert (log.held, budget.used) == (0, 0)
    assert log.can_rewind(3)


def test_little_is_kept_while_more_than_half_of_the_budget_is_used() -> None:
    budget = ByteBudget(3 * FAIR_SHARE_BYTES)
    log = kept(1 << 30, [chunk(number, FAIR_SHARE_BYTES // 2) for number in range(6)], budget=budget)
    assert (log.held, budget.used) == (3 * FAIR_SHARE_BYTES // 2, 3 * FAIR_SHARE_BYTES // 2)


# stored for readers

FINAL = FinalChunk(request_id="req_1", sequence_id=9, finish_reason=FinishReason.STOP, usage=Usage())


def storing(capacity: int = 100 * LEAST, *, stored: StoredBytes | None = None) -> OutputLog:
    stored = stored or StoredBytes(ByteBudget(1 << 20), 1 << 20, lambda wanted: None)
    return OutputLog(1 << 20, write_timeout=30, now=Clock(), kept_capacity=capacity, stored=stored)


def store(log: OutputLog, message: ServerMessage) -> None:
    log.put_nowait(message)
    log.take()


async def test_every_reader_receives_everything_from_the_beginning() -> None:
    log = storing()

    async def read() -> list[object]:
        found: list[object] = []
        position = 0
        while (entry := await log.get(position)) is not None:
            position, message = entry
            found.append(message)
        return found

    early = [asyncio.create_task(read()) for _ in range(3)]
    chunks = [chunk(number) for number in range(3)]
    for one in chunks:
        await asyncio.sleep(0)
        store(log, one)
    store(log, FINAL)
    log.finish()
    log.finish()
    assert await asyncio.gather(*early) == [[*chunks, FINAL]] * 3
    assert await read() == [*chunks, FINAL]
    assert log.messages == (*chunks, FINAL)


async def test_an_answer_of_the_largest_size_and_one_byte_more() -> None:
    budget = ByteBudget(1 << 20)
    log = storing(LEAST + 100, stored=StoredBytes(budget, 1 << 20, lambda wanted: None))
    with pytest.raises(PayloadTooLarge):
        store(log, chunk(0, LEAST + 101))
    assert (log.held, budget.used) == (0, 0)
    store(log, chunk(0, LEAST + 100))
    # The end is always stored.
    store(log, FINAL)
    assert log.held == budget.used == 2 * LEAST + 100
    log.discard()
    assert (log.held, budget.used) == (0, 0)
    store(log, chunk(1))
    assert (log.messages, log.held, budget.used) == ((), 0, 0)


@pytest.mark.parametrize(("together", "whole"), [(LEAST + 100, 1 << 20), (1 << 20, LEAST + 100)])
async def test_answers_together_and_the_whole_server(together: int, whole: int) -> None:
    budget = ByteBudget(whole)
    log = storing(stored=StoredBytes(budget, together, lambda wanted: None))
    with pytest.raises(EngineOverloaded):
        store(log, chunk(0, LEAST + 101))
    assert (log.held, budget.used) == (0, 0)
    store(log, chunk(0, LEAST + 100))


async def test_answers_are_evicted_when_the_budget_does_not_suffice() -> None:
    whole = ByteBudget(1 << 20)
    old: OutputLog
    asked = []

    def evict(wanted: int) -> None:
        asked.append(wanted)
        old.discard()

    stored = StoredBytes(whole, 2 * LEAST, evict)
    old, new = storing(stored=stored), storing(stored=stored)
    store(old, chunk(0))
    store(new, chunk(0))
    assert asked == []
    store(new, chunk(1))
    assert asked == [LEAST]
    assert (old.held, new.held, stored.used, whole.used) == (0, 2 * LEAST, 2 * LEAST, 2 * LEAST)


async def test_readers_skip_what_was_discarded() -> None:
    log = storing()
    store(log, chunk(1))
    store(log, chunk(2))
    waiting = asyncio.create_task(log.get(log.end))
    await asyncio.sleep(0)
    log.discard()
    log.store_end(FINAL)
    assert await waiting == (3, FINAL)
    assert await log.get(0) == (3, FINAL)
    log.finish()
    assert await log.get(3) is None


# Numbers of output.


def test_numbers_run_through_all_requests() -> None:
    sequencer = OutputSequencer()
    sequencer.open("req_a")
    sequencer.open("req_b")
    assert [sequencer.take_number(name) for name in ("req_a", "req_b", "req_a")] == [0, 1, 2]
    assert sequencer.take_last_number("req_a") == 3
    assert sequencer.take_number("req_b") == 4
    assert sequencer.next_sequence_id == 5


def test_nothing_follows_the_final() -> None:
    sequencer = OutputSequencer()
    sequencer.open("req_a")
    sequencer.take_last_number("req_a")
    with pytest.raises(RuntimeError, match="req_a"):
        sequencer.take_number("req_a")
    with pytest.raises(RuntimeError, match="req_a"):
        sequencer.take_last_number("req_a")
    assert sequencer.next_sequence_id == 1


def test_a_request_must_be_open() -> None:
    with pytest.raises(RuntimeError, match="not open"):
        OutputSequencer().take_number("req_a")
