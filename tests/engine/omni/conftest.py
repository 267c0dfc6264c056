"""Skips the tests that need torch and transformers where vLLM's environment is not; it has both."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
from support.vllm_engine import ENVIRONMENT

# Before vLLM is imported, which reads them then.
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

_HERE = os.path.dirname(__file__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = find_spec("vllm") is None
    for item in items:
        if item.get_closest_marker("vllm") is None or not str(item.path).startswith(_HERE):
            continue
        # Warnings that transformers and PyTorch raise are not ours.
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(240))
        if missing:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed (make test-vllm)"))
