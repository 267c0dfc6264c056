"""Messages kept for resume: how far back they reach, and what they cost."""

from __future__ import annotations

import pytest

from omni_ws.core.chunks import OutputChunk, OutputModality
from omni_ws.core.quota import ByteBudget
from omni_ws.service.conversation.messages import Journal, ServerMessage
from omni_ws.wire.server_frames import SpeechStartedFrame


def output(number: int) -> OutputChunk:
    return OutputChunk(request_id="req", sequence_id=number, modality=OutputModality.TEXT, text="x")


def filled(capacity: int, messages: list[ServerMessage], *, budget: ByteBudget | None = None) -> Journal:
    """Each message costs 10 bytes."""
    journal = Journal(capacity, budget=budget, fair_share=20)
    for message in messages:
        if budget is not None:
            budget.used += 10
        journal.record(message, 10)
    return journal


@pytest.mark.parametrize(("capacity", "reaches"), [(30, True), (29, False)])
def test_newest_bytes_are_kept(capacity: int, reaches: bool) -> None:
    journal = filled(capacity, [output(number) for number in range(3)])
    assert journal.reaches(-1) is reaches
    assert journal.reaches(0)
    assert not journal.reaches(3)


def test_a_message_without_a_number_belongs_to_the_output_behind_it() -> None:
    speech = SpeechStartedFrame(audio_ms=1)
    journal = filled(100, [output(0), speech, output(1)])
    assert [entry.message for entry in journal.take_after(0)] == [speech, output(1)]
    # Sent again, and lost again.
    journal.record(speech, 10)
    assert [entry.message for entry in journal.take_after(0)] == [speech]


def test_dropping_a_message_without_a_number_limits_the_reach() -> None:
    journal = filled(20, [output(0), SpeechStartedFrame(audio_ms=1), output(1), output(2)])
    assert not journal.reaches(0)
    assert journal.reaches(1)


def test_acknowledged_and_dropped_bytes_return_to_the_budget() -> None:
    budget = ByteBudget(1000)
    journal = filled(100, [output(number) for number in range(4)], budget=budget)
    journal.acknowledge(1)
    assert (journal.held, budget.used) == (20, 20)
    journal.acknowledge(1_000_000)
    assert (journal.held, budget.used) == (0, 0)
    assert journal.reaches(3)


def test_a_journal_shrinks_while_more_than_half_of_the_budget_is_used() -> None:
    budget = ByteBudget(60)
    journal = filled(1000, [output(number) for number in range(4)], budget=budget)
    assert (journal.held, budget.used) == (30, 30)
