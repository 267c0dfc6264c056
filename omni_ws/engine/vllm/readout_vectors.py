"""Reads and writes the files of readouts: vectors for each layer, and a manifest that names layers and concepts.

The safetensors file contains ``layer_<index>.vectors`` of shape (concepts, hidden size), in float16. It must not be in
the checkpoint's folder, where vLLM would load it as weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.tokens import ReadoutManifest

_DTYPE: Final = "float16"


@dataclass(frozen=True, slots=True)
class ReadoutVectors:
    """Readout vectors: a float32 matrix of shape (concepts, hidden size) for each layer of the manifest."""

    manifest: ReadoutManifest
    matrices: tuple[NDArray[np.float32], ...]

    def check_model(self, *, hidden_size: int, layers: int) -> None:
        """Raise ConfigurationError if the vectors are not for a model of this size."""
        problems = []
        if self.manifest.hidden_size != hidden_size:
            problems.append(
                f"the readout vectors are for a hidden size of {self.manifest.hidden_size}; "
                f"the model's is {hidden_size}"
            )
        if beyond := [layer for layer in self.manifest.layers if layer >= layers]:
            problems.append(f"the readout vectors are for layers {beyond}; the model has only {layers} layers")
        if problems:
            raise ConfigurationError(problems)


def load_vectors(vectors: Path, manifest: Path) -> ReadoutVectors:
    """Read both files. Raises ConfigurationError if they are missing, malformed or inconsistent."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    described = _manifest(manifest)
    try:
        tensors = load_file(vectors)
    except (OSError, SafetensorError, TypeError, KeyError) as error:  # the last two: dtypes that numpy lacks
        raise ConfigurationError([f"cannot read the readout vectors {vectors}: {error}"]) from None
    shape = (len(described.concepts), described.hidden_size)
    matrices = []
    for layer in described.layers:
        name = f"layer_{layer}.vectors"
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shape:
            found = "nothing" if tensor is None else f"{tensor.shape}"
            raise ConfigurationError([f"{vectors}: {name} must have the shape {shape}, got {found}"])
        if tensor.dtype != np.dtype(_DTYPE):
            raise ConfigurationError([f"{vectors}: {name} must be {_DTYPE}, got {tensor.dtype}"])
        matrix = tensor.astype(np.float32)
        if not np.isfinite(matrix).all():
            raise ConfigurationError([f"{vectors}: {name} contains NaN or infinity"])
        matrices.append(matrix)
    return ReadoutVectors(described, tuple(matrices))


def save_vectors(
    matrices: Mapping[int, NDArray[np.float32]], concepts: Sequence[str], vectors: Path, manifest: Path
) -> None:
    """Write both files. ``matrices`` has one for each layer, with a row for each concept."""
    from safetensors.numpy import save_file

    layers = sorted(matrices)
    save_file({f"layer_{layer}.vectors": matrices[layer].astype(np.float16) for layer in layers}, vectors)
    hidden_size = matrices[layers[0]].shape[1]
    described = {"concepts": list(concepts), "layers": layers, "hidden_size": hidden_size, "dtype": _DTYPE}
    manifest.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _manifest(path: Path) -> ReadoutManifest:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError([f"cannot read the readout manifest {path}: {error}"]) from None
    concepts, layers = _list(fields, "concepts", str), _list(fields, "layers", int)
    hidden_size = fields.get("hidden_size") if isinstance(fields, dict) else None
    if not concepts or not layers or type(hidden_size) is not int or hidden_size < 1 or min(layers) < 0:
        raise ConfigurationError([f"{path}: a manifest must have concepts, layers and a hidden_size"])
    if len(set(layers)) < len(layers) or len(set(concepts)) < len(concepts):
        raise ConfigurationError([f"{path}: layers and concepts must be unique"])
    if fields.get("dtype") != _DTYPE:
        raise ConfigurationError([f"{path}: dtype must be {_DTYPE}"])
    return ReadoutManifest(concepts=tuple(concepts), layers=tuple(layers), hidden_size=hidden_size, dtype=_DTYPE)


def _list(fields: Any, name: str, kind: type) -> list[Any]:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, list) and all(type(one) is kind for one in value) else []
