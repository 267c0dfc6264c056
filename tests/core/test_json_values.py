"""How many values a JSON document has, counted before it is parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core import json_values
from omni_ws.core.chunks import ToolCall
from omni_ws.core.json_values import MAX_BODY_VALUES, MAX_MESSAGE_VALUES, check_values
from omni_ws.errors import InvalidFrame

MOST = 10
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a,[{"\\ü\n'), max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('x,"\\', max_size=3), inner, max_size=4),
    max_leaves=20,
)


def weight(value: Any) -> int:
    """What a document counts: its separators, and four for each array and object."""
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 4 + max(0, len(value) - 1) + sum(map(weight, inner))


@given(JSON, st.sampled_from([1, 2, 7, 1 << 20]), st.booleans(), st.booleans())
def test_a_document_counts_what_is_outside_of_its_strings(value: Any, block: int, escaped: bool, as_text: bool) -> None:
    text = json.dumps(value, ensure_ascii=escaped, indent=1)
    data: bytes | str = text if as_text else text.encode()
    values = 1 + weight(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "_BLOCK", block)
        check_values(data, values)
        if values > 1 and 4 * len(data) >= values:
            with pytest.raises(InvalidFrame):
                check_values(data, values - 1)


@pytest.mark.parametrize("most", [MAX_MESSAGE_VALUES, MAX_BODY_VALUES])
def test_the_limit(most: int) -> None:
    numbers = b"[" + b",".join([b"1"] * (most - 4)) + b"]"
    check_values(numbers, most)
    with pytest.raises(InvalidFrame, match=f"more than {most} values"):
        check_values(numbers[:-1] + b",1]", most)
    check_values(b'{"text":"' + b",[{" * most + b'"}', most)


@pytest.mark.parametrize("data", [b"", b'"', b"\\" * 50, b'{"a":"' + b"," * 50, b"\xff" * 50, "\ud800" * 50])
def test_what_is_no_json_is_left_to_the_parser(data: bytes | str) -> None:
    check_values(data, MOST)


def test_what_stands_before_an_error_counts() -> None:
    """A parser has built it by then. Behind a backslash outside of a string, which hides a quote here, it ends."""
    with pytest.raises(InvalidFrame):
        check_values(b"[" + b"[]," * 50 + b'\\" "', MOST)


def test_arguments_of_a_call_with_too_many_values_are_not_whole() -> None:
    arguments = '{"a":[' + "[]," * MAX_MESSAGE_VALUES + "1]}"
    assert not ToolCall("call_1", "f", arguments).is_whole
    assert ToolCall("call_1", "f", '{"a":[1]}').is_whole
