"""Text chunks are cut at the boundaries of characters."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.input_stream import WholeCharacters
from omni_ws.core.reorder import Diverted, StreamEvent, TextRefused
from omni_ws.errors import EngineOverloaded


def text(number: int, payload: bytes, call: str | None = None) -> InputChunk:
    return InputChunk(Modality.TEXT, payload, number, tool_call_id=call)


def read(*chunks: InputChunk) -> tuple[str, list[int | None]]:
    """Return the text passed on, and the numbers of the chunks that were refused."""
    characters, passed, faults = WholeCharacters(), list[str](), list[int | None]()

    def take_in(chunk: InputChunk) -> list[StreamEvent]:
        passed.append(chunk.payload.decode())
        return []

    events = [event for chunk in chunks for event in characters.deliver(chunk, take_in)]
    for event in (*events, *characters.end()):
        assert isinstance(event, TextRefused)
        faults.append(event.error.sequence_id)
    assert not characters.pending
    return "".join(passed), faults


@given(st.text(), st.lists(st.integers(0, 30)))
def test_any_text_cut_anywhere(whole: str, cuts: list[int]) -> None:
    data = whole.encode()
    borders = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = [data[begin:end] for begin, end in pairwise(borders)]
    assert read(*(text(number, piece) for number, piece in enumerate(pieces))) == (whole, [])


@given(st.lists(st.binary(max_size=5)))
def test_any_bytes(pieces: list[bytes]) -> None:
    passed, faults = read(*(text(number, piece) for number, piece in enumerate(pieces)))
    assert bool(faults) is (passed.encode() != b"".join(pieces))
    assert set(faults) <= set(range(len(pieces)))


E_ACUTE = "é".encode()


@pytest.mark.parametrize(
    ("chunks", "passed", "faults"),
    [
        ([text(0, b"a"), text(1, b"\xff"), text(2, b"b")], "ab", [1]),
        ([text(0, b"a" + E_ACUTE[:1])], "a", [0]),
        ([text(0, E_ACUTE[:1]), text(1, b""), text(2, E_ACUTE[1:])], "é", []),
        ([text(0, E_ACUTE[:1]), text(1, b"b")], "b", [0]),
        ([text(0, E_ACUTE[:1]), text(1, b"\xff"), text(2, E_ACUTE[1:])], "é", [1]),
        ([text(0, E_ACUTE[:1]), text(1, E_ACUTE[1:] + b"\xff")], "", [1, 0]),
        ([text(0, b"x\xf0\x9f"), text(1, b"\x91")], "x", [0]),
        ([text(0, E_ACUTE[:1]), text(1, E_ACUTE[1:] + E_ACUTE[:1])], "é", [1]),
        ([text(0, E_ACUTE[:1]), text(1, E_ACUTE, "call")], "é", [0]),
        ([text(0, E_ACUTE[:1], "one"), text(1, E_ACUTE[1:], "two")], "", [1, 0]),
        ([text(0, b"\xed\xa0\x80")], "", [0]),
    ],
)
def test_who_is_at_fault(chunks: list[InputChunk], passed: str, faults: list[int]) -> None:
    assert read(*chunks) == (passed, faults)


def test_another_modality_ends_a_text() -> None:
    characters = WholeCharacters()
    assert characters.deliver(text(0, E_ACUTE[:1]), lambda chunk: []) == []
    sound = InputChunk(Modality.AUDIO, b"\xff\xff", 1)
    told, taken = characters.deliver(sound, lambda chunk: [Diverted(chunk)])
    assert isinstance(told, TextRefused)
    assert told.error.sequence_id == 0
    assert taken == Diverted(sound)
    assert characters.end() == []


def test_a_chunk_that_finds_no_room_may_come_again() -> None:
    def no_room(chunk: InputChunk) -> list[StreamEvent]:
        raise EngineOverloaded("no room")

    characters = WholeCharacters()
    characters.deliver(text(0, E_ACUTE[:1]), lambda chunk: [])
    for _ in range(2):
        with pytest.raises(EngineOverloaded):
            characters.deliver(text(1, E_ACUTE[1:]), no_room)
    (taken,) = characters.deliver(text(1, E_ACUTE[1:]), lambda chunk: [Diverted(chunk)])
    assert taken == Diverted(text(1, E_ACUTE))
