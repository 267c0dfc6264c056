"""Qwen3Code2Wav: the vocoder of Qwen3-Omni as a StepModel.

Codec frames are decoded as they arrive. All samples that later frames cannot change are sent at once: those of ``n``
frames but the last 555 (with the sizes of Qwen3-Omni), however the frames are divided among inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.omni.code2wav_network import Code2WavGraphs, Code2WavNetwork, Code2WavShape, SlotMemory, Weights
from omni_ws.engine.omni.step_model import NoSlot, RefusedInput, StepResult, VocoderInput, VocoderOutput

#: The numbers of frames that a step may decode of a session, a fixed set because of CUDA graphs. The largest that fits
#: is taken.
PIECES: Final = (32, 16, 8, 4, 2, 1)
#: The limit on frames that a step decodes for all sessions, so that sessions with other piece sizes wait less.
STEP_FRAMES: Final = 128
#: To decode a chunk costs as much as so many frames besides its own.
CONTEXT_FRAMES: Final = 2
#: The settings that sessions of vocoders may have.
_SETTINGS: Final = frozenset({"voice", "seed"})
#: The limit on frames of a session that wait to be decoded: 82 s of audio.
MOST_WAITING: Final = 1024


class _Stream:
    """The state of one session: its slot in the network, and its unfinished inputs."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        #: The number of frames decoded.
        self.done = 0
        #: The number of frames that wait to be decoded.
        self.waiting = 0
        #: Whether the last codes have come.
        self.ended = False
        #: The codes of the unfinished inputs.
        self._inputs: deque[NDArray[np.int64]] = deque()
        #: The frames of the oldest input that are decoded: their number, and their samples.
        self._done_of_first = 0
        self._samples: list[NDArray[np.float32]] = []

    @property
    def has_inputs(self) -> bool:
        """Whether there are unfinished inputs."""
        return bool(self._inputs)

    def add(self, item: VocoderInput) -> None:
        """Queue an input."""
        self._inputs.append(np.asarray(item.codes, np.int64))
        self.waiting += len(item.codes)
        self.ended = item.last

    def piece(self) -> int:
        """Return how many frames of the oldest input to decode next; 0 if all are decoded."""
        left = len(self._inputs[0]) - self._done_of_first
        if not self.done:
            # The start of a stream has its own graphs, for one size only.
            return min(left, 1)
        return next((size for size in PIECES if size <= left), 0)

    def next_codes(self) -> NDArray[np.int64]:
        """Return the codes (n, codebooks) of the next piece."""
        return self._inputs[0][self._done_of_first : self._done_of_first + self.piece()]

    def take(self, samples: NDArray[np.float32]) -> None:
        """Take the samples of the next piece, which is decoded now."""
        piece = self.piece()
        self._samples.append(samples)
        self._done_of_first += piece
        self.done += piece
        self.waiting -= piece

    def finished_inputs(self) -> Iterator[VocoderOutput]:
        """Remove the inputs whose frames are all decoded, and yield their outputs."""
        while self._inputs and not self.piece():
            samples = np.concatenate(self._samples) if self._samples else np.zeros(0, np.float32)
            frames = len(self._inputs.popleft())
            self._done_of_first, self._samples = 0, []
            yield VocoderOutput(samples, frames)


class Qwen3Code2Wav:
    """A StepModel: VocoderInput in, VocoderOutput out.

    The settings ``voice`` and ``seed`` are accepted without effect: the codes determine the voice, and decoding is
    deterministic.

    A step decodes a piece of each of several sessions, up to ``batch`` and STEP_FRAMES. All pieces have the same size,
    which the session that has waited longest decides. ``weights`` are the tensors of the module ``code2wav``; they are
    moved to ``device`` in float32. Raises ConfigurationError for weights that do not fit.
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
        #: The limit on pieces of a step, by the size of the pieces.
        self._most = {piece: max(1, min(batch, slots, STEP_FRAMES // piece)) for piece in PIECES}
        self._run = Code2WavGraphs(network, self._memory, codebooks=shape.codebooks, pieces=self._most)
        self._free = list(range(slots))
        self._streams: dict[int, _Stream] = {}
        #: The sessions with unfinished inputs; the one that has waited longest is first.
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
        stream.add(item)
        self._queue.setdefault(session, stream)

    def grant(self, session: int, frames: int) -> None:
        """See StepModel. Does nothing: a vocoder needs no grants."""

    def close(self, session: int) -> None:
        """See StepModel."""
        self._queue.pop(session, None)
        stream = self._streams.pop(session, None)
        if stream is not None:
            self._free.append(stream.slot)

    def step(self) -> Sequence[StepResult]:
        """See StepModel. Decodes one piece of each session of a batch."""
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
            if not stream.has_inputs:
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
        first = chosen[0][1].done == 0
        codes = np.stack([stream.next_codes() for _, stream in chosen])
        rows = np.array([stream.slot for _, stream in chosen])
        done = np.array([stream.done for _, stream in chosen])
        samples = self._run(codes.transpose(0, 2, 1), rows, done, first=first)
        for (session, stream), made in zip(chosen, samples, strict=True):
            stream.take(made)
            self._queue[session] = self._queue.pop(session)

    def _settle(self, session: int, stream: _Stream, results: list[StepResult]) -> None:
        """Add results for the inputs whose frames are all decoded."""
        results.extend(StepResult(session, output) for output in stream.finished_inputs())
        if not stream.has_inputs:
            self._queue.pop(session, None)
