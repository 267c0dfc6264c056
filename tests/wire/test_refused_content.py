"""Names under which other interfaces have their content are refused in every form of a chunk, whatever their value."""

from __future__ import annotations

from typing import Any, Final

import orjson
import pytest

from omni_ws.core.chunks import InputChunk
from omni_ws.errors import InvalidValue, OmniError, UnsupportedParameter
from omni_ws.wire.frames import CHUNK_ONLY_FIELDS, REFUSED_CONTENT_FIELDS, RefusedChunk, decode_frame
from omni_ws.wire.streaming_body import ObjectBody, read_append, read_create

URL: Final = "https://example.com/a.wav"
VALUES: Final[tuple[Any, ...]] = (URL, {"url": URL}, [], 0, False)


def as_a_frame(chunk: dict[str, Any]) -> tuple[OmniError, str | None]:
    refused = decode_frame(orjson.dumps({"type": "input_chunk", **chunk}))
    assert isinstance(refused, RefusedChunk)
    assert refused.sequence_id == chunk["sequence_id"]
    return refused.error, refused.error.param


def as_a_line(*lines: dict[str, Any]) -> tuple[OmniError, str | None]:
    with pytest.raises(OmniError) as caught:
        [*ObjectBody(max_chunk_bytes=100).feed(b"".join(orjson.dumps(line) + b"\n" for line in lines))]
    return caught.value, caught.value.param


def as_a_chunk_of(body: dict[str, Any]) -> tuple[OmniError, str | None]:
    refused = read_append(body)[-1]
    assert isinstance(refused.content, RefusedChunk)
    return refused.content.error, refused.name(refused.content.error.param)


def as_the_first_chunk(chunk: dict[str, Any]) -> tuple[OmniError, str | None]:
    (refused,) = read_create({"chunk": chunk})[1]
    assert isinstance(refused.content, RefusedChunk)
    return refused.content.error, refused.name(refused.content.error.param)


def test_the_names_that_other_interfaces_have() -> None:
    assert {"url", "audio", "image_url", "data", "content", "input_audio"} <= REFUSED_CONTENT_FIELDS
    assert {"b64_json", "file_data", "file_url", "uri", "bytes", "chunk", "frames", "token_ids"} <= CHUNK_ONLY_FIELDS


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_each_is_refused_by_its_name_in_every_form(value: Any) -> None:
    for name in REFUSED_CONTENT_FIELDS:
        chunk = {"text": "a", "sequence_id": 1, name: value}
        # A body with ``chunks`` is none itself.
        alone = ({"chunks": [chunk]}, "chunks[0].chunks") if name == "chunks" else (chunk, name)
        for (error, named), param in (
            (as_a_frame(chunk), name),
            (as_a_line(chunk), name),
            (as_a_line({"voice": None}, chunk), name),
            (as_a_chunk_of(alone[0]), alone[1]),
            (as_a_chunk_of({"chunks": [{"text": "a", "sequence_id": 0}, chunk]}), f"chunks[1].{name}"),
            (as_the_first_chunk(chunk), f"chunk.{name}"),
        ):
            assert (type(error), named) == (UnsupportedParameter, param), name


def test_null_says_nothing() -> None:
    chunk = {"text": "a", "sequence_id": 0, **dict.fromkeys(REFUSED_CONTENT_FIELDS)}
    assert isinstance(decode_frame(orjson.dumps({"type": "input_chunk", **chunk})), InputChunk)
    (line,) = ObjectBody(max_chunk_bytes=100).feed(orjson.dumps(chunk) + b"\n")
    assert isinstance(line, InputChunk)


def test_a_first_line_of_nothing_else_is_meant_as_a_chunk() -> None:
    """As parameters it would be ignored."""
    for name in CHUNK_ONLY_FIELDS:
        error, named = as_a_line({name: "hello"}, {"text": "a"})
        assert (type(error), named) == (UnsupportedParameter, name)
        if name not in ("chunk", "chunks"):
            with pytest.raises(InvalidValue) as caught:
                read_create({name: "hello"})
            assert caught.value.param == name
    for name in REFUSED_CONTENT_FIELDS - CHUNK_ONLY_FIELDS:
        (item,) = ObjectBody(max_chunk_bytes=100).feed(orjson.dumps({name: "hello"}) + b"\n")
        assert isinstance(item, dict), name
