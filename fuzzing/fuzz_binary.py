"""Binary frames, as the server and as a client decode them."""

from __future__ import annotations

from collections.abc import Iterator

import harness

with harness.instrumented():
    from omni_ws.core.chunks import InputChunk
    from omni_ws.errors import InvalidFrame
    from omni_ws.wire.frames import HEADER, decode_input, decode_output_audio, encode_input


def check(data: bytes) -> None:
    _check_input(data)
    try:
        audio = decode_output_audio(data)
    except InvalidFrame:
        return
    assert audio.payload == data[HEADER.size :]


def _check_input(data: bytes) -> None:
    try:
        frame = decode_input(data)
    except InvalidFrame:
        return
    if isinstance(frame, InputChunk):
        assert frame.payload == data[HEADER.size :]
        written = encode_input(frame)
        # Round trip, except for a timestamp that the flags declare absent.
        assert written[:8] + written[HEADER.size :] == data[:8] + data[HEADER.size :]
        assert decode_input(written) == frame
        assert decode_input(memoryview(data)) == frame
    else:
        assert frame.error.sequence_id == frame.sequence_id == int.from_bytes(data[4:8], "big")


def seeds() -> Iterator[bytes]:
    for kind in (1, 2):
        for modality in range(6):
            for flags in range(5):
                yield HEADER.pack(1, kind, modality, flags, 7, 1000) + b"\0\1"
    for vector in harness.vectors("binary_frames.jsonl"):
        yield bytes.fromhex(vector["hex"])


if __name__ == "__main__":
    harness.fuzz(check, seeds)
