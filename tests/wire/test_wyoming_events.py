"""The bounds and fields of Wyoming's events, at their limits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.errors import InvalidFrame, PayloadTooLarge
from omni_ws.wire.wyoming import (
    MAX_DATA_BYTES,
    MAX_LINE_BYTES,
    MAX_PAYLOAD_BYTES,
    EventBounds,
    decode_event,
    encode_event,
)

_DATA = st.dictionaries(
    st.text(max_size=8), st.none() | st.integers(-(2**53), 2**53) | st.text(max_size=20), max_size=3
)
EVENTS = st.lists(st.tuples(st.text(min_size=1, max_size=8), _DATA, st.binary(max_size=40)), max_size=5)


def read(stream: bytes, *cuts: int) -> list[bytes]:
    """The whole events of a stream that comes in pieces."""
    bounds, received, found = EventBounds(), bytearray(), list[bytes]()
    for start, end in zip((0, *cuts), (*cuts, len(stream)), strict=True):
        received += stream[start:end]
        while (at := bounds.end(received, 0)) is not None:
            found.append(bytes(received[:at]))
            del received[:at]
    return found


@given(events=EVENTS, data=st.data())
def test_events_are_found_wherever_the_stream_is_cut(
    events: list[tuple[str, dict[str, Any], bytes]], data: Any
) -> None:
    encoded = [encode_event(*event) for event in events]
    stream = b"".join(encoded)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    assert read(stream, *cuts) == encoded
    assert [tuple(decode_event(one)) for one in encoded] == events


def test_data_in_the_line_and_behind_it_are_one() -> None:
    line = {"type": "audio-chunk", "data": {"rate": 8000, "width": 2}, "data_length": 14, "payload_length": None}
    frame = json.dumps(line).encode() + b'\n{"rate":16000}'
    assert read(frame + b"{", len(frame)) == [frame]
    assert decode_event(frame) == ("audio-chunk", {"rate": 16_000, "width": 2}, b"")


def sized(**lengths: int) -> bytes:
    return json.dumps({"type": "x", **lengths}).encode() + b"\n"


@pytest.mark.parametrize(("name", "most"), [("data_length", MAX_DATA_BYTES), ("payload_length", MAX_PAYLOAD_BYTES)])
def test_lengths_at_the_limit_and_one_past_it(name: str, most: int) -> None:
    frame = sized(**{name: most}) + bytes(most)
    assert read(frame) == [frame]
    with pytest.raises(PayloadTooLarge, match=f"{name} may be {most}, not {most + 1}"):
        EventBounds().end(bytearray(sized(**{name: most + 1})), 0)
    with pytest.raises(InvalidFrame, match="negative"):
        EventBounds().end(bytearray(sized(**{name: -1})), 0)


def test_lines_at_the_limit_and_one_past_it() -> None:
    line = b'{"type":"x","data":{"a":"' + b"a" * (MAX_LINE_BYTES - 28) + b'"}}'
    assert len(line) == MAX_LINE_BYTES
    assert read(line + b"\n", 5, MAX_LINE_BYTES) == [line + b"\n"]
    for longer in (line.replace(b"a", b"aa", 1) + b"\n", b"a" * (MAX_LINE_BYTES + 1)):
        with pytest.raises(PayloadTooLarge):
            EventBounds().end(bytearray(longer), 0)


@pytest.mark.parametrize(
    "frame",
    [
        b"\n",
        b"GET / HTTP/1.1\r\n",
        b"[]\n",
        b"\xff\n",
        b'{"type":"x","data_length":"1"}\n',
        b'{"type":"x","payload_length":1.5}\n',
        b"[" * 5000 + b"\n",
        b'{"type":1}\n',
        b"{}\n",
        b'{"type":"x","data":[1]}\n',
        b'{"type":"x","data":1,"data_length":2}\n{}',
        b'{"type":"x","data_length":2}\n[]',
        b'{"type":"x","data_length":1}\n\xff',
        b'{"type":"x","data":{"a":[' + b"1," * 10_000 + b"1]}}\n",
    ],
)
def test_what_is_no_event_is_refused(frame: bytes) -> None:
    def decode() -> None:
        assert EventBounds().end(bytearray(frame), 0) == len(frame)
        decode_event(frame)

    with pytest.raises(InvalidFrame):
        decode()
