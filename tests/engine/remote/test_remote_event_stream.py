"""Server-sent events, however their bytes were cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.engine.remote import event_stream
from omni_ws.engine.remote.event_stream import EventReader, ServerSentEvent
from omni_ws.errors import EngineFailed


def read(*pieces: bytes) -> list[tuple[str, bytes]]:
    reader = EventReader()
    events = [event for piece in pieces for event in reader.feed(piece)]
    return [(name, data) for name, data in events + reader.finish()]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_ends_of_lines(end: bytes) -> None:
    lines = [
        b"data: one",
        b"",
        b"event: error",
        b"data: two",
        b"data:three",
        b"",
        b": comment",
        b"",
        b"data: [DONE]",
        b"",
    ]
    stream = end.join([*lines, b""])
    expected = [("message", b"one"), ("error", b"two\nthree"), ("message", b"[DONE]")]
    assert read(stream) == expected
    assert read(*(stream[place : place + 1] for place in range(len(stream)))) == expected


@given(st.lists(st.integers(min_value=0, max_value=60), max_size=8), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_cuts_change_nothing(cuts: list[int], end: bytes) -> None:
    stream = end.join(
        [b"\xef\xbb\xbfdata: {}", b"", b"id: 7", b"retry: 1", b"event: e", b"data: x", b"", b": ping", b""]
    )
    places = [0, *sorted(cuts), len(stream)]
    pieces = [stream[start:stop] for start, stop in pairwise(places)]
    assert read(*pieces) == [("message", b"{}"), ("e", b"x")]


def test_an_event_comes_as_soon_as_its_blank_line() -> None:
    reader = EventReader()
    assert reader.feed(b"data: a\n") == []
    assert reader.feed(b"\n") == [ServerSentEvent("message", b"a")]
    assert reader.feed(b"data: b\r\n\r") == [ServerSentEvent("message", b"b")]
    assert reader.feed(b"\ndata: c\r\n\r\n") == [ServerSentEvent("message", b"c")]


def test_the_last_blank_line_may_be_missing() -> None:
    assert read(b"data: [DONE]") == [("message", b"[DONE]")]
    assert read(b"data: [DONE]\n") == [("message", b"[DONE]")]


def test_names_without_data_are_nothing() -> None:
    assert read(b"event: ping\n\ndata: x\n\n") == [("message", b"x")]


def test_an_event_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_EVENT_BYTES", 100)
    assert EventReader().feed(b"data: " + b"x" * 94) == []
    with pytest.raises(EngineFailed):
        EventReader().feed(b"data: " + b"x" * 95)
    reader = EventReader()
    reader.feed(b"data: " + b"x" * 50 + b"\n")
    with pytest.raises(EngineFailed):
        reader.feed(b"data: " + b"x" * 50 + b"\n" + b"data: x")


def test_lines_without_data_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_EVENT_BYTES", 100)
    reader = EventReader()
    reader.feed(b"data:\n" * 100)
    with pytest.raises(EngineFailed):
        reader.feed(b"data:\n")
