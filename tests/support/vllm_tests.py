"""A pytest plugin: what all tests marked ``vllm`` have in common. They are skipped where vLLM is not installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = find_spec("vllm") is None
    for item in items:
        if item.get_closest_marker("vllm") is None:
            continue
        # Warnings that vLLM, transformers and PyTorch raise are not ours.
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(240))
        if missing:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed (make test-vllm)"))
