"""Forms: the result must not depend on where the body is cut, and is a request or a refusal.

The first byte is the number of cuts, one byte each. The rest is the body, with the boundary ``xXx``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import harness

with harness.instrumented():
    from omni_ws.errors import InvalidFrame, InvalidRequest, InvalidValue, OmniError, PayloadTooLarge, UnsupportedFormat
    from omni_ws.transport.http.exchange import MAX_FIELD_BYTES, MAX_PARTS, FormPart, FormReader
    from omni_ws.transport.http.request import error_body
    from omni_ws.wire.openai_requests import audio_file, form_fields, read_transcription

CONTENT_TYPE = "multipart/form-data; boundary=xXx"
MAX_CUTS = 15


def check(data: bytes) -> None:
    if not data:
        return
    count = data[0] % (MAX_CUTS + 1)
    cuts, body = data[1 : 1 + count], data[1 + count :]
    _read_type(body)
    places = [0, *sorted(min(place, len(body)) for place in cuts), len(body)]
    whole = _read([body])
    assert whole == _read([body[start:end] for start, end in pairwise(places)])
    if whole is not None:
        _use(whole)


def _read(pieces: list[bytes]) -> list[FormPart] | None:
    try:
        reader = FormReader(CONTENT_TYPE)
        for piece in pieces:
            reader.feed(piece)
        parts = reader.finish()
    except (InvalidFrame, InvalidValue, PayloadTooLarge) as error:
        _can_be_told(error)
        return None
    assert len(parts) <= MAX_PARTS
    assert all(part.filename is not None or len(part.data) <= MAX_FIELD_BYTES for part in parts)
    return parts


def _read_type(content_type: bytes) -> None:
    """Parses the header field, which is untrusted too."""
    try:
        FormReader(content_type[:256].decode("latin-1"))
    except (InvalidFrame, UnsupportedFormat) as error:
        _can_be_told(error)


def _use(parts: list[FormPart]) -> None:
    texts = [(part.name, part.data.decode("utf-8", "replace")) for part in parts if part.filename is None]
    try:
        read_transcription(form_fields(texts))
        for part in parts:
            audio_file(bytes(part.data), filename=part.filename or "", content_type=part.content_type)
    except InvalidRequest as error:
        _can_be_told(error)


def _can_be_told(error: OmniError) -> None:
    assert len(error_body(error)) < 4096


def seeds() -> Iterator[bytes]:
    def part(head: bytes, data: bytes) -> bytes:
        return b"--xXx\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (head, data)

    def fields(*pairs: tuple[bytes, bytes]) -> bytes:
        return b"".join(part(b'name="%b"' % name, value) for name, value in pairs)

    end, cuts = b"--xXx--\r\n", bytes([3, 10, 60, 90])
    file = part(b'name="file"; filename="a.wav"', b"RIFF\r\n--xX\r\r\n\0data")
    yield bytes([0]) + file + end
    yield cuts + fields((b"model", b"whisper-1"), (b"stream", b"true")) + file + end
    yield cuts + fields((b"timestamp_granularities[]", b"word"), (b"response_format", b"verbose_json")) + file + end
    yield cuts + fields((b"model", b"a"), (b"model[]", b"b"), (b"[]", b"c")) + end + b"epilogue"
    yield cuts + part(b'name="file"; filename="C:\\\\a\\"b.mp3"', b"ID3") + end
    yield cuts + part(b"name=file; filename*=UTF-8''%e2%82%ac.flac", b"fLaC") + end
    yield (
        cuts + b'--xXx\r\nContent-Type: audio/pcm;rate=8000\r\ncontent-disposition: form-data; name="file"; filename=""'
    )
    yield cuts + b'--xXx\r\nContent-Disposition: attachment; name="file"\r\n\r\na\r\n' + end
    yield cuts + b'--xXx\r\nContent-Disposition: form-data; filename="a"\r\n\r\na\r\n--xXx--'
    yield bytes([1, 3]) + b'multipart/form-data; boundary="a b"; boundary*0=c'
    yield bytes([0]) + b"preamble\r\n" + fields((b"language", b"en"), (b"temperature", b"nan")) + end


if __name__ == "__main__":
    harness.fuzz(check, seeds)
