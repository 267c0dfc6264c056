"""The benchmark of GPUs, with tiny shapes on the CPU."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (make test-vllm)")
pytest.importorskip("transformers", reason="transformers is not installed (make test-vllm)")

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import agreement
from benchmarks.gpu.made_weights import MadeTensors
from benchmarks.gpu.shapes import Family, omni_shape

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def test_it_measures_all_parts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "RESULTS-gpu.md")
    assert gpu.main(["--tiny", "--device", "cpu", "--write"]) == 0
    printed = capsys.readouterr().out
    for family in Family:
        for part in ("start", "Talker", "vocoder", "answers"):
            assert f"**{family}, tiny: {part}" in printed
        assert re.search(rf"^\| {re.escape(family)} \| 100% \| 0\.0e\+00 of the peak \|$", printed, re.MULTILINE)
    assert "code predictor, 15 passes" in printed
    # Only what a GPU did is written down.
    assert not gpu.RESULTS.exists()


def test_the_real_shapes_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu"])
    assert "--tiny" in capsys.readouterr().err


def test_frames_are_equal_up_to_the_first_that_differs() -> None:
    one = np.arange(20).reshape(10, 2)
    other = one.copy()
    assert agreement._common(one, other) == 10
    assert agreement._common(one, other[:7]) == 7
    other[4, 1] += 1
    assert agreement._common(one, other) == 4


@pytest.mark.parametrize(
    ("family", "name", "size"),
    [
        (Family.QWEN3, "talker.model.layers.19.mlp.experts.127.down_proj.weight", (1_024, 384)),
        (Family.QWEN3, "talker.model.layers.0.mlp.experts.0.gate_proj.weight", (384, 1_024)),
        (Family.QWEN3, "talker.code_predictor.lm_head.14.weight", (2_048, 1_024)),
        (Family.QWEN25, "talker.model.layers.23.mlp.up_proj.weight", (18_944, 896)),
        (Family.QWEN25, "talker.thinker_to_talker_proj.weight", (896, 3_584)),
    ],
)
def test_made_weights_have_the_names_and_shapes_of_a_checkpoint(
    family: Family, name: str, size: tuple[int, ...]
) -> None:
    source = MadeTensors(omni_shape(family, tiny=False), "cpu")
    assert name in source
    tensor = source.tensor(name)
    assert tensor.shape == size
    assert 0.9 < float(tensor.std()) * size[1] ** 0.5 < 1.1
    assert f"{name}x" not in source
