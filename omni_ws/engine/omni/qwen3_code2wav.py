"""Qwen3Code2Wav: the vocoder of Qwen3-Omni as a StepModel, and its network.

Codec frames are decoded as they arrive. Each sample is sent as soon as later frames cannot change it: at any time, all
samples of the decoded frames except the last 555 (for Qwen3-Omni), however the frames are divided among inputs.

Each session is a *stream* with a slot, in which convolutions and transformer keep past inputs, keys and values between
calls. ``rows`` (batch,) int64 are the slots of the streams in a batch. The last slot is scratch: it serves the rows
that pad a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final, Self

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.omni.transformer import rotated
from omni_ws.engine.omni.vocoder import DecodedStream, StepGraphs, Vocoder

#: The numbers of frames that a step may decode of a session, a fixed set because of CUDA graphs. The largest that fits
#: is taken.
PIECES: Final = (32, 16, 8, 4, 2, 1)
#: The limit on frames that a step decodes for all sessions, so that sessions with other piece sizes wait less.
STEP_FRAMES: Final = 128
#: Decoding a chunk takes as long as if the chunk had this many more frames.
CONTEXT_FRAMES: Final = 2
#: The limit on frames of a session that wait to be decoded: 82 s of audio.
MOST_WAITING: Final = 1024


class _Frames(DecodedStream):
    """The state of one session, with the codes that wait to be decoded; ``done`` counts decoded frames."""

    def __init__(self, slot: int, codebooks: int) -> None:
        super().__init__(slot)
        self._codes: NDArray[np.int64] = np.zeros((0, codebooks), np.int64)

    @property
    def waiting(self) -> int:
        return len(self._codes)

    def goal(self, codes: NDArray[np.int64]) -> int:
        self._codes = np.concatenate((self._codes, codes))
        return self.done + len(self._codes)

    def next_work(self) -> tuple[bool, int]:
        """Return whether the stream begins, and how many frames of the oldest input to decode next."""
        if not self.done:
            return True, 1  # the start of a stream has its own graphs, for one size only
        left = self._goals[0] - self.done
        return False, next(size for size in PIECES if size <= left)

    def take_codes(self, count: int) -> NDArray[np.int64]:
        """Remove and return the codes (count, codebooks) of the next ``count`` frames."""
        codes, self._codes = self._codes[:count], self._codes[count:]
        return codes


class Qwen3Code2Wav(Vocoder[_Frames]):
    """The Vocoder of Qwen3-Omni. Voice and seed have no effect: the codes determine the voice, and there is no noise.

    A step decodes an equal number of frames for each of several sessions: for at most ``batch`` sessions, and at most
    STEP_FRAMES in all. ``weights`` are the tensors of the module ``code2wav``; they are moved to ``device`` in float32.
    Raises ConfigurationError for weights that do not fit ``shape``.
    """

    def __init__(
        self,
        shape: Code2WavShape,
        weights: Weights,
        *,
        slots: int = 32,
        batch: int = 32,
        device: str | torch.device = "cpu",
    ) -> None:
        books, size = shape.num_quantizers, shape.codebook_size
        super().__init__(slots=slots, codebooks=books, codebook_size=size, most_waiting=MOST_WAITING)
        self._shape = shape
        self._memory = SlotMemory(slots, torch.device(device))
        held = {name: tensor.detach().to(device, torch.float32) for name, tensor in weights.items()}
        self._weight_bytes: int = sum(tensor.nbytes for tensor in held.values())
        try:
            network = Code2WavNetwork(shape, held, self._memory)
        except KeyError as error:
            raise ConfigurationError([f"code2wav: the checkpoint has no tensor {error.args[0]}"]) from error
        rows, needed = len(held["code_embedding.weight"]), books * size
        if rows != needed:
            raise ConfigurationError([f"code2wav: {rows} embeddings of codes where the configuration has {needed}"])
        #: The limit on pieces of a step, by the size of the pieces.
        self._pieces = {piece: max(1, min(batch, slots, STEP_FRAMES // piece)) for piece in PIECES}
        self._run = Code2WavGraphs(network, self._memory, codebooks=books, pieces=self._pieces)

    @property
    def samples_per_frame(self) -> int:
        return self._shape.samples_per_frame

    @property
    def memory_bytes(self) -> int:
        return self._weight_bytes + self._memory.nbytes + self._run.nbytes

    def warm_up(self) -> None:
        self._run.warm_up()

    def _begun(self, slot: int, settings: Mapping[str, Any]) -> _Frames:
        self._memory.clear(slot)
        return _Frames(slot, self._codebooks)

    def _most(self, work: tuple[bool, int]) -> int:
        return self._pieces[work[1]]

    def _decode(self, work: tuple[bool, int], streams: Sequence[_Frames]) -> None:
        first, piece = work
        codes = np.stack([stream.take_codes(piece) for stream in streams])
        rows = np.array([stream.slot for stream in streams])
        done = np.array([stream.done for stream in streams])
        for stream, made in zip(streams, self._run(codes.transpose(0, 2, 1), rows, done, first=first), strict=True):
            stream.take(made, piece)


#: In place of the number of frames, for a step that begins its streams with one frame each.
_BEGIN: Final = 0


class Code2WavGraphs:
    """A function of arrays that runs ``network``: on a GPU from CUDA graphs, with batches padded to a captured size.

    Batches are padded with rows of the scratch slot. ``pieces`` maps the number of frames per stream to the limit on
    streams in a batch.
    """

    def __init__(
        self, network: Code2WavNetwork, memory: SlotMemory, *, codebooks: int, pieces: Mapping[int, int]
    ) -> None:
        self._network = network
        self._device = memory.device
        self._on_gpu = memory.device.type == "cuda"
        self._scratch = memory.slots
        self._pieces = pieces
        rows = _filled(max(pieces.values()))
        self._codes = torch.zeros((rows, codebooks, max(pieces)), dtype=torch.int64, device=self._device)
        self._rows = torch.full((rows,), self._scratch, dtype=torch.int64, device=self._device)
        self._done = torch.zeros((rows,), dtype=torch.int64, device=self._device)
        self._graphs = StepGraphs(self._step, str(self._device))
        #: The bytes of the graphs on the device.
        self.nbytes = 0

    def __call__(
        self, codes: NDArray[np.int64], rows: NDArray[np.int64], done: NDArray[np.int64], *, first: bool
    ) -> NDArray[np.float32]:
        """Return the samples of a batch, (batch, samples); see Code2WavNetwork for the arguments."""
        batch, _, frames = codes.shape
        size = _filled(batch) if self._on_gpu else batch
        self._codes[:batch, :, :frames] = torch.tensor(codes)
        self._done[:batch] = torch.tensor(done)
        self._rows[:batch] = torch.tensor(rows)
        self._rows[batch:size] = self._scratch
        samples: NDArray[np.float32] = self._graphs.run(size, _BEGIN if first else frames)[:batch].cpu().numpy()
        return samples

    def warm_up(self) -> None:
        """Capture all shapes on a GPU; on a CPU run each number of frames once."""
        self._rows.fill_(self._scratch)
        if not self._on_gpu:
            self._graphs.warm_up((1, frames) for frames in (_BEGIN, *self._pieces))
            return
        before = torch.cuda.memory_reserved(self._device)
        most = {**self._pieces, _BEGIN: max(self._pieces.values())}
        self._graphs.warm_up((size, frames) for frames in most for size in _sizes(most[frames]))
        self.nbytes = torch.cuda.memory_reserved(self._device) - before

    def _step(self, batch: int, frames: int) -> torch.Tensor:
        """Run the network on the codes in the buffers, and return the samples."""
        codes = self._codes[:batch, :, : frames or 1]
        return self._network(codes, self._rows[:batch], self._done[:batch], first=frames == _BEGIN)


def _filled(batch: int) -> int:
    """Return the power of two to which a batch is padded."""
    return 1 << (batch - 1).bit_length()


def _sizes(most: int) -> list[int]:
    """Return the sizes to which batches of up to ``most`` are padded."""
    return [1 << power for power in range(_filled(most).bit_length())]


class Code2WavShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of the network: ``code2wav_config`` of a checkpoint.

    ``sliding_window`` is the number of positions to which a position attends in the transformer, itself included.
    """

    num_quantizers: int = 16
    codebook_size: int = 2048
    upsampling_ratios: tuple[int, ...] = (2, 2)
    upsample_rates: tuple[int, ...] = (8, 5, 4, 3)
    hidden_size: int = 1024
    hidden_act: str = "silu"
    num_hidden_layers: int = 8
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int | None = None
    sliding_window: int = 72
    rope_type: str = "default"
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Return the shape of a configuration. Raises ConfigurationError for one that is not supported."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        try:
            shape = msgspec.convert({**config, **rope}, cls)
        except msgspec.ValidationError as error:
            raise ConfigurationError([f"code2wav_config: {error}"]) from error
        for name, supported in (("hidden_act", "silu"), ("rope_type", "default")):
            if (value := getattr(shape, name)) != supported:
                raise ConfigurationError([f"code2wav_config: {name} {value!r} is not supported"])
        if shape.samples_per_frame <= shape.samples_held:
            where = "code2wav_config: upsample_rates and upsampling_ratios"
            raise ConfigurationError([f"{where} by which one frame makes no sound are not supported"])
        return shape

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def samples_per_frame(self) -> int:
        return prod(self.upsampling_ratios) * prod(self.upsample_rates)

    @property
    def samples_held(self) -> int:
        """The number of samples of the newest frame that depend on the next frame; an answer ends without them."""
        held = 0
        for rate in self.upsample_rates:
            held = (held + 1) * rate
        return held


