"""CUDA graphs of a model's steps (StepGraphs), and the buffers of a Talker's steps (StepBuffers)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch

from omni_ws.engine.omni.talker_network import SlotSpace, StepInputs

#: A step of one shape, such as (batch size, window of positions); returns a tensor that the next step may overwrite.
Step = Callable[[int, int], torch.Tensor]


class StepGraphs:
    """Runs ``step(batch, window)``: from a CUDA graph if one was captured for this shape, else directly.

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


_LENGTH, _POSITION, _FRAME, _ACTIVE = range(4)
#: Two sets of buffers on the host: one is filled while the device still reads the other.
_TURNS: Final = 2


class StepBuffers:
    """Copies the inputs of all slots to the device, and frames back, asynchronously.

    The frames of a step must have been waited for before the ``send`` of the next step but one.
    """

    def __init__(self, space: SlotSpace, row_size: int, codebooks: int) -> None:
        self._cuda = torch.device(space.device).type == "cuda"
        self._turn = 0
        self._rows = [self._host((space.slots, row_size), space.dtype) for _ in range(_TURNS)]
        self._numbers = [self._host((4, space.slots), torch.int64) for _ in range(_TURNS)]
        #: Views of ``_numbers`` as arrays: writing single elements is cheaper than in a tensor.
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
        """Begin to fill the buffers of a step, in which no slot is active yet."""
        self._turn = (self._turn + 1) % _TURNS
        self._filled[self._turn][_ACTIVE] = 0

    def put_lengths(self, slot: int, length: int) -> None:
        """Set the number of a slot's positions. Inactive slots need it too: the step may write their next position."""
        self._filled[self._turn][_LENGTH, slot] = length

    def put(self, slot: int, position: int, frame: int) -> None:
        """Make a slot active, with the M-RoPE position and the number of its frame."""
        numbers = self._filled[self._turn]
        numbers[_POSITION, slot], numbers[_FRAME, slot], numbers[_ACTIVE, slot] = position, frame, 1

    def put_rows(self, slots: list[int], rows: torch.Tensor) -> None:
        """Set the rows (n, row size) of the answers in ``slots``."""
        self._rows[self._turn][slots] = rows.to(self._device_rows.dtype)

    def send(self) -> None:
        """Start copying the inputs to the device."""
        self._device_rows.copy_(self._rows[self._turn], non_blocking=True)
        self._device_numbers.copy_(self._numbers[self._turn], non_blocking=True)

    def fetch(self, frames: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying ``frames`` (B, codebooks) to the host.

        Returns a function that waits for them and returns them; they stay valid until the next step but one.
        """
        here = self._frames[self._turn][: len(frames)]
        here.copy_(frames, non_blocking=True)
        if not self._cuda:
            return lambda: here
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> torch.Tensor:
            arrived.synchronize()
            return here

        return wait
