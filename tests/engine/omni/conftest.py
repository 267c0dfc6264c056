"""The environment of the tests that need torch and transformers; where vLLM is not installed, they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from support.vllm_tests import set_environment

set_environment()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For PyTorch: tiny models gain nothing from more, and sums have the same order."""
    if find_spec("torch") is None:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
