"""Picks out of a Thinker's prompt, as it arrives, what a Talker reads of it, and says what ends it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from omni_ws.engine.omni.step_model import PromptRows, RefusedInput

#: For a row without a token, or without a code.
NONE: Final = -1


@dataclass(frozen=True, slots=True)
class TalkerRows:
    """Rows of a Talker's prompt (n in all).

    Each is made of what it has: the embedding of its token (``tokens``), a state of the Thinker (``states`` marks the
    rows, ``hidden`` holds one after the other), the embedding of a code (``codes``). ``positions`` (3, n).
    """

    tokens: NDArray[np.int64]
    states: NDArray[np.bool_]
    hidden: NDArray[np.float32]
    codes: NDArray[np.int64]
    positions: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)

    def split(self, count: int) -> tuple[TalkerRows, TalkerRows]:
        """Return the first ``count`` rows and the others."""
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
    """Rows that wait, in order."""

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
        """Remove and return the first ``most`` rows, or all; there must be one."""
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


class PromptReader(Protocol):
    """Reads one prompt. It must not be used after RefusedInput."""

    def read(self, item: PromptRows) -> TalkerRows:
        """Return what the Talker reads of the next tokens. Raises RefusedInput."""
        ...

    def end(self) -> tuple[TalkerRows, int]:
        """Return the rows that follow the prompt, and the position of the answer's first row. Raises RefusedInput."""
        ...


class WholePromptReader:
    """Qwen2.5: each token is a row, state plus embedding; what was heard or seen has no embedding.

    ``media`` are the tokens of audio, image and video, ``last`` the token and the code of the row that ends the prompt.
    """

    def __init__(self, media: Sequence[int], last: tuple[int, int], hidden_size: int) -> None:
        self._media = np.array(media)
        self._last = last
        self._hidden_size = hidden_size
        self._position = 0

    def read(self, item: PromptRows) -> TalkerRows:
        if not item.states.all():
            raise RefusedInput("the Talker needs the Thinker's state of every token of the prompt")
        if len(item.tokens):
            self._position = max(self._position, int(item.positions.max()) + 1)
        tokens = np.where(np.isin(item.tokens, self._media), NONE, item.tokens)
        return TalkerRows(tokens, item.states, item.hidden, np.full(len(tokens), NONE), item.positions)

    def end(self) -> tuple[TalkerRows, int]:
        token, code = self._last
        return plain_rows([token], [code], self._position, self._hidden_size), self._position + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """The token ids by which Qwen3's Talker finds its way in a prompt, and those that end it."""

    turn: int
    user: int
    assistant: int
    media: tuple[int, ...]
    text_pad: int
    text_start: int
    #: nothink, think_bos, think_eos.
    style_codes: tuple[int, ...]
    pad_code: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TurnTokens:
        """Read the whole configuration. Raises KeyError."""
        thinker, talker = config["thinker_config"], config["talker_config"]
        return cls(
            turn=config["im_start_token_id"],
            user=config["user_token_id"],
            assistant=config["assistant_token_id"],
            media=tuple(thinker[f"{kind}_token_id"] for kind in ("audio", "image", "video")),
            text_pad=config["tts_pad_token_id"],
            text_start=config["tts_bos_token_id"],
            style_codes=tuple(talker[f"codec_{name}_id"] for name in ("nothink", "think_bos", "think_eos")),
            pad_code=talker["codec_pad_id"],
        )


class UserTurnsReader:
    """Qwen3: only the user's turns are rows: embeddings of text, states of what was heard or seen.

    Their positions are moved so that the other turns take no room. After them come the three tokens that begin the
    assistant's turn, and rows that name the ``speaker``'s code.
    """

    #: The tokens "<|im_start|>", "assistant" and the line's end.
    _HEADER: Final = 3

    def __init__(self, ids: TurnTokens, speaker: int, hidden_size: int) -> None:
        self._ids = ids
        self._hidden_size = hidden_size
        self._speaker = speaker
        #: A turn's first token, held until the next one says whose turn it is.
        self._held: PromptRows | None = None
        self._reads = False
        self._shift = 0
        self._position = 0
        self._header: list[int] | None = None

    def read(self, item: PromptRows) -> TalkerRows:
        if self._held is not None:
            item, self._held = _joined(self._held, item), None
        tokens, count = item.tokens, len(item.tokens)
        starts = np.flatnonzero(tokens == self._ids.turn).tolist()
        if starts and starts[-1] == count - 1:
            count = starts.pop()
            item, self._held = _cut(item, count)
        picked, shifts = np.zeros(count, np.bool_), np.zeros(count, np.int64)
        for start, end in pairwise([0, *starts, count]):
            if start == end:
                continue
            if tokens[start] == self._ids.turn:
                # Of the tokens before the cut: a turn may be its first token alone, where another begins behind it.
                self._begin_turn(tokens[start + 1], int(item.positions[0, start]))
            if self._header is not None:
                self._header += item.tokens[start:end][: self._HEADER - len(self._header)].tolist()
            if self._reads:
                picked[start:end], shifts[start:end] = True, self._shift
                self._position = max(self._position, int(item.positions[:, start:end].max()) + self._shift + 1)
        return self._rows(item, picked, shifts)

    def _begin_turn(self, role: int, position: int) -> None:
        self._reads = role == self._ids.user
        self._header = [] if role == self._ids.assistant else None
        self._shift = self._position - position

    def _rows(self, item: PromptRows, picked: NDArray[np.bool_], shifts: NDArray[np.int64]) -> TalkerRows:
        media = np.isin(item.tokens, self._ids.media)
        if (picked & media & ~item.states).any():
            raise RefusedInput("the Talker needs the Thinker's states of what the user's turns show or play")
        hidden = item.hidden[(picked & media)[item.states]]
        media = media[picked]
        tokens = np.where(media, NONE, item.tokens[picked])
        positions = (item.positions + shifts)[:, picked]
        return TalkerRows(tokens, media, hidden, np.full(len(tokens), NONE), positions)

    def end(self) -> tuple[TalkerRows, int]:
        ids, header = self._ids, self._header or []
        if len(header) < self._HEADER or self._held is not None:
            raise RefusedInput("the prompt must end with the beginning of the assistant's turn")
        codes = [*ids.style_codes, self._speaker, ids.pad_code]
        tokens = [*header, *[ids.text_pad] * (len(codes) - 1), ids.text_start]
        rows = plain_rows(tokens, [NONE] * len(header) + codes, self._position, self._hidden_size)
        return rows, self._position + len(rows)


def plain_rows(tokens: list[int], codes: list[int], position: int, hidden_size: int) -> TalkerRows:
    """Return rows without states, from ``position`` on."""
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


def _cut(item: PromptRows, count: int) -> tuple[PromptRows, PromptRows]:
    hidden = int(item.states[:count].sum())
    return (
        PromptRows(item.tokens[:count], item.positions[:, :count], item.states[:count], item.hidden[:hidden]),
        PromptRows(item.tokens[count:], item.positions[:, count:], item.states[count:], item.hidden[hidden:]),
    )
