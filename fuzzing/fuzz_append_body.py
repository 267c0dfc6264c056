"""Bodies that open a Mode B session or append to it: each chunk is valid, or refused by an error that names it.

The first byte chooses between opening and appending. The rest is the body.
"""

from __future__ import annotations

from collections.abc import Iterator

import harness

with harness.instrumented():
    from omni_ws.core.chunks import InputChunk
    from omni_ws.core.reorder import MAX_SEQUENCE_ID
    from omni_ws.errors import InvalidFrame, InvalidRequest, InvalidValue
    from omni_ws.transport.http.request import error_body
    from omni_ws.wire.frames import RefusedChunk, loads_object
    from omni_ws.wire.streaming_body import BodyChunk, read_append, read_create

_OPENS = 1


def check(data: bytes) -> None:
    opens = bool(data[:1]) and data[0] % 2 == _OPENS
    try:
        body = loads_object(data[1:])
        parameters, chunks = read_create(body) if opens else ({}, read_append(body))
    except UnicodeDecodeError:
        return
    except (InvalidFrame, InvalidValue) as error:
        _can_be_told(error)
        return
    assert not {"chunk", "chunks"} & parameters.keys()
    listed = isinstance(body.get("chunks"), list)
    assert len(chunks) == (len(body["chunks"]) if listed else len(chunks))
    assert listed or len(chunks) <= 1
    for index, chunk in enumerate(chunks):
        assert chunk.place == (f"chunks[{index}]" if listed else "chunk" if opens else "")
        _check_chunk(chunk)


def _check_chunk(chunk: BodyChunk) -> None:
    match chunk.content:
        case RefusedChunk(sequence_id=number, error=error):
            assert 0 <= number <= MAX_SEQUENCE_ID
            assert error.sequence_id == number
            _named(chunk, error)
        case InputChunk(sequence_id=number, payload=payload):
            assert number is None or 0 <= number <= MAX_SEQUENCE_ID
            assert type(payload) is bytes
        case error:
            assert error.sequence_id is None
            _named(chunk, error)


def _named(chunk: BodyChunk, error: InvalidRequest) -> None:
    name = chunk.name(error.param)
    assert (name or "").startswith(chunk.place)
    error.param = name
    _can_be_told(error)


def _can_be_told(error: InvalidRequest) -> None:
    assert len(error_body(error)) < 4096


def seeds() -> Iterator[bytes]:
    for opening in (bytes([0]), bytes([_OPENS])):
        yield opening + b"{}"
        yield opening + b'{"chunks":[{"sequence_id":0,"text":"a"},{"sequence_id":1,"payload":"!"},7]}'
        yield opening + b'{"chunks":{"sequence_id":0}}'
    yield bytes([0]) + b'{"sequence_id":4294967295,"payload":"AAE=","modality":"audio","end_of_input":true}'
    yield bytes([0]) + b'{"sequence_id":1,"text":"a","chunks":[]}'
    yield bytes([0]) + b'{"type":"finish"}'
    yield bytes([_OPENS]) + b'{"model":"local-model","stream":true,"chunk":{"text":"hi","end_of_input":true}}'
    yield bytes([_OPENS]) + b'{"text":"hi"}'
    yield bytes([_OPENS]) + b'{"chunk":{"offset":1},"chunks":[]}'
    for vector in harness.vectors("client_frames.jsonl"):
        if "frame" in vector:
            frame = vector["frame"].encode()
            yield bytes([0]) + frame
            yield bytes([0]) + b'{"chunks":[%b]}' % frame
            yield bytes([_OPENS]) + b'{"chunk":%b}' % frame


if __name__ == "__main__":
    harness.fuzz(check, seeds)
