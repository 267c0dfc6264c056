"""Counting the fields of a protobuf message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.generated import salience_pb2 as messages
from omni_ws.transport.grpc_salience import has_more_fields

MESSAGE = messages.GenerateRequest(
    session_id="toks_1",
    append_tokens=range(1000),
    offset=2**32 - 1,
    priority=-1,  # encoded as ten bytes
    temperature=0.5,
    logprobs_ranges=[messages.PositionRange(start=1, end=2)] * 3,
    images=[messages.ImageAttachment(bytes=b"\x08" * 500, mime="image/png")],
).SerializeToString()


def test_at_the_limit_and_one_past_it() -> None:
    assert not has_more_fields(MESSAGE, 9)
    assert has_more_fields(MESSAGE, 8)
    assert not has_more_fields(b"", 0)
    assert has_more_fields(b"\x32\x00" * 5, 4)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (b"\x09" + bytes(8), 1),
        (b"\x0d" + bytes(4), 1),
        (b"\x0b\x10\x01\x0c\x10\x01", 4),  # a group of one field, and a field
        (b"\x0e" + b"\x10\x01" * 9, 0),  # not a wire type: a parser stops there
        (b"\x80" * 11 + b"\x10\x01" * 9, 0),
        (b"\x10\x01\x80", 1),
    ],
)
def test_kinds_of_fields(message: bytes, fields: int) -> None:
    assert not has_more_fields(message, fields + 1)
    assert fields == 0 or has_more_fields(message, fields - 1)


@given(st.binary(max_size=200))
def test_anything_has_an_answer(message: bytes) -> None:
    assert not has_more_fields(message, len(message))
