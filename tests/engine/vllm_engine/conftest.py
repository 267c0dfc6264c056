"""Where vLLM is not installed, the tests that need it are skipped; the others of this folder run."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from support.vllm_engine import ENVIRONMENT

if TYPE_CHECKING:
    from support.vllm_serve import VllmServers

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


@pytest.fixture(autouse=True, scope="session")
def quick_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models start in a process that has imported vLLM already, which is most of what their start takes."""
    if find_spec("vllm") is None or not any(item.get_closest_marker("vllm") for item in request.session.items):
        yield
        return
    from support.imported_already import models_in_forked_processes

    with models_in_forked_processes():
        yield


@pytest.fixture
def early_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many pieces of prompts have been computed while their inputs were still open, over all requests."""
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
    """What vLLM leaves to the garbage collector complains when it is collected: here, not at the end of all tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    yield
    collect()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """After the last fixture has let go."""
    collect()
