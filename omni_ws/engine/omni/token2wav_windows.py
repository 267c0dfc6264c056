"""The windows in which Qwen2.5's Token2Wav makes an answer: fixed ones, whenever its codes come.

The network looks one block ahead in some layers and is evaluated many times, so no code's sound is final before the
whole answer is known. What is computed from a window with some blocks on either side is as good as final; windows that
begin at blocks of the whole answer, and never depend on when codes came, make the same sound each time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """In blocks: what the ``first`` window makes final, what each later one does, and what they read on either side."""

    past: int = 2
    first: int = 1
    chunk: int = 3
    future: int = 1

    def unlocked(self, blocks: int) -> int:
        """Return how many windows can be computed from so many whole blocks, of an answer that goes on."""
        later = blocks - self.first - self.future
        return 0 if later < 0 else 1 + later // self.chunk

    def count(self, blocks: int) -> int:
        """Return how many windows an answer of so many blocks has, a part of one included."""
        return 0 if not blocks else 1 + max(0, -(-(blocks - self.first) // self.chunk))

    def blocks(self, index: int) -> tuple[int, int]:
        """Return where the blocks begin and end that window ``index`` makes final."""
        begin = self.first + (index - 1) * self.chunk if index else 0
        return begin, self.first + index * self.chunk


#: As the authors of the model stream it; the first window is shorter, for an early first sound.
STREAMING = WindowPlan()


@dataclass(frozen=True, slots=True)
class MelWindow:
    """A window's place in the answer, in codes: it reads ``left`` to ``right`` and makes ``begin`` to ``end`` final."""

    left: int
    begin: int
    end: int
    right: int
    last: bool

    @classmethod
    def of(cls, plan: WindowPlan, index: int, *, block: int, total: int | None) -> MelWindow:
        """Return window ``index`` for blocks of ``block`` codes; ``total`` codes make the answer, if that is known."""
        begin, end = plan.blocks(index)
        left, right = max(0, begin - plan.past) * block, (end + plan.future) * block
        begin, end = begin * block, end * block
        if total is None:
            return cls(left, begin, end, right, last=False)
        return cls(left, begin, min(end, total), min(right, total), last=end >= total)
