"""Fixtures of the tests of vLLM's engines, and the environment of those that need vLLM.

Starting a model is most of what a test of vLLM costs, so an engine serves all tests that need one of its kind. They run
on the event loop of the session, and each leaves the engine as it found it. Tests that need other settings, or that
break more than they mend, start engines of their own.

A test that uses an engine is asynchronous, even if it awaits nothing: for another one, pytest-asyncio ends the loop,
and the engine with it, and the next test starts both again.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from support.vllm_engine import left_as_found, running_engine
from support.vllm_tests import set_environment

from omni_ws.engine.base import EngineState

if TYPE_CHECKING:
    from omni_ws.engine.vllm.engine import VllmEngine

set_environment()


@pytest.fixture(autouse=True, scope="session")
def quick_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start models in a process that has already imported vLLM, which is most of the time that a start takes."""
    if find_spec("vllm") is None or not any(item.get_closest_marker("vllm") for item in request.session.items):
        yield
        return
    from support.imported_already import models_in_forked_processes

    collect()
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


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def text_model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """A model of text that keeps to schemas and calls tools."""
    from support.tiny_models import ENGINE_ARGS, build_text_model

    # With random weights the model would generate white space forever where a grammar allows it.
    args = {**ENGINE_ARGS, "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
    folder = build_text_model(tmp_path_factory.mktemp("models") / "text")
    async with running_engine(folder, args, tool_parser="hermes") as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def text_engine(text_model: VllmEngine) -> AsyncIterator[VllmEngine]:
    async with left_as_found(text_model) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def voice_model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """A model of text with a Talker, with readouts, and with traces of what torch computes."""
    from support.tiny_models import ENGINE_ARGS, build_codec, build_talker, build_text_model, write_talker_profile
    from support.vllm_engine import random_vectors

    from omni_ws.engine.vllm.readouts import Readouts

    folder = tmp_path_factory.mktemp("voice")
    settings: dict[str, Any] = {
        "talker": str(build_talker(folder / "talker")),
        "talker_profile": str(write_talker_profile(folder / "talker.toml", build_codec(folder / "codec"))),
        "talker_args": {**ENGINE_ARGS, "max_num_seqs": 4},
    }
    readouts = Readouts(random_vectors(("warm", "loud", "round")))
    thinker = build_text_model(folder / "thinker")
    traces = folder / "profiles"
    async with running_engine(thinker, ENGINE_ARGS, readouts=readouts, trace_root=traces, **settings) as engine:
        yield engine
    assert engine._speaker is not None
    assert engine._speaker.state is not EngineState.OK


@pytest_asyncio.fixture(loop_scope="session")
async def voice_engine(voice_model: VllmEngine) -> AsyncIterator[VllmEngine]:
    async with left_as_found(voice_model) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def hearing_model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """A model that hears, in segments of a second and more."""
    from support.tiny_models import MULTIMODAL_ARGS, build_audio_model

    folder = build_audio_model(tmp_path_factory.mktemp("models") / "tiny-audio")
    async with running_engine(folder, MULTIMODAL_ARGS, audio_segment_ms=1000) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def hearing_engine(hearing_model: VllmEngine) -> AsyncIterator[VllmEngine]:
    async with left_as_found(hearing_model) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """A model that sees two pictures or a film, and with readouts."""
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    from support.tiny_models import MULTIMODAL_ARGS, build_vision_model
    from support.vllm_engine import random_vectors

    from omni_ws.engine.vllm.readouts import Readouts

    args = {**MULTIMODAL_ARGS, "limit_mm_per_prompt": {"image": 2, "video": 1}}
    folder = build_vision_model(tmp_path_factory.mktemp("models") / "vision")
    async with running_engine(folder, args, readouts=Readouts(random_vectors(("warm", "loud")))) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def seeing_engine(seeing_model: VllmEngine) -> AsyncIterator[VllmEngine]:
    async with left_as_found(seeing_model) as engine:
        yield engine


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
