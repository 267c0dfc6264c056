"""What is recorded of HTTP bodies and queries: all of them, but no credentials of MCP servers."""

from __future__ import annotations

import random
from urllib.parse import parse_qsl, quote, urlencode

import orjson
import pytest

from omni_ws.transport.recording import (
    BodyScrubber,
    scrubbed_target,
)

SECRETS = {"server_url": "https://h.example/mcp?key=sekrit", "authorization": "sekrit", "headers": {"X-Key": "sekrit"}}
ENTRY = {"type": "mcp", "server_label": "sums", **SECRETS}
PARAMETERS = orjson.dumps({"model": "m", "tools": [ENTRY]})
CHUNK = b'{"text": "Say \\"headers\\": caf\\u00e9"}'
KEPT = {"model": "m", "tools": [{"type": "mcp", "server_label": "sums", "server_url": "https://h.example/mcp"}]}
#: A tool of the client that takes such fields.
FUNCTION = b'{"tools":[{"function":{"parameters":{"properties":{"headers":{},"authorization":{}}}}}]}'


def recorded(body: bytes, seed: int, *, whole: bool = False, prefix_bytes: int = 0) -> bytes:
    """What is recorded of a body that arrives in pieces."""
    chance = random.Random(seed)
    scrubber = BodyScrubber(whole=whole, prefix_bytes=prefix_bytes)
    found = b""
    while body:
        size = chance.choice([1, 2, 20, 1000])
        found += scrubber.feed(body[:size])
        body = body[size:]
    return found + scrubber.finish()


@pytest.mark.parametrize("seed", range(5))
def test_lines(seed: int) -> None:
    found = recorded(b"\n".join([PARAMETERS, CHUNK, b"", PARAMETERS + b"\r", CHUNK, b"no JSON", FUNCTION]), seed)
    first, *others = found.split(b"\n")
    assert orjson.loads(first) == KEPT
    assert others == [CHUNK, b"", first + b"\r", CHUNK, b"no JSON", FUNCTION]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("prefix_bytes", [4, 8])
def test_frames(seed: int, prefix_bytes: int) -> None:
    def framed(*frames: bytes) -> bytes:
        return b"".join(len(one).to_bytes(prefix_bytes, "big") + one for one in frames)

    binary = b'\x01"headers": of a chunk'
    found = recorded(framed(PARAMETERS, CHUNK, b"", binary), seed, prefix_bytes=prefix_bytes)
    kept = orjson.dumps(KEPT)
    assert found == framed(kept, CHUNK, b"", binary)
    assert recorded(framed(CHUNK, PARAMETERS)[:-20], seed, prefix_bytes=prefix_bytes) == framed(CHUNK)
    assert recorded(framed(CHUNK)[:-1], seed, prefix_bytes=prefix_bytes) == framed(CHUNK)[:-1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "body",
    [
        orjson.dumps({"tools": [ENTRY]}, option=orjson.OPT_INDENT_2),
        PARAMETERS[:-2],
        b'{"authorization": "sekrit", "type": "mc',
        b'{"authoriz\\u0061tion": "sekrit", "type": ',
        b'"authorization"\n: "sekrit"',
        quote(PARAMETERS).encode(),
        b"tools=" + quote(PARAMETERS, safe="").encode(),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_what_is_cut_or_of_another_form_keeps_none(body: bytes, seed: int, whole: bool) -> None:
    found = recorded(b'{"text": "before"}\n' + body + b"\nbehind", seed, whole=whole)
    assert b"sekrit" not in found
    assert found.startswith(b"null" if whole else b'{"text": "before"}\n')


@pytest.mark.parametrize("seed", range(5))
def test_a_whole_body(seed: int) -> None:
    body = orjson.dumps({"model": "m", "tools": [ENTRY]}, option=orjson.OPT_INDENT_2)
    assert orjson.loads(recorded(body, seed, whole=True)) == KEPT
    for same in (FUNCTION, b"RIFF mcp server_ \\u00", b'{"cut": '):
        assert recorded(same, seed, whole=True) == same


def test_queries() -> None:
    given = [
        ("tools", orjson.dumps([ENTRY]).decode()),
        ("model", "mcp"),
        ("tools.authorization", "sekrit"),
        ("tools.server_url", "https://h/?sekrit"),
        ("headers", "sekrit"),
        ("instructions", '{"headers": "sekrit'),
    ]
    path, _, query = scrubbed_target(f"/v1/chat/completions?{urlencode(given)}").partition("?")
    assert path == "/v1/chat/completions"
    kept = parse_qsl(query, keep_blank_values=True)
    assert orjson.loads(kept[0][1]) == KEPT["tools"]
    assert kept[1:] == [
        ("model", "mcp"),
        ("tools.authorization", "redacted"),
        ("tools.server_url", "redacted"),
        ("headers", "redacted"),
        ("instructions", "null"),
    ]
    for same in ("/v1/chat/completions", "/v1/chat/completions?", "/v1/a?b=&instructions=caf%c3%a9+mcp&c"):
        assert scrubbed_target(same) == same