class Code2WavNetwork:
    """The network of the vocoder: embedding, transformer and convolutions.

    ``weights`` are the float32 tensors of the module ``code2wav``, on the device of ``memory``. ``memory`` holds the
    state of each stream.
    """

    def __init__(self, shape: Code2WavShape, weights: Weights, memory: SlotMemory) -> None:
        self._embedding = weights["code_embedding.weight"]
        offsets = torch.arange(shape.num_quantizers, device=memory.device) * shape.codebook_size
        self._offsets = offsets.view(1, -1, 1)
        self._transformer = WindowTransformer(shape, weights, "pre_transformer", memory)
        self._upsample = [
            _Upsampling(weights, f"upsample.{index}", memory, ratio)
            for index, ratio in enumerate(shape.upsampling_ratios)
        ]
        self._enter = CausalConvolution(weights, "decoder.0", memory)
        self._decoder = [
            _DecoderBlock(weights, f"decoder.{index}.block", memory, rate)
            for index, rate in enumerate(shape.upsample_rates, 1)
        ]
        after = len(shape.upsample_rates) + 1
        self._leave_act = _SnakeBeta(weights, f"decoder.{after}")
        self._leave = CausalConvolution(weights, f"decoder.{after + 1}", memory)

    def __call__(self, codes: Tensor, rows: Tensor, done: Tensor, *, first: bool) -> Tensor:
        """Return the samples that become final with the next frames, (batch, n * samples_per_frame).

        ``codes`` (batch, codebooks, n) int64; ``rows`` (batch,) int64 are the slots of the streams, ``done`` (batch,)
        int64 the numbers of frames decoded earlier. ``first``: these are the first frames of all streams; then there
        are ``samples_held`` fewer samples for each.
        """
        # With TF32, PyTorch's default for convolutions on a GPU, the error is a thousandth of the peak.
        precise = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with torch.inference_mode(), precise:
            x = functional.embedding(codes + self._offsets, self._embedding).mean(1)
            x = self._transformer(x, rows, done).transpose(1, 2)
            for upsampling in self._upsample:
                x = upsampling(x, rows, first=first)
            x = self._enter(x, rows)
            for block in self._decoder:
                x = block(x, rows, first=first)
            return self._leave(self._leave_act(x), rows)[:, 0].clamp(-1, 1)


