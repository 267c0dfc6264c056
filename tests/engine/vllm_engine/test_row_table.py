"""What is kept of the rows of a conversation, and how much."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.commands import read_message

from omni_ws.engine.vllm.thinker_rows import KeptPrompt, KeptRows, RowTable, shared_prefix
from omni_ws.engine.vllm.worker_channel import as_float32

WIDTH = 8


def rows(places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Rows that tell their places."""
    return places, np.tile(places + 100, (3, 1)), np.tile(places[:, None], (1, WIDTH)).astype(np.float32)


def table(*places: int) -> RowTable:
    made = RowTable()
    if places:
        made.add(*rows(np.array(places)))
    return made


def prompt(length: int) -> KeptPrompt:
    """All of whose rows are known."""
    return KeptPrompt(identity=np.arange(length), table=table(*range(length)))


def test_a_table_has_what_was_added_in_any_order() -> None:
    made = table(4, 5, 6)
    made.add(*rows(np.array([0, 1, 5])))  # 5 again, as after a preemption
    every = np.arange(9)
    assert made.has(every).tolist() == [place in (0, 1, 4, 5, 6) for place in every]
    known = np.array([6, 0, 5])
    assert made.states(known)[:, 0].tolist() == [6, 0, 5]
    assert made.positions(known).tolist() == [[106, 100, 105]] * 3


def test_a_cut_table_forgets_and_takes_less() -> None:
    made = table(*range(100))
    before = made.nbytes
    made.cut(10)
    assert made.has(np.arange(12)).tolist() == [True] * 10 + [False] * 2
    assert made.nbytes <= before / 5
    made.add(*rows(np.array([11])))
    assert made.states(np.array([9, 11]))[:, 0].tolist() == [9, 11]
    made.cut(0)
    assert made.nbytes == 0


def test_bfloat16_is_read_as_float32() -> None:
    made = RowTable()
    half = np.array([[1.5, -2.0, 0.0, 3.0]], np.float32)
    bits = (half.view(np.uint32) >> 16).astype(np.uint16)
    made.add(np.array([0]), np.zeros((3, 1), np.int64), bits)
    np.testing.assert_array_equal(made.states(np.array([0])), half)


def test_rows_that_are_expected_are_never_copied() -> None:
    made = RowTable()
    made.expect(100)
    made.add(*rows(np.arange(10)))
    place = made._rows
    made.add(*rows(np.arange(10, 100)))
    assert made._rows is place
    before = made.nbytes
    made.cut(100)
    assert made._rows is place
    assert made.nbytes == before


@pytest.mark.vllm
def test_a_worker_packs_bfloat16_as_it_is() -> None:
    """And several requests of a step into one message each."""
    torch = pytest.importorskip("torch")
    from omni_ws.engine.vllm.worker_channel import SentRows
    from omni_ws.engine.vllm.workers import _Message, _packed

    states = torch.tensor([[1.5, -2.0], [0.0, 3.0], [4.0, 0.25]], dtype=torch.bfloat16)
    sent = _packed(
        [
            _Message("a", np.arange(1), *rows(np.array([7]))[:2]),
            _Message("bc", np.arange(2), *rows(np.array([1, 2]))[:2]),
        ],
        states,
    )
    found = []
    source = io.BytesIO(sent)
    while source.tell() < len(sent):
        header, body = read_message(source, SentRows)
        assert header.bfloat16
        places = np.frombuffer(body[: 8 * header.count], np.int64)
        bits = np.frombuffer(body[32 * header.count :], np.uint16).reshape(header.count, header.width)
        found.append((header.key, places.tolist(), as_float32(bits).tolist()))
    assert found == [("a", [7], [[1.5, -2.0]]), ("bc", [1, 2], [[0.0, 3.0], [4.0, 0.25]])]


@pytest.mark.parametrize(
    ("one", "other", "length"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 5, 3], 1), ([1], [1], 1)]
)
def test_the_shared_prefix(one: list[int], other: list[int], length: int) -> None:
    assert shared_prefix(np.array(one), np.array(other)) == length


def test_a_prompt_that_turns_out_otherwise_keeps_the_rows_of_its_beginning() -> None:
    kept = prompt(10)
    assert kept.follow(np.array([0, 1, 2, 30, 31])) == 3
    assert kept.table.has(np.arange(5)).tolist() == [True] * 3 + [False] * 2


def test_a_conversation_is_kept_up_to_the_last_byte_and_no_further() -> None:
    size = prompt(10).nbytes
    kept = KeptRows(2 * size)
    for name in ("a", "b"):
        kept.keep(name, prompt(10))
    assert (len(kept), kept.nbytes) == (2, 2 * size)
    kept.capacity -= 1
    kept.keep("b", prompt(10))
    assert (len(kept), kept.nbytes) == (1, size)
    assert len(kept.take("b").identity) == 10
    assert kept.nbytes == 0


def test_the_oldest_goes_first_and_comes_back_with_another_salt() -> None:
    first = prompt(10)
    kept = KeptRows(2 * first.nbytes)
    kept.keep("old", first)
    kept.keep("used", prompt(10))
    kept.keep("old", kept.take("old"))  # used meanwhile
    kept.keep("new", prompt(10))
    again = kept.take("old")
    assert again.salt == first.salt
    gone = kept.take("used")
    assert (len(gone.identity), gone.nbytes < first.nbytes) == (0, True)
    assert gone.salt not in (first.salt, kept.take("used").salt)


def test_a_prompt_larger_than_all_the_room_is_not_kept() -> None:
    kept = KeptRows(prompt(10).nbytes - 1)
    kept.keep("large", prompt(10))
    assert (len(kept), kept.nbytes) == (0, 0)


def test_a_request_without_a_session_finds_nothing() -> None:
    kept = KeptRows(1 << 20)
    salts: set[Any] = {kept.take(None).salt for _ in range(3)}
    assert len(salts) == 3
