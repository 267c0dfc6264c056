from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.errors import InvalidFrame, InvalidRequest, InvalidValue, UnknownType
from omni_ws.wire.frames import RefusedChunk
from omni_ws.wire.streaming_body import MAX_CHUNKS, BodyChunk, read_append, read_create

HELLO = {"sequence_id": 3, "text": "hello", "end_of_input": True}
HELLO_CHUNK = InputChunk(Modality.TEXT, b"hello", 3, end_of_input=True)


@pytest.mark.parametrize("body", [HELLO, {**HELLO, "type": "input_chunk", "unknown": {}}])
def test_a_body_that_is_a_chunk(body: dict[str, Any]) -> None:
    assert read_append(body) == [BodyChunk("", HELLO_CHUNK)]


def test_a_chunk_that_says_nothing_says_so_by_its_type() -> None:
    assert read_append({"type": "input_chunk"}) == [BodyChunk("", InputChunk(Modality.AUDIO, b""))]
    with pytest.raises(InvalidFrame, match="chunks"):
        read_append({"format": "pcm16"})


def test_a_body_of_several_chunks() -> None:
    assert read_append({"chunks": [{"payload": "AAA="}, HELLO]}) == [
        BodyChunk("chunks[0]", InputChunk(Modality.AUDIO, b"\0\0")),
        BodyChunk("chunks[1]", HELLO_CHUNK),
    ]
    assert read_append({"chunks": []}) == []


def test_as_many_chunks_as_a_body_may_bring_and_one_more() -> None:
    assert len(read_append({"chunks": [{}] * MAX_CHUNKS})) == MAX_CHUNKS
    with pytest.raises(InvalidValue):
        read_append({"chunks": [{}] * (MAX_CHUNKS + 1)})


def test_the_parameters_of_a_session_and_its_first_chunks() -> None:
    assert read_create({"voice": "slt", "modalities": ["text"]}) == ({"voice": "slt", "modalities": ["text"]}, [])
    assert read_create({"voice": "slt", "chunk": HELLO}) == ({"voice": "slt"}, [BodyChunk("chunk", HELLO_CHUNK)])
    assert read_create({"chunks": [HELLO]}) == ({}, [BodyChunk("chunks[0]", HELLO_CHUNK)])
    assert read_create({"chunk": None, "chunks": None}) == ({}, [])


@pytest.mark.parametrize(
    ("chunk", "error", "param"),
    [
        ({"payload": "?"}, InvalidFrame, "payload"),
        ({"text": 1}, InvalidFrame, "text"),
        ({"type": 1}, InvalidFrame, "type"),
        ({"type": "finish"}, UnknownType, "type"),
        ({"modality": "smell"}, InvalidValue, "modality"),
        ({"text": "a", "modality": "audio"}, InvalidValue, "modality"),
    ],
)
def test_a_chunk_that_is_refused_by_its_number(chunk: dict[str, Any], error: type[InvalidRequest], param: str) -> None:
    (numbered,) = read_append({"chunks": [{**chunk, "sequence_id": 7}]})
    assert isinstance(numbered.content, RefusedChunk)
    assert numbered.content.sequence_id == numbered.content.error.sequence_id == 7
    assert type(numbered.content.error) is error
    for number in (None, -1, 2**32, "7", True):
        (bare,) = read_append({"chunks": [{**chunk, "sequence_id": number}]})
        assert isinstance(bare.content, InvalidRequest)
    assert numbered.name(numbered.content.error.param) == f"chunks[0].{param}"


def test_names_of_fields() -> None:
    assert BodyChunk("", HELLO_CHUNK).name("text") == "text"
    assert BodyChunk("", HELLO_CHUNK).name(None) is None
    assert BodyChunk("chunk", HELLO_CHUNK).name(None) == "chunk"


json: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.just([{}])
)
fields = st.sampled_from(["type", "sequence_id", "modality", "payload", "text", "format", "timestamp_ms", "chunks"])


@given(st.dictionaries(fields, json | st.lists(st.dictionaries(fields, json, max_size=4), max_size=3), max_size=4))
def test_any_object_is_read_or_refused(body: dict[str, Any]) -> None:
    try:
        chunks = read_append(body)
    except InvalidRequest:
        return
    for chunk in chunks:
        assert isinstance(chunk.content, InputChunk | RefusedChunk | InvalidRequest)
