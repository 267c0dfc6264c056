"""Where vLLM is not installed, the tests that need it are skipped; the others of this folder run."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from support.vllm_engine import ENVIRONMENT

# Before vLLM is imported, which reads them once.
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

_HERE = os.path.dirname(__file__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = find_spec("vllm") is None
    for item in items:
        if item.get_closest_marker("vllm") is None or not str(item.path).startswith(_HERE):
            continue
        # What vLLM and PyTorch complain about on import is theirs.
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        item.add_marker(pytest.mark.timeout(240))
        if missing:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed (make test-vllm)"))


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    """What vLLM leaves to the garbage collector complains when it is collected: here, not at the end of all tests."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
