"""Mode A bodies, without a server: the items do not depend on how a body is cut, and every error names its place."""

from __future__ import annotations

import struct
from contextlib import suppress
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.errors import InvalidFrame, InvalidValue, OmniError, PayloadTooLarge, UnknownType, UnsupportedFormat
from omni_ws.wire.frames import max_frame_bytes
from omni_ws.wire.streaming_body import (
    BodyItem,
    BodyReader,
    ObjectBody,
    RawAudioBody,
    body_reader,
    placed,
    query_parameters,
)

MULTIPART = "application/x-multipart-streaming"
TYPES = ["application/x-ndjson", f"{MULTIPART}; framing=length32", f"{MULTIPART}; framing=length64", "audio/pcm"]


def read(reader: BodyReader, *pieces: bytes) -> list[BodyItem]:
    items = [item for piece in pieces for item in reader.feed(piece)]
    return [*items, *reader.finish()]


def ndjson(*pieces: bytes, max_chunk_bytes: int = 100) -> list[BodyItem]:
    return read(ObjectBody(max_chunk_bytes=max_chunk_bytes), *pieces)


def text(word: bytes, **fields: Any) -> InputChunk:
    return InputChunk(Modality.TEXT, word, **fields)


def frame(payload: bytes, size: int) -> bytes:
    return len(payload).to_bytes(size, "big") + payload


# --- which reader


@pytest.mark.parametrize(
    ("content_type", "place"),
    [
        ("", "line 1"),
        ("application/x-ndjson", "line 1"),
        ("Application/JSON; charset=utf-8", "line 1"),
        ("application/x-www-form-urlencoded", "line 1"),
        (MULTIPART, "line 1"),
        (f"{MULTIPART};framing=ndjson", "line 1"),
        (f'{MULTIPART}; framing="length32"', "frame 1"),
        (f"{MULTIPART}; a=b; Framing = LENGTH64", "frame 1"),
        # Parameters of other media types are ignored.
        ("application/x-ndjson; framing=length32", "line 1"),
        ("audio/pcm;rate=8000", ""),
        ("AUDIO/WAV", ""),
    ],
)
def test_the_content_type_says_which_form(content_type: str, place: str) -> None:
    reader = body_reader(content_type, max_chunk_bytes=10)
    size = 8 if "64" in content_type else 4
    item = next(reader.feed(b'{"text":"a"}\n' if place != "frame 1" else frame(b'{"text":"a"}', size)))
    assert reader.place == place
    assert isinstance(item, InputChunk)
    assert (item.modality is Modality.AUDIO) is (place == "")


@pytest.mark.parametrize(
    ("content_type", "error", "param"),
    [
        ("text/plain", UnsupportedFormat, "Content-Type"),
        ("multipart/form-data; boundary=x", UnsupportedFormat, "Content-Type"),
        ("video/mp4", UnsupportedFormat, "Content-Type"),
        (f"{MULTIPART}; framing=length16", InvalidValue, "framing"),
        (f"{MULTIPART}; framing=", InvalidValue, "framing"),
    ],
)
def test_what_is_no_streaming_body(content_type: str, error: type[OmniError], param: str) -> None:
    with pytest.raises(error) as caught:
        body_reader(content_type, max_chunk_bytes=10)
    assert caught.value.param == param


# --- the first object


@pytest.mark.parametrize(
    "first",
    [{}, {"voice": "x"}, {"type": "session_config", "model": "m"}, {"messages": []}, {"stream": False, "format": "x"}],
)
def test_parameters(first: dict[str, Any]) -> None:
    assert ndjson(orjson.dumps(first)) == [first]
    body = frame(orjson.dumps(first), 4)
    assert read(ObjectBody(prefix_bytes=4, max_chunk_bytes=100), body) == [first]


