"""SlotTalker: a Talker as a StepModel, whose sessions have slots of its KV cache.

``talker`` and ``vocoder`` are the factories of the models that the two StepProcesses of an omni model run.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.omni.qwen3_code2wav import CONTEXT_FRAMES, Code2WavShape, Qwen3Code2Wav
from omni_ws.engine.omni.step_process import (
    AnswerEnd,
    AnswerRows,
    Codes,
    CodesEnd,
    LoadedModel,
    PromptReset,
    PromptRows,
    StepResult,
    TalkerItem,
    TalkerSettings,
)
from omni_ws.engine.omni.talker_network import (
    Qwen3Talker,
    Qwen25Talker,
    RowQueue,
    SlotSpace,
    StepBuffers,
    TalkerNetwork,
    TalkerRows,
    plain_rows,
)
from omni_ws.engine.omni.transformer import (
    BlockShape,
    CheckpointTensors,
    load_speakers,
)
from omni_ws.engine.omni.vocoder import StepGraphs, Vocoder
from omni_ws.errors import EngineOverloaded, InvalidValue

#: The sample rate of both families, in Hz, which no configuration file contains.
SAMPLE_RATE: Final = 24_000


def talker(folder: str, slots: int, positions: int) -> LoadedModel:
    """Load the Talker of the checkpoint in ``folder``, with ``slots`` slots of ``positions`` positions each.

    See ``load_talker``. Raises ConfigurationError. The facts of the LoadedModel are ``voices``: the names of the
    voices, the default first.
    """
    model = load_talker(Path(folder), slots=slots, longest=positions)
    return model, {"voices": model.voices}


def vocoder(folder: str, slots: int) -> LoadedModel:
    """Load the vocoder of the checkpoint in ``folder``, on a GPU if there is one. Raises ConfigurationError.

    The facts of the LoadedModel are ``sample_rate`` in Hz; ``frame_ms``, the duration of a codec frame in milliseconds;
    ``context_frames``, see ``StepSession.decode``; and ``block``, see VocoderStage (None for Qwen3).
    """
    path = Path(folder)
    config = orjson.loads((path / "config.json").read_bytes())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Vocoder[Any]
    context, block = 0, None
    if "code2wav_config" in config:
        shape, context = Code2WavShape.read(config["code2wav_config"]), CONTEXT_FRAMES
        model = Qwen3Code2Wav(shape, _weights(path, "code2wav."), slots=slots, device=device)
    else:
        from omni_ws.engine.omni.vocoder import (
            ODE_STEPS,
            STREAMING,
            Qwen25Token2Wav,
            Token2WavNetwork,
        )

        sizes, weights, speakers = config["token2wav_config"], _weights(path, "token2wav."), load_speakers(path)
        network = Token2WavNetwork(sizes, weights, speakers, ode_steps=ODE_STEPS, device=device)
        model, block = Qwen25Token2Wav(network, slots=slots), STREAMING.first * network.codes_per_block
    frame_ms = model.samples_per_frame * 1000 / SAMPLE_RATE
    return model, {"sample_rate": SAMPLE_RATE, "frame_ms": frame_ms, "context_frames": context, "block": block}


def _weights(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a module, whose names begin with ``prefix``, by their names without it."""
    tensors = CheckpointTensors(folder)
    return {name.removeprefix(prefix): tensors.tensor(name) for name in tensors.names(prefix)}


_QWEN3: Final = "qwen3_omni_moe"
#: The path of the configuration of the Talker's transformer in config.json, by ``model_type``.
_TALKER_CONFIGS: Final[Mapping[str, tuple[str, ...]]] = {
    _QWEN3: ("talker_config", "text_config"),
    "qwen2_5_omni": ("talker_config",),
}


