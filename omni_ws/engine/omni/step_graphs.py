"""StepGraphs: a step of fixed shapes, captured as CUDA graphs; without CUDA the same function is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

#: A step of the first so many slots within a window of positions; returns a tensor that the next step overwrites.
Step = Callable[[int, int], torch.Tensor]


class StepGraphs:
    """Runs ``step(batch, window)``, from a graph where one was captured for the two.

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
