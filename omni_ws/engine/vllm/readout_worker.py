"""ReadoutWorker: runs inside vLLM's workers; projects the residual stream and sends the results to the server.

A request asks for readouts in the ``extra_args`` of its sampling parameters: ``{"readout": {"key": …, "ranges": …}}``.
The projections of a step are sent in the step that computed them, as one message for each run of positions, through a
Unix socket: no RPC is needed for a token. vLLM has to run eagerly, since compiled graphs do not support hooks.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from omni_ws.engine.vllm.readout_channel import FRAME
from omni_ws.engine.vllm.worker_channel import connect_worker
from omni_ws.engine.vllm.worker_steps import StepWatch


@dataclass(slots=True)
class _Rows:
    """``count`` consecutive rows of a step that belong to a request, with their positions in its tokens."""

    key: str
    first_row: int
    first_position: int
    count: int


class ReadoutWorker:
    """A mixin of vLLM's worker (``worker_extension_cls``), which provides ``model_runner`` and ``rank``."""

    model_runner: Any
    rank: int

    def install_readouts(self, address: str, layers: Sequence[int], matrices: Sequence[bytes], concepts: int) -> int:
        """Hook into the layers; returns the number of layers that the model has.

        ``matrices`` are float32, of shape (concepts, hidden size) each. Without ``address`` nothing is hooked. With
        tensor parallelism one worker suffices, since all have the same stream.
        """
        runner = self.model_runner
        blocks = _decoder_layers(runner.model)
        if address and self.rank == 0:
            self._readout = _Readout(runner, address, layers, matrices, concepts)
            for place, layer in enumerate(layers):
                blocks[layer].register_forward_hook(self._readout.hook(place))
        return len(blocks)


class _Readout:
    """The hooks of one worker, and its connection to the server."""

    def __init__(
        self, runner: Any, address: str, layers: Sequence[int], matrices: Sequence[bytes], concepts: int
    ) -> None:
        self._runner = runner
        self._layers = len(layers)
        self._vectors = [
            torch.from_numpy(np.frombuffer(matrix, np.float32).reshape(concepts, -1).copy()).to(runner.device)
            for matrix in matrices
        ]
        self._wanted: list[_Rows] = []
        self._rows: torch.Tensor | None = None
        self._values: list[torch.Tensor] = []
        self._socket: socket.socket | None = connect_worker(address)
        self._watch = StepWatch(runner, "readout")
        forward = runner._model_forward

        def model_forward(*arguments: Any, **options: Any) -> Any:
            # Only here, after input preparation, are the rows in the order in which the model gets them.
            self._wanted = self._wanted_rows()
            if not self._wanted:
                return forward(*arguments, **options)
            rows = np.concatenate([np.arange(one.first_row, one.first_row + one.count) for one in self._wanted])
            self._rows = torch.from_numpy(rows).to(runner.device)
            try:
                return forward(*arguments, **options)
            finally:
                self._send()

        runner._model_forward = model_forward

    def hook(self, place: int) -> Callable[..., None]:
        """Return a forward hook for the layer that is the ``place``-th of those read out."""

        def after_layer(module: Any, inputs: Any, output: Any) -> None:
            if not self._wanted:
                return
            # vLLM's layers return their own output and the stream to which it is to be added separately.
            parts = output if isinstance(output, tuple) else (output,)
            stream = parts[0][self._rows]
            if len(parts) > 1 and parts[1] is not None:
                stream = stream + parts[1][self._rows]
            self._values.append(stream.float() @ self._vectors[place].T)

        return after_layer

    def _wanted_rows(self) -> list[_Rows]:
        """Return the rows of this step whose positions are to be read out."""
        wanted: list[_Rows] = []
        for step in self._watch.asked():
            for start, end in step.asked["ranges"]:
                first, last = max(start, step.begins), min(end, step.begins + step.count)
                if first < last:
                    row = step.first_row + first - step.begins
                    wanted.append(_Rows(step.asked["key"], row, first, last - first))
        return wanted

    def _send(self) -> None:
        """Send the projections of this step."""
        wanted, values = self._wanted, self._values
        self._wanted, self._values = [], []
        if len(values) != self._layers or self._socket is None:
            return  # the step failed
        numbers = torch.stack(values, dim=1).cpu().numpy()
        frames = bytearray()
        row = 0
        for one in wanted:
            key = one.key.encode()
            frames += FRAME.pack(len(key), one.first_position, one.count) + key
            frames += numbers[row : row + one.count].tobytes()
            row += one.count
        try:
            self._socket.sendall(frames)
        except OSError:
            self._socket = None  # the server has exited, and vLLM will be stopped


def _decoder_layers(model: Any) -> Any:
    """Return the transformer blocks of the language model, wherever the architecture has them."""
    if hasattr(model, "get_language_model"):
        model = model.get_language_model()
    while not hasattr(model, "layers"):
        model = model.language_model if hasattr(model, "language_model") else model.model
    return model.layers
