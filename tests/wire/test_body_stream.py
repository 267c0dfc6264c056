from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.errors import InvalidFrame, OmniError, PayloadTooLarge
from omni_ws.wire.streaming_body import LengthPrefixedDecoder, NdjsonDecoder

Decoder = NdjsonDecoder | LengthPrefixedDecoder


def decode(decoder: Decoder, pieces: list[bytes]) -> tuple[list[bytes], str | None]:
    """Return all items, followed by the error that ended them, if any."""
    out: list[bytes] = []
    try:
        for piece in pieces:
            out.extend(decoder.feed(piece))
        out.extend(decoder.finish())
    except OmniError as error:
        return out, f"{error.code}: {error}"
    return out, None


def cut(data: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(borders)]


# lines


def test_lines() -> None:
    decoder = NdjsonDecoder(max_line_bytes=100)
    assert list(decoder.feed(b'{"a":1}\n\n \t\r\n {"b":2}\r\n{"c"')) == [b'{"a":1}', b'{"b":2}']
    assert decoder.line_number == 4
    assert list(decoder.feed(b":3}")) == []
    assert list(decoder.finish()) == [b'{"c":3}']
    assert decoder.line_number == 5


def test_the_number_is_that_of_the_line_given_out() -> None:
    decoder = NdjsonDecoder(max_line_bytes=100)
    assert [(line, decoder.line_number) for line in decoder.feed(b"a\n\nb\n")] == [(b"a", 1), (b"b", 3)]


def test_an_empty_body_has_no_lines() -> None:
    assert decode(NdjsonDecoder(max_line_bytes=10), []) == ([], None)


@pytest.mark.parametrize("pieces", [[b"12345\n1234567890\n"], [b"12345\n123456", b"7890"]])
def test_a_line_at_the_limit(pieces: list[bytes]) -> None:
    assert decode(NdjsonDecoder(max_line_bytes=10), pieces) == ([b"12345", b"1234567890"], None)


@pytest.mark.parametrize("pieces", [[b"1\n12345678901\n"], [b"1\n123456", b"78901"], [b"1\n", b"1" * 11]])
def test_a_line_past_the_limit(pieces: list[bytes]) -> None:
    lines, error = decode(NdjsonDecoder(max_line_bytes=10), pieces)
    assert lines == [b"1"]
    assert error == "payload_too_large: line 2 is longer than 10 bytes"


@given(
    st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r\n", b" ", b"123456", b"\xff"]), max_size=30).map(b"".join),
    st.lists(st.integers(0, 60)),
)
def test_lines_do_not_depend_on_how_the_body_is_cut(body: bytes, places: list[int]) -> None:
    whole = NdjsonDecoder(max_line_bytes=6)
    pieces = NdjsonDecoder(max_line_bytes=6)
    assert decode(pieces, cut(body, places)) == decode(whole, [body])
    assert pieces.line_number == whole.line_number


@given(st.lists(st.binary(max_size=8).filter(lambda line: b"\n" not in line), max_size=20))
def test_lines_are_what_was_sent_but_for_white_space(lines: list[bytes]) -> None:
    stripped = [line.strip(b" \t\r") for line in lines]
    out, error = decode(NdjsonDecoder(max_line_bytes=8), [b"\n".join(lines)])
    assert (out, error) == ([line for line in stripped if line], None)


# length-prefixed frames


def frame(payload: bytes, prefix: int) -> bytes:
    return len(payload).to_bytes(prefix, "big") + payload


@pytest.mark.parametrize("prefix", [4, 8])
def test_frames(prefix: int) -> None:
    decoder = LengthPrefixedDecoder(prefix_bytes=prefix, max_frame_bytes=10)
    body = frame(b"abc", prefix) + frame(b"", prefix) + frame(b"0123456789", prefix)
    assert decode(decoder, [body]) == ([b"abc", b"0123456789"], None)
    assert decoder.frame_number == 3


@pytest.mark.parametrize("prefix", [4, 8])
def test_a_length_past_the_limit_is_refused_when_it_is_read(prefix: int) -> None:
    decoder = LengthPrefixedDecoder(prefix_bytes=prefix, max_frame_bytes=10)
    assert list(decoder.feed(frame(b"a", prefix))) == [b"a"]
    with pytest.raises(PayloadTooLarge, match=r"frame 2: at most 10 bytes per frame, got 11"):
        list(decoder.feed((11).to_bytes(prefix, "big")))


@pytest.mark.parametrize("rest", [b"\0", b"\0\0\0\x02", b"\0\0\0\x02a"])
def test_a_body_that_ends_inside_a_frame(rest: bytes) -> None:
    decoder = LengthPrefixedDecoder(prefix_bytes=4, max_frame_bytes=10)
    assert list(decoder.feed(frame(b"a", 4) + rest)) == [b"a"]
    with pytest.raises(InvalidFrame, match="inside frame 2"):
        list(decoder.finish())


@given(
    st.sampled_from([4, 8]),
    st.lists(st.binary(max_size=7), max_size=10),
    st.binary(max_size=9),
    st.lists(st.integers(0, 120)),
)
def test_frames_do_not_depend_on_how_the_body_is_cut(
    prefix: int, payloads: list[bytes], rest: bytes, places: list[int]
) -> None:
    body = b"".join(frame(payload, prefix) for payload in payloads) + rest
    whole = decode(LengthPrefixedDecoder(prefix_bytes=prefix, max_frame_bytes=6), [body])
    assert decode(LengthPrefixedDecoder(prefix_bytes=prefix, max_frame_bytes=6), cut(body, places)) == whole


@given(st.sampled_from([4, 8]), st.lists(st.binary(max_size=6), max_size=10))
def test_frames_are_what_was_sent(prefix: int, payloads: list[bytes]) -> None:
    body = b"".join(frame(payload, prefix) for payload in payloads)
    out = decode(LengthPrefixedDecoder(prefix_bytes=prefix, max_frame_bytes=6), [body])
    assert out == ([payload for payload in payloads if payload], None)
