"""How two models share a GPU's memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from omni_ws.config.model import VllmConfig
from omni_ws.config.values import ConfigurationError
from omni_ws.engine.vllm.checkpoint import SHARE, memory_shares, weights_bytes
from omni_ws.engine.vllm.engine import VllmEngine

GB = 10**9
FOUR = {"tensor_parallel_size": 4}


@pytest.mark.parametrize(
    ("thinker", "talker", "thinker_args", "talker_args", "shares"),
    [
        (16 * GB, 6 * GB, {}, {}, (0.655, 0.245)),
        (6 * GB, 6 * GB, {}, {}, (0.45, 0.45)),
        # The minimum is a tenth.
        (140 * GB, 6 * GB, {}, {}, (0.8, 0.1)),
        (1 * GB, 60 * GB, {}, {}, (0.1, 0.8)),
        (140 * GB, 6 * GB, FOUR, {}, (0.768, 0.132)),
        (140 * GB, 6 * GB, {**FOUR, "pipeline_parallel_size": 2}, FOUR, (0.8, 0.1)),
        (None, 6 * GB, {}, {}, (0.65, 0.25)),
        (16 * GB, None, {}, {}, (0.65, 0.25)),
        (16 * GB, 6 * GB, {SHARE: 0.5}, {}, (0.5, 0.4)),
        (16 * GB, 6 * GB, {SHARE: 0.95}, {}, (0.95, 0.1)),
        (16 * GB, 6 * GB, {}, {SHARE: 0.3}, (0.6, 0.3)),
        (16 * GB, 6 * GB, {SHARE: 0.5}, {SHARE: 0.2}, (0.5, 0.2)),
    ],
)
def test_shares(
    thinker: int | None,
    talker: int | None,
    thinker_args: dict[str, Any],
    talker_args: dict[str, Any],
    shares: tuple[float, float],
) -> None:
    assert memory_shares(thinker, talker, thinker_args, talker_args) == pytest.approx(shares, abs=6e-4)


@pytest.mark.parametrize("share", ["half", True])
def test_a_share_is_a_number(share: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"vllm\.talker_args\.gpu_memory_utilization: must be a number"):
        memory_shares(GB, GB, {}, {SHARE: share})


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({"model-1.safetensors": 5, "model-2.safetensors": 6, "pytorch_model.bin": 100, "config.json": 7}, 11),
        ({"consolidated.safetensors": 100, "model.safetensors": 11}, 11),
        ({"consolidated.00.pt": 11}, 11),
        ({"config.json": 7}, None),
    ],
)
def test_the_weights_of_a_folder(tmp_path: Path, files: dict[str, int], size: int | None) -> None:
    for name, length in files.items():
        (tmp_path / name).write_bytes(bytes(length))
    assert weights_bytes(str(tmp_path)) == size


@pytest.mark.vllm
@pytest.mark.slow
def test_the_shares_reach_vllm_and_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, size in (("thinker", 3_000_000), ("orpheus", 1_500_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(size))
    folders: dict[str, Any] = {"model": str(tmp_path / "thinker"), "talker": str(tmp_path / "orpheus")}
    for args, shares in (({}, (0.6, 0.3)), ({SHARE: 0.7}, (0.7, 0.2))):
        engine = VllmEngine(VllmConfig(**folders, args=args))
        assert engine._speaker is not None
        with caplog.at_level(logging.INFO):
            engine._share_memory(engine._speaker)
        both = engine._thinker, engine._speaker.talker
        assert tuple(model.engine_args().gpu_memory_utilization for model in both) == pytest.approx(shares)
    assert "the Thinker uses up to 60 % of a GPU's memory (0.0 GB of weights)" in caplog.text
    assert "the Talker uses up to 20 % of a GPU's memory" in caplog.text


@pytest.mark.vllm
@pytest.mark.slow
def test_a_name_that_nobody_knows_has_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert weights_bytes("nobody/nothing-of-this-name") is None
    assert weights_bytes("../not a name") is None
