"""Fixtures of the tests of vLLM's engines, and the environment of those that need vLLM."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from support.vllm_tests import set_environment

if TYPE_CHECKING:
    from support.vllm_serve import VllmServers

set_environment()


@pytest.fixture(autouse=True, scope="session")
def quick_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start models in a process that has already imported vLLM, which is most of the time that a start takes."""
    if find_spec("vllm") is None or not any(item.get_closest_marker("vllm") for item in request.session.items):
        yield
        return
    from support.imported_already import models_in_forked_processes

    with models_in_forked_processes():
        yield


@pytest.fixture
def early_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the parts of prompts computed while their inputs were open, over all requests."""
    from omni_ws.engine.vllm.thinker import Thinker

    thinkers: list[Thinker] = []
    work_early = Thinker._work_early

    async def working(self: Thinker, *arguments: Any) -> None:
        thinkers.append(self)
        await work_early(self, *arguments)

    monkeypatch.setattr(Thinker, "_work_early", working)
    return lambda: sum(thinker.early_steps for thinker in thinkers)


@pytest.fixture(scope="session")
def vllm_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServers]:
    from support import vllm_serve

    with vllm_serve.vllm_servers(tmp_path_factory.mktemp("served")) as servers:
        yield servers


def collect() -> None:
    """Collect what vLLM leaves to the garbage collector here, where its warnings are filtered."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    yield
    collect()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Runs after the last fixture has ended."""
    collect()
