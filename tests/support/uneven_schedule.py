"""``pytest --uneven 7``: every task wakes up late, by a random number of passes of the event loop.

An event loop runs what is ready in order, and so does nearly everything happen in the same order each time, until a
busy machine has it otherwise. Which task goes on first is not for a test or for the product to rely on: what fails here
is a race. The same seed gives a test the same delays. Tests that count passes are marked ``counts_passes``, and left
alone. (The library websockets starts its pings for a connection that was lost meanwhile: that may be reported, too.)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

_LoopFactory = Callable[[], asyncio.AbstractEventLoop]
#: What asyncio does on its own account is not ours to delay.
_ASYNCIO = Path(asyncio.__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--uneven", metavar="SEED", help="let every task wake up late, by chance")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "counts_passes: relies on the order in which an event loop wakes its tasks")


@pytest.hookimpl(wrapper=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Generator[None, Mapping[str, _LoopFactory], Mapping[str, _LoopFactory]]:
    factories = yield
    seed = config.getoption("--uneven")
    if seed is None or item.get_closest_marker("counts_passes") is not None:
        return factories
    return {name: _uneven(factory, f"{seed} {item.nodeid} {name}") for name, factory in factories.items()}


def _uneven(factory: _LoopFactory, seed: str) -> _LoopFactory:
    def make() -> asyncio.AbstractEventLoop:
        chance = random.Random(seed)
        loop = factory()
        loop.set_task_factory(lambda loop, work, **options: asyncio.Task(_delayed(work, chance), loop=loop, **options))
        return loop

    return make


def _delayed(work: Any, chance: random.Random) -> Any:
    code = getattr(work, "cr_code", None)
    if code is None or Path(code.co_filename).parent == _ASYNCIO:
        return work
    return _Late(work, chance)


class _Late(Coroutine[Any, Any, Any]):
    """A coroutine that lets the loop pass a few times before it goes on from where it waited."""

    def __init__(self, work: Coroutine[Any, Any, Any], chance: random.Random) -> None:
        self._work = work
        self._chance = chance
        self._thrown: BaseException | None = None
        self._passes = self._draw()

    def __await__(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)  # what a task shows of its coroutine

    def send(self, value: Any) -> Any:
        if self._passes:
            self._passes -= 1
            return None  # to a task: once more in the next pass
        thrown, self._thrown = self._thrown, None
        waits_for = self._work.send(value) if thrown is None else self._work.throw(thrown)
        if waits_for is not None:
            self._passes = self._draw()
        return waits_for

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        """A cancellation that comes while it is late is told when it goes on."""
        self._thrown = value or (kind if isinstance(kind, BaseException) else kind())
        return self.send(None)

    def close(self) -> None:
        self._work.close()

    def _draw(self) -> int:
        """Mostly none, sometimes a few, seldom many."""
        match self._chance.random():
            case share if share < 0.7:
                return 0
            case share if share < 0.95:
                return self._chance.randrange(1, 5)
            case _:
                return self._chance.randrange(5, 40)