class _SnakeBeta:
    """The activation x + sin²(a x) / b, with a and b for each channel."""

    def __init__(self, weights: Weights, name: str) -> None:
        self._a = weights[f"{name}.alpha"].exp()[:, None]
        self._inverse_b = (1.0 / (weights[f"{name}.beta"].exp() + 1e-9))[:, None]

    def __call__(self, x: Tensor) -> Tensor:
        return x + self._inverse_b * torch.sin(x * self._a).square()


class _Upsampling:
    """A transposed convolution and a ConvNeXt block."""

    def __init__(self, weights: Weights, name: str, memory: SlotMemory, ratio: int) -> None:
        self._up = TransposedConvolution(weights, f"{name}.0", memory, stride=ratio)
        channels = weights[f"{name}.1.gamma"].shape[0]
        self._depthwise = CausalConvolution(weights, f"{name}.1.dwconv", memory, groups=channels)
        self._norm = weights[f"{name}.1.norm.weight"], weights[f"{name}.1.norm.bias"]
        self._widen = weights[f"{name}.1.pwconv1.weight"], weights[f"{name}.1.pwconv1.bias"]
        self._narrow = weights[f"{name}.1.pwconv2.weight"], weights[f"{name}.1.pwconv2.bias"]
        self._gamma = weights[f"{name}.1.gamma"]

    def __call__(self, x: Tensor, rows: Tensor, *, first: bool) -> Tensor:
        x = self._up(x, rows, first=first)
        inner = self._depthwise(x, rows).transpose(1, 2)
        inner = functional.layer_norm(inner, inner.shape[-1:], *self._norm, eps=1e-6)
        inner = functional.linear(functional.gelu(functional.linear(inner, *self._widen)), *self._narrow)
        return x + (self._gamma * inner).transpose(1, 2)


