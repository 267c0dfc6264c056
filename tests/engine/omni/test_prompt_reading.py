"""What the Talkers read of a prompt, in whatever pieces it arrives."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch", reason="PyTorch is not installed (make test-vllm)")

from omni_ws.engine.omni.step_process import PromptRows
from omni_ws.engine.omni.talker_network import (
    NONE,
    RowQueue,
    TalkerRows,
    UserTurnsReader,
    WholePromptReader,
)
from omni_ws.errors import InvalidValue

pytestmark = pytest.mark.vllm

TURN, SYSTEM, USER, ASSISTANT, LINE, SOUND, PICTURE = 100, 101, 102, 103, 10, 90, 91
MEDIA = (SOUND, PICTURE)
CODES = {"codec_nothink_id": 1, "codec_think_bos_id": 2, "codec_think_eos_id": 3, "codec_pad_id": 4}
CONFIG = {
    "im_start_token_id": TURN,
    "user_token_id": USER,
    "assistant_token_id": ASSISTANT,
    "tts_pad_token_id": 80,
    "tts_bos_token_id": 81,
    "thinker_config": {"audio_token_id": SOUND, "image_token_id": PICTURE, "video_token_id": PICTURE},
    "talker_config": CODES,
}
SPEAKER = 9
PROMPT = [
    *(TURN, SYSTEM, LINE, 5, 6),
    *(TURN, USER, LINE, 7, SOUND, SOUND, 8),
    *(TURN, ASSISTANT, LINE, 11, 12, 13, 14),
    *(TURN, USER, LINE, PICTURE, PICTURE, PICTURE, 15),
    *(TURN, ASSISTANT, LINE),
]
#: As M-RoPE counts: a picture's tokens have one time, and places in it; the text after it goes on behind the largest.
POSITIONS = np.tile(np.arange(len(PROMPT)), (3, 1))
POSITIONS[:, 22:25] = [[22, 22, 22], [22, 24, 25], [22, 23, 24]]
POSITIONS[:, 25:] = np.arange(26, 26 + len(PROMPT) - 25)


def item(begin: int = 0, end: int = len(PROMPT)) -> PromptRows:
    tokens = np.array(PROMPT[begin:end], np.int64)
    states = np.isin(tokens, MEDIA)
    hidden = np.flatnonzero(np.isin(PROMPT, MEDIA))
    hidden = hidden[(hidden >= begin) & (hidden < end)]
    return PromptRows(tokens, POSITIONS[:, begin:end], states, np.tile(hidden[:, None], (1, 2)).astype(np.float32))


def joined(parts: list[TalkerRows]) -> TalkerRows:
    queue = RowQueue()
    for part in parts:
        queue.put(part)
    return queue.take(len(queue))


def same(one: TalkerRows, other: TalkerRows) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in TalkerRows.__slots__)


def read(cuts: list[int]) -> tuple[TalkerRows, TalkerRows, int]:
    reader = UserTurnsReader(CONFIG, SPEAKER, 2)
    rows = joined([reader.read(item(*piece)) for piece in pairwise(cuts)])
    return rows, *reader.end()


def test_only_the_users_turns_are_read_and_take_room() -> None:
    rows, ending, first = read([0, len(PROMPT)])
    text = [TURN, USER, LINE, 7, NONE, NONE, 8, TURN, USER, LINE, NONE, NONE, NONE, 15]
    assert rows.tokens.tolist() == text
    assert rows.states.tolist() == [token == NONE for token in text]
    assert rows.hidden[:, 0].tolist() == [9, 10, 22, 23, 24]
    assert set(rows.codes.tolist()) == {NONE}
    # The first turn begins at 0, the second after it; within a turn nothing moves.
    assert rows.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 14]
    assert rows.positions[1].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14]
    assert rows.positions[2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14]
    assert ending.tokens.tolist() == [TURN, ASSISTANT, LINE, 80, 80, 80, 80, 81]
    assert ending.codes.tolist() == [NONE, NONE, NONE, 1, 2, 3, SPEAKER, 4]
    assert ending.positions.tolist() == [[*range(15, 23)]] * 3
    assert first == 23


@pytest.mark.parametrize("seed", range(50))
def test_pieces_do_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cuts = sorted([0, len(PROMPT), *rng.integers(0, len(PROMPT) + 1, rng.integers(0, 30)).tolist()])
    whole, pieces = read([0, len(PROMPT)]), read(cuts)
    assert same(whole[0], pieces[0])
    assert same(whole[1], pieces[1])
    assert whole[2] == pieces[2]


@pytest.mark.parametrize(
    "tokens",
    [
        [TURN, USER, *[50] * 60, TURN, TURN],  # ends a piece of 64 rows, as a user may type
        [TURN, TURN],
        [TURN, TURN, TURN, USER, LINE, 7, TURN, TURN, ASSISTANT, LINE],
        [TURN, USER, LINE, 7, TURN, TURN, USER, LINE, 8, TURN, ASSISTANT, LINE],
    ],
)
def test_a_turn_of_its_first_token_alone_says_nothing(tokens: list[int]) -> None:
    def rows_of(tokens: list[int], begin: int) -> PromptRows:
        count = len(tokens)
        positions = np.tile(np.arange(begin, begin + count), (3, 1))
        return PromptRows(np.array(tokens), positions, np.zeros(count, np.bool_), np.zeros((0, 2), np.float32))

    whole = UserTurnsReader(CONFIG, SPEAKER, 2).read(rows_of(tokens, 0))
    read_tokens = whole.tokens.tolist()
    spoken = [token for token in tokens if token in (7, 8, 50)]
    assert [token for token in read_tokens if token in (7, 8, 50)] == spoken
    assert ASSISTANT not in read_tokens
    for size in (1, 2, 3):
        reader = UserTurnsReader(CONFIG, SPEAKER, 2)
        pieces = [reader.read(rows_of(tokens[at : at + size], at)) for at in range(0, len(tokens), size)]
        assert [t for piece in pieces for t in piece.tokens.tolist()] == read_tokens
        assert [p for piece in pieces for p in piece.positions[0].tolist()] == whole.positions[0].tolist()


@pytest.mark.parametrize("end", range(len(PROMPT)))
def test_a_prompt_must_end_with_the_assistants_turn(end: int) -> None:
    reader = UserTurnsReader(CONFIG, SPEAKER, 2)
    reader.read(item(0, end))
    if 15 <= end <= 19:  # an earlier turn of the assistant
        assert reader.end()[0].tokens[:3].tolist() == [TURN, ASSISTANT, LINE]
    else:
        with pytest.raises(InvalidValue, match="beginning of the assistant's turn"):
            reader.end()


def test_what_the_user_shows_needs_states() -> None:
    whole = item()
    bare = PromptRows(whole.tokens, whole.positions, np.zeros(len(PROMPT), np.bool_), whole.hidden[:0])
    with pytest.raises(InvalidValue, match="states of what the user's turns show or play"):
        UserTurnsReader(CONFIG, SPEAKER, 2).read(bare)
    # More states than are read do no harm.
    every: NDArray[np.float32] = np.tile(np.arange(len(PROMPT), dtype=np.float32)[:, None], (1, 2))
    more = PromptRows(whole.tokens, whole.positions, np.ones(len(PROMPT), np.bool_), every)
    assert same(UserTurnsReader(CONFIG, SPEAKER, 2).read(more), read([0, len(PROMPT)])[0])


def test_qwen25_reads_every_token() -> None:
    whole = item()
    every = np.ones((len(PROMPT), 2), np.float32)
    reader = WholePromptReader(MEDIA, (70, 71), 2)
    rows = reader.read(PromptRows(whole.tokens, whole.positions, np.ones(len(PROMPT), np.bool_), every))
    assert rows.tokens.tolist() == [NONE if token in MEDIA else token for token in PROMPT]
    assert np.array_equal(rows.positions, POSITIONS)
    ending, first = reader.end()
    last = int(POSITIONS.max())
    assert (ending.tokens.tolist(), ending.codes.tolist(), ending.positions.tolist()) == ([70], [71], [[last + 1]] * 3)
    assert first == last + 2
    with pytest.raises(InvalidValue, match="state of every token"):
        reader.read(whole)


def test_a_queue_gives_rows_in_any_portions() -> None:
    rows, _, _ = read([0, len(PROMPT)])
    queue = RowQueue()
    for piece in rows.split(5):
        queue.put(piece)
    queue.put(rows.split(0)[0])  # no rows
    taken = [queue.take(most) for most in (3, 4, 100)]
    assert [len(part) for part in taken] == [3, 4, len(rows) - 7]
    assert len(queue) == 0
    assert same(joined(taken), rows)
