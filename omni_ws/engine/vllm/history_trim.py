"""HistoryTrim: leaves out the oldest turns of a conversation, so that a prompt fits into the model's context."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from omni_ws.core.history import Message
from omni_ws.engine.history_turns import whole_turns

#: What history may not take of the context, in tokens: room for the input, and for an answer without ``max_tokens``.
INPUT_RESERVE: Final = 1024
ANSWER_RESERVE: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimit:
    """The lengths that bound a prompt with history, in tokens."""

    #: The prompt's own: the context, less a reserve for the answer.
    prompt: int
    #: What is left for the input before it has come.
    input_reserve: int
    #: The length that history is shortened by at a time, see HistoryTrim.
    stride: int

    @classmethod
    def of(cls, context: int, max_tokens: int | None) -> Self:
        """Return the limit for a model's context and the longest answer that is asked for."""
        answer = min(max_tokens or ANSWER_RESERVE, context // 4)
        return cls(prompt=context - answer, input_reserve=min(INPUT_RESERVE, context // 8), stride=max(1, context // 4))


@dataclass(slots=True)
class HistoryTrim:
    """Which turns of ``history`` a prompt leaves out: the oldest, and whole ones only.

    ``size`` returns the tokens of a message. Messages of the role ``system`` are instructions, and stay.

    The history is cut at multiples of ``stride``, counted from its beginning. vLLM's prefix cache only helps prompts
    that begin alike: if each turn pushed out another one, a long conversation would be computed anew with every turn.
    Cut this way, its prompts begin alike until they have grown by a stride. As the cut depends on the history alone,
    nothing has to be remembered between requests.
    """

    history: Sequence[Message]
    stride: int
    size: Callable[[Message], int]
    #: The number of each message's turn.
    _turns: list[int] = field(init=False)
    #: Where each turn begins, in tokens, and where the last one ends. Counted when first needed: mostly all fits.
    _begins: list[int] = field(default_factory=list)
    _cut: int = 0
    #: The first turn that is not left out.
    _first: int = 0

    def __post_init__(self) -> None:
        self._turns = [number for number, turn in enumerate(whole_turns(self.history)) for _ in turn]

    def leave_out(self, tokens: int) -> bool:
        """Leave out at least ``tokens`` more, at least one turn; returns False if nothing is left to leave out."""
        begins = self._positions()
        first, wanted = self._first, begins[self._first] + tokens
        while self._first < len(begins) - 1 and (begins[self._first] < wanted or self._first == first):
            self._cut += self.stride
            while self._first < len(begins) - 1 and begins[self._first] < self._cut:
                self._first += 1
        return self._first > first

    def kept(self, calls: Collection[str] = ()) -> tuple[Message, ...]:
        """Return what is not left out, with the turns that have the tool calls ``calls``."""
        if not self._first:
            return tuple(self.history)
        numbered = list(zip(self._turns, self.history, strict=True))
        pinned = {turn for turn, message in numbered if any(call.id in calls for call in message.tool_calls)}
        return tuple(
            message for turn, message in numbered if turn >= self._first or turn in pinned or message.role == "system"
        )

    @property
    def open_calls(self) -> tuple[str, ...]:
        """The tool calls of a last turn without an answer: the input may be their results."""
        if not self.history or not (self.history[-1].tool_calls or self.history[-1].role == "tool"):
            return ()
        numbered = zip(self._turns, self.history, strict=True)
        return tuple(call.id for turn, message in numbered if turn == self._turns[-1] for call in message.tool_calls)

    def _positions(self) -> list[int]:
        if not self._begins:
            sizes = [0] * (self._turns[-1] + 1 if self._turns else 0)
            for turn, message in zip(self._turns, self.history, strict=True):
                if message.role != "system":
                    sizes[turn] += self.size(message)
            position = 0
            for size in sizes:
                self._begins.append(position)
                position += size
            self._begins.append(position)
        return self._begins
