"""A step of fixed shapes, as CUDA graphs (StepGraphs), and the buffers that it reads and fills (StepBuffers)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch

from omni_ws.engine.omni.talker_network import SlotSpace, StepInputs

#: A step of the first so many slots within a window of positions; returns a tensor that the next step overwrites.
Step = Callable[[int, int], torch.Tensor]


class StepGraphs:
    """Runs ``step(batch, window)``, from a graph where one was captured for the two. Without CUDA there are none.

    The step must read its inputs from fixed buffers and must not wait for the device. All graphs share their memory, as
    one runs at a time. Not run on a GPU yet.
    """

    def __init__(self, step: Step, device: str) -> None:
        self._step = step
        self._captures = torch.device(device).type == "cuda"
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def __contains__(self, shape: object) -> bool:
        """Whether the shape was captured."""
        return shape in self._graphs

    def run(self, batch: int, window: int) -> torch.Tensor:
        captured = self._graphs.get((batch, window))
        if captured is None:
            return self._step(batch, window)
        graph, output = captured
        graph.replay()
        return output

    def warm_up(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Capture each shape, the largest first so that the others fit into its memory; on a CPU run each once."""
        ordered = sorted(shapes, reverse=True)
        if not self._captures:
            for shape in ordered:
                self._step(*shape)
            return
        pool = torch.cuda.graph_pool_handle()
        for shape in ordered:
            # Libraries choose their algorithms and allocate their workspaces in the first runs, which a graph cannot.
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


_LENGTH, _POSITION, _FRAME, _ACTIVE = range(4)
#: While one step runs on the device, the next one is filled in.
_TURNS: Final = 2


class StepBuffers:
    """Carries the inputs of all slots to the device, and frames back, without waiting.

    Between a ``send`` and the second next one, the first must have been waited for.
    """

    def __init__(self, space: SlotSpace, row_size: int, codebooks: int) -> None:
        self._cuda = torch.device(space.device).type == "cuda"
        self._turn = 0
        self._rows = [self._host((space.slots, row_size), space.dtype) for _ in range(_TURNS)]
        self._numbers = [self._host((4, space.slots), torch.int64) for _ in range(_TURNS)]
        #: The same numbers, as it is cheaper to write into them one by one.
        self._filled = [numbers.numpy() for numbers in self._numbers]
        self._frames = [self._host((space.slots, codebooks), torch.int64) for _ in range(_TURNS)]
        self._device_rows = torch.zeros(space.slots, row_size, dtype=space.dtype, device=space.device)
        self._device_numbers = torch.zeros(4, space.slots, dtype=torch.int64, device=space.device)
        numbers = self._device_numbers
        self.inputs = StepInputs(
            self._device_rows, numbers[_LENGTH], numbers[_POSITION], numbers[_FRAME], numbers[_ACTIVE]
        )

    def _host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self._cuda)

    def begin(self) -> None:
        """Begin to fill in a step: no slot is active."""
        self._turn = (self._turn + 1) % _TURNS
        self._filled[self._turn][_ACTIVE] = 0

    def put_lengths(self, slot: int, length: int) -> None:
        """Say how many positions a slot has, also where it is not active: there the step may write the next one."""
        self._filled[self._turn][_LENGTH, slot] = length

    def put(self, slot: int, position: int, frame: int) -> None:
        """Make a slot active."""
        numbers = self._filled[self._turn]
        numbers[_POSITION, slot], numbers[_FRAME, slot], numbers[_ACTIVE, slot] = position, frame, 1

    def put_rows(self, slots: list[int], rows: torch.Tensor) -> None:
        """Set the answers' rows of ``slots``, (n, row size)."""
        self._rows[self._turn][slots] = rows.to(self._device_rows.dtype)

    def send(self) -> None:
        self._device_rows.copy_(self._rows[self._turn], non_blocking=True)
        self._device_numbers.copy_(self._numbers[self._turn], non_blocking=True)

    def fetch(self, frames: torch.Tensor) -> CodesOnTheWay:
        """Have ``frames`` (B, codebooks) carried to the host."""
        here = self._frames[self._turn][: len(frames)]
        here.copy_(frames, non_blocking=True)
        arrived = None
        if self._cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        return CodesOnTheWay(here, arrived)


class CodesOnTheWay:
    """Codes that the device sends to the host."""

    def __init__(self, frames: torch.Tensor, arrived: torch.cuda.Event | None) -> None:
        self._frames, self._arrived = frames, arrived

    def wait(self) -> torch.Tensor:
        """Return the frames (B, codebooks), which stay until the second next step."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._frames
