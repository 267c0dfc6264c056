"""RowsWorker: runs inside vLLM's workers; sends the Thinker's states to the server, from which the Talker speaks.

A request asks for its rows in the ``extra_args`` of its sampling parameters: ``{"rows": key}``. The state of Qwen2.5 is
what the model returns; that of Qwen3 is an auxiliary output of the same forward, which vLLM knows from its draft
models. So there are no hooks, and graphs are compiled and captured as ever. The rows of a step are sent through a Unix
socket, with their M-RoPE positions.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from omni_ws.engine.vllm.readout_worker import ReadoutWorker
from omni_ws.engine.vllm.rows_channel import BFLOAT16_BYTES, FLOAT32_BYTES, ROWS
from omni_ws.engine.vllm.worker_channel import connect_worker
from omni_ws.engine.vllm.worker_steps import StepWatch

#: The name by which requests ask.
ASKED: Final = "rows"
#: The most rows of a message: the server does other things between two of them.
_ROWS_AT_ONCE: Final = 256
#: The steps whose rows may wait to be sent. Beyond it the model waits for the server.
_STEPS_AHEAD: Final = 16


class _Runner:
    """The worker's ``model_runner``, seen as it is set: before it loads the model, which is then compiled."""

    def __get__(self, worker: Any, kind: type | None = None) -> Any:
        return self if worker is None else worker.__dict__["model_runner"]

    def __set__(self, worker: Any, runner: Any) -> None:
        worker.__dict__["model_runner"] = runner
        layer = None if runner is None else _state_layer(runner)
        if layer is None:
            return
        load = runner.load_model

        def load_model(*arguments: Any, **options: Any) -> None:
            load(*arguments, **options)
            runner.get_model().get_language_model().model._set_aux_hidden_state_layers((layer,))
            runner.use_aux_hidden_state_outputs = True  # so that it expects them

        runner.load_model = load_model


def _state_layer(runner: Any) -> int | None:
    """Return how many blocks the state that the Talker reads has passed, or None if it is what the model returns."""
    talker = getattr(runner.model_config.hf_config, "talker_config", None)
    layer: int | None = getattr(talker, "accept_hidden_layer", None)
    return layer


class RowsWorker(ReadoutWorker):
    """A mixin of vLLM's worker (``worker_extension_cls``). It has what readouts need too: there is one for both."""

    model_runner = _Runner()
    rank: int

    def install_rows(self, address: str, tokens: Sequence[int] | None) -> None:
        """Send the rows of those ``tokens`` (None: of all) from now on.

        With tensor parallelism one worker suffices, since all have the same states.
        """
        if self.rank == 0:
            _Rows(self.model_runner, address, None if tokens is None else np.asarray(tokens))


class _Message(NamedTuple):
    """The rows of one request in a step: ``rows`` of the step's, of ``indices`` in the request's tokens."""

    key: str
    rows: NDArray[np.int64]
    indices: NDArray[np.int64]
    positions: NDArray[np.int64]


class _Rows:
    """The wrapped forward of one worker, and its connection to the server."""

    def __init__(self, runner: Any, address: str, tokens: NDArray[np.int64] | None) -> None:
        self._runner = runner
        self._tokens = tokens
        self._watch = StepWatch(runner, ASKED)
        self._sender = _Sender(connect_worker(address))
        forward = runner._model_forward

        def model_forward(*arguments: Any, **options: Any) -> Any:
            messages = self._messages()
            if not messages:
                return forward(*arguments, **options)
            rows = torch.from_numpy(np.concatenate([one.rows for one in messages])).to(runner.device)
            output = forward(*arguments, **options)
            self._send(messages, output[1][0] if isinstance(output, tuple) else output, rows)
            return output

        runner._model_forward = model_forward

    def _messages(self) -> list[_Message]:
        batch, mrope = self._runner.input_batch, self._runner.mrope_positions
        messages = []
        for step in self._watch.asked():
            places = np.arange(step.count)
            if self._tokens is not None:
                tokens = batch.token_ids_cpu[step.index, step.begins : step.begins + step.count]
                places = places[np.isin(tokens, self._tokens)]
            if len(places):
                rows = step.first_row + places
                # Copied, as the next step is prepared in the same buffer.
                positions = mrope.np[:, rows].astype(np.int64)
                indices = step.begins + places
                for first in range(0, len(rows), _ROWS_AT_ONCE):
                    part = slice(first, first + _ROWS_AT_ONCE)
                    messages.append(_Message(step.asked, rows[part], indices[part], positions[:, part]))
        return messages

    def _send(self, messages: list[_Message], states: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the rows out of the graph's buffer, which its next replay overwrites, and leave the rest to a thread.

        The part for CUDA was written without a GPU at hand, and has not run on one.
        """
        taken = states.index_select(0, rows)
        if taken.dtype is not torch.bfloat16:
            taken = taken.float()
        if not taken.is_cuda:
            self._sender.put(messages, taken, None)
            return
        # On the stream of the forward, so before the replay; the model does not wait for it.
        pinned = torch.empty(taken.shape, dtype=taken.dtype, pin_memory=True)
        pinned.copy_(taken, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._sender.put(messages, pinned, copied)


class _Sender:
    """Sends rows in a thread of its own: the model does not wait for copies, nor for the server."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting: queue.Queue[tuple[list[_Message], torch.Tensor, Any]] = queue.Queue(_STEPS_AHEAD)
        self._connected = True
        threading.Thread(target=self._run, name="rows", daemon=True).start()

    def put(self, messages: list[_Message], rows: torch.Tensor, copied: Any) -> None:
        """Send ``rows``, those of all messages, once they are ``copied`` (an event of CUDA)."""
        self._waiting.put((messages, rows, copied))

    def _run(self) -> None:
        while True:
            messages, rows, copied = self._waiting.get()
            if not self._connected:
                continue  # the server has exited, and vLLM will be stopped
            if copied is not None:
                copied.synchronize()
            try:
                self._connection.sendall(_packed(messages, rows))
            except OSError:
                self._connected = False


def _packed(messages: list[_Message], rows: torch.Tensor) -> bytes:
    is_half = rows.dtype is torch.bfloat16
    numbers = (rows.view(torch.int16) if is_half else rows).numpy()
    data = bytearray()
    first = 0
    for one in messages:
        key, count = one.key.encode(), len(one.indices)
        data += ROWS.pack(len(key), count, numbers.shape[1], BFLOAT16_BYTES if is_half else FLOAT32_BYTES) + key
        data += one.indices.tobytes() + one.positions.tobytes() + numbers[first : first + count].tobytes()
        first += count
    return bytes(data)
