"""Qwen3Code2Wav: the vocoder of Qwen3-Omni as a StepModel.

Codec frames are decoded as they come, and what they settle is sent at once: ``n`` frames settle all samples but the
last 555 (in the shape of Qwen3-Omni), whatever the sizes in which they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.omni.code2wav_network import Code2WavGraphs, Code2WavNetwork, Code2WavShape, SlotMemory, Weights
from omni_ws.engine.omni.step_model import NoSlot, RefusedInput, StepResult, VocoderInput, VocoderOutput

#: How many frames a step decodes of a session, the largest that fits first: each size is a shape of its own on a GPU.
PIECES: Final = (32, 16, 8, 4, 2, 1)
#: The most frames that a step decodes for all sessions, lest those wait long whose pieces are not among them.
STEP_FRAMES: Final = 128
#: What a chunk costs besides its own frames, as frames.
CONTEXT_FRAMES: Final = 2
#: Settings that vocoders may have.
_SETTINGS: Final = frozenset({"voice", "seed"})
#: The limit on frames of a session that wait to be decoded: 82 s of sound.
MOST_WAITING: Final = 1024


@dataclass(slots=True)
class _Pending:
    """An input that is being decoded: its codes, how many frames of it are done, and their samples."""

    codes: NDArray[np.int64]
    done: int = 0
    samples: list[NDArray[np.float32]] = field(default_factory=list)


@dataclass(slots=True)
class _Stream:
    slot: int
    #: The number of frames decoded.
    done: int = 0
    waiting: int = 0
    inputs: deque[_Pending] = field(default_factory=deque)
    ended: bool = False

    def piece(self) -> int:
        """Return how many frames of the oldest input to decode next; 0 if none of it are left."""
        left = len(self.inputs[0].codes) - self.inputs[0].done
        if not self.done:
            # Beginning has shapes of its own: one size suffices.
            return min(left, 1)
        return next((size for size in PIECES if size <= left), 0)


class Qwen3Code2Wav:
    """A StepModel: VocoderInput in, VocoderOutput out.

    The voice is in the codes, and nothing is drawn: the settings ``voice`` and ``seed`` have no effect.

    A step decodes pieces of one size, of as many sessions as have one, up to ``batch`` and STEP_FRAMES; the session
    that has waited longest decides. ``weights`` are the tensors of the module ``code2wav``; they are moved to
    ``device`` in float32. Raises ConfigurationError for weights that do not fit.
    """

    def __init__(
        self,
        shape: Code2WavShape,
        weights: Weights,
        *,
        slots: int = 32,
        batch: int = 32,
        device: str | torch.device = "cpu",
    ) -> None:
        self._device = torch.device(device)
        self._shape = shape
        self._memory = SlotMemory(slots, self._device)
        held = {name: tensor.detach().to(self._device, torch.float32) for name, tensor in weights.items()}
        self._weight_bytes: int = sum(tensor.nbytes for tensor in held.values())
        try:
            network = Code2WavNetwork(shape, held, self._memory)
        except KeyError as error:
            raise ConfigurationError([f"code2wav: the checkpoint has no tensor {error.args[0]}"]) from error
        rows, needed = len(held["code_embedding.weight"]), shape.codebooks * shape.codebook_size
        if rows != needed:
            raise ConfigurationError([f"code2wav: {rows} embeddings of codes where the configuration has {needed}"])
        #: How many pieces of so many frames a step may decode.
        self._most = {piece: max(1, min(batch, slots, STEP_FRAMES // piece)) for piece in PIECES}
        self._run = Code2WavGraphs(network, self._memory, codebooks=shape.codebooks, pieces=self._most)
        self._free = list(range(slots))
        self._streams: dict[int, _Stream] = {}
        #: The sessions that have inputs; the one that has waited longest is first.
        self._queue: dict[int, _Stream] = {}

    @property
    def samples_per_frame(self) -> int:
        return self._shape.samples_per_frame

    @property
    def memory_bytes(self) -> int:
        """See StepModel."""
        return self._weight_bytes + self._memory.nbytes + self._run.nbytes

    @property
    def slots(self) -> int:
        """See StepModel."""
        return self._memory.slots

    @property
    def busy(self) -> bool:
        """See StepModel."""
        return bool(self._queue)

    def warm_up(self) -> None:
        """See StepModel."""
        self._run.warm_up()

    def open(self, session: int, settings: Mapping[str, Any]) -> None:
        """See StepModel."""
        if unknown := settings.keys() - _SETTINGS:
            raise RefusedInput(f"unknown setting of the vocoder: {min(unknown)}")
        if not self._free:
            raise NoSlot
        slot = self._free.pop()
        self._memory.clear(slot)
        self._streams[session] = _Stream(slot)

    def feed(self, session: int, item: VocoderInput) -> None:
        """See StepModel. Codes that are refused end the session."""
        stream = self._streams[session]
        try:
            self._check(stream, item)
        except RefusedInput:
            self.close(session)
            raise
        stream.inputs.append(_Pending(np.asarray(item.codes, np.int64)))
        stream.waiting += len(item.codes)
        stream.ended = item.last
        self._queue.setdefault(session, stream)

    def grant(self, session: int, frames: int) -> None:
        """Do nothing: a vocoder makes nothing that it was not given codes for."""

    def close(self, session: int) -> None:
        """See StepModel."""
        self._queue.pop(session, None)
        stream = self._streams.pop(session, None)
        if stream is not None:
            self._free.append(stream.slot)

    def step(self) -> Sequence[StepResult]:
        """See StepModel: decode one piece of each session of a batch."""
        results: list[StepResult] = []
        chosen = self._choose(results)
        if chosen:
            self._decode(chosen)
            for session, stream in chosen:
                self._settle(session, stream, results)
        return results

    def _check(self, stream: _Stream, item: VocoderInput) -> None:
        """Raise RefusedInput for an item that cannot be decoded."""
        codes = item.codes
        if stream.ended:
            raise RefusedInput("codes after the last ones of the answer")
        if codes.ndim != 2 or codes.shape[1] != self._shape.codebooks or not np.issubdtype(codes.dtype, np.integer):
            raise RefusedInput(f"codes must be integers of the shape (frames, {self._shape.codebooks})")
        if stream.waiting + len(codes) > MOST_WAITING:
            raise RefusedInput(f"more than {MOST_WAITING} codec frames wait to be decoded")
        if len(codes) and not 0 <= codes.min() <= codes.max() < self._shape.codebook_size:
            wrong = codes.max() if codes.min() >= 0 else codes.min()
            raise RefusedInput(f"code {wrong} is not one of the {self._shape.codebook_size} of a codebook")

    def _choose(self, results: list[StepResult]) -> list[tuple[int, _Stream]]:
        """Return the sessions of the next batch; adds results for inputs without frames."""
        chosen: list[tuple[int, _Stream]] = []
        kind: tuple[bool, int] | None = None
        for session, stream in list(self._queue.items()):
            if not stream.piece():
                self._settle(session, stream, results)
            if not stream.inputs:
                continue
            here = (stream.done == 0, stream.piece())
            kind = kind or here
            if here == kind:
                chosen.append((session, stream))
                if len(chosen) == self._most[kind[1]]:
                    break
        return chosen

    def _decode(self, chosen: list[tuple[int, _Stream]]) -> None:
        """Decode a piece of each of these sessions, and move them to the end of the queue."""
        piece, first = chosen[0][1].piece(), chosen[0][1].done == 0
        inputs = [stream.inputs[0] for _, stream in chosen]
        codes = np.stack([pending.codes[pending.done : pending.done + piece] for pending in inputs])
        rows = np.array([stream.slot for _, stream in chosen])
        done = np.array([stream.done for _, stream in chosen])
        samples = self._run(codes.transpose(0, 2, 1), rows, done, first=first)
        for (session, stream), pending, made in zip(chosen, inputs, samples, strict=True):
            pending.samples.append(made)
            pending.done += piece
            stream.done += piece
            stream.waiting -= piece
            self._queue[session] = self._queue.pop(session)

    def _settle(self, session: int, stream: _Stream, results: list[StepResult]) -> None:
        """Add results for the inputs that are complete."""
        while stream.inputs and not stream.piece():
            pending = stream.inputs.popleft()
            samples = np.concatenate(pending.samples) if pending.samples else np.zeros(0, np.float32)
            results.append(StepResult(session, VocoderOutput(samples, len(pending.codes))))
        if not stream.inputs:
            self._queue.pop(session, None)