@pytest.mark.parametrize(
    ("first", "chunk"),
    [
        ({"text": "a"}, text(b"a")),
        ({"payload": "YQ=="}, InputChunk(Modality.AUDIO, b"a")),
        ({"modality": "image"}, InputChunk(Modality.IMAGE, b"")),
        ({"end_of_input": True}, InputChunk(Modality.AUDIO, b"", end_of_input=True)),
        ({"sequence_id": 3}, InputChunk(Modality.AUDIO, b"", 3)),
        ({"type": "input_chunk"}, InputChunk(Modality.AUDIO, b"")),
        ({"type": "input_chunk", "text": "a", "voice": "ignored"}, text(b"a")),
    ],
)
def test_a_first_chunk(first: dict[str, Any], chunk: InputChunk) -> None:
    assert ndjson(orjson.dumps(first)) == [chunk]


def test_only_the_first_object_is_parameters() -> None:
    assert ndjson(b'{"text":"a"}\n{"voice":"x"}\n') == [text(b"a"), InputChunk(Modality.AUDIO, b"")]
    assert ndjson(b'{}\n{"text":"a"}') == [{}, text(b"a")]


# --- any cuts


BODIES = {
    TYPES[0]: b'{"voice":"x"}\n\r\n{"text":"\xc3\xa9"}\n  {"payload":"AAEC","sequence_id":1}\n{"end_of_input":true}',
    TYPES[1]: b"".join(frame(one, 4) for one in (b'{"a":1}', b"", struct.pack(">BBBBII", 1, 1, 2, 0, 5, 0) + b"ab")),
    TYPES[2]: b"".join(frame(one, 8) for one in (b'{"text":"a"}', struct.pack(">BBBBII", 1, 1, 1, 3, 6, 7) + b"b")),
}


@given(st.sampled_from(sorted(BODIES)), st.lists(st.integers(0, 120), max_size=8))
def test_cutting_changes_nothing(content_type: str, cuts: list[int]) -> None:
    body = BODIES[content_type]
    borders = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[start:end] for start, end in pairwise(borders)]
    whole = read(body_reader(content_type, max_chunk_bytes=100), body)
    assert len(whole) >= 2
    assert read(body_reader(content_type, max_chunk_bytes=100), *pieces) == whole


@given(st.lists(st.binary(max_size=30)), st.integers(1, 7))
def test_raw_audio_is_what_it_is(pieces: list[bytes], size: int) -> None:
    items = read(RawAudioBody(media_type="audio/pcm", max_chunk_bytes=size), *pieces)
    chunks = [item for item in items if isinstance(item, InputChunk)]
    assert b"".join(chunk.payload for chunk in chunks) == b"".join(pieces)
    assert all(0 < len(chunk.payload) <= size and chunk.modality is Modality.AUDIO for chunk in chunks)


# --- places


def test_places() -> None:
    reader = ObjectBody(max_chunk_bytes=100)
    assert [reader.place for _ in reader.feed(b'{}\n\n{"text":"a"}\n{"text":"b"}\n')] == ["line 1", "line 3", "line 4"]
    frames = ObjectBody(prefix_bytes=4, max_chunk_bytes=100)
    body = frame(b"{}", 4) + frame(b"", 4) + frame(b'{"text":"a"}', 4)
    assert [frames.place for _ in frames.feed(body)] == ["frame 1", "frame 3"]
    assert RawAudioBody(media_type="audio/pcm", max_chunk_bytes=1).place == ""
    assert placed(InvalidValue("bad"), "line 3").message == "line 3: bad"
    assert placed(InvalidValue("bad"), "").message == "bad"


