"""What the vLLM engine is started with so that its processes can be traced, and who cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_ws.config.model import VllmConfig
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.torch_trace import TorchTrace, traced_arguments
from omni_ws.errors import UnsupportedParameter


async def test_models_that_were_not_started_for_traces_refuse_them(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedParameter, match=r"profiler\.root is not set"):
        await TorchTrace(None, []).start(tmp_path / "x")
    engine = VllmEngine(VllmConfig(model="nowhere", args={"profiler_config": {}}), trace_root=tmp_path)
    with pytest.raises(UnsupportedParameter, match="profiler_config is set"):
        await engine.start_trace(tmp_path / "x")


def test_what_the_operator_set_counts(tmp_path: Path) -> None:
    assert traced_arguments({"a": 1}, None, "Thinker") == {"a": 1}
    assert traced_arguments({"profiler_config": {"b": 2}}, tmp_path, "Thinker") == {"profiler_config": {"b": 2}}
    added = traced_arguments({"a": 1}, tmp_path, "Thinker")
    assert (added["a"], added["profiler_config"]["profiler"]) == (1, "torch")
    assert Path(added["profiler_config"]["torch_profiler_dir"]).is_relative_to(tmp_path)