def load_talker(
    folder: str | Path,
    *,
    slots: int,
    longest: int,
    device: str | None = None,
    dtype: str | None = None,
    piece: int = 256,
    read_late: bool | None = None,
) -> SlotTalker:
    """Load the Talker of the checkpoint in ``folder``, and no other part of the model.

    The Talker has ``slots`` for sessions, each with ``longest`` positions for the rows of the prompt and the frames of
    the answer. ``device`` is by default a GPU if there is one; ``dtype`` is by default "bfloat16" on a GPU and
    "float32" on a CPU. For ``piece`` and ``read_late`` see SlotTalker. Raises ConfigurationError.
    """
    folder = Path(folder)
    config = _config(folder)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if torch.device(device).type == "cpu" else "bfloat16")
    space = SlotSpace(slots, longest, device, getattr(torch, dtype))
    tensors = CheckpointTensors(folder)
    network: TalkerNetwork
    try:
        if config["model_type"] == _QWEN3:
            network = Qwen3Talker(tensors, config, space)
        else:
            speakers = {name: speaker.bos_token for name, speaker in load_speakers(folder).items()}
            network = Qwen25Talker(tensors, config, space, speakers)
    except KeyError as error:
        raise ConfigurationError([f"{folder / 'config.json'}: {error.args[0]} is missing"]) from error
    return SlotTalker(network, piece=piece, read_late=read_late)


def talker_memory(folder: str | Path, *, slots: int, longest: int, value_bytes: int = 2) -> int:
    """Return how many bytes ``load_talker`` will take for weights and slots; reads config.json and the files' headers.

    ``value_bytes`` is the size of a number in memory. CUDA's context, libraries and graphs take further memory. Raises
    ConfigurationError.
    """
    folder = Path(folder)
    config = _config(folder)
    sizes: Mapping[str, Any] = config
    path = _TALKER_CONFIGS[config["model_type"]]
    try:
        for name in path:
            sizes = sizes[name]
        vocabulary = int(sizes["vocab_size"])
    except KeyError as error:
        raise ConfigurationError([f"{folder / 'config.json'}: {error.args[0]} is missing"]) from error
    position = BlockShape.of(sizes, ".".join(path)).positions_bytes(value_bytes)
    # A slot has a byte for each code, for the repetition penalty: whether its session has drawn the code.
    return CheckpointTensors(folder).bytes_of("talker.", value_bytes) + slots * (longest * position + vocabulary)


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    try:
        config = orjson.loads(path.read_bytes())
        kind = config.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError([f"{path}: not readable: {error}"]) from error
    if kind not in _TALKER_CONFIGS:
        known = ", ".join(_TALKER_CONFIGS)
        raise ConfigurationError([f"{path}: model_type {kind!r} has no Talker here; known are {known}"])
    if "talker_config" not in config:
        raise ConfigurationError([f"{path}: the model has no Talker"])
    result: Mapping[str, Any] = config
    return result


#: The batch sizes of steps below the number of slots, which is the largest batch size.
_BATCHES: Final = (1, 2, 4, 8, 16, 32)
#: The smallest window of positions that a step attends to; further windows are 2, 4, 8 … times as large.
_SMALLEST_WINDOW: Final = 256


