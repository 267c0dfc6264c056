"""Converts a Thinker's prompt, as it arrives, to the rows that a Talker reads: TalkerRows.

WholePromptReader does so for Qwen2.5-Omni, UserTurnsReader for Qwen3-Omni.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.engine.omni.step_process import PromptRows
from omni_ws.errors import InvalidValue

#: In place of the token of a row without a token, and of the code of a row without a code.
NONE: Final = -1


@dataclass(frozen=True, slots=True)
class TalkerRows:
    """Rows of a Talker's prompt.

    The network's input for a row is made of up to three parts: the embedding of a token, a hidden state of the Thinker,
    and the embedding of a codec code. ``tokens`` (n,) and ``codes`` (n,) are NONE where a row lacks the part;
    ``states`` (n,) marks the rows with a hidden state, and ``hidden`` (k, hidden size) has these states in order.
    ``positions`` (3, n) are M-RoPE positions.
    """

    tokens: NDArray[np.int64]
    states: NDArray[np.bool_]
    hidden: NDArray[np.float32]
    codes: NDArray[np.int64]
    positions: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)

    def split(self, count: int) -> tuple[TalkerRows, TalkerRows]:
        """Return the first ``count`` rows, and the others."""
        hidden = int(self.states[:count].sum())
        return (
            TalkerRows(
                self.tokens[:count],
                self.states[:count],
                self.hidden[:hidden],
                self.codes[:count],
                self.positions[:, :count],
            ),
            TalkerRows(
                self.tokens[count:],
                self.states[count:],
                self.hidden[hidden:],
                self.codes[count:],
                self.positions[:, count:],
            ),
        )


class RowQueue:
    """TalkerRows that wait to be computed; its length is the number of rows."""

    def __init__(self) -> None:
        self._pieces: deque[TalkerRows] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, rows: TalkerRows) -> None:
        if len(rows):
            self._pieces.append(rows)
            self._count += len(rows)

    def take(self, most: int) -> TalkerRows:
        """Remove and return up to ``most`` rows. The queue must not be empty."""
        taken, count = [], 0
        while self._pieces and count < most:
            first = self._pieces.popleft()
            if count + len(first) > most:
                first, rest = first.split(most - count)
                self._pieces.appendleft(rest)
            taken.append(first)
            count += len(first)
        self._count -= count
        return TalkerRows(
            np.concatenate([rows.tokens for rows in taken]),
            np.concatenate([rows.states for rows in taken]),
            np.concatenate([rows.hidden for rows in taken]),
            np.concatenate([rows.codes for rows in taken]),
            np.concatenate([rows.positions for rows in taken], axis=1),
        )


class WholePromptReader:
    """A converter of one prompt for Qwen2.5: each token is a row, made of its hidden state and its embedding.

    The rows of audio, images and video, whose tokens are ``media``, have no embedding. ``last`` is the token and the
    code of the row that ends the prompt. It must not be used after InvalidValue.
    """

    def __init__(self, media: Sequence[int], last: tuple[int, int], hidden_size: int) -> None:
        self._media = np.array(media)
        self._last = last
        self._hidden_size = hidden_size
        self._position = 0

    def read(self, item: PromptRows) -> TalkerRows:
        """Return the rows for the next tokens of the prompt. Raises InvalidValue."""
        if not item.states.all():
            raise InvalidValue("the Talker needs the Thinker's state of every token of the prompt")
        if len(item.tokens):
            self._position = max(self._position, int(item.positions.max()) + 1)
        tokens = np.where(np.isin(item.tokens, self._media), NONE, item.tokens)
        return TalkerRows(tokens, item.states, item.hidden, np.full(len(tokens), NONE), item.positions)

    def end(self) -> tuple[TalkerRows, int]:
        """Return the rows after the prompt, and the position of the first row of the answer. Raises InvalidValue."""
        token, code = self._last
        return plain_rows([token], [code], self._position, self._hidden_size), self._position + 1


class UserTurnsReader:
    """A converter of one prompt for Qwen3, whose Talker reads the user's turns only; used like WholePromptReader.

    A row is the embedding of a text token, or the hidden state of a token of audio, image or video. Positions are
    shifted so that the other turns leave no gaps. Behind the user's turns come the three tokens that begin the
    assistant's turn, and rows with codes, among them the code of the ``speaker``. ``config`` is the whole config.json;
    raises KeyError for what is missing there.
    """

    #: The number of tokens that begin the assistant's turn: "<|im_start|>", "assistant" and a line break.
    _HEADER: Final = 3

    def __init__(self, config: Mapping[str, Any], speaker: int, hidden_size: int) -> None:
        thinker, talker = config["thinker_config"], config["talker_config"]
        self._hidden_size = hidden_size
        #: "<|im_start|>", which begins each turn; the role's token follows.
        self._turn: int = config["im_start_token_id"]
        self._user: int = config["user_token_id"]
        self._assistant: int = config["assistant_token_id"]
        self._media = [thinker[f"{kind}_token_id"] for kind in ("audio", "image", "video")]
        self._text_pad: int = config["tts_pad_token_id"]
        self._text_start: int = config["tts_bos_token_id"]
        style = [talker[f"codec_{name}_id"] for name in ("nothink", "think_bos", "think_eos")]
        #: The codes of the rows that end the prompt.
        self._codes: list[int] = [*style, speaker, talker["codec_pad_id"]]
        #: The first token of a turn, held until the next token tells whose turn it is.
        self._held: PromptRows | None = None
        #: Whether the current turn is the user's.
        self._reads = False
        #: What is added to the positions of the current turn.
        self._shift = 0
        #: The position that follows all rows so far.
        self._position = 0
        #: The first tokens of the assistant's turn, while that is the last turn so far.
        self._header: list[int] | None = None

    def read(self, item: PromptRows) -> TalkerRows:
        if self._held is not None:
            item, self._held = _joined(self._held, item), None
        tokens, count = item.tokens, len(item.tokens)
        starts = np.flatnonzero(tokens == self._turn).tolist()
        if starts and starts[-1] == count - 1:
            count = starts.pop()
            item, self._held = item.split(count)
        picked, shifts = np.zeros(count, np.bool_), np.zeros(count, np.int64)
        for start, end in pairwise([0, *starts, count]):
            if start == end:
                continue
            if tokens[start] == self._turn:
                # The role may be in ``self._held``, so it is looked up in ``tokens``, which are not cut.
                self._begin_turn(tokens[start + 1], int(item.positions[0, start]))
            if self._header is not None:
                self._header += item.tokens[start:end][: self._HEADER - len(self._header)].tolist()
            if self._reads:
                picked[start:end], shifts[start:end] = True, self._shift
                self._position = max(self._position, int(item.positions[:, start:end].max()) + self._shift + 1)
        return self._rows(item, picked, shifts)

    def _begin_turn(self, role: int, position: int) -> None:
        self._reads = role == self._user
        self._header = [] if role == self._assistant else None
        self._shift = self._position - position

    def _rows(self, item: PromptRows, picked: NDArray[np.bool_], shifts: NDArray[np.int64]) -> TalkerRows:
        media = np.isin(item.tokens, self._media)
        if (picked & media & ~item.states).any():
            raise InvalidValue("the Talker needs the Thinker's states of what the user's turns show or play")
        hidden = item.hidden[(picked & media)[item.states]]
        media = media[picked]
        tokens = np.where(media, NONE, item.tokens[picked])
        positions = (item.positions + shifts)[:, picked]
        return TalkerRows(tokens, media, hidden, np.full(len(tokens), NONE), positions)

    def end(self) -> tuple[TalkerRows, int]:
        header, codes = self._header or [], self._codes
        if len(header) < self._HEADER or self._held is not None:
            raise InvalidValue("the prompt must end with the beginning of the assistant's turn")
        tokens = [*header, *[self._text_pad] * (len(codes) - 1), self._text_start]
        rows = plain_rows(tokens, [NONE] * len(header) + codes, self._position, self._hidden_size)
        return rows, self._position + len(rows)


def plain_rows(tokens: list[int], codes: list[int], position: int, hidden_size: int) -> TalkerRows:
    """Return rows without hidden states, at consecutive positions from ``position`` on."""
    count = len(tokens)
    positions = np.broadcast_to(np.arange(position, position + count), (3, count))
    states, hidden = np.zeros(count, np.bool_), np.zeros((0, hidden_size), np.float32)
    return TalkerRows(np.array(tokens), states, hidden, np.array(codes), positions)


def _joined(first: PromptRows, second: PromptRows) -> PromptRows:
    return PromptRows(
        np.concatenate((first.tokens, second.tokens)),
        np.concatenate((first.positions, second.positions), axis=1),
        np.concatenate((first.states, second.states)),
        np.concatenate((first.hidden, second.hidden)),
    )
