"""LoneObject tells an ordinary body from NDJSON, reading as little of it as possible."""

from __future__ import annotations

import itertools
import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_ws.core.json_values import MAX_BODY_VALUES
from omni_ws.errors import InvalidFrame
from omni_ws.wire.streaming_body import LoneObject

MARKS = frozenset({"messages", "input"})


def lone(*parts: bytes, limit: int = 1000) -> tuple[bool, int]:
    """Return the verdict, and after how many pieces it was reached."""
    body = LoneObject(MARKS, max_line_bytes=limit)
    for index, part in enumerate(parts, 1):
        if (verdict := body.feed(part)) is not None:
            return verdict, index
    return body.finish(), len(parts) + 1


@pytest.mark.parametrize("end", [b"\n", b""])
def test_an_object_of_too_many_values_is_refused(end: bytes) -> None:
    with pytest.raises(InvalidFrame, match="values"):
        lone(b'{"messages":[' + b"[]," * (MAX_BODY_VALUES // 5) + b"1]}" + end, limit=1 << 30)


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[]}',
        b'{"input":"a"}\n',
        b' \r\n\n\t{"messages":[]} \r\n \n',
        b'{\n  "messages": [\n  ]\n}\n',
        b'{"stream": true,\n"messages": []}',
        '{"model": "é",\n"input": "é"}'.encode(),
    ],
)
def test_an_object_by_itself(body: bytes) -> None:
    assert lone(body) == (True, 2)
    assert lone(*(bytes([byte]) for byte in body)) == (True, len(body) + 1)


@pytest.mark.parametrize(
    ("body", "known_at"),
    [
        (b'{"text":"a"}\n', 13),
        (b'\n{"model":"m"}\n{"text":"a"}\n', 15),
        (b'{"messages":[]}\n \n{"text":"a"}', 19),
        (b'{"messages":[]} {"text":"a"}\n', 29),
        (b'{"messages":[],}\n{', 17),
        (b"[1]", 1),
        (b"  hello", 3),
        (b'{"messages":"\xff"}\n', 17),
        (b"", 1),
        (b" \n ", 4),
        (b'{"text":"a"}', 13),
        (b'{\n "text": "a"\n}\n', 18),
        (b'{"messages":[', 14),
        (b'{\n "messages": [] } {}', 23),
        (b'{"a":' * 2000 + b"\n", 10_001),
    ],
)
def test_everything_else_and_when_it_is_known(body: bytes, known_at: int) -> None:
    verdict, parts = lone(*(bytes([byte]) for byte in body), limit=20_000)
    assert (verdict, parts) == (False, known_at)
    assert lone(body, limit=20_000)[0] is False


def test_a_line_that_is_longer_than_any_chunk_can_only_be_an_ordinary_body() -> None:
    body = orjson.dumps({"messages": ["a" * 100]})
    assert lone(body + b"\n", limit=len(body)) == (True, 2)
    assert lone(body + b"\n{}", limit=len(body) + 1) == (False, 1)
    # Not examined before the end: NDJSON would refuse such a line, whatever follows it.
    assert lone(body + b"\n{}", limit=len(body) - 1) == (False, 2)
    assert lone(body + b"\n", limit=len(body) - 1) == (True, 2)


@given(
    value=st.dictionaries(st.sampled_from(["messages", "input", "model", "text"]), st.text() | st.none()),
    indent=st.none() | st.integers(0, 3),
    cuts=st.lists(st.integers(0, 200), max_size=5),
    behind=st.sampled_from(["", "\n", "\r\n \n", "\n{}", " {}"]),
)
@settings(deadline=None)
def test_how_a_body_is_cut_and_laid_out_changes_nothing(
    value: dict[str, str | None], indent: int | None, cuts: list[int], behind: str
) -> None:
    body = (json.dumps(value, indent=indent) + behind).encode()
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    parts = [body[start:stop] for start, stop in itertools.pairwise(places)]
    assert lone(*parts)[0] is (bool(MARKS & value.keys()) and not behind.strip())
