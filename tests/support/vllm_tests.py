"""A pytest plugin: what all tests marked ``vllm`` have in common. They are skipped where vLLM is not installed.

``-m vllm`` imports only the files that have such tests. Importing all others would take longer than vLLM itself does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

#: For small models: one process for each, one thread, no telemetry, no look-ups, no log.
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
    "TOKENIZERS_PARALLELISM": "false",
}


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = find_spec("vllm") is None
    for item in items:
        if item.get_closest_marker("vllm") is None:
            continue
        # Warnings that vLLM, transformers and PyTorch raise are not ours.
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if missing:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed (make test-vllm)"))
