"""TalkerAnswer: one session of a Talker, on the host: what it has read, what it has to speak, what it may make."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from omni_ws.engine.omni.items import AnswerEnd, AnswerRows, PromptReset, PromptRows, TalkerItem
from omni_ws.engine.omni.prompt_reading import RowQueue
from omni_ws.engine.omni.step_model import RefusedInput
from omni_ws.engine.omni.talker_network import TalkerNetwork
from omni_ws.engine.omni.talker_settings import TalkerSettings


class TalkerAnswer:
    """Raises RefusedInput from ``feed``; the session is over then."""

    def __init__(self, session: int, slot: int, settings: TalkerSettings, network: TalkerNetwork) -> None:
        self.session = session
        self.slot = slot
        self.granted = 0
        #: Rows of the prompt that have not been computed, and the positions that the slot has.
        self.prompt = RowQueue()
        self.length = 0
        #: How many frames were begun, and how many the answer may have.
        self.frames = 0
        self.most_frames = settings.max_tokens
        #: Whether a frame or an error ended the answer.
        self.over = False
        self._settings = settings
        self._network = network
        self._reader = network.reader(settings.voice)
        #: Whether the prompt is complete, and the answer.
        self._answering = self._answer_complete = False
        self._position = 0
        self._tokens: deque[int] = deque()
        self._states: deque[NDArray[np.float32]] = deque()
        self._rows_read = self._rows_taken = 0

    @property
    def answering(self) -> bool:
        """Whether the prompt is complete."""
        return self._answering

    @property
    def is_empty(self) -> bool:
        """Whether the answer ended before its first row."""
        return self._answer_complete and not self._rows_read

    @property
    def can_step(self) -> bool:
        """Whether all is there for the next frame: the prompt, a row, and a grant."""
        return (
            not self.over
            and self._answering
            and not self.prompt
            and self.granted > 0
            and self.frames < self.most_frames
            and (bool(self._tokens) or (self._answer_complete and not self.is_empty))
        )

    @property
    def position(self) -> int:
        """The M-RoPE position of the next frame, the same on all three axes."""
        return self._position + self.frames

    @property
    def rows_used(self) -> int:
        return min(self._rows_taken, self._rows_read)

    def feed(self, item: TalkerItem) -> None:
        match item:
            case _ if self.over:
                pass
            case PromptRows():
                self._read_prompt(item)
            case PromptReset():
                self._require(not self._answering, "the prompt cannot begin anew once the answer has begun")
                self.prompt, self.length = RowQueue(), 0
                self._reader = self._network.reader(self._settings.voice)
            case AnswerRows():
                self._read_answer(item)
            case AnswerEnd():
                self._require(not self._answer_complete, "the answer has ended already")
                self._answer_complete = True

    def take_row(self) -> tuple[int, NDArray[np.float32] | None]:
        """Remove and return the next row of the answer: its token, and the state where the family has one."""
        self._rows_taken += 1
        if self._tokens:
            return self._tokens.popleft(), self._states.popleft() if self._states else None
        first, later = self._network.after_answer
        return (first if self._rows_taken == self._rows_read + 1 else later), None

    def _read_prompt(self, item: PromptRows) -> None:
        self._require(not self._answering, "rows of the prompt after the answer has begun")
        count, size = len(item.tokens), self._network.hidden_size
        self._check_tokens(item.tokens)
        fit = item.positions.shape == (3, count) and item.states.shape == (count,) and item.states.dtype == np.bool_
        self._require(fit, "tokens, positions and states of the prompt's rows do not match")
        self._check_states(item.hidden, (int(item.states.sum()), size))
        self.prompt.put(self._reader.read(item))
        self._check_length()

    def _read_answer(self, item: AnswerRows) -> None:
        self._require(not self._answer_complete, "rows of the answer after its end")
        count = len(item.tokens)
        self._check_tokens(item.tokens)
        self._check_states(item.hidden, (count if self._network.answer_states else 0, self._network.hidden_size))
        if not self._answering:
            self._begin_answer()
        # A frame reads a row: what is behind the last possible frame is never read.
        room = max(0, self.most_frames - self._rows_read)
        self._tokens.extend(item.tokens[:room].tolist())
        self._states.extend(item.hidden[:room])
        self._rows_read += count

    def _begin_answer(self) -> None:
        rows, self._position = self._reader.end()
        self.prompt.put(rows)
        self._check_length()
        self._answering = True
        room = self._network.space.longest - self.length - len(self.prompt)
        self.most_frames = min(self.most_frames, room)

    def _check_length(self) -> None:
        longest = self._network.space.longest
        rows = self.length + len(self.prompt)
        # The first frame needs a position, too.
        self._require(rows < longest, f"the prompt is too long for the Talker: {rows} rows, at most {longest - 1}")

    def _check_tokens(self, tokens: NDArray[np.int64]) -> None:
        known = tokens.ndim == 1 and tokens.dtype == np.int64
        known = known and (not len(tokens) or (tokens.min() >= 0 and tokens.max() < self._network.vocabulary))
        self._require(bool(known), f"tokens must be numbers from 0 to {self._network.vocabulary - 1}")

    def _check_states(self, hidden: NDArray[np.float32], shape: tuple[int, int]) -> None:
        self._require(hidden.shape == shape, f"the Thinker's states must have the shape {shape}, got {hidden.shape}")
        # One that is not would stay in the slot and spoil later sessions.
        self._require(bool(np.isfinite(hidden).all()), "the Thinker's states must be finite")

    @staticmethod
    def _require(holds: bool, otherwise: str) -> None:
        if not holds:
            raise RefusedInput(otherwise)