@pytest.mark.parametrize(
    ("line", "error", "param"),
    [
        (b"{", InvalidFrame, None),
        (b"5", InvalidFrame, None),
        (b'{"text":"\xff"}', InvalidFrame, None),
        (b'{"text":"\\ud800"}', InvalidFrame, None),
        (b'{"text":"a","unknown":"\xff"}', InvalidFrame, None),
        (b'{"type":"cancel"}', UnknownType, "type"),
        (b'{"type":"finish","text":"a"}', UnknownType, "type"),
        (b'{"type":null,"text":5}', InvalidFrame, "text"),
        (b'{"text":"a","sequence_id":4294967296}', InvalidValue, "sequence_id"),
        (b'{"a":' * 30_000 + b"1" + b"}" * 30_000, InvalidFrame, None),  # Python 3.13 takes thousands,
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_bad_lines(line: bytes, error: type[OmniError], param: str | None, first: bool) -> None:
    if first and param == "type":
        return  # as the first object these are parameters
    before = b"" if first else b"{}\n"
    with pytest.raises(error) as caught:
        ndjson(before + line, max_chunk_bytes=1_000_000)
    assert caught.value.param == param
    assert caught.value.message.startswith("line 1" if first else "line 2")


def test_a_type_that_is_null_is_none() -> None:
    assert ndjson(b'{"type":null,"text":"a"}') == [text(b"a")]


def test_lines_at_their_longest() -> None:
    longest = max_frame_bytes(30)
    line = b'{"text":"a"}' + b" " * (longest - 12)
    assert ndjson(line, max_chunk_bytes=30) == [text(b"a")]
    with pytest.raises(PayloadTooLarge, match="line 1"):
        ndjson(line + b" ", max_chunk_bytes=30)
    body = frame(b'{"text":"a"}'.ljust(longest), 8)
    assert read(ObjectBody(prefix_bytes=8, max_chunk_bytes=30), body) == [text(b"a")]
    with pytest.raises(PayloadTooLarge, match="frame 1"):
        read(ObjectBody(prefix_bytes=8, max_chunk_bytes=30), frame(b"x" * (longest + 1), 8)[:8])


def test_a_chunk_of_the_largest_size_fits_into_a_line() -> None:
    payload = orjson.dumps({"payload": "A" * (4 << 20) + "A" * 1398104, "modality": "text"})
    assert len(payload) < max_frame_bytes(4 << 20)


@given(st.sampled_from(TYPES), st.lists(st.binary(max_size=40), max_size=5))
def test_any_bytes_are_read_or_refused(content_type: str, pieces: list[bytes]) -> None:
    with suppress(OmniError):
        for item in read(body_reader(content_type, max_chunk_bytes=50), *pieces):
            assert isinstance(item, InputChunk | dict)


# --- the query


@pytest.mark.parametrize(
    ("query", "fields"),
    [
        ([], {}),
        ([("voice", "5")], {"voice": "5"}),
        ([("audio.voice", "5"), ("audio.format", "mp3")], {"audio": {"voice": "5", "format": "mp3"}}),
        ([("model", "true"), ("stream", "false")], {"model": "true", "stream": False}),
        ([("sampling.max_tokens", "5")], {"sampling": {"max_tokens": 5}}),
        ([("sampling", '{"seed":1}'), ("sampling.top_p", "0.5")], {"sampling": {"seed": 1, "top_p": 0.5}}),
        ([("modalities", "text,audio")], {"modalities": ["text", "audio"]}),
        ([("modalities", '["text"]')], {"modalities": ["text"]}),
        ([("instructions", "be brief")], {"instructions": "be brief"}),
        ([("start_policy", "on_end_only")], {"start_policy": "on_end_only"}),
        ([("voice", "a"), ("voice", "b")], {"voice": "b"}),
        ([("prompt", "1984"), ("input_audio.prompt", "true")], {"prompt": "1984", "input_audio": {"prompt": "true"}}),
    ],
)
def test_query_parameters(query: list[tuple[str, str]], fields: dict[str, Any]) -> None:
    assert query_parameters(query) == fields


def test_a_query_that_contradicts_itself() -> None:
    with pytest.raises(InvalidValue) as caught:
        query_parameters([("sampling", "5"), ("sampling.top_p", "1")])
    assert caught.value.param == "sampling"


@given(st.lists(st.tuples(st.text(alphabet="ab.", max_size=6), st.text(max_size=6))))
def test_any_query_is_read_or_refused(query: list[tuple[str, str]]) -> None:
    with suppress(InvalidValue):
        fields = query_parameters(query)
        assert set(fields) == {name.partition(".")[0] for name, _ in query}
