"""The Talkers of Qwen3-Omni and Qwen2.5-Omni: the rows that they read, their network, and the sampling of codes.

WholePromptReader (Qwen2.5-Omni) and UserTurnsReader (Qwen3-Omni) convert the Thinker's prompt to TalkerRows as it
arrives. Shapes: B sessions, V codes of a vocabulary, C candidate codes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from omni_ws.engine.omni.step_process import PromptRows, TalkerSettings
from omni_ws.engine.omni.transformer import (
    BlockShape,
    CheckpointTensors,
    Put,
    SlotCache,
    Transformer,
    default_speaker,
)
from omni_ws.errors import InvalidValue

#: In place of the token of a row without a token, and of the code of a row without a code.
NONE: Final = -1


@dataclass(frozen=True, slots=True)
class TalkerRows:
    """Rows of a Talker's prompt; a *row* is the network's input for one position.

    A row is made of up to three parts: the embedding of a token, a hidden state of the Thinker, and the embedding of
    a codec code. ``tokens`` (n,) and ``codes`` (n,) are NONE for rows without this part; ``states`` (n,) marks the rows
    with a hidden state, and ``hidden`` (k, hidden size) has these states in order. ``positions`` (3, n) are M-RoPE
    positions.
    """

    tokens: NDArray[np.int64]
    states: NDArray[np.bool_]
    hidden: NDArray[np.float32]
    codes: NDArray[np.int64]
    positions: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)

    def split(self, count: int) -> tuple[TalkerRows, TalkerRows]:
        """Return the first ``count`` rows, and the others."""
        hidden = int(self.states[:count].sum())
        return (
            TalkerRows(
                self.tokens[:count],
                self.states[:count],
                self.hidden[:hidden],
                self.codes[:count],
                self.positions[:, :count],
            ),
            TalkerRows(
                self.tokens[count:],
                self.states[count:],
                self.hidden[hidden:],
                self.codes[count:],
                self.positions[:, count:],
            ),
        )


class RowQueue:
    """A queue of TalkerRows that wait to be computed; its length is the number of rows."""

    def __init__(self) -> None:
        self._pieces: deque[TalkerRows] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, rows: TalkerRows) -> None:
        if len(rows):
            self._pieces.append(rows)
            self._count += len(rows)

    def take(self, most: int) -> TalkerRows:
        """Remove and return up to ``most`` rows. The queue must not be empty."""
        taken, count = [], 0
        while self._pieces and count < most:
            first = self._pieces.popleft()
            if count + len(first) > most:
                first, rest = first.split(most - count)
                self._pieces.appendleft(rest)
            taken.append(first)
            count += len(first)
        self._count -= count
        return TalkerRows(
            np.concatenate([rows.tokens for rows in taken]),
            np.concatenate([rows.states for rows in taken]),
            np.concatenate([rows.hidden for rows in taken]),
            np.concatenate([rows.codes for rows in taken]),
            np.concatenate([rows.positions for rows in taken], axis=1),
        )


class WholePromptReader:
    """A converter of one prompt to rows for Qwen2.5: a row is made of a token's hidden state and its embedding.

    ``media`` are the tokens of audio, images and video, whose rows have no embedding. ``last`` is the token and the
    code of the row that ends the prompt. After InvalidValue the reader must not be used.
    """

    def __init__(self, media: Sequence[int], last: tuple[int, int], hidden_size: int) -> None:
        self._media = np.array(media)
        self._last = last
        self._hidden_size = hidden_size
        self._position = 0

    def read(self, item: PromptRows) -> TalkerRows:
        """Return the rows for the next tokens of the prompt. Raises InvalidValue if a state they need is missing."""
        if not item.states.all():
            raise InvalidValue("the Talker needs the Thinker's state of every token of the prompt")
        if len(item.tokens):
            self._position = max(self._position, int(item.positions.max()) + 1)
        tokens = np.where(np.isin(item.tokens, self._media), NONE, item.tokens)
        return TalkerRows(tokens, item.states, item.hidden, np.full(len(tokens), NONE), item.positions)

    def end(self) -> tuple[TalkerRows, int]:
        """Return the rows after the prompt, and the M-RoPE position of the first row of the answer.

        UserTurnsReader raises InvalidValue for a prompt that does not end with the beginning of the assistant's turn.
        """
        token, code = self._last
        return plain_rows([token], [code], self._position, self._hidden_size), self._position + 1


class UserTurnsReader:
    """A converter of one prompt to rows for Qwen3, whose Talker reads only the user's turns.

    Its methods are those of WholePromptReader. A row is the embedding of a text token, or the hidden state of a token
    of audio, image or video. Positions are shifted so that the other turns leave no gaps. After the user's turns come
    the three tokens that begin the assistant's turn, and rows with codes, among them the code of the ``speaker``.
    ``config`` is the whole config.json. Raises KeyError for a missing entry.
    """

    #: The number of tokens that begin the assistant's turn: "<|im_start|>", "assistant" and a line break.
    _HEADER: Final = 3

    def __init__(self, config: Mapping[str, Any], speaker: int, hidden_size: int) -> None:
        thinker, talker = config["thinker_config"], config["talker_config"]
        self._hidden_size = hidden_size
        #: "<|im_start|>", which begins each turn; the role's token follows.
        self._turn: int = config["im_start_token_id"]
        self._user: int = config["user_token_id"]
        self._assistant: int = config["assistant_token_id"]
        self._media = [thinker[f"{kind}_token_id"] for kind in ("audio", "image", "video")]
        self._text_pad: int = config["tts_pad_token_id"]
        self._text_start: int = config["tts_bos_token_id"]
        style = [talker[f"codec_{name}_id"] for name in ("nothink", "think_bos", "think_eos")]
        #: The codes of the rows that end the prompt.
        self._codes: list[int] = [*style, speaker, talker["codec_pad_id"]]
        #: The first token of a turn, held until the next token tells whose turn it is.
        self._held: PromptRows | None = None
        #: Whether the current turn is the user's.
        self._reads = False
        #: What is added to the positions of the current turn.
        self._shift = 0
        #: The position that follows all rows so far.
        self._position = 0
        #: The first tokens of the assistant's turn, while that is the last turn so far.
        self._header: list[int] | None = None

    def read(self, item: PromptRows) -> TalkerRows:
        if self._held is not None:
            item, self._held = _joined(self._held, item), None
        tokens, count = item.tokens, len(item.tokens)
        starts = np.flatnonzero(tokens == self._turn).tolist()
        if starts and starts[-1] == count - 1:
            count = starts.pop()
            item, self._held = item.split(count)
        picked, shifts = np.zeros(count, np.bool_), np.zeros(count, np.int64)
        for start, end in pairwise([0, *starts, count]):
            if start == end:
                continue
            if tokens[start] == self._turn:
                # The role may be in ``self._held``, so it is looked up in ``tokens``, which are not cut.
                self._begin_turn(tokens[start + 1], int(item.positions[0, start]))
            if self._header is not None:
                self._header += item.tokens[start:end][: self._HEADER - len(self._header)].tolist()
            if self._reads:
                picked[start:end], shifts[start:end] = True, self._shift
                self._position = max(self._position, int(item.positions[:, start:end].max()) + self._shift + 1)
        return self._rows(item, picked, shifts)

    def _begin_turn(self, role: int, position: int) -> None:
        self._reads = role == self._user
        self._header = [] if role == self._assistant else None
        self._shift = self._position - position

    def _rows(self, item: PromptRows, picked: NDArray[np.bool_], shifts: NDArray[np.int64]) -> TalkerRows:
        media = np.isin(item.tokens, self._media)
        if (picked & media & ~item.states).any():
            raise InvalidValue("the Talker needs the Thinker's states of what the user's turns show or play")
        hidden = item.hidden[(picked & media)[item.states]]
        media = media[picked]
        tokens = np.where(media, NONE, item.tokens[picked])
        positions = (item.positions + shifts)[:, picked]
        return TalkerRows(tokens, media, hidden, np.full(len(tokens), NONE), positions)

    def end(self) -> tuple[TalkerRows, int]:
        header, codes = self._header or [], self._codes
        if len(header) < self._HEADER or self._held is not None:
            raise InvalidValue("the prompt must end with the beginning of the assistant's turn")
        tokens = [*header, *[self._text_pad] * (len(codes) - 1), self._text_start]
        rows = plain_rows(tokens, [NONE] * len(header) + codes, self._position, self._hidden_size)
        return rows, self._position + len(rows)


def plain_rows(tokens: list[int], codes: list[int], position: int, hidden_size: int) -> TalkerRows:
    """Return rows without hidden states, at consecutive positions from ``position`` on."""
    count = len(tokens)
    positions = np.broadcast_to(np.arange(position, position + count), (3, count))
    states, hidden = np.zeros(count, np.bool_), np.zeros((0, hidden_size), np.float32)
    return TalkerRows(np.array(tokens), states, hidden, np.array(codes), positions)


def _joined(first: PromptRows, second: PromptRows) -> PromptRows:
    return PromptRows(
        np.concatenate((first.tokens, second.tokens)),
        np.concatenate((first.positions, second.positions), axis=1),
        np.concatenate((first.states, second.states)),
        np.concatenate((first.hidden, second.hidden)),
    )


# The Talkers of Qwen3-Omni and Qwen2.5-Omni, the network that both share, and the sampling of codes (SamplingState).
#
# Shapes: B sessions, V codes of a vocabulary, C candidate codes.


#: The Thinker's embeddings, which stay on the CPU: the Talker looks up single rows of them.
EMBEDDINGS: Final = "thinker.model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class SlotSpace:
    """The slots of a Talker: their number, the positions of a slot (``longest``), device and dtype."""

    slots: int
    longest: int
    device: str
    dtype: torch.dtype


class TalkerNetwork(ABC):
    """Base class of the two Talkers' networks: weights, KV cache in slots, and two forward passes.

    ``prefill`` computes rows of one session's prompt, ``step`` computes a frame for each session of a batch.
    """

    #: The names of the voices, the default first.
    voices: tuple[str, ...]
    #: The settings of a session that asks for none.
    defaults: TalkerSettings
    #: The tokens of the rows after the answer: of the first such row, and of all further ones.
    after_answer: tuple[int, int]
    #: The codes of the first codebook that end an answer.
    end_codes: frozenset[int]
    codebooks: int
    #: Whether rows of the answer contain the Thinker's hidden states.
    answer_states: bool
    #: The code that stands in for the frame before the first.
    _start_code: int

    def __init__(
        self, source: CheckpointTensors, space: SlotSpace, shape: BlockShape, sampling: SamplingState, first_codes: str
    ) -> None:
        self.space = space
        self._embeddings = source.tensor(EMBEDDINGS)
        self._transformer = Transformer(source, "talker.model", shape, space.device, space.dtype)
        self._cache = SlotCache(shape, space.slots, space.longest, space.device, space.dtype)
        self._sampling = sampling
        self._head = source.tensor("talker.codec_head.weight").to(space.device, space.dtype)
        #: The embeddings of the first codebook.
        self._codes = source.tensor(first_codes).to(space.device, space.dtype)
        #: The sum of the embeddings of the codes in each slot's last frame, which is added to the next row.
        self._feedback = torch.zeros(space.slots, self._codes.shape[1], device=space.device, dtype=space.dtype)

    @property
    def memory_bytes(self) -> int:
        """The size of all tensors of the network on the device, in bytes."""
        return held_bytes(vars(self), {id(self._embeddings)})

    @property
    def hidden_size(self) -> int:
        """The size of the Thinker's states and embeddings."""
        return int(self._embeddings.shape[1])

    @property
    def vocabulary(self) -> int:
        """The number of tokens in the Thinker's vocabulary."""
        return int(self._embeddings.shape[0])

    @abstractmethod
    def reader(self, voice: str) -> WholePromptReader | UserTurnsReader:
        """Return a new reader for the prompt of an answer in ``voice``."""

    def open(self, slot: int, settings: TalkerSettings) -> None:
        """Prepare a slot for a session with ``settings``, whose seed must be set."""
        self._sampling.open(slot, settings)
        self._feedback[slot] = self._codes[self._start_code]

    def reset(self) -> None:
        """Set the contents of all slots to zero."""
        self._cache.keys.zero_()
        self._cache.values.zero_()
        self._feedback.zero_()

    def embedded(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """Return the Thinker's embeddings of ``tokens`` (n,), (n, hidden size) float32 on the CPU; zeros for NONE."""
        there = torch.from_numpy(tokens != NONE)
        rows = self._embeddings[torch.from_numpy(np.maximum(tokens, 0))].float()
        return rows.masked_fill_(~there[:, None], 0)

    def prefill(self, slot: int, start: int, rows: TalkerRows) -> None:
        """Compute keys and values of ``rows`` of a prompt, and store them in the slot from position ``start`` on."""
        positions = torch.tensor(rows.positions, device=self.space.device)[:, None]
        put, mask = self._cache.piece(slot, start, len(rows))
        self._transformer(self._prompt_inputs(rows)[None], self._transformer.rotations(positions), put, mask)

    def step(self, inputs: StepBuffers, batch: int, window: int) -> torch.Tensor:
        """Compute and return the next frame of each of the first ``batch`` slots, (batch, codebooks).

        ``window`` is the number of positions to attend to, which must be larger than the lengths of these slots.
        """
        lengths, frames = inputs.lengths[:batch], inputs.frames[:batch]
        active = inputs.active[:batch].bool()
        positions = inputs.positions[:batch].expand(3, -1)[..., None]
        x = self._answer_inputs(inputs.rows[:batch], self._feedback[:batch])
        put, mask = self._cache.row(lengths, window)
        state = self._transformer(x[:, None], self._transformer.rotations(positions), put, mask)[:, 0]
        first = self._sampling.draw(functional.linear(state, self._head).float(), frames, active)
        codes, feedback = self._frame(state, first, frames)
        self._feedback[:batch] = torch.where(active[:, None], feedback, self._feedback[:batch])
        return codes

    def _to_device(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self.space.device, self.space.dtype)

    def _with_codes(self, x: torch.Tensor, rows: TalkerRows) -> torch.Tensor:
        """Add the embeddings of the rows' codes to ``x`` (n, size)."""
        where = np.flatnonzero(rows.codes != NONE)
        if not len(where):
            return x
        codes = torch.tensor(rows.codes[where], device=self.space.device)
        return x.index_add(0, torch.tensor(where, device=self.space.device), self._codes[codes])

    @abstractmethod
    def _prompt_inputs(self, rows: TalkerRows) -> torch.Tensor:
        """Return the transformer's input (n, H) for a piece of a prompt."""

    @abstractmethod
    def _answer_inputs(self, rows: torch.Tensor, feedback: torch.Tensor) -> torch.Tensor:
        """Return the transformer's input (B, H) for rows of answers.

        ``feedback`` (B, H) are the sums of the embeddings of the codes in the previous frames.
        """

    @abstractmethod
    def _frame(
        self, state: torch.Tensor, first: torch.Tensor, frames: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the whole frames (B, codebooks), and their feedback (B, H) to the next rows.

        ``state`` (B, H) are the last hidden states, ``first`` (B,) the codes of the first codebook, ``frames`` (B,) the
        numbers of the frames.
        """


def held_bytes(thing: Any, counted: set[int]) -> int:
    """Return the bytes of all tensors in an object graph, except for objects whose ids are in ``counted``.

    Adds the ids of the objects found to ``counted``.
    """
    if id(thing) in counted:
        return 0
    counted.add(id(thing))
    match thing:
        case torch.Tensor():
            return int(thing.nbytes)
        case dict():
            inside = list(thing.values())
        case list() | tuple():
            inside = list(thing)
        case _ if is_dataclass(thing):
            inside = [getattr(thing, field.name) for field in fields(thing)]
        case _:
            inside = list(getattr(thing, "__dict__", {}).values())
    return sum(held_bytes(part, counted) for part in inside)


_LENGTH, _POSITION, _FRAME, _ACTIVE = range(4)
#: Two sets of buffers on the host: one is filled while the device still reads the other.
_TURNS: Final = 2


class StepBuffers:
    """The inputs of a step, for every slot, in fixed buffers on the device, which CUDA graphs require.

    ``rows`` (slots, hidden size of the Thinker) are rows of the answers. ``lengths`` (slots,) are the numbers of
    positions in use, ``positions`` (slots,) the M-RoPE positions of the next rows, ``frames`` (slots,) the numbers of
    the next frames. The result of a slot that is not ``active`` (slots,) is discarded.

    Inputs are copied to the device, and frames back, asynchronously. Before ``begin`` is called for step n + 2, the
    caller must have waited for the frames of step n.
    """

    def __init__(self, space: SlotSpace, row_size: int, codebooks: int) -> None:
        self._cuda = torch.device(space.device).type == "cuda"
        self._turn = 0
        self._host_rows = [self._host((space.slots, row_size), space.dtype) for _ in range(_TURNS)]
        self._host_numbers = [self._host((4, space.slots), torch.int64) for _ in range(_TURNS)]
        #: Views of ``_host_numbers`` as arrays: writing single elements is cheaper than in a tensor.
        self._filled = [numbers.numpy() for numbers in self._host_numbers]
        self._host_frames = [self._host((space.slots, codebooks), torch.int64) for _ in range(_TURNS)]
        self.rows = torch.zeros(space.slots, row_size, dtype=space.dtype, device=space.device)
        self._numbers = torch.zeros(4, space.slots, dtype=torch.int64, device=space.device)
        self.lengths, self.positions, self.frames, self.active = self._numbers

    def _host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self._cuda)

    def begin(self) -> None:
        """Begin to fill the buffers for a step; no slot is active yet."""
        self._turn = (self._turn + 1) % _TURNS
        self._filled[self._turn][_ACTIVE] = 0

    def put_lengths(self, slot: int, length: int) -> None:
        """Set a slot's number of positions, also for inactive slots: a step may write to their next position."""
        self._filled[self._turn][_LENGTH, slot] = length

    def put(self, slot: int, position: int, frame: int) -> None:
        """Make a slot active; ``position`` is the M-RoPE position of its next row, ``frame`` the frame's number."""
        numbers = self._filled[self._turn]
        numbers[_POSITION, slot], numbers[_FRAME, slot], numbers[_ACTIVE, slot] = position, frame, 1

    def put_rows(self, slots: list[int], rows: torch.Tensor) -> None:
        """Set the next rows (n, row size) of the answers in the ``n`` slots ``slots``."""
        self._host_rows[self._turn][slots] = rows.to(self.rows.dtype)

    def send(self) -> None:
        """Start copying the inputs to the device."""
        self.rows.copy_(self._host_rows[self._turn], non_blocking=True)
        self._numbers.copy_(self._host_numbers[self._turn], non_blocking=True)

    def fetch(self, frames: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying ``frames`` (B, codebooks) to the host.

        Returns a function that waits for the frames of this step n and returns them; they are valid until step n + 2.
        """
        here = self._host_frames[self._turn][: len(frames)]
        here.copy_(frames, non_blocking=True)
        if not self._cuda:
            return lambda: here
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> torch.Tensor:
            arrived.synchronize()
            return here

        return wait


#: The number of special ids at the end of the vocabulary, which are no codes; of these only the end code is drawn.
_SPECIAL_CODES: Final = 1024


class Qwen3Talker(TalkerNetwork):
    """The Talker of Qwen3-Omni: 12.5 frames of 16 codes a second.

    The network is a top-k MoE with a shared expert, and a CodePredictor for 15 of the 16 codebooks. Its rows are text,
    or hidden states of the user's audio, images and video. For one prompt, it computes the same as
    ``Qwen3OmniMoeForConditionalGeneration.generate`` of the package transformers.

    ``config`` is the whole config.json. Raises ConfigurationError for missing tensors, KeyError for missing settings.
    """

    answer_states = False

    def __init__(self, source: CheckpointTensors, config: Mapping[str, Any], space: SlotSpace) -> None:
        talker = config["talker_config"]
        shape = BlockShape.of(talker["text_config"], "talker_config.text_config", interleaved=True)
        vocabulary = int(talker["text_config"]["vocab_size"])
        end = int(talker["codec_eos_token_id"])
        suppressed = [code for code in range(vocabulary - _SPECIAL_CODES, vocabulary) if code != end]
        sampling = SamplingState(space.slots, vocabulary, space.device, suppressed=suppressed)
        super().__init__(source, space, shape, sampling, "talker.model.codec_embedding.weight")
        predictor = talker["code_predictor_config"]
        self._predictor = CodePredictor(
            source, "talker.code_predictor", predictor, space.slots, space.device, space.dtype
        )
        self.codebooks = self._predictor.codebooks
        self._text = _Projection.load(source, "talker.text_projection", space)
        self._media = _Projection.load(source, "talker.hidden_projection", space)
        self._speakers: dict[str, int] = talker["speaker_id"]
        self.voices = tuple(sorted(self._speakers, key=lambda name: name.lower() != "ethan"))
        self.defaults = TalkerSettings(voice=self.voices[0], temperature=0.9, top_k=50, top_p=1.0)
        self.end_codes = frozenset([end])
        self.after_answer = (config["tts_eos_token_id"], config["tts_pad_token_id"])
        self._config = config
        self._start_code = int(talker["codec_bos_id"])
        self.reader(self.voices[0])  # raises for what the configuration lacks

    def reader(self, voice: str) -> UserTurnsReader:
        return UserTurnsReader(self._config, self._speakers[voice], self.hidden_size)

    def _prompt_inputs(self, rows: TalkerRows) -> torch.Tensor:
        x = self._text(self._to_device(self.embedded(rows.tokens)))
        if len(rows.hidden):
            media = torch.tensor(np.flatnonzero(rows.states), device=self.space.device)
            x = x.index_copy(0, media, self._media(self._to_device(torch.from_numpy(rows.hidden))))
        return self._with_codes(x, rows)

    def _answer_inputs(self, rows: torch.Tensor, feedback: torch.Tensor) -> torch.Tensor:
        return self._text(rows) + feedback

    def _frame(
        self, state: torch.Tensor, first: torch.Tensor, frames: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        further, feedback = self._predictor(state, functional.embedding(first, self._codes), self._sampling, frames)
        return torch.cat((first[:, None], further), dim=1), feedback


@dataclass(frozen=True, slots=True)
class _Projection:
    """An MLP of two layers, from the Thinker's hidden size to the Talker's."""

    weights: tuple[torch.Tensor, torch.Tensor]
    biases: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def load(cls, source: CheckpointTensors, prefix: str, space: SlotSpace) -> _Projection:
        first, second, first_bias, second_bias = (
            source.tensor(f"{prefix}.linear_fc{layer}.{kind}").to(space.device, space.dtype)
            for kind in ("weight", "bias")
            for layer in (1, 2)
        )
        return cls((first, second), (first_bias, second_bias))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.silu(functional.linear(x, self.weights[0], self.biases[0]))
        return functional.linear(inner, self.weights[1], self.biases[1])


class CodePredictor:
    """The small transformer in Qwen3's Talker that predicts the other codes of a frame from the first code.

    For each frame, it runs once over two rows, the Talker's last state and the first code, and then once for each
    further code except the last. The KV cache holds one frame. ``config`` is ``code_predictor_config`` of the
    checkpoint.
    """

    def __init__(
        self,
        source: CheckpointTensors,
        prefix: str,
        config: Mapping[str, Any],
        slots: int,
        device: str,
        dtype: torch.dtype,
    ) -> None:
        self.codebooks = int(config["num_code_groups"])
        self.shape = BlockShape.of(config, "talker_config.code_predictor_config")
        self._transformer = Transformer(source, f"{prefix}.model", self.shape, device, dtype)

        def each(name: str) -> list[torch.Tensor]:
            numbers = range(self.codebooks - 1)
            return [source.tensor(f"{prefix}.{name}.{number}.weight").to(device, dtype) for number in numbers]

        self._embeddings = each("model.codec_embedding")
        self._heads = each("lm_head")
        size = (self.shape.layers, slots, self.shape.kv_heads, self.codebooks, self.shape.head_dim)
        self._keys = torch.zeros(size, device=device, dtype=dtype)
        self._values = torch.zeros_like(self._keys)
        self._first_mask = torch.ones(1, 2, 2, dtype=torch.bool, device=device).tril()
        positions = torch.arange(self.codebooks, device=device).expand(3, 1, -1)
        self._rotations = self._transformer.rotations(positions)

    def __call__(
        self, state: torch.Tensor, first: torch.Tensor, sampling: SamplingState, frames: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of the other codebooks (B, codebooks - 1), and the sum of all codes' embeddings (B, H).

        ``state`` (B, H) is the Talker's last state, ``first`` (B, H) the embedding of the first code, ``frames`` (B,)
        the numbers of the frames.
        """
        rows, total, codes = torch.stack((state, first), dim=1), first, []
        for number, (embedding, head) in enumerate(zip(self._embeddings, self._heads, strict=True)):
            done = number + 1 if number else 0
            rotations = self._rotations[0][:, done : number + 2], self._rotations[1][:, done : number + 2]
            mask = None if number else self._first_mask
            states = self._transformer(rows, rotations, self._put(done, number + 2), mask)
            logits = functional.linear(states[:, -1], head).float()
            code = sampling.draw_residual(logits, frames, number + 1)
            codes.append(code)
            embedded = functional.embedding(code, embedding)
            total = total + embedded
            rows = embedded[:, None]
        return torch.stack(codes, dim=1), total

    def _put(self, start: int, end: int) -> Put:
        """Return a ``Put`` that stores the frame's positions ``start`` to ``end``, and returns those up to ``end``."""

        def put(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            batch = len(keys)
            self._keys[layer, :batch, :, start:end] = keys
            self._values[layer, :batch, :, start:end] = values
            return self._keys[layer, :batch, :, :end], self._values[layer, :batch, :, :end]

        return put


class Qwen25Talker(TalkerNetwork):
    """The Talker of Qwen2.5-Omni: 50 frames of one code a second.

    Every token of prompt and answer is a row: the Thinker's hidden state plus the token's embedding. For one prompt,
    the network computes the same as ``Qwen2_5OmniForConditionalGeneration.generate`` of the package transformers,
    except that it adds the embeddings of codec_pad and codec_bos, as in training; transformers 5.19 omits them for
    prompts without padding.

    ``config`` is the whole config.json, ``speakers`` has the token that begins the speech of each voice. Raises
    ConfigurationError for missing tensors, KeyError for missing settings.
    """

    answer_states = True
    codebooks = 1

    def __init__(
        self, source: CheckpointTensors, config: Mapping[str, Any], space: SlotSpace, speakers: Mapping[str, int]
    ) -> None:
        talker = config["talker_config"]
        shape = BlockShape.of(talker, "talker_config", interleaved=False)
        pad, start, end, mask = (int(talker[f"tts_codec_{name}_token_id"]) for name in ("pad", "start", "end", "mask"))
        self.end_codes = frozenset([pad, end])
        vocabulary = int(talker["vocab_size"])
        unreadable = range(_readable_codes(config), vocabulary)
        suppressed = sorted({start, *unreadable} - self.end_codes)
        # In transformers each row of the prompt has one of these codes, so the repetition penalty applies to them.
        sampling = SamplingState(
            space.slots, vocabulary, space.device, suppressed=suppressed, penalised=[mask, pad, start]
        )
        super().__init__(source, space, shape, sampling, "talker.model.embed_tokens.weight")
        self._weight, self._bias = (
            source.tensor(f"talker.thinker_to_talker_proj.{kind}").to(space.device, space.dtype)
            for kind in ("weight", "bias")
        )
        self._speakers = dict(speakers)
        self.voices = tuple(sorted(self._speakers, key=lambda name: name != default_speaker(self._speakers)))
        self.defaults = TalkerSettings(voice=self.voices[0], temperature=0.9, top_k=40, top_p=0.8)
        self.after_answer = (talker["tts_text_end_token_id"], talker["tts_text_pad_token_id"])
        self._media = tuple(config["thinker_config"][f"{kind}_token_index"] for kind in ("audio", "image", "video"))
        self._pad, self._start_code = pad, start

    def reader(self, voice: str) -> WholePromptReader:
        return WholePromptReader(self._media, (self._speakers[voice], self._pad), self.hidden_size)

    def _prompt_inputs(self, rows: TalkerRows) -> torch.Tensor:
        x = self.embedded(rows.tokens)
        x[torch.from_numpy(rows.states)] += torch.from_numpy(rows.hidden)
        return self._projected(self._with_codes(self._to_device(x), rows))

    def _answer_inputs(self, rows: torch.Tensor, feedback: torch.Tensor) -> torch.Tensor:
        return self._projected(rows + feedback)

    def _frame(
        self, state: torch.Tensor, first: torch.Tensor, frames: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return first[:, None], functional.embedding(first, self._codes)

    def _projected(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


def _readable_codes(config: Mapping[str, Any]) -> int:
    """Return the number of codes that Token2Wav can decode; the Talker's vocabulary has further codes."""
    vocoder = config.get("token2wav_config", {}).get("dit_config", {})
    return int(vocoder.get("num_embeds", 8193)) + 1


#: The numbers of draws that are reserved for a frame, one for each codebook.
_DRAWS: Final = 64


class SamplingState:
    """The sampling parameters of the sessions, on the device, and the codes that each session has drawn.

    The codes of a session do not depend on the other sessions in a batch: the noise is a function of the session's
    seed, the number of the frame, the codebook and the code. ``suppressed`` codes are never drawn. The repetition
    penalty applies to ``penalised`` codes from the start, to other codes once the session has drawn them.
    """

    def __init__(
        self, slots: int, vocabulary: int, device: str, *, suppressed: list[int], penalised: list[int] | None = None
    ) -> None:
        self.temperature = torch.ones(slots, 1, device=device)
        self.top_k = torch.ones(slots, 1, dtype=torch.int64, device=device)
        self.top_p = torch.ones(slots, 1, device=device)
        self.penalty = torch.ones(slots, 1, device=device)
        self.seed = torch.zeros(slots, dtype=torch.int64, device=device)
        self.had = torch.zeros(slots, vocabulary, dtype=torch.bool, device=device)
        self._vocabulary = vocabulary
        self._suppressed = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._suppressed[suppressed] = True
        self._first_had = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._first_had[penalised or []] = True

    def open(self, slot: int, settings: TalkerSettings) -> None:
        """Set the parameters of a new session in ``slot``, and forget the codes that were drawn there.

        ``settings.seed`` must not be None.
        """
        # A temperature closer to 0 would let logits overflow.
        self.temperature[slot] = max(settings.temperature, 0.01) if settings.temperature else 0
        self.top_k[slot] = min(settings.top_k, self._vocabulary) if settings.top_k > 0 else self._vocabulary
        self.top_p[slot] = settings.top_p
        self.penalty[slot] = settings.repetition_penalty
        assert settings.seed is not None
        digest = blake2b(str(settings.seed).encode(), digest_size=4).digest()
        self.seed[slot] = int.from_bytes(digest) & _MASK_31
        self.had[slot] = self._first_had

    def draw(self, logits: torch.Tensor, frames: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Draw codes (B,) from ``logits`` (B, V) float32 of the first slots, and note them for ``active`` slots (B,).

        ``frames`` (B,) are the numbers of the frames. The parameters are applied in this order: repetition penalty,
        suppression, temperature, top_k, top_p.
        """
        batch = len(logits)
        had = self.had[:batch]
        penalty = self.penalty[:batch]
        logits = torch.where(had, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        logits = logits.masked_fill(self._suppressed, -torch.inf)
        temperature = self.temperature[:batch]
        greedy = temperature == 0
        ordered, codes = (logits / temperature.masked_fill(greedy, 1)).sort(dim=-1, descending=True)
        ranks = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill(ranks >= self.top_k[:batch], -torch.inf)
        seeds, draws = self.seed[:batch], frames * _DRAWS
        code = _drawn(ordered, codes, greedy=greedy, top_p=self.top_p[:batch], seeds=seeds, draws=draws)
        had.scatter_(1, code[:, None], had.gather(1, code[:, None]) | active[:, None])
        return code

    def draw_residual(self, logits: torch.Tensor, frames: torch.Tensor, codebook: int) -> torch.Tensor:
        """Draw codes (B,) of ``codebook`` 1 or higher, from ``logits`` (B, V), with top_k 50 and top_p 0.8.

        These are the values in transformers. At temperature 0 a session gets the most probable code.
        """
        batch = len(logits)
        ordered, codes = logits.topk(min(50, logits.shape[-1]), dim=-1)
        greedy, draws = self.temperature[:batch] == 0, frames * _DRAWS + codebook
        return _drawn(ordered, codes, greedy=greedy, top_p=0.8, seeds=self.seed[:batch], draws=draws)


def _drawn(
    logits: torch.Tensor,
    codes: torch.Tensor,
    *,
    greedy: torch.Tensor,
    top_p: torch.Tensor | float,
    seeds: torch.Tensor,
    draws: torch.Tensor,
) -> torch.Tensor:
    """Draw codes (B,) from the most probable candidates that together have the probability ``top_p``.

    ``logits`` (B, C) of the candidates ``codes`` (B, C) are in descending order. ``greedy`` (B, 1) marks sessions that
    get the most probable code. ``seeds`` (B,) and ``draws`` (B,) determine the noise.
    """
    probabilities = logits.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # The most probable code always stays, however sums and top_p are rounded.
    before[:, 0] = -1
    logits = logits.masked_fill(before >= top_p, -torch.inf)
    # The largest sum of logit and Gumbel noise is a draw from the softmax.
    noise = gumbel_noise(seeds, draws, codes).masked_fill(greedy, 0)
    best = (logits + noise).argmax(dim=-1, keepdim=True)
    return codes.gather(1, best)[:, 0]


def gumbel_noise(seeds: torch.Tensor, draws: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise (B, C) for ``codes`` (B, C), a function of the code, the seed (B,) and draw number (B,)."""
    keys = _hashed(_hashed(seeds) ^ _hashed(draws & _MASK_31))
    bits = _hashed(keys[:, None] ^ _hashed(codes))
    uniform = (bits.double() + 0.5) / (1 << 31)
    return -torch.log(-torch.log(uniform)).float()


def normal_at(positions: torch.Tensor, seed: int) -> torch.Tensor:
    """Return standard normal noise for integer ``positions``: a function of position and seed alone.

    Overlapping windows therefore have the same noise where they overlap.
    """
    first = _hashed(positions * 2, seed).double() / (1 << 31)
    second = _hashed(positions * 2 + 1, seed).double() / (1 << 31)
    # The Box-Muller transform; 1 - first is never 0.
    return (torch.sqrt(-2 * torch.log1p(-first)) * torch.cos(2 * math.pi * second)).float()


_MASK_31: Final = (1 << 31) - 1


def _hashed(numbers: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return a 31-bit hash of each of the 31-bit ``numbers``: products of two such numbers stay below 2^63."""
    mixed = (numbers + ((seed * 0x5851F42D + 0x14057B7E) & _MASK_31)) & _MASK_31
    for factor in (0x45D9F3B3, 0x2C1B3C6D, 0x297A2D39):
        mixed = mixed ^ (mixed >> 16)
        mixed = (mixed * factor) & _MASK_31
    return mixed ^ (mixed >> 15)
