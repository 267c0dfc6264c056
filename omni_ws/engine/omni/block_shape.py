"""BlockShape: the sizes of a transformer in a Talker, and where its rotary positions come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_ws.config.values import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """What the tensors alone do not tell.

    ``axes`` says for each of the ``head_dim / 2`` rotary frequencies which of the three M-RoPE positions (time, height,
    width) turns it. ``experts_per_token`` is 0 where there are no experts.
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
        """Read a text configuration, the newer form (``rope_parameters``) and the older (``rope_scaling``).

        ``interleaved`` says how the family lays out M-RoPE: the sections' frequencies by turns (Qwen3), or one section
        after the other (Qwen2.5); None is for one axis. ``place`` is its name in config.json, for errors. Raises
        ConfigurationError for what is missing or unknown.
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
        """Return the bytes of keys and values that one position takes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * value_bytes


def _axes(frequencies: int, rope: Mapping[str, Any], place: str, interleaved: bool) -> tuple[int, ...]:
    """Return the axis of each frequency."""
    sections = rope["mrope_section"]
    if len(sections) != 3 or sum(sections) != frequencies:
        raise ConfigurationError(
            [f"{place}: mrope_section {sections} must be three numbers with the sum {frequencies}"]
        )
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    # Height and width take every third frequency as far as their sections reach; what is left is time's.
    axes = [0] * frequencies
    for axis in (1, 2):
        for frequency in range(axis, min(frequencies, sections[axis] * 3), 3):
            axes[frequency] = axis
    return tuple(axes)
