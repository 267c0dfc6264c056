"""Streamed bodies: the result must not depend on where the body is cut.

The first byte chooses the decoder and its limit; the second is the number of cuts, one byte each. The rest is the
body.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import harness

with harness.instrumented():
    from omni_ws.errors import InvalidFrame, InvalidValue, PayloadTooLarge, UnknownType, UnsupportedParameter
    from omni_ws.wire.frames import decode_frame, decode_input, loads_object
    from omni_ws.wire.streaming_body import LengthPrefixedDecoder, NdjsonDecoder

MAX_CUTS = 15
_DECODERS = 3


def check(data: bytes) -> None:
    if len(data) < 2:
        return
    count = data[1] % (MAX_CUTS + 1)
    cuts, body = data[2 : 2 + count], data[2 + count :]
    places = [0, *sorted(min(place, len(body)) for place in cuts), len(body)]
    whole = _decode(data[0], [body])
    pieces = _decode(data[0], [body[start:end] for start, end in pairwise(places)])
    assert whole == pieces
    for frame in whole[0]:
        _read(frame)


def _decode(choice: int, pieces: list[bytes]) -> tuple[list[bytes], str | None]:
    limit = choice // _DECODERS
    decoder: NdjsonDecoder | LengthPrefixedDecoder
    match choice % _DECODERS:
        case 0:
            decoder = NdjsonDecoder(max_line_bytes=limit)
        case 1:
            decoder = LengthPrefixedDecoder(prefix_bytes=4, max_frame_bytes=limit)
        case _:
            decoder = LengthPrefixedDecoder(prefix_bytes=8, max_frame_bytes=limit)
    out: list[bytes] = []
    try:
        for piece in pieces:
            out.extend(decoder.feed(piece))
        out.extend(decoder.finish())
    except PayloadTooLarge as error:
        return out, str(error)
    except InvalidFrame as error:
        if isinstance(decoder, NdjsonDecoder):
            raise
        return out, str(error)
    finally:
        assert all(0 < len(frame) <= limit for frame in out)
    return out, None


def _read(frame: bytes) -> None:
    for read in (loads_object, decode_frame, decode_input):
        with suppress(InvalidFrame, InvalidValue, UnknownType, UnsupportedParameter, UnicodeDecodeError):
            read(frame)


def seeds() -> Iterator[bytes]:
    line = b'{"text":"hi"}'
    yield bytes([0 + _DECODERS * 80, 2, 3, 9]) + line + b"\n\n \r\n" + line + b"\r\n"
    yield bytes([0 + _DECODERS * 5, 1, 5]) + b"12345\n123456\n"
    for choice, prefix in ((1, 4), (2, 8)):
        frame = len(line).to_bytes(prefix, "big") + line
        yield bytes([choice + _DECODERS * 80, 3, 2, 5, 20]) + frame + bytes(prefix) + frame
        yield bytes([choice + _DECODERS * 5, 0]) + frame
    for vector in harness.vectors("ndjson.jsonl"):
        body = vector["body"].encode() if "body" in vector else bytes.fromhex(vector["body_hex"])
        yield bytes([min(vector["max_line_bytes"], 84) * _DECODERS, 2, 4, 8]) + body
    for vector in harness.vectors("length_prefixed.jsonl"):
        choice = vector["prefix_bytes"] // 4
        yield bytes([choice + _DECODERS * min(vector["max_frame_bytes"], 84), 2, 3, 9]) + bytes.fromhex(
            vector["body_hex"]
        )


if __name__ == "__main__":
    harness.fuzz(check, seeds)
