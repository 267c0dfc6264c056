"""A bound on the digits of a chunk's size: h11 takes 20, and what others make of so many is not known."""

from __future__ import annotations

from typing import Final

import h11
from h11._readers import ChunkedReader
from h11._receivebuffer import ReceiveBuffer

#: Of 64 bits, which is what others read sizes into; a proxy that sees another size sees another request.
MAX_SIZE_DIGITS: Final = 16

_HEX_DIGITS: Final = frozenset(b"0123456789abcdefABCDEF")


class BoundedChunks(ChunkedReader):
    """h11's reader; its parts are not promised, and tests/transport/http/test_front_door_contract.py keeps watch."""

    def __call__(self, buffer: ReceiveBuffer) -> h11.Data | h11.EndOfMessage | None:
        if not (self._bytes_in_chunk or self._reading_trailer):
            start = len(self._bytes_to_discard)
            digits = buffer._data[start : start + MAX_SIZE_DIGITS + 1]
            if len(digits) > MAX_SIZE_DIGITS and _HEX_DIGITS.issuperset(digits):
                raise h11.RemoteProtocolError("chunk size too long")
        return super().__call__(buffer)


def bound_chunk_sizes(http: h11.Connection) -> None:
    """For the body of the request whose head was read last."""
    if isinstance(http._reader, ChunkedReader):
        http._reader = BoundedChunks()
