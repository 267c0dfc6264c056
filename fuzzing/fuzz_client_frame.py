"""Text frames of a client: each is accepted, or refused with an error that can be sent."""

from __future__ import annotations

from collections.abc import Iterator

import harness

with harness.instrumented():
    import msgspec

    from omni_ws.core.chunks import InputChunk
    from omni_ws.core.reorder import MAX_SEQUENCE_ID
    from omni_ws.errors import InvalidFrame, InvalidValue, OmniError, UnknownType, UnsupportedParameter
    from omni_ws.wire.frames import MAX_TIMESTAMP_MS, ConfigPatch, PingFrame, RefusedChunk, decode_frame
    from omni_ws.wire.server_frames import (
        PongFrame,
        SessionUpdatedFrame,
        decode_server_frame,
        encode_frame,
        error_frame,
    )
    from omni_ws.wire.session_config import FIELDS, SessionConfig, effective, merge


def check(data: bytes) -> None:
    try:
        frame = decode_frame(data)
    except UnicodeDecodeError:
        assert not _is_utf8(data)
        return
    except (InvalidFrame, InvalidValue, UnknownType, UnsupportedParameter) as error:
        assert _is_utf8(data)
        _can_be_sent(error)
        return
    assert _is_utf8(data)
    match frame:
        case RefusedChunk(sequence_id=sequence_id, error=refusal):
            assert refusal.sequence_id == sequence_id
            assert 0 <= sequence_id <= MAX_SEQUENCE_ID
            _can_be_sent(refusal)
        case InputChunk():
            assert frame.sequence_id is not None
            assert 0 <= frame.sequence_id <= MAX_SEQUENCE_ID
            assert frame.timestamp_ms is None or 0 <= frame.timestamp_ms <= MAX_TIMESTAMP_MS
            assert type(frame.payload) is bytes
        case ConfigPatch(fields=fields):
            _check_configuration(fields)
        case PingFrame(t=t):
            encode_frame(PongFrame(t=t, server_time_ms=0))


def _is_utf8(data: bytes) -> bool:
    return data.decode("utf-8", "ignore").encode() == data


def _can_be_sent(error: OmniError) -> None:
    sent = encode_frame(error_frame(error))
    assert len(sent) < 4096
    assert decode_server_frame(sent) == error_frame(error)


def _check_configuration(fields: dict[str, object]) -> None:
    try:
        patch = {name: value for name, value in fields.items() if name in FIELDS}
        config = effective(merge({}, patch))
    except InvalidValue as error:
        _can_be_sent(error)
        return
    assert effective(merge(merge({}, patch), patch)) == config
    values = {name: getattr(config, name) for name in SessionConfig.__struct_fields__}
    sent = encode_frame(SessionUpdatedFrame(**values))
    assert msgspec.json.decode(sent)["type"] == "session_updated"


def seeds() -> Iterator[bytes]:
    yield b'{"type":"input_chunk","sequence_id":0,"modality":"audio","payload":"AAE=","timestamp_ms":20}'
    yield b'{"type":"input_chunk","sequence_id":1,"text":"hi","end_of_input":true,"format":null}'
    yield b'{"type":"session_config","start_policy":{"type":"on_modality","modality":"audio","min_audio_ms":500}}'
    yield b'{"type":"session_config","input_audio":{"format":"pcmu","sample_rate":8000},"sampling":{"seed":1}}'
    yield b'{"type":"session_config","turn_detection":{"type":"server_vad","threshold":0.5},"voice":null}'
    yield b'{"type":"ping","t":[{"a":[1.5,true,null,"\\u00e9"]}]}'
    yield b'{"type":"output_ack","sequence_id":3,"played_ms":1.5}'
    yield b'{"type":"cancel","request_id":"req_1"}'
    yield b'{"type":"history_truncate","request_id":"req_1"}'
    yield b'{"type":"history_get","original":true}'
    for vector in harness.vectors("client_frames.jsonl"):
        yield vector["frame"].encode() if "frame" in vector else bytes.fromhex(vector["hex"])


if __name__ == "__main__":
    harness.fuzz(check, seeds)
