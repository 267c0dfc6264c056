from __future__ import annotations

from omni_ws.core.chunks import InputChunk, Usage


def test_an_end_is_an_empty_chunk() -> None:
    end = InputChunk.end()
    assert (end.payload, end.end_of_input, end.sequence_id) == (b"", True, None)


def test_usage_adds_up() -> None:
    assert Usage(input_tokens=2, output_tokens=3).total_tokens == 5
