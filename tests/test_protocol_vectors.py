"""The golden vectors of the specification (protocol/vectors), each through the code that it describes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.checked_input_stream import AcknowledgedStream

from omni_ws.core.chunks import AudioFormat, InputChunk, InputMode, Modality, OutputChunk, OutputModality
from omni_ws.core.input_stream import StreamLimits
from omni_ws.core.quota import ByteBudget
from omni_ws.core.reorder import RequestOpened, StreamEvent
from omni_ws.core.request_input import (
    GenerationStarted,
    InputAppended,
    InputEnded,
    InputSettings,
    RequestInput,
    TimestampOrder,
)
from omni_ws.core.start_policy import ON_FIRST_CHUNK
from omni_ws.errors import EmptyInput, InvalidValue, OmniError, leaves
from omni_ws.wire.frames import (
    CLIENT_TYPES,
    BinaryAudio,
    ConfigPatch,
    RefusedChunk,
    decode_frame,
    decode_input,
    decode_output_audio,
    encode_input,
    encode_output_audio,
)
from omni_ws.wire.server_frames import decode_server_frame, encode_frame
from omni_ws.wire.session_config import effective, merge, start_policy
from omni_ws.wire.streaming_body import LengthPrefixedDecoder, NdjsonDecoder

VECTORS = Path(__file__).parents[1] / "protocol" / "vectors"
FILES = (
    "client_frames",
    "binary_frames",
    "server_frames",
    "ndjson",
    "length_prefixed",
    "start_policies",
    "session_config",
    "reorder",
    "alignment",
)

Vector = dict[str, Any]


def load(name: str) -> list[Vector]:
    lines = (VECTORS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def vectors(name: str) -> Callable[[Callable[[Vector], None]], Callable[[], None]]:
    """Makes a test of one vector a test of all in the file. What fails names its vector."""

    def with_all(test: Callable[[Vector], None]) -> Callable[[], None]:
        def test_with_all() -> None:
            for vector in load(name):
                try:
                    test(vector)
                except BaseException as failure:
                    failure.add_note(f"vector: {vector['name']}")
                    raise

        return test_with_all

    return with_all


def test_every_file_is_run_and_names_its_vectors_once() -> None:
    assert {path.stem for path in VECTORS.glob("*.jsonl")} == set(FILES)
    for name in FILES:
        names = [vector["name"] for vector in load(name)]
        assert len(names) >= 5
        assert len(names) == len(set(names)), name


def test_every_client_type_and_every_error_of_a_frame_has_a_vector() -> None:
    expected = [vector["expect"] for vector in load("client_frames")]
    assert {expect["type"] for expect in expected if "type" in expect} == CLIENT_TYPES
    codes = {expect["error"] for expect in expected if "error" in expect}
    assert codes == {"invalid_frame", "invalid_value", "unknown_type", "unsupported_parameter"}


# --- frames


def chunk_fields(chunk: InputChunk) -> dict[str, Any]:
    return {
        "type": "input_chunk",
        "sequence_id": chunk.sequence_id,
        "modality": chunk.modality,
        "payload_hex": chunk.payload.hex(),
        "format": chunk.format,
        "timestamp_ms": chunk.timestamp_ms,
        "end_of_input": chunk.end_of_input,
        **({} if chunk.tool_call_id is None else {"tool_call_id": chunk.tool_call_id}),
        **({} if chunk.ref is None else {"ref": chunk.ref}),
    }


def refusal(error: OmniError, *, consumes: bool) -> dict[str, Any]:
    return {
        "error": error.code,
        "param": error.param,
        "sequence_id": error.sequence_id,
        "consumes_sequence_id": consumes,
    }


def outcome(decode: Callable[[bytes], object], data: bytes) -> object:
    """What became of the bytes, in the form of a vector's ``expect``."""
    try:
        frame = decode(data)
    except UnicodeDecodeError:
        return {"close": 1007}
    except OmniError as refused:
        return refusal(refused, consumes=False)
    match frame:
        case InputChunk():
            return chunk_fields(frame)
        case RefusedChunk(sequence_id=sequence_id, error=error):
            assert error.sequence_id == sequence_id
            return refusal(error, consumes=True)
        case ConfigPatch(fields=fields):
            return {"type": "session_config", "fields": fields}
        case BinaryAudio(sequence_id=sequence_id, start_ms=start_ms, payload=payload):
            return {"sequence_id": sequence_id, "start_ms": start_ms, "payload_hex": payload.hex()}
    return msgspec.to_builtins(frame)