class SlotTalker:
    """A Talker as a StepModel: each step makes one codec frame for every session that is ready.

    A session takes the lowest free slot, so that the batch of a step covers only the first slots. A step also computes
    up to ``piece`` rows of one session's prompt. With ``read_late``, the default on a GPU, a step returns the frames
    that the previous step began, so that the device always has work; when an answer ends, one frame too many may then
    have been begun.
    """

    def __init__(self, network: TalkerNetwork, *, piece: int = 256, read_late: bool | None = None) -> None:
        self.network = network
        self._space = network.space
        self._piece = piece
        self._read_late = torch.device(self._space.device).type == "cuda" if read_late is None else read_late
        self._free = list(range(self._space.slots))
        self._answers: dict[int, TalkerAnswer] = {}
        self._buffers = StepBuffers(self._space, network.hidden_size, network.codebooks)
        self._graphs = StepGraphs(self._device_step, self._space.device)
        #: Reads the frames that the last step has begun.
        self._unread: Callable[[], list[StepResult]] | None = None

    @property
    def voices(self) -> tuple[str, ...]:
        """The names of the voices, the default first."""
        return self.network.voices

    @property
    def codebooks(self) -> int:
        return self.network.codebooks

    @property
    def slots(self) -> int:
        return self._space.slots

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def memory_bytes(self) -> int:
        """The bytes of weights and slots; on a GPU, all memory that PyTorch has reserved, with buffers and graphs."""
        if torch.device(self._space.device).type == "cuda":
            return int(torch.cuda.memory_reserved(self._space.device))
        return self.network.memory_bytes

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def warm_up(self) -> None:
        """Capture (on a CPU: run) every shape of a step, and compute a piece of a prompt. No session may be open."""
        assert not self._answers
        self._graphs.warm_up([(batch, window) for batch in self._batches() for window in self._windows()])
        count = min(self._piece, self._space.longest)
        self.network.prefill(0, 0, plain_rows([0] * count, [0] * count, 0, self.network.hidden_size))
        self.network.reset()

    def open(self, session: int, settings: Mapping[str, Any]) -> None:
        checked = self.network.defaults.changed(settings, self.voices)
        if session in self._answers:
            raise ValueError(f"session {session} is open already")
        if not self._free:
            raise EngineOverloaded("all slots are taken")
        slot = heapq.heappop(self._free)
        with torch.no_grad():
            self.network.open(slot, checked)
        self._answers[session] = TalkerAnswer(session, slot, checked, self.network)

    def feed(self, session: int, item: TalkerItem) -> None:
        """Queue an item for the session; ignored if the answer or the session has ended. Raises InvalidValue."""
        answer = self._answers.get(session)
        if answer is None:
            return
        try:
            answer.feed(item)
        except InvalidValue:
            self.close(session)
            raise

    def grant(self, session: int, frames: int) -> None:
        if answer := self._answers.get(session):
            answer.grant(frames)

    def close(self, session: int) -> None:
        answer = self._answers.pop(session, None)
        if answer is not None:
            answer.end()
            heapq.heappush(self._free, answer.slot)

    @property
    def busy(self) -> bool:
        return self._unread is not None or any(
            answer.can_step or (not answer.over and (bool(answer.prompt) or answer.is_empty))
            for answer in self._answers.values()
        )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self) -> Sequence[StepResult]:
        """Compute a piece of one prompt and the next frame of each ready session; return the finished frames.

        With ``read_late``, these are the frames that the previous step began.
        """
        results = [
            self._ended_empty(answer) for answer in self._answers.values() if answer.is_empty and not answer.over
        ]
        self._compute_prompt()
        ready = [answer for answer in self._answers.values() if answer.can_step]
        read, self._unread = self._unread, self._begin(ready) if ready else None
        if not self._read_late:
            read, self._unread = self._unread, None
        return results + (read() if read else [])

    def _ended_empty(self, answer: TalkerAnswer) -> StepResult:
        answer.end()
        return answer.session, Codes(np.zeros((0, self.codebooks), np.int64), CodesEnd.STOP)

    def _begin(self, ready: list[TalkerAnswer]) -> Callable[[], list[StepResult]]:
        """Start to compute a frame for each session in ``ready``; return a function that waits for these frames."""
        self._buffers.begin()
        for answer in self._answers.values():
            self._buffers.put_lengths(answer.slot, min(answer.length, self._space.longest - 1))
        rows = [answer.take_row() for answer in ready]
        vectors = self.network.embedded(np.array([token for token, _ in rows]))
        for vector, (_, state) in zip(vectors, rows, strict=True):
            if state is not None:
                vector += torch.tensor(state)  # copies: an unpickled array may be read-only
        self._buffers.put_rows([answer.slot for answer in ready], vectors)
        begun = []
        for answer in ready:
            self._buffers.put(answer.slot, answer.position, answer.frames)
            answer.begin_frame()
            begun.append((answer, answer.rows_used, answer.frames == answer.most_frames))
        self._buffers.send()
        batch = self._fitting(self._batches(), max(answer.slot for answer in ready) + 1)
        window = self._fitting(self._windows(), max(answer.length for answer in ready))
        return partial(self._read, begun, self._buffers.fetch(self._graphs.run(batch, window)))

    def _compute_prompt(self) -> None:
        """Compute a piece of one session's prompt. Sessions whose answer has begun come first, the others in turn."""
        waiting = [answer for answer in self._answers.values() if answer.prompt and not answer.over]
        if not waiting:
            return
        answer = next((answer for answer in waiting if answer.answering), waiting[0])
        start = answer.length
        self.network.prefill(answer.slot, start, answer.take_prompt(self._piece))
        self._answers[answer.session] = self._answers.pop(answer.session)

    def _read(self, begun: list[tuple[TalkerAnswer, int, bool]], wait: Callable[[], torch.Tensor]) -> list[StepResult]:
        """Wait for the frames, and return those of answers that are not over.

        ``begun`` has for each frame the answer, the number of rows that the answer had used, and whether this is the
        last frame allowed.
        """
        codes = wait().numpy()
        results: list[StepResult] = []
        for answer, rows_used, is_last in begun:
            if answer.over:
                continue
            made, end = codes[answer.slot : answer.slot + 1].copy(), CodesEnd.LENGTH if is_last else None
            if int(made[0, 0]) in self.network.end_codes:
                made, end = made[:0], CodesEnd.STOP
            if end is not None:
                answer.end()
            results.append((answer.session, Codes(made, end, rows_used)))
        return results

    def _device_step(self, batch: int, window: int) -> torch.Tensor:
        return self.network.step(self._buffers, batch, window)

    def _batches(self) -> list[int]:
        return [*(size for size in _BATCHES if size < self._space.slots), self._space.slots]

    def _windows(self) -> list[int]:
        sizes = [_SMALLEST_WINDOW]
        while sizes[-1] < self._space.longest:
            sizes.append(2 * sizes[-1])
        return [*sizes[:-1], self._space.longest]

    @staticmethod
    def _fitting(sizes: list[int], needed: int) -> int:
        return next(size for size in sizes if size >= needed)


