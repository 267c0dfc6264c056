"""StepGraphs: CUDA graphs of a model's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

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
