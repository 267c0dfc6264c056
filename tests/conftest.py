"""Which event loop a test runs on, and what every test may ask for.

Asynchronous tests run on asyncio's own loop, those of ``tests/transport`` on uvloop, which is what production uses.
What asks the loop for more than its tasks and timers runs on both (``_BOTH_LOOPS``), and what is marked
``virtual_clock`` on a loop whose time jumps (support/virtual_clock.py), and on no other.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop
import websockets.asyncio.client
from hypothesis import settings
from support.patience import PATIENCE_SEC
from support.virtual_clock import VirtualClockLoop

import omni_ws.client
from omni_ws.service.process import QUIETED_LOGGERS

pytest_plugins = ["support.uneven_schedule", "support.vllm_tests", "support.voices"]

_TESTS = Path(__file__).parent
_PRODUCTION_LOOP = {_TESTS / "transport", _TESTS / "outside" / "test_calls_through_turn.py"}
#: What reads, writes, pauses and closes sockets itself, or hands them over.
_BOTH_LOOPS = {
    _TESTS / "transport" / "http",
    _TESTS / "transport" / "native" / "test_websocket_pressure.py",
    _TESTS / "workers" / "test_worker_parts.py",
}
#: Passes of the event loop in which what was cancelled may still come to its end.
_WINDING_UP_PASSES = 1000

# An example that took long on a busy machine is no failure. Where CI is set every run tries the same examples, so that
# a failure there is about the change; elsewhere each run tries others.
settings.register_profile("unhurried", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("unhurried")

#: For ``--hypothesis-profile=fast``; tests that say themselves how many examples they need keep to that.
settings.register_profile("fast", max_examples=25)

#: What clients of this process wait for a server by themselves (10 s and 20 s) is not enough on a busy machine.
_PATIENT_CLIENTS: Mapping[Callable[..., Any], Mapping[str, float]] = {
    websockets.asyncio.client.connect.__init__: {"open_timeout": PATIENCE_SEC, "ping_timeout": PATIENCE_SEC},
    inspect.unwrap(omni_ws.client.connect): {"open_timeout": PATIENCE_SEC},
}

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-case", action="store_true", help="run each test with the first of its parameters only")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Lets no garbage be collected while pytest parses the source of a test that failed.

    What is collected may log its traceback, which parses source too, and in Python 3.11 a parser inside another breaks
    that one ("AST constructor recursion depth mismatch"): instead of the failure there would be an internal error.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if was_enabled:
            gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--one-case"):
        first: dict[str, pytest.Item] = {}
        for item in items:
            first.setdefault(item.nodeid.partition("[")[0], item)
        kept = set(first.values())
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = first.values()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "virtual_clock: runs on an event loop whose clock jumps over idle time")
    # What a shell without job control starts in the background ignores ^C, and so would the children of the tests.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spares each garbage collection, then and later, the look at a million objects of thousands of tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    if item.get_closest_marker("virtual_clock") is not None:
        return {"virtual_clock": VirtualClockLoop}
    places = {item.path, *item.path.parents}
    loops: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    if places.isdisjoint(_BOTH_LOOPS):
        del loops["uvloop" if places.isdisjoint(_PRODUCTION_LOOP) else "asyncio"]
    return loops


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Undoes what a server that started in this process set up: levels, and a handler that keeps the test's stderr."""
    root, quieted = logging.getLogger(), [logging.getLogger(name) for name in QUIETED_LOGGERS]
    handlers, levels = root.handlers[:], [logger.level for logger in (root, *quieted)]
    yield
    root.handlers[:] = handlers
    for logger, level in zip((root, *quieted), levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def _patient_clients(request: pytest.FixtureRequest) -> Iterator[None]:
    """Clients have the patience of the tests where they say nothing else; by the virtual clock they have their own."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("virtual_clock") is None:
            for connect, patience in _PATIENT_CLIENTS.items():
                patch.setattr(connect, "__kwdefaults__", {**(connect.__kwdefaults__ or {}), **patience})
        yield


@pytest.fixture
def no_weights(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who has fetched nothing: embedded parts are those that need no weights, whatever this machine has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Fail a test that leaves a task behind: every task must have an owner, and end with it."""
    before = asyncio.all_tasks()
    yield
    for _ in range(_WINDING_UP_PASSES):
        left = asyncio.all_tasks() - before - {asyncio.current_task()}
        if not left:
            return
        await asyncio.sleep(0)
    pytest.fail(f"tasks left behind: {left}")
