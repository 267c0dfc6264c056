"""What a process of an engine sends, for who has no event loop."""

from __future__ import annotations

from typing import IO, Any

import msgspec

from omni_ws.engine.child_main import HEAD_BYTES, decode_header, decode_lengths


def read_message(source: IO[bytes], kinds: Any) -> tuple[Any, bytes]:
    """The header and the body of the next message; its header is of ``kinds``."""
    header_bytes, body_bytes = decode_lengths(source.read(HEAD_BYTES))
    return decode_header(msgspec.json.Decoder(kinds), source.read(header_bytes)), source.read(body_bytes)