class TalkerAnswer:
    """The state of one session on the CPU: rows that wait to be computed or spoken, and the granted frames."""

    def __init__(self, session: int, slot: int, settings: TalkerSettings, network: TalkerNetwork) -> None:
        self.session = session
        self.slot = slot
        #: Rows of the prompt that have not been computed.
        self.prompt = RowQueue()
        #: The number of positions that are computed in the slot.
        self.length = 0
        #: The number of frames begun, and the limit.
        self.frames = 0
        self.most_frames = settings.max_tokens
        #: Whether the answer has ended, or was closed.
        self.over = False
        self._granted = 0
        self._settings = settings
        self._network = network
        self._reader = network.reader(settings.voice)
        #: Whether the prompt is complete.
        self.answering = False
        self._answer_complete = False
        #: The M-RoPE position of the first frame.
        self._position = 0
        #: Rows of the answer that have not been spoken: their tokens, and hidden states where the family has them.
        self._tokens: deque[int] = deque()
        self._states: deque[NDArray[np.float32]] = deque()
        self._rows_read = self._rows_taken = 0

    @property
    def is_empty(self) -> bool:
        """Whether the answer ended without any row from the Thinker."""
        return self._answer_complete and not self._rows_read

    @property
    def can_step(self) -> bool:
        """Whether the next frame can be made: the prompt is computed, a row waits, and a granted frame is left."""
        return (
            not self.over
            and self.answering
            and not self.prompt
            and self._granted > 0
            and self.frames < self.most_frames
            and (bool(self._tokens) or (self._answer_complete and not self.is_empty))
        )

    @property
    def position(self) -> int:
        """The M-RoPE position of the next frame, on all three axes."""
        return self._position + self.frames

    @property
    def rows_used(self) -> int:
        """The number of the answer's rows, from the Thinker, that the frames begun so far have read."""
        return min(self._rows_taken, self._rows_read)

    def grant(self, frames: int) -> None:
        """Allow ``frames`` more codec frames; no frame is made that was not allowed."""
        self._granted += frames

    def end(self) -> None:
        """End the answer: no frame follows."""
        self.over = True

    def take_prompt(self, most: int) -> TalkerRows:
        """Remove and return up to ``most`` rows of the prompt, for the caller to compute now."""
        rows = self.prompt.take(most)
        self.length += len(rows)
        return rows

    def begin_frame(self) -> None:
        """Count a frame whose computation begins, and use up one granted frame."""
        self.length += 1
        self.frames += 1
        self._granted -= 1

    def feed(self, item: TalkerItem) -> None:
        """Check and queue an item; ignored if the answer is over.

        Raises InvalidValue, after which the session must be closed.
        """
        match item:
            case _ if self.over:
                pass
            case PromptRows():
                self._read_prompt(item)
            case PromptReset():
                self._require(not self.answering, "the prompt cannot begin anew once the answer has begun")
                self.prompt, self.length = RowQueue(), 0
                self._reader = self._network.reader(self._settings.voice)
            case AnswerRows():
                self._read_answer(item)
            case AnswerEnd():
                self._require(not self._answer_complete, "the answer has ended already")
                self._answer_complete = True

    def take_row(self) -> tuple[int, NDArray[np.float32] | None]:
        """Remove and return the next row of the answer: its token, and its hidden state (None for Qwen3).

        After the answer's last row, returns the tokens of ``TalkerNetwork.after_answer``, without states.
        """
        self._rows_taken += 1
        if self._tokens:
            return self._tokens.popleft(), self._states.popleft() if self._states else None
        first, later = self._network.after_answer
        return (first if self._rows_taken == self._rows_read + 1 else later), None

    def _read_prompt(self, item: PromptRows) -> None:
        self._require(not self.answering, "rows of the prompt after the answer has begun")
        count, size = len(item.tokens), self._network.hidden_size
        self._check_tokens(item.tokens)
        fit = item.positions.shape == (3, count) and item.states.shape == (count,) and item.states.dtype == np.bool_
        self._require(fit, "tokens, positions and states of the prompt's rows do not match")
        self._check_states(item.hidden, (int(item.states.sum()), size))
        self.prompt.put(self._reader.read(item))
        self._check_length()

    def _read_answer(self, item: AnswerRows) -> None:
        self._require(not self._answer_complete, "rows of the answer after its end")
        count = len(item.tokens)
        self._check_tokens(item.tokens)
        self._check_states(item.hidden, (count if self._network.answer_states else 0, self._network.hidden_size))
        if not self.answering:
            self._begin_answer()
        # Each frame reads one row, so rows beyond the limit on frames are never read.
        room = max(0, self.most_frames - self._rows_read)
        self._tokens.extend(item.tokens[:room].tolist())
        self._states.extend(item.hidden[:room])
        self._rows_read += count

    def _begin_answer(self) -> None:
        rows, self._position = self._reader.end()
        self.prompt.put(rows)
        self._check_length()
        self.answering = True
        room = self._network.space.longest - self.length - len(self.prompt)
        self.most_frames = min(self.most_frames, room)

    def _check_length(self) -> None:
        longest = self._network.space.longest
        rows = self.length + len(self.prompt)
        # The first frame needs a position, too.
        self._require(rows < longest, f"the prompt is too long for the Talker: {rows} rows, at most {longest - 1}")

    def _check_tokens(self, tokens: NDArray[np.int64]) -> None:
        known = tokens.ndim == 1 and tokens.dtype == np.int64
        known = known and (not len(tokens) or (tokens.min() >= 0 and tokens.max() < self._network.vocabulary))
        self._require(bool(known), f"tokens must be numbers from 0 to {self._network.vocabulary - 1}")

    def _check_states(self, hidden: NDArray[np.float32], shape: tuple[int, int]) -> None:
        self._require(hidden.shape == shape, f"the Thinker's states must have the shape {shape}, got {hidden.shape}")
        # A NaN would stay in the slot's KV cache and spoil later sessions.
        self._require(bool(np.isfinite(hidden).all()), "the Thinker's states must be finite")

    @staticmethod
    def _require(holds: bool, otherwise: str) -> None:
        if not holds:
            raise InvalidValue(otherwise)
