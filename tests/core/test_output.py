from __future__ import annotations

import pytest

from omni_ws.core.chunks import FinalChunk, FinishReason, OutputSequencer, Usage


def test_numbers_run_through_all_requests() -> None:
    sequencer = OutputSequencer()
    sequencer.open("req_a")
    sequencer.open("req_b")
    assert [sequencer.take_number(name) for name in ("req_a", "req_b", "req_a")] == [0, 1, 2]
    usage = Usage(input_tokens=2, output_tokens=3)
    assert sequencer.finish("req_a", FinishReason.STOP, usage) == FinalChunk(
        request_id="req_a", sequence_id=3, finish_reason=FinishReason.STOP, usage=usage
    )
    assert sequencer.take_number("req_b") == 4
    assert sequencer.next_sequence_id == 5


def test_nothing_follows_the_final() -> None:
    sequencer = OutputSequencer()
    sequencer.open("req_a")
    sequencer.finish("req_a", FinishReason.CANCELLED, Usage())
    with pytest.raises(RuntimeError, match="req_a"):
        sequencer.take_number("req_a")
    with pytest.raises(RuntimeError, match="req_a"):
        sequencer.finish("req_a", FinishReason.STOP, Usage())
    assert sequencer.next_sequence_id == 1


def test_a_request_must_be_open() -> None:
    with pytest.raises(RuntimeError, match="not open"):
        OutputSequencer().take_number("req_a")
