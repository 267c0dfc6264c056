"""PackedEntries: each entry of an object of JSON, and none that it does not have."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.engine.tts.neural import PackedEntries

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)  # JSON has neither
VALUES = st.text() | st.dictionaries(st.text(), NUMBERS | st.text())


def packed(entries: dict[str, object]) -> PackedEntries:
    return PackedEntries(json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode())


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), VALUES, min_size=1, max_size=200), st.text())
def test_every_name_has_its_value(entries: dict[str, object], other: str) -> None:
    found = packed(entries)
    assert {name: found.get(name) for name in entries} == entries
    assert found.get(other) == entries.get(other)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 129])
def test_the_first_and_the_last_of_each_block_are_found(count: int) -> None:
    entries: dict[str, object] = {f"word {place:03}": f"{place}" for place in range(count)}
    found = packed(entries)
    assert [found.get(name) for name in entries] == list(entries.values())
    assert [found.get(name) for name in ("", "word", "word 000x", "word 0000", "x", "\ud800")] == [None] * 6


def test_the_order_of_the_text_does_not_matter() -> None:
    found = packed({"b": "2", "é": "3", "a": {"x": 1.5}, 'a"': "quoted", "a\n": "{}"})
    assert [found.get(name) for name in ("a", "b", "é", 'a"', "a\n")] == [{"x": 1.5}, "2", "3", "quoted", "{}"]
