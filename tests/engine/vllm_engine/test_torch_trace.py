"""The arguments with which the vLLM engine makes its processes traceable."""

from __future__ import annotations

from pathlib import Path

from omni_ws.config.model import VllmConfig
from omni_ws.engine.vllm.engine import TorchTrace, VllmEngine, traced_arguments


def test_traces_need_a_root_and_no_profiler_of_the_operators(tmp_path: Path) -> None:
    assert TorchTrace(tmp_path, []).possible
    assert not TorchTrace(None, []).possible
    config = VllmConfig(model="nowhere", args={"profiler_config": {}})
    assert not VllmEngine(config, trace_root=tmp_path).can_trace


def test_what_the_operator_set_counts(tmp_path: Path) -> None:
    assert traced_arguments({"a": 1}, None, "Thinker") == {"a": 1}
    assert traced_arguments({"profiler_config": {"b": 2}}, tmp_path, "Thinker") == {"profiler_config": {"b": 2}}
    added = traced_arguments({"a": 1}, tmp_path, "Thinker")
    assert (added["a"], added["profiler_config"]["profiler"]) == (1, "torch")
    assert Path(added["profiler_config"]["torch_profiler_dir"]).is_relative_to(tmp_path)
