"""Code that runs inside vLLM's processes: workers that send readouts and hidden states, and logits processors.

A request asks for readouts, hidden states or a processor in the ``extra_args`` of its sampling parameters. The results
of a step are sent through a Unix socket, without an RPC for each token.
"""

from __future__ import annotations

import math
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as RowLogitsProcessor

from omni_ws.engine.child_main import encode_message
from omni_ws.engine.vllm.worker_channel import SentReadouts, SentRows


class ReadoutWorker:
    """A mixin of vLLM's worker (``worker_extension_cls``) that sends readouts: projections of the residual stream.

    A request asks with ``{"readout": {"key": "prompt-0-1f2e3d4c", "ranges": [(0, 12)]}}`` in its ``extra_args``. Each
    run of consecutive positions in a step is sent as one message, once ``install_readouts`` was called. vLLM has to run
    eagerly, since compiled graphs do not support hooks.
    """

    model_runner: Any
    rank: int

    def install_readouts(self, address: str, layers: Sequence[int], matrices: Sequence[bytes], concepts: int) -> int:
        """Add hooks to ``layers``, and return the number of layers that the model has.

        ``matrices`` has, for each of ``layers``, the bytes of a float32 matrix (concepts, hidden size). ``address`` is
        that of a WorkerChannel; with "", the layers are only counted. With tensor parallelism only the first worker has
        hooks, since all workers have the same stream.
        """
        runner = self.model_runner
        blocks = _decoder_layers(runner.model)
        if address and self.rank == 0:
            self._readout = _Readout(runner, address, layers, matrices, concepts)
            for place, layer in enumerate(layers):
                blocks[layer].register_forward_hook(self._readout.hook(place))
        return len(blocks)


class _Readout:
    """The hooks of one ReadoutWorker, and its connection to the server."""

    def __init__(
        self, runner: Any, address: str, layers: Sequence[int], matrices: Sequence[bytes], concepts: int
    ) -> None:
        self._runner = runner
        self._layers = len(layers)
        self._vectors = [
            torch.from_numpy(np.frombuffer(matrix, np.float32).reshape(concepts, -1).copy()).to(runner.device)
            for matrix in matrices
        ]
        self._wanted: list[AskedRows] = []
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
        """Return a forward hook for the layer that is read out with the matrix of index ``place``."""

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

    def _wanted_rows(self) -> list[AskedRows]:
        """Return the rows of this step whose positions are to be read out."""
        wanted: list[AskedRows] = []
        for step in self._watch.asked():
            for start, end in step.asked["ranges"]:
                first, last = max(start, step.begins), min(end, step.begins + step.count)
                if first < last:
                    row = step.first_row + first - step.begins
                    wanted.append(AskedRows(step.asked, step.index, row, first, last - first))
        return wanted

    def _send(self) -> None:
        """Send the projections of this step; nothing if the step failed or the server has exited."""
        wanted, values = self._wanted, self._values
        self._wanted, self._values = [], []
        if len(values) != self._layers or self._socket is None:
            return  # the step failed
        numbers = torch.stack(values, dim=1).cpu().numpy()
        messages = bytearray()
        row = 0
        for one in wanted:
            header = SentReadouts(one.asked["key"], one.begins, one.count)
            messages += encode_message(header, numbers[row : row + one.count].tobytes())
            row += one.count
        try:
            self._socket.sendall(messages)
        except OSError:
            self._socket = None  # the server has exited, and vLLM will be stopped


def _decoder_layers(model: Any) -> Any:
    """Find and return the transformer blocks of the language model, whose place depends on the architecture."""
    if hasattr(model, "get_language_model"):
        model = model.get_language_model()
    while not hasattr(model, "layers"):
        model = model.language_model if hasattr(model, "language_model") else model.model
    return model.layers


#: The key in ``extra_args`` with which requests ask for rows.
ASKED: Final = "rows"
#: The maximum number of rows in a message: between messages the server can do other work.
_ROWS_AT_ONCE: Final = 256
#: The number of steps whose rows may wait to be sent. Beyond it the model waits for the server.
_STEPS_AHEAD: Final = 16


class _Runner:
    """A descriptor for the worker's ``model_runner``, which patches the runner before it loads and compiles the model.

    The patch makes the model of Qwen3 output the hidden states that its Talker reads; Qwen2.5 needs none.
    """

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
    """Return the number of blocks after which the Talker reads the state; None if it reads the model's output."""
    talker = getattr(runner.model_config.hf_config, "talker_config", None)
    layer: int | None = getattr(talker, "accept_hidden_layer", None)
    return layer


