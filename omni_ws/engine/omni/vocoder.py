"""Vocoder: the base class of both vocoders, a StepModel that decodes the codes of many sessions in batches.

A DecodedStream is the state of one session. StepGraphs are CUDA graphs of a model's steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from omni_ws.engine.omni.step_process import StepResult, VocoderInput
from omni_ws.errors import EngineOverloaded, InvalidValue

#: The settings that sessions of vocoders may have.
_SETTINGS: Final = frozenset({"voice", "seed"})


class DecodedStream(ABC):
    """The state of one session: its unfinished inputs, and the samples that are made for the oldest of them.

    ``done`` counts what is decoded, in units of the vocoder: frames or windows. An input is finished, and its samples
    are sent, when ``done`` reaches the number that ``goal`` returned for it.
    """

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.done = 0
        #: Whether the last codes have come.
        self.ended = False
        self._goals: deque[int] = deque()
        self._samples: list[NDArray[np.float32]] = []

    @property
    def has_inputs(self) -> bool:
        """Whether there are unfinished inputs."""
        return bool(self._goals)

    @property
    @abstractmethod
    def waiting(self) -> int:
        """The number of frames that wait to be decoded."""

    @abstractmethod
    def next_work(self) -> tuple[bool, int]:
        """Return what the next step is to do. Sessions form a batch if they return the same; may begin that work."""

    @abstractmethod
    def goal(self, codes: NDArray[np.int64]) -> int:
        """Keep the ``codes`` of an input; returns the ``done`` at which the input is finished."""

    def add(self, item: VocoderInput) -> None:
        """Queue an input."""
        self.ended = item.last
        self._goals.append(self.goal(np.asarray(item.codes, np.int64)))

    def take(self, samples: NDArray[np.float32], done: int) -> None:
        """Add the samples of the next ``done`` units, which have been decoded."""
        self._samples.append(samples)
        self.done += done

    def finished_inputs(self) -> Iterator[NDArray[np.float32]]:
        """Remove the finished inputs, and yield their samples."""
        while self._goals and self._goals[0] <= self.done:
            self._goals.popleft()
            samples, self._samples = self._samples, []
            yield np.concatenate(samples) if samples else np.zeros(0, np.float32)


Stream = TypeVar("Stream", bound=DecodedStream)


class Vocoder(ABC, Generic[Stream]):
    """A StepModel whose input is VocoderInput, and whose output for each input is samples (n,) float32, maybe none.

    The samples are those that no later code changes.

    A step works for several sessions whose next work is alike; the session that has waited longest decides which work.
    Frames have ``codebooks`` codes, each below ``codebook_size``. At most ``most_waiting`` frames of a session may wait
    to be decoded. Settings of a session are ``voice`` and ``seed``.
    """

    def __init__(self, *, slots: int, codebooks: int, codebook_size: int, most_waiting: int) -> None:
        self.slots = slots
        self._codebooks = codebooks
        self._codebook_size = codebook_size
        self._most_waiting = most_waiting
        self._free = list(range(slots))
        self._streams: dict[int, Stream] = {}
        #: The sessions with unfinished inputs; the one that has waited longest is first.
        self._queue: dict[int, Stream] = {}

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """The bytes that weights, slots and buffers take on the device."""

    @property
    @abstractmethod
    def samples_per_frame(self) -> int:
        """The number of samples of a codec frame."""

    @abstractmethod
    def warm_up(self) -> None:
        """Run, compile or capture every shape that occurs, so that the first session is as fast as the others."""

    @abstractmethod
    def _begun(self, slot: int, settings: Mapping[str, Any]) -> Stream:
        """Return the stream of a new session in ``slot``. Raises InvalidValue for settings."""

    @abstractmethod
    def _most(self, work: tuple[bool, int]) -> int:
        """Return for how many sessions at most a step may do ``work``."""

    @abstractmethod
    def _decode(self, work: tuple[bool, int], streams: Sequence[Stream]) -> None:
        """Do the ``work`` for these streams."""

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._queue)

    def open(self, session: int, settings: Mapping[str, Any]) -> None:
        """Open a session. Raises EngineOverloaded without a free slot, or InvalidValue for settings."""
        if unknown := settings.keys() - _SETTINGS:
            raise InvalidValue(f"unknown setting of the vocoder: {min(unknown)}")
        if not self._free:
            raise EngineOverloaded("all slots are taken")
        self._streams[session] = self._begun(self._free[-1], settings)
        self._free.pop()

    def feed(self, session: int, item: VocoderInput) -> None:
        """Queue codes for later steps. Raises InvalidValue for codes that are refused, and then closes the session."""
        stream = self._streams[session]
        try:
            self._check(stream, item)
        except InvalidValue:
            self.close(session)
            raise
        stream.add(item)
        self._queue.setdefault(session, stream)

    def grant(self, session: int, frames: int) -> None:
        """Do nothing: only a Talker needs grants."""

    def close(self, session: int) -> None:
        """Free the slot of a session, and all that the session holds; unknown sessions are ignored."""
        self._queue.pop(session, None)
        stream = self._streams.pop(session, None)
        if stream is not None:
            self._free.append(stream.slot)

    def step(self) -> Sequence[StepResult]:
        """Decode the next codes of a batch of sessions, and return the sound that became ready."""
        results: list[StepResult] = []
        chosen: dict[int, Stream] = {}
        work: tuple[bool, int] | None = None
        for session, stream in list(self._queue.items()):
            results += self._settled(session, stream)
            if not stream.has_inputs:
                continue
            here = stream.next_work()
            work = work or here
            if here == work:
                chosen[session] = stream
                if len(chosen) == self._most(work):
                    break
        if work is not None:
            self._decode(work, list(chosen.values()))
        for session, stream in chosen.items():
            self._queue[session] = self._queue.pop(session)  # to the end
            results += self._settled(session, stream)
        return results

    def _settled(self, session: int, stream: Stream) -> list[StepResult]:
        """Return the results of the finished inputs; a session without other inputs leaves the queue."""
        results = [(session, samples) for samples in stream.finished_inputs()]
        if not stream.has_inputs:
            del self._queue[session]
        return results

    def _check(self, stream: Stream, item: VocoderInput) -> None:
        """Raise InvalidValue for an item that cannot be decoded."""
        codes, size = item.codes, self._codebook_size
        if stream.ended:
            raise InvalidValue("codes after the last ones of the answer")
        if codes.ndim != 2 or codes.shape[1] != self._codebooks or not np.issubdtype(codes.dtype, np.integer):
            raise InvalidValue(f"codes must be integers of the shape (frames, {self._codebooks})")
        if stream.waiting + len(codes) > self._most_waiting:
            raise InvalidValue(f"more than {self._most_waiting} codec frames wait to be decoded")
        if len(codes) and not 0 <= codes.min() <= codes.max() < size:
            wrong = codes.max() if codes.min() >= 0 else codes.min()
            raise InvalidValue(f"code {wrong} is not one of the {size} of a codebook")


# CUDA graphs of a vocoder's and a Talker's steps.

#: A step of one shape, such as (batch size, window of positions); returns a tensor that the next step may overwrite.
Step = Callable[[int, int], torch.Tensor]


class StepGraphs:
    """A runner of ``step(batch, window)``: from a CUDA graph if one was captured for this shape, else directly.

    The step must read its inputs from fixed buffers and must not synchronise with the device. All graphs share one
    memory pool, since only one of them runs at a time. On a CPU there are none.
    """

    def __init__(self, step: Step, device: str) -> None:
        self._step = step
        self._captures = torch.device(device).type == "cuda"
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def __contains__(self, shape: object) -> bool:
        """Whether a graph of this shape was captured."""
        return shape in self._graphs

    def run(self, batch: int, window: int) -> torch.Tensor:
        captured = self._graphs.get((batch, window))
        if captured is None:
            return self._step(batch, window)
        graph, output = captured
        graph.replay()
        return output

    def warm_up(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Capture a graph of each shape, the largest first: the others fit into its memory. On a CPU run each once."""
        ordered = sorted(shapes, reverse=True)
        if not self._captures:
            for shape in ordered:
                self._step(*shape)
            return
        pool = torch.cuda.graph_pool_handle()
        for shape in ordered:
            # In the first runs libraries choose algorithms and allocate workspaces, which cannot be captured.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._step(*shape)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = self._step(*shape)
            self._graphs[shape] = graph, output
