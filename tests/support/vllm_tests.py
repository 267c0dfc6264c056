"""A pytest plugin: what all tests marked ``vllm`` have in common. They are skipped where vLLM is not installed.

``-m vllm`` imports only the files that have such tests. Importing all others would take longer than vLLM itself does.
Several processes share the work by ``-n 3 --dist loadgroup --no-loadscope-reorder``: a process takes a whole file, or
all files that share an engine or a reference, those that take longest first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

#: For small models: one process for each, one thread, no telemetry, no look-ups, no log, and nothing compiled: vLLM
#: compiles what counts ranks of log-probabilities, also where models run eagerly, which is half of what a start takes.
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
    "TOKENIZERS_PARALLELISM": "false",
}
#: The files that share an engine of the session (tests/engine/vllm_engine/conftest.py), by the engine, and those that
#: share what transformers makes of the omni models (support/omni_reference.py), which a process computes once.
_SHARING: Mapping[str, tuple[str, ...]] = {
    "omni reference": (
        "test_thinker_rows",
        "test_vllm_omni",
        "test_omni_reference",
        "test_talkers",
        "test_talker_batches",
        "test_talker_refusals",
        "test_starving_voice",
        "test_step_graphs",
        "test_qwen25_token2wav",
    ),
    "voice_model": ("test_talker", "test_vllm_speech", "test_vllm_token_sessions_crowded", "test_vllm_profile"),
    "text_model": (
        "test_vllm_text",
        "test_vllm_tools",
        "test_vllm_options",
        "test_vllm_completions",
        "test_vllm_http_answers",
    ),
    "hearing_model and seeing_model": ("test_vllm_media", "test_vllm_token_sessions", "test_vllm_server"),
}
_GROUP: Mapping[str, str] = {file: group for group, files in _SHARING.items() for file in files}
#: By the processor time that they take, the most first. What is not named takes less.
_LONGEST: tuple[str, ...] = (
    "omni reference",
    "test_serve_tiny",
    "test_vllm_kills",
    "test_vllm_nodes",
    "voice_model",
    "text_model",
    "hearing_model and seeing_model",
    "test_real_weights",
    "test_vllm_parts",
    "test_vllm_death",
    "test_vllm_asr",
    "test_remote_vllm_serve",
    "test_vllm_start",
    "test_whole_vllm",
    "test_vllm_signals",
    "test_readout_making",
)


def set_environment() -> None:
    """Before vLLM is imported, which reads it then. What is set already stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out a file without such tests, unless the command names it: pytest would call it missing."""
    if config.getoption("markexpr") != "vllm" or not collection_path.match("test_*.py"):
        return None
    if any(collection_path == Path(one.partition("::")[0]).absolute() for one in config.args):
        return None
    return True if "mark.vllm" not in collection_path.read_text(encoding="utf-8") else None


def _group(file: Path) -> str:
    return _GROUP.get(file.stem, file.stem)


def _place(item: pytest.Item) -> int:
    return (*_LONGEST, group := _group(item.path)).index(group)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("markexpr") == "vllm":
        items.sort(key=_place)
    missing = find_spec("vllm") is None
    for item in items:
        if item.get_closest_marker("vllm") is None:
            continue
        item.add_marker(pytest.mark.xdist_group(_group(item.path)))
        # Warnings that vLLM, transformers and PyTorch raise are not ours.
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if missing:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed (make test-vllm)"))
