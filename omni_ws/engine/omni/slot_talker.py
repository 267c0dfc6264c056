"""SlotTalker: a Talker as StepModel: sessions in slots, one frame of all that can go on in each step."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from omni_ws.engine.omni.items import Codes, CodesEnd, TalkerItem
from omni_ws.engine.omni.prompt_reading import plain_rows
from omni_ws.engine.omni.step_buffers import CodesOnTheWay, StepBuffers
from omni_ws.engine.omni.step_graphs import StepGraphs
from omni_ws.engine.omni.step_model import NoSlot, RefusedInput, StepResult
from omni_ws.engine.omni.talker_answer import TalkerAnswer
from omni_ws.engine.omni.talker_network import TalkerNetwork

#: A step is for one of so many slots, and for the largest number, those of the Talker.
_BATCHES: Final = (1, 2, 4, 8, 16, 32)
#: The smallest window of positions that a step attends to; larger ones are twice, four times … as large.
_SMALLEST_WINDOW: Final = 256


@dataclass(frozen=True, slots=True)
class _Begun:
    """A frame that a step was begun for; ``rows_used`` and ``last`` as they are with it."""

    answer: TalkerAnswer
    rows_used: int
    last: bool


class SlotTalker:
    """Serves as many sessions as there are slots.

    A session takes the lowest free slot, so that a step is for the first slots only. ``piece`` limits the rows of a
    prompt that one step computes, for one session. With ``read_late``, the default on a GPU, a step returns the frames
    of the step before it, so that the device always has work; a session may then be a frame further than its end.
    """

    def __init__(self, network: TalkerNetwork, *, piece: int = 256, read_late: bool | None = None) -> None:
        self.network = network
        self._space = network.space
        self._piece = piece
        self._read_late = torch.device(self._space.device).type == "cuda" if read_late is None else read_late
        self._free = list(range(self._space.slots))
        self._answers: dict[int, TalkerAnswer] = {}
        self._buffers = StepBuffers(self._space, network.hidden_size, network.codebooks)
        self._graphs = StepGraphs(self._device_step, self._space.device)
        self._begun: tuple[list[_Begun], CodesOnTheWay] | None = None

    @property
    def voices(self) -> tuple[str, ...]:
        """The names of the voices, the default first."""
        return self.network.voices

    @property
    def codebooks(self) -> int:
        return self.network.codebooks

    @property
    def slots(self) -> int:
        return self._space.slots

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def memory_bytes(self) -> int:
        """What weights, slots and buffers take; on a GPU all that PyTorch has reserved there, graphs included."""
        if torch.device(self._space.device).type == "cuda":
            return int(torch.cuda.memory_reserved(self._space.device))
        return self.network.memory_bytes

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def warm_up(self) -> None:
        """Capture or run every shape of a step, and a piece of a prompt. There must be no session."""
        assert not self._answers
        self._graphs.warm_up([(batch, window) for batch in self._batches() for window in self._windows()])
        count = min(self._piece, self._space.longest)
        self.network.prefill(0, 0, plain_rows([0] * count, [0] * count, 0, self.network.hidden_size))
        self.network.reset()

    def open(self, session: int, settings: Mapping[str, Any]) -> None:
        checked = self.network.defaults.changed(settings, self.voices)
        if session in self._answers:
            raise ValueError(f"session {session} is open already")
        if not self._free:
            raise NoSlot
        slot = heapq.heappop(self._free)
        with torch.no_grad():
            self.network.open(slot, checked)
        self._answers[session] = TalkerAnswer(session, slot, checked, self.network)

    def feed(self, session: int, item: TalkerItem) -> None:
        """Take an item; unknown sessions are ignored, as is what comes after the answer's end. Raises RefusedInput."""
        answer = self._answers.get(session)
        if answer is None:
            return
        try:
            answer.feed(item)
        except RefusedInput:
            self.close(session)
            raise

    def grant(self, session: int, frames: int) -> None:
        if answer := self._answers.get(session):
            answer.granted += frames

    def close(self, session: int) -> None:
        answer = self._answers.pop(session, None)
        if answer is not None:
            answer.over = True
            heapq.heappush(self._free, answer.slot)

    @property
    def busy(self) -> bool:
        return self._begun is not None or any(
            answer.can_step or (not answer.over and (bool(answer.prompt) or answer.is_empty))
            for answer in self._answers.values()
        )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self) -> Sequence[StepResult]:
        """Compute a piece of one prompt, begin a frame of each session that can have one, return what is made."""
        results = [
            self._ended_empty(answer) for answer in self._answers.values() if answer.is_empty and not answer.over
        ]
        self._compute_prompt()
        ready = [answer for answer in self._answers.values() if answer.can_step]
        earlier, self._begun = self._begun, self._begin(ready) if ready else None
        if not self._read_late:
            earlier, self._begun = self._begun, None
        return results + (self._read(*earlier) if earlier else [])

    def _ended_empty(self, answer: TalkerAnswer) -> StepResult:
        answer.over = True
        return StepResult(answer.session, Codes(np.zeros((0, self.codebooks), np.int64), CodesEnd.STOP))

    def _begin(self, ready: list[TalkerAnswer]) -> tuple[list[_Begun], CodesOnTheWay]:
        """Begin a frame of each session in ``ready``."""
        self._buffers.begin()
        for answer in self._answers.values():
            self._buffers.put_lengths(answer.slot, min(answer.length, self._space.longest - 1))
        rows = [answer.take_row() for answer in ready]
        vectors = self.network.embedded(np.array([token for token, _ in rows]))
        for vector, (_, state) in zip(vectors, rows, strict=True):
            if state is not None:
                vector += torch.tensor(state)  # A copy, as what came over a socket may be read-only.
        self._buffers.put_rows([answer.slot for answer in ready], vectors)
        begun = []
        for answer in ready:
            self._buffers.put(answer.slot, answer.position, answer.frames)
            answer.length += 1
            answer.frames += 1
            answer.granted -= 1
            begun.append(_Begun(answer, answer.rows_used, answer.frames == answer.most_frames))
        self._buffers.send()
        batch = self._fitting(self._batches(), max(answer.slot for answer in ready) + 1)
        window = self._fitting(self._windows(), max(answer.length for answer in ready))
        return begun, self._buffers.fetch(self._graphs.run(batch, window))

    def _compute_prompt(self) -> None:
        """Compute a piece of one session's prompt: of those that wait to speak first, else in turn."""
        waiting = [answer for answer in self._answers.values() if answer.prompt and not answer.over]
        if not waiting:
            return
        answer = next((answer for answer in waiting if answer.answering), waiting[0])
        rows = answer.prompt.take(self._piece)
        self.network.prefill(answer.slot, answer.length, rows)
        answer.length += len(rows)
        self._answers[answer.session] = self._answers.pop(answer.session)

    def _read(self, begun: list[_Begun], frames: CodesOnTheWay) -> list[StepResult]:
        """Return what the begun frames are; those of sessions that are over or closed do not count."""
        codes = frames.wait().numpy()
        results = []
        for frame in begun:
            answer = frame.answer
            if answer.over:
                continue
            made, end = codes[answer.slot : answer.slot + 1].copy(), CodesEnd.LENGTH if frame.last else None
            if int(made[0, 0]) in self.network.end_codes:
                made, end = made[:0], CodesEnd.STOP
            answer.over = end is not None
            results.append(StepResult(answer.session, Codes(made, end, frame.rows_used)))
        return results

    def _device_step(self, batch: int, window: int) -> torch.Tensor:
        return self.network.step(self._buffers.inputs, batch, window)

    def _batches(self) -> list[int]:
        return [*(size for size in _BATCHES if size < self._space.slots), self._space.slots]

    def _windows(self) -> list[int]:
        sizes = [_SMALLEST_WINDOW]
        while sizes[-1] < self._space.longest:
            sizes.append(2 * sizes[-1])
        return [*sizes[:-1], self._space.longest]

    @staticmethod
    def _fitting(sizes: list[int], needed: int) -> int:
        return next(size for size in sizes if size >= needed)