@vectors("client_frames")
def test_client_frame(vector: Vector) -> None:
    data = bytes.fromhex(vector["hex"]) if "hex" in vector else vector["frame"].encode()
    assert outcome(decode_frame, data) == vector["expect"]


@vectors("binary_frames")
def test_binary_frame(vector: Vector) -> None:
    decoders: dict[str, Callable[[bytes], object]] = {
        "input": decode_input,
        "output": decode_output_audio,
    }
    data = bytes.fromhex(vector["hex"])
    assert outcome(decoders[vector["direction"]], data) == vector["expect"]
    if "error" not in vector["expect"] and vector.get("canonical", True):
        assert encoded(vector) == data


def encoded(vector: Vector) -> bytes:
    expect = vector["expect"]
    payload = bytes.fromhex(expect["payload_hex"])
    if vector["direction"] == "input":
        chunk = InputChunk(
            Modality(expect["modality"]),
            payload,
            expect["sequence_id"],
            None,
            expect["timestamp_ms"],
            expect["end_of_input"],
        )
        return encode_input(chunk)
    output = OutputChunk(
        request_id="req_01",
        sequence_id=expect["sequence_id"],
        modality=OutputModality.AUDIO,
        payload=payload,
        start_ms=expect["start_ms"],
    )
    return encode_output_audio(output)


@vectors("server_frames")
def test_server_frame_survives_decoding_and_encoding(vector: Vector) -> None:
    frame = decode_server_frame(vector["frame"])
    assert json.loads(encode_frame(frame)) == json.loads(vector["frame"])


def test_errors_in_server_frames_say_of_themselves_what_the_table_says() -> None:
    table = {error.wire.code: error.wire.retryable for error in leaves()}
    frames = [json.loads(vector["frame"]) for vector in load("server_frames")]
    errors = [frame["error"] for frame in frames if frame["type"] == "error"]
    assert errors
    for error in errors:
        assert error["retryable"] is table[error["code"]]


# --- bodies


def cuts(body: bytes, splits: Iterable[list[int]]) -> Iterator[list[bytes]]:
    """The body whole, byte by byte, and cut into the given sizes (the last piece is what is left)."""
    yield [body]
    yield [body[index : index + 1] for index in range(len(body))]
    for sizes in splits:
        pieces, start = [], 0
        for size in sizes:
            pieces.append(body[start : start + size])
            start += size
        yield [*pieces, body[start:]]


