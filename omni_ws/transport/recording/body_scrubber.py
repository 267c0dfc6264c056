"""The bytes of an HTTP body as they may be recorded: without the credentials of MCP servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import parse_qsl, urlencode

from omni_ws.wire.mcp_servers import CREDENTIALS, REPLACED, has_credential_key, scrubbed
from omni_ws.wire.recording import REDACTED

_LINE: Final = re.compile(rb"[^\n]*\n")
_SECRET_FIELDS: Final = (*CREDENTIALS, "server_url")


class BodyScrubber:
    """Takes a body in pieces, and returns what of it may be recorded by then.

    It holds back what cannot be judged yet: all of the body if it is one JSON value (``whole``), otherwise the line or
    the frame that is not complete; the server's limits on bodies, lines and frames bound that. Frames have a length of
    ``prefix_bytes``. Behind a line with a key of credentials that is no JSON nothing is recorded: the server reads no
    further either.
    """

    def __init__(self, *, whole: bool = False, prefix_bytes: int = 0) -> None:
        self._whole = whole
        self._prefix_bytes = prefix_bytes
        self._held = bytearray()
        self._spoilt = False

    def feed(self, data: bytes) -> bytes:
        """Add a piece of the body, and return what may be recorded now."""
        if self._spoilt:
            return b""
        held = self._held
        held += data
        if self._whole:
            return b""
        if self._prefix_bytes:
            return b"".join(self._frames())
        end = data.rfind(b"\n") + 1
        if not end:
            return b""
        end += len(held) - len(data)
        lines = bytes(held[:end])
        del held[:end]
        return b"".join(map(self._line, _LINE.findall(lines))) if has_credential_key(lines) else lines

    def finish(self) -> bytes:
        """Return what may be recorded of the rest. The body has ended, or nothing more of it arrives."""
        rest = bytes(self._held)
        self._held.clear()
        if self._prefix_bytes:
            return b"" if has_credential_key(rest) else rest
        return scrubbed(rest) if self._whole else self._line(rest)

    def _line(self, line: bytes) -> bytes:
        if self._spoilt:
            return b""
        text = line.strip()
        if not has_credential_key(text):
            return line
        kept = scrubbed(text) if text[:1] == b"{" else REPLACED  # the value of a lone key is on a line of its own
        self._spoilt = kept == REPLACED
        return kept + line[len(line.rstrip()) :]

    def _frames(self) -> Iterator[bytes]:
        held, start = self._held, 0
        while len(held) - start >= self._prefix_bytes:
            first = start + self._prefix_bytes
            end = first + int.from_bytes(held[start:first], "big")
            if end > len(held):
                break
            frame = bytes(held[first:end])
            start = end
            if frame[:1] == b"{":
                frame = scrubbed(frame)
            yield len(frame).to_bytes(self._prefix_bytes, "big") + frame
        del held[:start]


def scrubbed_target(target: str) -> str:
    """Return the target of a request as it may be recorded: without credentials of MCP servers in its query."""
    path, _, query = target.partition("?")
    fields = parse_qsl(query, keep_blank_values=True)
    kept = [(name, _scrubbed_field(name, value)) for name, value in fields]
    return target if kept == fields else f"{path}?{urlencode(kept)}"


def _scrubbed_field(name: str, value: str) -> str:
    if name.rpartition(".")[2] in _SECRET_FIELDS:
        return REDACTED
    return scrubbed(value.encode()).decode()
