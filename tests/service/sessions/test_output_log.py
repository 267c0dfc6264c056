"""The output log: its readers, its limits, and the budget that logs share."""

from __future__ import annotations

import asyncio

import pytest

from omni_ws.core.chunks import FinalChunk, FinishReason, OutputChunk, OutputModality, Usage
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import EngineOverloaded, PayloadTooLarge
from omni_ws.service.conversation.messages import MESSAGE_OVERHEAD_BYTES
from omni_ws.service.sessions.output_log import OutputLog, OutputLogBudget

FINAL = FinalChunk(request_id="req_1", sequence_id=9, finish_reason=FinishReason.STOP, usage=Usage())
#: What ``audio(0)`` costs.
LEAST = MESSAGE_OVERHEAD_BYTES


def audio(size: int, number: int = 0) -> OutputChunk:
    return OutputChunk(request_id="req_1", sequence_id=number, modality=OutputModality.AUDIO, payload=b"x" * size)


def make(capacity: int = 10_000, *, together: int = 10_000, whole: int = 10_000) -> tuple[OutputLog, ByteBudget]:
    budget = ByteBudget(whole)
    return OutputLog(capacity, OutputLogBudget(budget, together, lambda wanted: None)), budget


async def test_every_reader_receives_everything_from_the_beginning() -> None:
    log, _ = make()

    async def read() -> list[object]:
        found: list[object] = []
        position = 0
        while (entry := await log.get(position)) is not None:
            position, message = entry
            found.append(message)
        return found

    early = [asyncio.create_task(read()) for _ in range(3)]
    chunks = [audio(1, number) for number in range(3)]
    for chunk in chunks:
        await asyncio.sleep(0)
        log.append(chunk)
    log.append(FINAL)
    log.close()
    log.close()
    assert await asyncio.gather(*early) == [[*chunks, FINAL]] * 3
    assert await read() == [*chunks, FINAL]
    assert log.messages == (*chunks, FINAL)


async def test_an_answer_of_the_largest_size_and_one_byte_more() -> None:
    log, budget = make(LEAST + 100)
    with pytest.raises(PayloadTooLarge):
        log.append(audio(101))
    assert (log.size, budget.used) == (0, 0)
    log.append(audio(100))
    # The end is always logged.
    log.append(FINAL)
    assert log.size == budget.used == 2 * LEAST + 100
    log.clear()
    assert (log.size, budget.used) == (0, 0)


async def test_answers_together_and_the_whole_server() -> None:
    for log, budget in (make(together=LEAST + 100), make(whole=LEAST + 100)):
        with pytest.raises(EngineOverloaded):
            log.append(audio(101))
        assert (log.size, budget.used) == (0, 0)
        log.append(audio(100))


async def test_logs_are_evicted_when_the_budget_does_not_suffice() -> None:
    whole = ByteBudget(10_000)
    old: OutputLog
    asked = []

    def evict(wanted: int) -> None:
        asked.append(wanted)
        old.clear()

    budget = OutputLogBudget(whole, 2 * LEAST, evict)
    old, new = OutputLog(10_000, budget), OutputLog(10_000, budget)
    old.append(audio(0))
    new.append(audio(0))
    assert asked == []
    new.append(audio(0))
    assert asked == [LEAST]
    assert (old.size, new.size, budget.used, whole.used) == (0, 2 * LEAST, 2 * LEAST, 2 * LEAST)


async def test_readers_skip_cleared_messages() -> None:
    log, budget = make()
    log.append(audio(1))
    log.append(audio(2))
    waiting = asyncio.create_task(log.get(log.end))
    await asyncio.sleep(0)
    log.clear()
    log.append_end(FINAL)
    assert await waiting == (3, FINAL)
    assert await log.get(0) == (3, FINAL)
    assert budget.used == 0
    log.close()
    assert await log.get(3) is None
