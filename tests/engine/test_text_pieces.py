import asyncio
from itertools import pairwise

import pytest

from omni_ws.engine.answer_limit import AnswerText
from omni_ws.engine.clauses import PIECE_CHARACTERS, pieces_of


@pytest.mark.parametrize("length", [0, 1, PIECE_CHARACTERS, PIECE_CHARACTERS + 1, 3 * PIECE_CHARACTERS])
def test_pieces_are_the_text(length: int) -> None:
    text = "".join(chr(97 + number % 26) for number in range(length))
    pieces = list(pieces_of(text))
    assert "".join(pieces) == text
    assert len(pieces) == -(-length // PIECE_CHARACTERS)
    assert all(0 < len(piece) <= PIECE_CHARACTERS for piece in pieces)


async def test_others_have_their_turn_between_two_pieces() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    seen = []
    async for piece in AnswerText({}).add("x" * 5 * PIECE_CHARACTERS):
        seen.append((turns, len(piece)))
    task.cancel()
    assert [length for _, length in seen] == [PIECE_CHARACTERS] * 5
    assert seen[0][0] == 0
    assert all(later > earlier for (earlier, _), (later, _) in pairwise(seen))


async def test_one_piece_comes_at_once() -> None:
    others: list[str] = []
    asyncio.get_running_loop().call_soon(others.append, "another's turn")
    assert [piece async for piece in AnswerText({}).add("hello")] == ["hello"]
    assert others == []
