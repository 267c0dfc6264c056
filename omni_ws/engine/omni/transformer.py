"""The decoder-only transformer of Talkers and code predictors, its KV cache in slots, and its checkpoint.

Shapes: B sessions, n new positions of each, W positions that they attend to, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, TypeAlias

import orjson
import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional

from omni_ws.config.values import ConfigurationError

_INDEX: Final = "model.safetensors.index.json"


class CheckpointTensors:
    """The tensors of the safetensors files in ``folder``; if there is an index file, of the files in that index.

    The files are mapped into memory, so only the tensors that are used are read. Raises ConfigurationError for a folder
    without such files, and for damaged files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = folder / _INDEX
        try:
            if index.exists():
                files = set(orjson.loads(index.read_bytes())["weight_map"].values())
            else:
                files = {path.name for path in folder.glob("*.safetensors")}
            #: The open file of each tensor.
            self._files: dict[str, Any] = {}
            for file in sorted(files):
                opened = safe_open(str(folder / file), framework="pt")
                self._files |= dict.fromkeys(opened.keys(), opened)
        except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
            raise ConfigurationError([f"{folder}: not a readable safetensors checkpoint: {error}"]) from error
        if not self._files:
            raise ConfigurationError([f"{folder}: no safetensors files"])

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def names(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with ``prefix``."""
        return (name for name in self._files if name.startswith(prefix))

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor ``name``, mapped from its file: pages are read when they are used.

        Raises ConfigurationError for a missing tensor, and for a quantised one (one byte per value), since its scales
        would not be applied.
        """
        if name not in self._files:
            raise ConfigurationError([f"{self._folder}: the checkpoint has no tensor {name}"])
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        if tensor.dtype.itemsize == 1:
            raise ConfigurationError([f"{self._folder}: {name} is quantised ({tensor.dtype}), which is not supported"])
        return tensor

    def bytes_of(self, prefix: str, value_bytes: int | None = None) -> int:
        """Return the bytes of all tensors whose names begin with ``prefix``; reads only the headers of the files.

        ``value_bytes`` is the size of a number in memory; by default it is the size in the file.
        """
        total = 0
        for name in self.names(prefix):
            part = self._files[name].get_slice(name)
            bits = _bits(part.get_dtype()) if value_bytes is None else 8 * value_bytes
            total += prod(part.get_shape()) * bits // 8
        return total


def _bits(dtype: str) -> int:
    """Return the bits of a number of type ``dtype``, a name of safetensors such as BF16, F8_E4M3, I64 or BOOL."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8


SPEAKERS_FILE: Final = "spk_dict.pt"
_DEFAULT_SPEAKER: Final = "Chelsie"


@dataclass(frozen=True, slots=True)
class OmniSpeaker:
    """A voice. ``bos_token``, a token of the Thinker, begins the Talker's answer; the other fields are for the vocoder.

    ``condition`` (1, n) float32 is the embedding of the speaker, ``reference_mel`` (1, frames, bins) float32 a sample
    of the speaker's speech as mel frames.
    """

    bos_token: int
    condition: torch.Tensor
    reference_mel: torch.Tensor


def load_speakers(folder: Path) -> dict[str, OmniSpeaker]:
    """Return the speakers of the checkpoint in ``folder`` by name.

    Raises ConfigurationError for a file that cannot be read, or has no speakers.
    """
    path = folder / SPEAKERS_FILE
    try:
        # ``weights_only``: an unrestricted pickle could run any code.
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere in torch's unpickler
        raise ConfigurationError([f"{path}: cannot be read: {error}"]) from error
    if not isinstance(loaded, Mapping) or not loaded:
        raise ConfigurationError([f"{path}: no speakers"])
    return {str(name): _speaker(f"{path}: {name}", entry) for name, entry in loaded.items()}


def default_speaker(names: Iterable[str]) -> str:
    """Return the default voice: the default of the model's authors if it is in ``names``, or else the first name."""
    known = [*names]
    return _DEFAULT_SPEAKER if _DEFAULT_SPEAKER in known else known[0]


def _speaker(where: str, entry: Any) -> OmniSpeaker:
    try:
        bos, condition, mel = int(entry["bos_token"]), entry["cond"].float(), entry["ref_mel"].float()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError([f"{where}: bos_token, cond and ref_mel are needed"]) from error
    if condition.ndim != 2 or mel.ndim != 3 or len(condition) != 1 or len(mel) != 1:
        raise ConfigurationError([f"{where}: cond must be (1, n) and ref_mel (1, frames, bins)"])
    return OmniSpeaker(bos, condition, mel)


# The decoder-only transformer of Talkers and code predictors, and its KV cache in slots.
#
# Shapes: B sessions, n new positions of each, W positions that they attend to, H hidden size.


#: Puts a layer's new keys and values (B, kv_heads, n, head_dim) into a KV cache; returns all keys and values to attend
#: to, (B, kv_heads, W, head_dim).
Put: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Transformer:
    """A decoder-only transformer: its layers and the final norm.

    ``prefix`` is the prefix of its tensors in the checkpoint. Biases, norms of queries and keys, and experts are used
    if the checkpoint has them. Raises ConfigurationError for missing tensors.
    """

    def __init__(
        self, source: CheckpointTensors, prefix: str, shape: BlockShape, device: str, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        self._layers = [_load(source, f"{prefix}.layers.{i}", shape, device, dtype) for i in range(shape.layers)]
        self._norm = source.tensor(f"{prefix}.norm.weight").to(device, dtype)
        frequencies = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        self._frequencies = (1.0 / shape.rope_theta**frequencies).to(device)
        self._axes = torch.tensor(shape.axes, device=device)
        self._dtype = dtype

    def rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine (B, n, 1, head_dim) for M-RoPE ``positions`` (3, B, n)."""
        angles = positions[self._axes].permute(1, 2, 0).float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)

    def __call__(
        self,
        x: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        put: Put,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the normalised hidden states (B, n, H) of the inputs ``x`` (B, n, H).

        ``put`` stores keys and values in the KV cache, see ``Put``. ``mask`` (B or 1, n, W) is True where a query may
        attend to a position; None means everywhere.
        """
        eps, size = self.shape.norm_eps, self.shape.hidden_size
        added = self._grouped(mask)
        for number, layer in enumerate(self._layers):
            x = x + self._attend(
                number, layer, functional.rms_norm(x, (size,), layer.attention_norm, eps), rotations, put, added
            )
            x = x + layer.mlp(functional.rms_norm(x, (size,), layer.mlp_norm, eps))
        return functional.rms_norm(x, (size,), self._norm, eps)

    def _grouped(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Convert a boolean mask (B, n, W) to a mask to be added to scores, (B, 1, group * n, W); see ``_attend``."""
        if mask is None:
            return None
        group = self.shape.heads // self.shape.kv_heads
        # Converted here once; scaled_dot_product_attention would convert a boolean mask in every layer.
        added = torch.zeros_like(mask, dtype=self._dtype).masked_fill_(~mask, -torch.inf)
        return added.repeat(1, group, 1)[:, None]

    def _attend(
        self,
        number: int,
        layer: _Layer,
        x: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        put: Put,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        shape, (batch, new, _) = self.shape, x.shape
        qkv = functional.linear(x, layer.qkv, layer.qkv_bias).view(batch, new, -1, shape.head_dim)
        queries, keys, values = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=2)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = functional.rms_norm(queries, (shape.head_dim,), layer.query_norm, shape.norm_eps)
            keys = functional.rms_norm(keys, (shape.head_dim,), layer.key_norm, shape.norm_eps)
        queries, keys = rotated(queries, *rotations), rotated(keys, *rotations)
        every_key, every_value = put(number, keys.transpose(1, 2), values.transpose(1, 2))
        # Grouped-query attention: the heads of a group become further queries of one head, so keys are not repeated.
        queries = queries.transpose(1, 2).reshape(batch, shape.kv_heads, -1, shape.head_dim)
        mixed = functional.scaled_dot_product_attention(queries, every_key, every_value, attn_mask=mask)
        mixed = mixed.view(batch, shape.heads, new, shape.head_dim).transpose(1, 2).reshape(batch, new, -1)
        return functional.linear(mixed, layer.output)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of a decoder layer; the query, key and value projections are one matrix."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    mlp_norm: torch.Tensor
    mlp: GatedMlp | Experts


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to ``x`` (…, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def _load(source: CheckpointTensors, prefix: str, shape: BlockShape, device: str, dtype: torch.dtype) -> _Layer:
    def get(name: str) -> torch.Tensor:
        return source.tensor(f"{prefix}.{name}").to(device, dtype)

    def get_if(name: str) -> torch.Tensor | None:
        return get(name) if f"{prefix}.{name}" in source else None

    parts = [f"self_attn.{part}_proj" for part in "qkv"]
    biased = f"{prefix}.{parts[0]}.bias" in source
    has_experts = f"{prefix}.mlp.gate.weight" in source
    return _Layer(
        attention_norm=get("input_layernorm.weight"),
        qkv=torch.cat([get(f"{part}.weight") for part in parts]),
        qkv_bias=torch.cat([get(f"{part}.bias") for part in parts]) if biased else None,
        query_norm=get_if("self_attn.q_norm.weight"),
        key_norm=get_if("self_attn.k_norm.weight"),
        output=get("self_attn.o_proj.weight"),
        mlp_norm=get("post_attention_layernorm.weight"),
        mlp=Experts.load(source, f"{prefix}.mlp", shape, device, dtype)
        if has_experts
        else GatedMlp.load(source, f"{prefix}.mlp", device, dtype),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The sizes of a transformer and its rotary embedding, which cannot be read from the tensors alone.

    ``axes`` has, for each of the ``head_dim / 2`` rotary frequencies, the axis of the M-RoPE position that it rotates
    by: 0 for time, 1 for height, 2 for width. ``experts_per_token`` is the k of a top-k MoE; 0 for dense models.
    """

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    axes: tuple[int, ...]
    experts_per_token: int = 0
    normalise_experts: bool = True

    @classmethod
    def of(cls, config: Mapping[str, Any], place: str, *, interleaved: bool | None = None) -> BlockShape:
        """Read the configuration of a text model, with ``rope_parameters`` or, in older files, ``rope_scaling``.

        ``interleaved`` is the layout of M-RoPE: whether the frequencies of the three axes alternate (Qwen3) or form one
        section for each axis (Qwen2.5). None means an ordinary rotary embedding. ``place`` is the name of ``config``
        within config.json, for errors. Raises ConfigurationError for missing or unsupported entries.
        """
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "mrope"):
            raise ConfigurationError([f"{place}: rotary positions of the type {kind!r} are not supported"])
        if (activation := config.get("hidden_act", "silu")) != "silu":
            raise ConfigurationError([f"{place}: the activation {activation!r} is not supported"])
        try:
            heads = int(config["num_attention_heads"])
            head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
            return cls(
                hidden_size=int(config["hidden_size"]),
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config["num_key_value_heads"]),
                head_dim=head_dim,
                norm_eps=float(config["rms_norm_eps"]),
                rope_theta=float(rope.get("rope_theta") or config["rope_theta"]),
                axes=(0,) * (head_dim // 2) if interleaved is None else _axes(head_dim // 2, rope, place, interleaved),
                experts_per_token=int(config.get("num_experts_per_tok", 0)),
                normalise_experts=bool(config.get("norm_topk_prob", True)),
            )
        except KeyError as error:
            raise ConfigurationError([f"{place}: {error.args[0]} is missing"]) from None

    def positions_bytes(self, value_bytes: int) -> int:
        """Return the bytes of one position in the KV cache; ``value_bytes`` is the size of a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * value_bytes


def _axes(frequencies: int, rope: Mapping[str, Any], place: str, interleaved: bool) -> tuple[int, ...]:
    """Return the axis of each rotary frequency, see ``BlockShape.axes``."""
    sections = rope["mrope_section"]
    if len(sections) != 3 or sum(sections) != frequencies:
        raise ConfigurationError(
            [f"{place}: mrope_section {sections} must be three numbers with the sum {frequencies}"]
        )
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    # Height and width have every third frequency up to the end of their sections; all others belong to time.
    axes = [0] * frequencies
    for axis in (1, 2):
        for frequency in range(axis, min(frequencies, sections[axis] * 3), 3):
            axes[frequency] = axis
    return tuple(axes)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """The feed-forward network of a dense layer, SwiGLU.

    ``gate_up`` (2 * inner, H) has the gate and the up projection, ``down`` (H, inner) the down projection.
    """

    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def load(cls, source: CheckpointTensors, prefix: str, device: str, dtype: torch.dtype) -> GatedMlp:
        parts = [source.tensor(f"{prefix}.{name}_proj.weight").to(device, dtype) for name in ("gate", "up")]
        return cls(torch.cat(parts), source.tensor(f"{prefix}.down_proj.weight").to(device, dtype))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(x, self.gate_up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.down)


#: Up to this many pairs of row and expert, the matrices of each pair are gathered: few operators, but each matrix is
#: copied. Beyond it, rows are sorted by expert, and grouped_mm reads each matrix once.
_GATHERED: Final = 16
#: The same limit on GPUs where grouped_mm would synchronise with the device, which a step must not do: 32 rows of 8
#: experts.
_GATHERED_OTHERWISE: Final = 256
#: The CUDA architectures (major versions) on which grouped_mm of bfloat16 is one kernel.
_GROUPING: Final = (9, 10)


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward network of a MoE layer: top-k routing over E experts, and a shared expert.

    The computation has no loop over experts. ``gate_up`` (E, 2 * inner, H) and ``down`` (E, H, inner) are as in
    GatedMlp. For up to ``gathered`` pairs of row and expert, the matrices of each pair are gathered; for more, the rows
    are sorted by expert (see _GATHERED), which synchronises with the device on some GPUs.
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: GatedMlp
    shared_gate: torch.Tensor
    per_token: int
    normalise: bool
    gathered: int

    @classmethod
    def load(
        cls, source: CheckpointTensors, prefix: str, shape: BlockShape, device: str, dtype: torch.dtype
    ) -> Experts:
        router = source.tensor(f"{prefix}.gate.weight").to(device, dtype)
        inner, size = source.tensor(f"{prefix}.experts.0.gate_proj.weight").shape
        gate_up = torch.empty(len(router), 2 * inner, size, device=device, dtype=dtype)
        down = torch.empty(len(router), size, inner, device=device, dtype=dtype)
        # Copied in place one by one, so that loading takes no further memory on the device.
        for expert in range(len(router)):
            for name, place in (
                ("gate", gate_up[expert, :inner]),
                ("up", gate_up[expert, inner:]),
                ("down", down[expert]),
            ):
                place.copy_(source.tensor(f"{prefix}.experts.{expert}.{name}_proj.weight"))
        return cls(
            router=router,
            gate_up=gate_up,
            down=down,
            shared=GatedMlp.load(source, f"{prefix}.shared_expert", device, dtype),
            shared_gate=source.tensor(f"{prefix}.shared_expert_gate.weight").to(device, dtype),
            per_token=shape.experts_per_token,
            normalise=shape.normalise_experts,
            gathered=_most_gathered(device, dtype),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.shape[-1])
        weights = functional.softmax(functional.linear(rows, self.router), dim=-1, dtype=torch.float32)
        weights, chosen = weights.topk(self.per_token, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        made = self._gathered(rows, chosen) if chosen.numel() <= self.gathered else self._sorted(rows, chosen)
        mixed = (made * weights.to(x.dtype)[:, :, None]).sum(dim=1)
        shared = torch.sigmoid(functional.linear(rows, self.shared_gate)) * self.shared(rows)
        return (mixed + shared).view(x.shape)

    def _gathered(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the outputs (rows, k, H) of the experts in ``chosen`` (rows, k), with gathered matrices."""
        gate, up = torch.matmul(self.gate_up[chosen], rows[:, None, :, None]).squeeze(-1).chunk(2, dim=-1)
        inner = functional.silu(gate) * up
        return torch.matmul(self.down[chosen], inner[..., None]).squeeze(-1)

    def _sorted(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the outputs (rows, k, H) of the experts in ``chosen`` (rows, k), with rows sorted by expert."""
        experts, order = chosen.view(-1).sort(stable=True)
        numbers = torch.arange(len(self.router), device=rows.device)
        ends = torch.searchsorted(experts, numbers, right=True).to(torch.int32)
        inputs = rows[order // self.per_token]
        gate, up = functional.grouped_mm(inputs, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        made = functional.grouped_mm(functional.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        return torch.empty_like(made).index_copy_(0, order, made).view(*chosen.shape, -1)


def _most_gathered(device: str, dtype: torch.dtype) -> int:
    if torch.device(device).type != "cuda":
        return _GATHERED
    groups = dtype is torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in _GROUPING
    return _GATHERED if groups else _GATHERED_OTHERWISE


class SlotCache:
    """The KV cache of all sessions of a Talker, in slots of one size. The caller keeps the length of each slot.

    ``keys`` and ``values`` are (layers, slots, kv_heads, longest, head_dim). ``piece`` and ``row`` return the ``put``
    and the ``mask`` of a pass, see Transformer.
    """

    def __init__(self, shape: BlockShape, slots: int, longest: int, device: str, dtype: torch.dtype) -> None:
        size = (shape.layers, slots, shape.kv_heads, longest, shape.head_dim)
        # Zeros, not uninitialised: masked positions are multiplied by 0, and 0 times NaN is NaN.
        self.keys = torch.zeros(size, device=device, dtype=dtype)
        self.values = torch.zeros(size, device=device, dtype=dtype)

    def piece(self, slot: int, start: int, count: int) -> tuple[Put, torch.Tensor]:
        """Return the ``put`` and the ``mask`` for a pass over ``count`` positions of one slot, from ``start`` on."""
        here, new, end = slice(slot, slot + 1), slice(start, start + count), start + count

        def put(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.keys[layer, here, :, new] = keys
            self.values[layer, here, :, new] = values
            return self.keys[layer, here, :, :end], self.values[layer, here, :, :end]

        ones = torch.ones(count, end, dtype=torch.bool, device=self.keys.device)
        return put, ones.tril(start)[None]

    def row(self, lengths: torch.Tensor, window: int) -> tuple[Put, torch.Tensor]:
        """Return the ``put`` and the ``mask`` for a pass over the next position of each of the first B slots.

        ``lengths`` (B,) are the numbers of positions that the slots have already. The pass attends only to the first
        ``window`` positions; ``window`` must be larger than the lengths. The position that is written for an inactive
        slot is overwritten by the slot's next pass.
        """
        slots = torch.arange(len(lengths), device=lengths.device)

        def put(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            every_key, every_value = self.keys[layer], self.values[layer]
            every_key[slots, :, lengths] = keys[:, :, 0]
            every_value[slots, :, lengths] = values[:, :, 0]
            return every_key[: len(slots), :, :window], every_value[: len(slots), :, :window]

        return put, (torch.arange(window, device=lengths.device) <= lengths[:, None])[:, None]
