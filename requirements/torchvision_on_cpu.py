"""Lets the torchvision of the package index be imported beside a CPU build of PyTorch.

That torchvision is a CUDA build: its compiled part does not load, and its Python part then stumbles over two operators
that nobody declared. What image processors use of it is pure PyTorch, so declaring the two is enough (they still cannot
be called). `make test` puts this module into its environment, which imports it in every process.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[object] = []


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators right before torchvision is imported, so that processes without it pay nothing."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for schema in _SCHEMAS:
                library.define(schema)
            _declared.append(library)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