class RowsWorker(ReadoutWorker):
    """A mixin of vLLM's worker that sends the Thinker's hidden states, from which the Talker speaks.

    The class is also a ReadoutWorker, because vLLM takes only one mixin. A request asks with ``{"rows": "<key of the
    request>"}`` in its ``extra_args``. The Talker of Qwen2.5 reads the model's output; the Talker of Qwen3 reads an
    auxiliary output of the same forward pass, a feature that vLLM has for draft models. So no hooks are needed, and
    graphs are compiled and captured as usual. Rows are sent with their M-RoPE positions.
    """

    model_runner = _Runner()
    rank: int

    def install_rows(self, address: str, tokens: Sequence[int] | None) -> None:
        """Begin to send the rows of ``tokens`` (None: of all tokens) to the WorkerChannel at ``address``.

        With tensor parallelism only the first worker sends, since all workers have the same states.
        """
        if self.rank == 0:
            _Rows(self.model_runner, address, None if tokens is None else np.asarray(tokens))


class _Message(NamedTuple):
    """Rows of one request in a step: indices in the step (``rows``), places (``indices``) and M-RoPE positions."""

    key: str
    rows: NDArray[np.int64]
    indices: NDArray[np.int64]
    positions: NDArray[np.int64]


class _Rows:
    """The wrapped forward function of one RowsWorker, and its connection to the server."""

    def __init__(self, runner: Any, address: str, tokens: NDArray[np.int64] | None) -> None:
        self._runner = runner
        self._tokens = tokens
        self._watch = StepWatch(runner, ASKED)
        self._connection = connect_worker(address)
        #: The rows of steps to send: their messages, the rows, and the CUDA event after which the rows are there.
        self._waiting: queue.Queue[tuple[list[_Message], torch.Tensor, Any]] = queue.Queue(_STEPS_AHEAD)
        threading.Thread(target=self._send_all, name="rows", daemon=True).start()
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
        """Copy the rows out of the graph's buffer, which the next replay overwrites; a thread sends the copy.

        The part for CUDA was written without a GPU at hand, and has not run on one.
        """
        taken = states.index_select(0, rows)
        if taken.dtype is not torch.bfloat16:
            taken = taken.float()
        if not taken.is_cuda:
            self._waiting.put((messages, taken, None))
            return
        # On the stream of the forward, so before the replay; the model does not wait for it.
        pinned = torch.empty(taken.shape, dtype=taken.dtype, pin_memory=True)
        pinned.copy_(taken, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._waiting.put((messages, pinned, copied))

    def _send_all(self) -> None:
        """Send waiting rows to the server. Runs in a separate thread, so that the model waits for nothing of this."""
        connected = True
        while True:
            messages, rows, copied = self._waiting.get()
            if not connected:
                continue  # the server has exited, and vLLM will be stopped
            if copied is not None:
                copied.synchronize()
            try:
                self._connection.sendall(_packed(messages, rows))
            except OSError:
                connected = False


def _packed(messages: list[_Message], rows: torch.Tensor) -> bytes:
    is_half = rows.dtype is torch.bfloat16
    numbers = (rows.view(torch.int16) if is_half else rows).numpy()
    data = bytearray()
    first = 0
    for one in messages:
        count = len(one.indices)
        header = SentRows(one.key, count, numbers.shape[1], bfloat16=is_half)
        body = one.indices.tobytes() + one.positions.tobytes() + numbers[first : first + count].tobytes()
        data += encode_message(header, body)
        first += count
    return bytes(data)


_SEND_BUFFER_BYTES: Final = 4 << 20


def connect_worker(address: str) -> socket.socket:
    """Connect a worker to the WorkerChannel at ``address``, and return the socket. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    connection.connect(address)
    return connection


@dataclass(frozen=True, slots=True)
class AskedRows:
    """Consecutive rows of one request in a step: ``count`` rows of the step, from the index ``first_row`` on.

    The first row belongs to the token with the index ``begins`` in the prompt and answer of the request.
    """

    #: The value in ``extra_args`` with which the request asks.
    asked: Any
    #: The index of the request in the runner's batch.
    index: int
    first_row: int
    begins: int
    count: int


class StepWatch:
    """A watch on the steps of vLLM's model ``runner``, which finds requests that ask for their rows.

    A request asks with the key ``name`` in the ``extra_args`` of its sampling parameters. Other requests cost only one
    look-up each. The watch wraps ``runner.execute_model``.
    """

    def __init__(self, runner: Any, name: str) -> None:
        self._runner = runner
        self._name = name
        self._scheduled: Any = None
        execute = runner.execute_model

        def execute_model(scheduled: Any, *arguments: Any, **options: Any) -> Any:
            self._scheduled = scheduled
            return execute(scheduled, *arguments, **options)

        runner.execute_model = execute_model

    def asked(self) -> Iterator[AskedRows]:
        """Yield the requested rows of the step that is about to run. To be called once for each step.

        The call has to come after the preparation of the input and just before the model's forward pass: only then are
        the rows in the order in which the model gets them. A forward pass outside a step, as in the warm-up, has no
        rows.
        """
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is None:
            return
        batch, row = self._runner.input_batch, 0
        for index, request_id in enumerate(batch.req_ids):
            count = scheduled.num_scheduled_tokens.get(request_id, 0)
            sampling = self._runner.requests[request_id].sampling_params
            asked = ((sampling and sampling.extra_args) or {}).get(self._name)
            if asked is not None:
                yield AskedRows(asked, index, row, int(batch.num_computed_tokens_cpu[index]), count)
            row += count


# Logits processors that constrain a speech language model to the tokens of each slot in its codec frames. vLLM loads a
# logits processor by name in its engine process. There are two, as each generation of vLLM's model runner has an
# interface of its own; the configuration of the engine decides which processor runs (``processor_name``).

_PATTERN: Final = "codec_pattern"


class Pattern(NamedTuple):
    """The tokens that a Talker may generate.

    In slot ``i``, these are ``codebook_size`` IDs from ``first_token + i * codebook_size`` on. The token ``stop`` is
    allowed after each whole frame.
    """

    first_token: int
    codebook_size: int
    slots: int
    stop: int


def extra_arguments(pattern: Pattern) -> dict[str, Any]:
    """Return the ``SamplingParams.extra_args`` of a request that is constrained to ``pattern``."""
    return {_PATTERN: list(pattern)}


def processor_name(vllm_config: Any) -> str:
    """Return the entry of ``logits_processors`` for the model runner that this configuration uses."""
    processor = CodecPatternRows if vllm_config.use_v2_model_runner else CodecPattern
    return f"{processor.__module__}:{processor.__qualname__}"


def _pattern_of(params: SamplingParams) -> Pattern | None:
    """Return the pattern that a request asks for; None without one. Raises ValueError for a malformed pattern."""
    wanted = (params.extra_args or {}).get(_PATTERN)
    if wanted is None:
        return None
    if not isinstance(wanted, list | tuple) or len(wanted) != 4 or any(type(number) is not int for number in wanted):
        raise ValueError(f"{_PATTERN} must be [first token, codebook size, slots per frame, stop token]")
    pattern = Pattern(*wanted)
    if min(pattern.first_token, pattern.stop) < 0 or min(pattern.codebook_size, pattern.slots) < 1:
        raise ValueError(f"{_PATTERN}: token ids must not be negative; codebook size and slots must be at least 1")
    return pattern


class CodecPattern(AdapterLogitsProcessor):  # type: ignore[misc]
    """The logits processor for vLLM's model runner V1, called for one request at a time."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        _pattern_of(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> partial[torch.Tensor] | None:
        pattern = _pattern_of(params)
        return None if pattern is None else partial(_keep_slot, pattern)


def _keep_slot(pattern: Pattern, output_tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Return ``logits`` with -inf for all tokens that ``pattern`` does not allow after ``output_tokens``."""
    done = len(output_tokens)
    slot = done % pattern.slots
    low = pattern.first_token + slot * pattern.codebook_size
    kept = torch.full_like(logits, -math.inf)
    kept[low : low + pattern.codebook_size] = logits[low : low + pattern.codebook_size]
    if slot == 0 and done:
        kept[pattern.stop] = logits[pattern.stop]
    return kept


class CodecPatternRows(RowLogitsProcessor):  # type: ignore[misc]
    """The logits processor for vLLM's second model runner, called once for all rows of a step, on the device."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        super().__init__(vllm_config, req_states)
        self._requests = req_states
        #: The Pattern of each request, by the request's index; ``slots`` is 0 for requests without a pattern.
        self._patterns = np.zeros((req_states.max_num_reqs, len(Pattern._fields)), np.int64)
        self._on_device = torch.zeros(self._patterns.shape, dtype=torch.int64, device=req_states.device)
        self._tokens = torch.arange(req_states.vocab_size, device=req_states.device)
        self._changed = False

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        _pattern_of(sampling_params)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        pattern = _pattern_of(sampling_params)
        self._patterns[req_idx] = (0, 0, 0, 0) if pattern is None else pattern
        self._changed = True
        return pattern is not None

    def apply_staged_writes(self) -> None:
        if self._changed:
            # Transfer a copy, because the next step may change the host's array before the transfer has finished.
            self._on_device.copy_(torch.from_numpy(self._patterns.copy()))
            self._changed = False

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        if not self._patterns[ctx.idx_mapping_np, Pattern._fields.index("slots")].any():
            return logits
        requests = ctx.expanded_idx_mapping.long()
        first, size, slots, stop = self._on_device[requests].unsqueeze(-1).unbind(1)
        # A row samples the token after position ``pos``.
        done = (ctx.pos + 1 - self._requests.prompt_len.gpu[requests]).long().unsqueeze(-1)
        slot = done % slots.clamp(min=1)
        low = first + slot * size
        kept = (self._tokens >= low) & (self._tokens < low + size)
        kept |= (self._tokens == stop) & (slot == 0) & (done > 0)
        kept |= slots == 0
        return logits.masked_fill_(~kept[:, : logits.shape[-1]], -math.inf)