_DILATIONS = (1, 3, 9)


class _DecoderBlock:
    """Activation, transposed convolution and three dilated residual units."""

    def __init__(self, weights: Weights, name: str, memory: SlotMemory, rate: int) -> None:
        self._act = _SnakeBeta(weights, f"{name}.0")
        self._up = TransposedConvolution(weights, f"{name}.1", memory, stride=rate)
        self._units = [
            (
                _SnakeBeta(weights, f"{name}.{index}.act1"),
                CausalConvolution(weights, f"{name}.{index}.conv1", memory, dilation=dilation),
                _SnakeBeta(weights, f"{name}.{index}.act2"),
                CausalConvolution(weights, f"{name}.{index}.conv2", memory),
            )
            for index, dilation in enumerate(_DILATIONS, 2)
        ]

    def __call__(self, x: Tensor, rows: Tensor, *, first: bool) -> Tensor:
        x = self._up(self._act(x), rows, first=first)
        for act1, conv1, act2, conv2 in self._units:
            x = x + conv2(act2(conv1(act1(x), rows)), rows)
        return x


class WindowTransformer:
    """The sliding-window transformer: its blocks and the final norm.

    Each slot has a KV cache of the last ``window - 1`` positions, after the rotary embedding. All shapes depend on the
    batch size and the number of new positions only.
    """

    def __init__(self, shape: Code2WavShape, weights: Weights, name: str, memory: SlotMemory) -> None:
        self._shape = shape
        self._past = shape.sliding_window - 1
        layers = (f"{name}.layers.{index}" for index in range(shape.num_hidden_layers))
        self._blocks = [_Block(shape, weights, layer, memory, self._past) for layer in layers]
        self._norm = weights[f"{name}.norm.weight"]
        even = torch.arange(0, shape.head_size, 2, dtype=torch.float, device=memory.device)
        self._frequencies = 1.0 / (shape.rope_theta ** (even / shape.head_size))

    def __call__(self, x: Tensor, rows: Tensor, done: Tensor) -> Tensor:
        """Return the outputs for the next positions of the streams, (batch, n, size) -> (batch, n, size).

        ``done`` (batch,) int64 are the numbers of earlier positions of the streams.
        """
        new = x.shape[1]
        positions = done[:, None] + torch.arange(new, device=x.device)
        angles = positions[..., None].float() * self._frequencies
        angles = torch.cat((angles, angles), -1)[:, None]
        mask = self._mask(new, done)
        for block in self._blocks:
            x = block(x, rows, angles.cos(), angles.sin(), mask)
        return _rms_norm(x, self._norm, self._shape.rms_norm_eps)

    def _mask(self, new: int, done: Tensor) -> Tensor:
        """Return the mask (batch, 1, n, past + n) bool: which cached and new positions each new position attends to."""
        key = torch.arange(self._past + new, device=done.device)
        query = torch.arange(new, device=done.device)[:, None]
        in_window = (key >= query) & (key <= query + self._past)
        filled = key >= self._past - done.clamp(max=self._past)[:, None]
        return in_window[None, None] & filled[:, None, None]


