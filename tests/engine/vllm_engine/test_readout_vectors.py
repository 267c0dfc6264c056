"""The files of readouts, and every way in which they can be invalid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.vllm.readouts import load_vectors, save_vectors

pytestmark = pytest.mark.vllm


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    made = tmp_path / "readout.safetensors", tmp_path / "readout.json"
    save_vectors({0: np.ones((2, 8), np.float32), 3: np.ones((2, 8), np.float32)}, ["one", "two"], *made)
    return made


def refused(files: tuple[Path, Path], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        load_vectors(*files)


@pytest.mark.parametrize("which", [0, 1])
def test_a_file_that_is_not_there(files: tuple[Path, Path], which: int) -> None:
    files[which].unlink()
    refused(files, "cannot read the readout")


@pytest.mark.parametrize("which", [0, 1])
def test_a_folder_in_its_place(files: tuple[Path, Path], which: int) -> None:
    files[which].unlink()
    files[which].mkdir()
    refused(files, "cannot read the readout")


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("data", [b"", b"\xff\xfe nothing", b"{", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_file_of_another_kind(files: tuple[Path, Path], which: int, data: bytes) -> None:
    files[which].write_bytes(data)
    refused(files, "readout")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"concepts": []}, "a manifest must have concepts"),
        ({"concepts": "warm"}, "a manifest must have concepts"),
        ({"concepts": ["one", 2]}, "a manifest must have concepts"),
        ({"concepts": ["one", "one"]}, "must be unique"),
        ({"concepts": ["one"]}, r"must have the shape \(1, 8\), got \(2, 8\)"),
        ({"layers": []}, "layers"),
        ({"layers": [-1, 3]}, "layers"),
        ({"layers": [True, 3]}, "layers"),
        ({"layers": [0, 0]}, "must be unique"),
        ({"layers": [0, 4]}, r"layer_4\.vectors must have the shape \(2, 8\), got nothing"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 8.0}, "hidden_size"),
        ({"hidden_size": 16}, "must have the shape"),
        ({"dtype": "float32"}, "dtype must be float16"),
        ({"dtype": None}, "dtype must be float16"),
    ],
    ids=str,
)
def test_a_manifest_that_says_what_cannot_be(files: tuple[Path, Path], changes: dict[str, Any], match: str) -> None:
    fields = {**json.loads(files[1].read_text()), **changes}
    files[1].write_text(json.dumps(fields))
    refused(files, match)


@pytest.mark.parametrize("manifest", ["[]", "3", "null"])
def test_a_manifest_that_is_none(files: tuple[Path, Path], manifest: str) -> None:
    files[1].write_text(manifest)
    refused(files, "a manifest must have")


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_vectors_that_are_no_numbers(files: tuple[Path, Path], wrong: float) -> None:
    matrix = np.ones((2, 8), np.float32)
    matrix[1, 3] = wrong
    save_vectors({0: matrix}, ["one", "two"], *files)
    refused(files, "contains NaN or infinity")


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_vectors_of_another_kind(files: tuple[Path, Path], kind: str) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({f"layer_{layer}.vectors": torch.ones((2, 8), dtype=getattr(torch, kind)) for layer in (0, 3)}, files[0])
    refused(files, "readout")
