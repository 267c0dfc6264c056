"""What token sessions should say: the same weights in transformers, random readouts, and how near is near enough."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from omni_ws.engine.base import ReadoutManifest
from omni_ws.engine.vllm.readouts import ReadoutVectors
from omni_ws.generated import salience_pb2 as messages

ALL = [{"start": 0, "end": 2**32 - 1}]
#: Of the largest number.
TOLERANCE = 1e-3


class Reference:
    """The same weights in transformers: log-probabilities, and the residual stream after each layer."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import LlamaForCausalLM

        self.torch = torch
        self.model: Any = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.streams: dict[int, Any] = {}
        for index, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(lambda _, __, out, index=index: self.keep(index, out))

    def keep(self, index: int, output: Any) -> None:
        self.streams[index] = (output[0] if isinstance(output, tuple) else output)[0]

    def run(self, tokens: Sequence[int]) -> Any:
        """Log-probabilities of what comes after each position, shape (positions, vocabulary)."""
        with self.torch.no_grad():
            logits = self.model(self.torch.tensor([list(tokens)])).logits[0]
        return logits.log_softmax(-1).numpy()

    def readouts(self, tokens: Sequence[int], vectors: ReadoutVectors) -> np.ndarray[Any, Any]:
        """Shape (positions, layers times concepts)."""
        self.run(tokens)
        parts = [
            self.streams[layer].numpy() @ matrix.T
            for layer, matrix in zip(vectors.manifest.layers, vectors.matrices, strict=True)
        ]
        return np.concatenate(parts, axis=1)


def close(found: Any, wanted: Any) -> bool:
    found, wanted = np.asarray(found), np.asarray(wanted)
    return found.shape == wanted.shape and float(np.abs(found - wanted).max()) <= TOLERANCE * float(
        np.abs(wanted).max()
    )


def readouts(tokens: Sequence[messages.Token]) -> list[list[float]]:
    return [list(token.readout) for token in tokens]


def png(width: int, height: int, colour: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "PNG")
    return out.getvalue()


#: Of the tiny text model.
LAYERS = (0, 1)
HIDDEN_SIZE = 128


def random_vectors(concepts: Sequence[str]) -> ReadoutVectors:
    random = np.random.default_rng(5)
    matrices = tuple(random.standard_normal((len(concepts), HIDDEN_SIZE)).astype(np.float32) for _ in LAYERS)
    manifest = ReadoutManifest(concepts=tuple(concepts), layers=LAYERS, hidden_size=HIDDEN_SIZE, dtype="float16")
    return ReadoutVectors(manifest, matrices)