class _Block:
    """One layer: attention and gated MLP, each with a scale for each channel before the residual sum."""

    def __init__(self, shape: Code2WavShape, weights: Weights, name: str, memory: SlotMemory, past: int) -> None:
        self._shape = shape
        self._past = past
        self._keys = memory.tensor(shape.num_key_value_heads, past, shape.head_size)
        self._values = memory.tensor(shape.num_key_value_heads, past, shape.head_size)
        self._q, self._k, self._v, self._o = (_linear(weights, f"{name}.self_attn.{part}_proj") for part in "qkvo")
        self._gate, self._up, self._down = (
            _linear(weights, f"{name}.mlp.{part}_proj") for part in ("gate", "up", "down")
        )
        self._attention_norm = weights[f"{name}.input_layernorm.weight"]
        self._mlp_norm = weights[f"{name}.post_attention_layernorm.weight"]
        self._attention_scale = weights[f"{name}.self_attn_layer_scale.scale"]
        self._mlp_scale = weights[f"{name}.mlp_layer_scale.scale"]

    def __call__(self, x: Tensor, rows: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor) -> Tensor:
        normed = _rms_norm(x, self._attention_norm, self._shape.rms_norm_eps)
        x = x + self._attention_scale * self._attend(normed, rows, cosine, sine, mask)
        normed = _rms_norm(x, self._mlp_norm, self._shape.rms_norm_eps)
        gated = functional.silu(functional.linear(normed, *self._gate)) * functional.linear(normed, *self._up)
        return x + self._mlp_scale * functional.linear(gated, *self._down)

    def _attend(self, x: Tensor, rows: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            functional.linear(x, *part).unflatten(-1, (-1, self._shape.head_size)).transpose(1, 2)
            for part in (self._q, self._k, self._v)
        )
        keys = torch.cat((self._keys[rows], rotated(key, cosine, sine)), 2)
        values = torch.cat((self._values[rows], value), 2)
        self._keys[rows] = keys[:, :, -self._past :]
        self._values[rows] = values[:, :, -self._past :]
        attended = functional.scaled_dot_product_attention(
            rotated(query, cosine, sine),
            keys,
            values,
            attn_mask=mask,
            enable_gqa=self._shape.num_attention_heads != self._shape.num_key_value_heads,
        )
        return functional.linear(attended.transpose(1, 2).flatten(2), *self._o)


def _linear(weights: Weights, name: str) -> tuple[Tensor, Tensor | None]:
    return weights[f"{name}.weight"], weights.get(f"{name}.bias")


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


#: The tensors of a module or checkpoint, by their names.
Weights = Mapping[str, Tensor]


class SlotMemory:
    """The owner of all tensors with the state of streams, for ``slots`` slots and the scratch slot."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots = slots
        self.device = device
        self._tensors: list[Tensor] = []

    def tensor(self, *shape: int) -> Tensor:
        """Return a new tensor of zeros, (slots + 1, *shape) float32."""
        made = torch.zeros((self.slots + 1, *shape), device=self.device)
        self._tensors.append(made)
        return made

    def clear(self, slot: int) -> None:
        """Set the state of ``slot`` to zero."""
        for tensor in self._tensors:
            tensor[slot].zero_()

    @property
    def nbytes(self) -> int:
        total: int = sum(tensor.nbytes for tensor in self._tensors)
        return total


class CausalConvolution:
    """A causal convolution with stride 1; the input before the start of a stream is zero."""

    def __init__(self, weights: Weights, name: str, memory: SlotMemory, *, dilation: int = 1, groups: int = 1) -> None:
        self._weight, self._bias = weights[f"{name}.conv.weight"], weights[f"{name}.conv.bias"]
        self._dilation, self._groups = dilation, groups
        self._reach = (self._weight.shape[2] - 1) * dilation
        self._past = memory.tensor(self._weight.shape[1] * groups, self._reach)

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the outputs for the next inputs, (batch, channels, n) -> (batch, channels out, n)."""
        if self._reach:
            x = torch.cat((self._past[rows], x), -1)
            self._past[rows] = x[..., -self._reach :]
        return functional.conv1d(x, self._weight, self._bias, dilation=self._dilation, groups=self._groups)


class TransposedConvolution:
    """A transposed convolution for upsampling that cuts ``kernel - stride`` samples off both ends of a stream.

    The last outputs of a call therefore depend on the next call's inputs, and are returned by the next call; at the end
    of a stream they are cut off. Raises ConfigurationError unless the kernel is once or twice the stride.
    """

    def __init__(self, weights: Weights, name: str, memory: SlotMemory, *, stride: int) -> None:
        self._weight, self._bias = weights[f"{name}.conv.weight"], weights[f"{name}.conv.bias"]
        self._stride = stride
        self._cut = self._weight.shape[2] - stride
        if self._cut not in (0, stride):
            kernel = self._weight.shape[2]
            raise ConfigurationError([f"{name}: a kernel of {kernel} with a stride of {stride} is not supported"])
        self._past = memory.tensor(self._weight.shape[0], 1) if self._cut else None

    def __call__(self, x: Tensor, rows: Tensor, *, first: bool) -> Tensor:
        """Return the outputs for the next inputs; ``first``: these are the first inputs of their streams.

        (batch, channels, n) -> (batch, channels out, n * stride); with ``first`` and a kernel of twice the stride,
        (batch, channels out, (n - 1) * stride).
        """
        if self._past is not None:
            if not first:
                x = torch.cat((self._past[rows], x), -1)
            self._past[rows] = x[..., -1:]
        made = functional.conv_transpose1d(x, self._weight, self._bias, stride=self._stride)
        return made[..., self._cut : made.shape[-1] - self._cut]