def everything(decoder: NdjsonDecoder | LengthPrefixedDecoder, pieces: list[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        yield from decoder.feed(piece)
    yield from decoder.finish()


@vectors("ndjson")
def test_lines_of_a_body(vector: Vector) -> None:
    for pieces in cuts(vector["body"].encode(), vector["splits"]):
        decoder = NdjsonDecoder(max_line_bytes=vector["max_line_bytes"])
        lines: list[list[object]] = []
        error = None
        try:
            for line in everything(decoder, pieces):
                lines.append([decoder.line_number, line.decode()])
        except OmniError as refused:
            error = {"code": refused.code, "line": decoder.line_number}
        assert (lines, error) == (vector["lines"], vector["error"])


@vectors("length_prefixed")
def test_frames_of_a_body(vector: Vector) -> None:
    for pieces in cuts(bytes.fromhex(vector["body_hex"]), vector["splits"]):
        decoder = LengthPrefixedDecoder(prefix_bytes=vector["prefix_bytes"], max_frame_bytes=vector["max_frame_bytes"])
        frames: list[str] = []
        error = None
        try:
            for frame in everything(decoder, pieces):
                frames.append(frame.hex())
        except OmniError as refused:
            named = re.search(r"frame (\d+)", refused.message)
            error = {"code": refused.code, "frame": named and int(named[1])}
        assert (frames, error) == (vector["frames_hex"], vector["error"])


# --- policies, order and configuration


@vectors("alignment")
def test_alignment(vector: Vector) -> None:
    order = TimestampOrder(vector["alignment_window_ms"], map(timed_chunk, vector["before"]))
    for step in vector["steps"]:
        now = step["at_ms"] / 1000
        if "chunk" in step:
            passed = order.put(timed_chunk(step["chunk"]), now=now)
        else:
            passed = order.handle_timer(now=now) if "timer" in step else order.take_all()
        assert [chunk.sequence_id for chunk in passed] == step["passed"]
        if "end" in step:
            assert (len(order), order.held_bytes, order.get_timer()) == (0, 0, None)


def timed_chunk(chunk: Vector) -> InputChunk:
    return InputChunk(Modality(chunk["modality"]), b"x", chunk["sequence_id"], None, chunk.get("timestamp_ms"))


@vectors("start_policies")
def test_start_policy(vector: Vector) -> None:
    try:
        happened = started(vector)
    except InvalidValue as refused:
        happened = {"error": refused.code}
    assert happened == vector["expect"]


def started(vector: Vector) -> dict[str, Any] | None:
    """What made the request start, or why it could not; None where it has not started."""
    config = effective({"start_policy": vector["start_policy"], "input_audio": vector["input_audio"]})
    audio = AudioFormat(config.input_audio.format, config.input_audio.sample_rate, config.input_audio.channels)
    settings = InputSettings(start_policy=start_policy(config), mode=InputMode.SNAPSHOT, audio=audio)
    session = RequestInput(settings)
    for chunk in vector["chunks"]:
        for event in session.finish() if "finish" in chunk else session.receive_chunk(policy_chunk(chunk)):
            match event:
                case GenerationStarted(trigger=trigger, sequence_id=sequence_id, chunks=chunks):
                    return {"trigger": trigger, "sequence_id": sequence_id, "chunks_at_start": len(chunks)}
                case InputEnded(error=EmptyInput() as empty):
                    return {"error": empty.code}
    return None


def policy_chunk(chunk: Vector) -> InputChunk:
    payload = chunk["text"].encode() if "text" in chunk else bytes(chunk["bytes"])
    return InputChunk(
        Modality(chunk["modality"]), payload, chunk["sequence_id"], None, None, chunk.get("end_of_input", False)
    )


@vectors("session_config")
def test_session_config(vector: Vector) -> None:
    defaults = load("session_config")[0]["defaults"]
    wanted: dict[str, Any] = {}
    for step in vector["steps"]:
        if "error" in step:
            with pytest.raises(OmniError) as refused:
                effective(merge(wanted, step["patch"]))
            assert (refused.value.code, refused.value.param) == (step["error"], step["param"])
        else:
            wanted = merge(wanted, step["patch"])
            assert msgspec.to_builtins(effective(wanted)) == {**defaults, **step["effective"]}


# --- order


@vectors("reorder")
def test_order_of_arrival(vector: Vector) -> None:
    names = {
        "reorder_window_chunks": "reorder_window",
        "max_payload_per_session": "max_held_bytes",
        "max_chunk_bytes": "max_chunk_bytes",
    }
    limits = StreamLimits(**{names[name]: value for name, value in vector["limits"].items()})
    settings = InputSettings(start_policy=ON_FIRST_CHUNK, mode=InputMode.EXTEND)
    stream = AcknowledgedStream(limits, lambda: settings, budget=ByteBudget(1 << 30), now=0)
    stream.reject_out_of_order = vector["out_of_order"] == "reject"
    for step in vector["steps"]:
        assert {"at_ms": step["at_ms"], **arrive(stream, step)} == {"at_ms": step["at_ms"], **step["expect"]}


def arrive(stream: AcknowledgedStream, step: Vector) -> dict[str, Any]:
    events: Sequence[StreamEvent] = []
    error = None
    try:
        events = act(stream, step)
    except OmniError as refused:
        error = {"code": refused.code, "sequence_id": refused.sequence_id}
    accepted: list[int | None] = []
    for event in events:
        match event:
            case GenerationStarted(chunks=chunks):
                accepted += [chunk.sequence_id for chunk in chunks]
            case InputAppended(chunk=chunk):
                accepted.append(chunk.sequence_id)
    return {
        "accepted": accepted,
        "opened": sum(isinstance(event, RequestOpened) for event in events),
        "ended": sum(isinstance(event, InputEnded) for event in events),
        "ack": ack_of(stream),
        "error": error,
    }


def act(stream: AcknowledgedStream, step: Vector) -> Sequence[StreamEvent]:
    now = step["at_ms"] / 1000
    match step:
        case {"chunk": chunk}:
            arrived = InputChunk(
                Modality.AUDIO,
                bytes(chunk["bytes"]),
                chunk.get("sequence_id"),
                end_of_input=chunk.get("end_of_input", False),
            )
            return stream.receive_chunk(arrived, now=now)
        case {"refused": sequence_id}:
            return stream.refuse(sequence_id, now=now)
        case {"finish": True}:
            return stream.finish(now=now)
        case {"cancel": True}:
            stream.cancel(now=now)
        case {"ping": True}:
            stream.touch(now=now)
        case {"timer": True}:
            stream.handle_timer(now=now)
        case _:
            raise ValueError(f"unknown step {step}")
    return []


def ack_of(stream: AcknowledgedStream) -> dict[str, Any] | None:
    if not stream.ack_due:
        return None
    return dict(zip(("next_sequence_id", "buffered_chunks", "received_bytes"), stream.take_ack(), strict=True))
